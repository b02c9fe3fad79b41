"""Ranks that train alone for H steps: against a textbook version of all of them in one process."""

from __future__ import annotations

import numpy as np
import pytest
from computed_once import computed_once
from textbook_steps import steps_for

import mpishard as ms
from mpishard import nn
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.optimizers import LBFGS, SGD, Adam, LocalSGDOptimizer
from mpishard.testing.worlds import in_worlds

generator = np.random.default_rng(5)
X = generator.standard_normal((29, 6))
Y = np.sin(X[:, :3])
PERIOD = 4


def plain():
    return nn.MLP([6, 8, 3], activation="tanh", seed=2)


def nesterov():
    return SGD(0.7, momentum=0.9, nesterov=True)


def build(backend, rule=None, period=PERIOD, outer=None, unit=1):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=unit)
    model = ms.DDPModel(plain(), config)
    rule = SGD(1e-3, momentum=0.9) if rule is None else rule
    return model, LocalSGDOptimizer(rule, config, period, outer)


def share(step, rank, size):
    """Return uneven batches, other ones in each step; in each fifth the last rank has none."""
    cuts = [k * 29 // size + (0 < k < size) for k in range(size + 1)]
    rows = np.random.default_rng(step).permutation(29)[cuts[rank] : cuts[rank + 1]]
    if step % 5 == 3 and rank == size - 1 > 0:
        rows = rows[:0]
    return X[rows], Y[rows]


class Inner:
    """The textbook rule of one rank."""

    def __init__(self, name, length):
        self.name, self.step = name, 0
        self.first, self.second = np.zeros(length), np.zeros(length)

    def update(self, theta, gradient, number):
        if self.name == "sgd":
            self.first = 0.9 * self.first + gradient
            return theta - 1e-3 * self.first
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        mean = self.first / (1 - 0.9**number)
        return theta - 1e-3 * mean / (np.sqrt(self.second / (1 - 0.999**number)) + 1e-8)


@computed_once
def textbook(rule, outer, size, steps):
    """Return the parameters of all ranks after some steps."""
    model = plain()
    start = model.get_parameters()
    thetas = [start.copy() for _ in range(size)]
    inners = [Inner(rule, start.size) for _ in range(size)]
    velocity, weights = np.zeros_like(start), np.zeros(size)
    for step in range(steps):
        for rank in range(size):
            x, y = share(step, rank, size)
            if len(x):
                at = model.with_parameters(thetas[rank])
                gradient = at.compute_loss_and_gradients(x, y)[1]
                thetas[rank] = inners[rank].update(thetas[rank], gradient, step + 1)
            weights[rank] += len(x)
        if (step + 1) % PERIOD == 0:
            mean = sum(w * t for w, t in zip(weights, thetas, strict=True)) / weights.sum()
            if outer:
                change = start - mean
                velocity = 0.9 * velocity + change
                mean = start - 0.7 * (change + 0.9 * velocity)
            start, weights = mean, np.zeros(size)
            thetas = [mean.copy() for _ in range(size)]
    return thetas


@pytest.mark.parametrize("has_outer", [False, True])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
@in_worlds(1, 2, 3, 4)
def test_many_steps_are_the_textbooks(backend, rule, has_outer):
    inner = Adam(1e-3) if rule == "adam" else None
    model, optimizer = build(
        backend, inner, outer=nesterov() if has_outer else None, unit=1 if has_outer else 1000
    )
    steps = steps_for(backend.world_size)
    for step in range(steps):
        optimizer.step(model, *share(step, backend.rank, backend.world_size))
    everyones = backend.all_gather(model.local_parameter_shard[None].copy())
    if backend.rank == 0:
        expected = textbook(rule, has_outer, backend.world_size, steps)
        np.testing.assert_allclose(everyones, expected, rtol=0, atol=1e-12)
        # The last period is not over.
        assert backend.world_size == 1 or (everyones[0] != everyones[1]).any()
    assert optimizer.steps == steps
    optimizer.settle()
    everyones = backend.all_gather(model.local_parameter_shard[None].copy())
    assert (everyones == everyones[0]).all()


@in_worlds(1, 2, 3, 4)
def test_a_period_of_one_with_descent_is_ddp(backend):
    model, optimizer = build(backend, SGD(0.05), period=1)
    config = model.sharding_configuration
    other, exact = ms.DDPModel(plain(), config), ms.DDPOptimizer(SGD(0.05), config)
    for step in range(20):
        batch = share(step, backend.rank, backend.world_size)
        losses = optimizer.step(model, *batch), exact.step(other, *batch)
        np.testing.assert_allclose(*losses, rtol=1e-12)
    np.testing.assert_allclose(model.get_parameters(), other.get_parameters(), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("messages_only")
@pytest.mark.parametrize("has_outer", [False, True])
@in_worlds(1, 2, 3, 4)
def test_an_all_reduce_of_the_parameters_travels_every_period(backend, has_outer):
    model, optimizer = build(backend, outer=nesterov() if has_outer else None)
    optimizer.bind(model)
    backend.traffic.reset()
    backend.all_reduce(np.zeros(7))
    small = backend.traffic.total_bytes
    backend.traffic.reset()
    backend.all_reduce(np.zeros(1))
    weight = backend.traffic.total_bytes
    backend.traffic.reset()
    for step in range(3 * PERIOD + 1):
        optimizer.step(model, *share(step, backend.rank, backend.world_size))
    mine = backend.traffic.total_bytes - (3 * PERIOD + 1) * small - 3 * weight
    total = int(backend.all_reduce(np.array([mine]))[0])
    assert total == 3 * 2 * (backend.world_size - 1) * 8 * model.parameter_count


@pytest.mark.parametrize("has_outer", [False, True])
@in_worlds(1, 2, 3)
def test_a_checkpoint_has_the_inner_state_of_each_rank(backend, has_outer, shared_path):
    def steps(model, optimizer, first, last):
        for step in range(first, last):
            optimizer.step(model, *share(step, backend.rank, backend.world_size))

    made = [build(backend, Adam(1e-3), outer=nesterov() if has_outer else None) for _ in range(2)]
    (model, optimizer), (again, other) = made
    steps(model, optimizer, 0, 2)
    if backend.world_size > 1:
        with pytest.raises(
            ShardingError, match=r"a checkpoint needs equal replicas.* call settle\(\)"
        ):
            ms.checkpoint.save(shared_path / "no", model, optimizer)
    steps(model, optimizer, 2, PERIOD)
    ms.checkpoint.save(shared_path / "yes", model, optimizer)
    steps(model, optimizer, PERIOD, 11)
    ms.checkpoint.load(shared_path / "yes", again, other)
    steps(again, other, PERIOD, 11)
    assert again.local_parameter_shard.tobytes() == model.local_parameter_shard.tobytes()


def test_another_number_of_ranks_takes_means_or_copies_of_inner_states(tmp_path):
    def first_moments(backend, write):
        model, optimizer = build(backend, Adam(1e-3), outer=nesterov())
        optimizer.bind(model)
        if write:
            for step in range(PERIOD):
                optimizer.step(model, *share(step, backend.rank, backend.world_size))
            ms.checkpoint.save(tmp_path / "run", model, optimizer)
        else:
            ms.checkpoint.load(tmp_path / "run", model, optimizer)
        state = optimizer._state
        outer = np.concatenate(backend.all_gather(state._outer_state["velocity"].copy())[None])
        return optimizer.state["first_moment"].copy(), np.sort(outer), optimizer.steps

    written = ms.run_in_threads(3, first_moments, True)
    moments = [m for m, _, _ in written]
    for size in (1, 2, 3, 5):
        found = ms.run_in_threads(size, first_moments, False)
        for rank, (moment, outer, steps) in enumerate(found):
            if size < 3:
                expected = np.mean([moments[i] for i in range(3) if i % size == rank], axis=0)
            else:
                expected = moments[rank % 3]
            np.testing.assert_allclose(moment, expected, rtol=1e-15)
            np.testing.assert_array_equal(outer, written[0][1])
            assert steps == PERIOD


@in_worlds(1, 2, 3)
def test_optimize_evaluates_and_saves_one_model_and_resumes(backend, shared_path):
    def run(limit, folder):
        config = ms.ShardingConfiguration(backend)
        optimizer = LocalSGDOptimizer(Adam(1e-3), config, 3, nesterov())
        return optimizer.optimize(
            ms.OptimizationInputData(
                model=plain(),
                x_train=X,
                y_train=Y,
                x_validation=X,
                y_validation=Y,
                batch_size=8,
                validate_every=4,
                max_steps=limit,
                progress=False,
                checkpoint=shared_path / folder,
                checkpoint_every=5,
                keep_best=True,
            )
        )

    whole = run(12, "whole")
    run(10, "parts")
    rest = run(12, "parts")
    assert rest.loss_history == whole.loss_history[10:]
    assert rest.validation_history == whole.validation_history
    result = whole.model.get_parameters()
    assert (backend.all_gather(result[None]) == result).all()


@in_worlds(2, 3)
def test_a_value_that_is_not_finite_stops_all_ranks_before_the_update(backend):
    model, optimizer = build(backend)
    optimizer.step(model, *share(0, backend.rank, backend.world_size))
    before = model.local_parameter_shard.copy()
    x, y = share(1, backend.rank, backend.world_size)
    bad = np.full_like(x, np.nan) if backend.rank == 1 else x
    with pytest.raises(NonFiniteLossError, match=r"the loss of ranks \[1\]"):
        optimizer.step(model, bad, y)
    assert model.local_parameter_shard.tobytes() == before.tobytes()
    optimizer.step(model, x, y)
    assert optimizer.steps == 2


@in_worlds(2, 3)
def test_accumulated_batches_are_one_step_and_settings_must_agree(backend):
    model, optimizer = build(backend, SGD(0.05), period=2)
    other, second = build(backend, SGD(0.05), period=2)
    for step in range(4):
        x, y = share(step, backend.rank, 2 * backend.world_size)
        with model.accumulate():
            optimizer.step(model, x[:1], y[:1])
        optimizer.step(model, x[1:], y[1:])
        second.step(other, x, y)
    np.testing.assert_allclose(model.get_parameters(), other.get_parameters(), atol=1e-12)
    model, wrong = build(backend, period=2 + (backend.rank > 0))
    with pytest.raises(ValueError, match="synchronization_period is 2, 3"):
        wrong.bind(model)


@in_worlds(1, 2)
def test_arguments(backend):
    config = ms.ShardingConfiguration(backend)
    assert LocalSGDOptimizer(SGD(), config).synchronization_period == 10
    for given, error, match in (
        ((SGD(), config, 0), ValueError, "synchronization_period must be 1 or more"),
        ((SGD(), config, 2.5), TypeError, "synchronization_period must be an integer"),
        ((SGD(), config, 2, "sgd"), TypeError, "outer must be an Optimizer, got str"),
        ((SGD(), config, 2, SGD(clip_value=1.0)), ValueError, "outer must have no clipping"),
        ((LBFGS(), config, 2), ValueError, "LBFGS compares .* each replica has a function"),
    ):
        with pytest.raises(error, match=match):
            LocalSGDOptimizer(*given)
    for choice, match in (
        (
            {"gradient_leaves": 2},
            "=2 gives the same bits .* LocalSGDOptimizer would .* leave out",
        ),
        ({"auto_sync_gradients": False}, "LocalSGDOptimizer synchronizes the ranks: leave out one"),
    ):
        other = ms.ShardingConfiguration(backend, **choice)
        with pytest.raises(ValueError, match=match):
            LocalSGDOptimizer(SGD(), other).bind(ms.DDPModel(plain(), other))
    model, optimizer = build(backend)
    optimizer.step(model, X, Y)
    for refused in (
        lambda: optimizer.last_computed_gradients,
        lambda: optimizer.apply_gradients(model.get_parameters(), model),
    ):
        with pytest.raises(NotImplementedError):
            refused()
