"""Ranks that wait for nobody who is at most s steps behind: replayed in one process."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.optimizers import LAMB, SGD, Adam, AsyncSGDOptimizer
from mpishard.testing.worlds import in_worlds

generator = np.random.default_rng(5)
X = generator.standard_normal((29, 6))
Y = np.sin(X[:, :3])
STEPS = 50


def plain():
    return nn.MLP([6, 8, 3], activation="tanh", seed=2)


def build(backend, rule=None, staleness=2, model=None, unit=1):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=unit)
    wrapped = ms.DDPModel(model or plain(), config)
    return wrapped, AsyncSGDOptimizer(rule or SGD(0.01, momentum=0.9), config, staleness)


def share(step, rank):
    """Of other samples in each step and on each rank, and uneven; of some steps nothing."""
    count = 0 if (step + rank) % 11 == 10 else 3 + (step + rank) % 5
    rows = np.random.default_rng((step, rank)).permutation(29)[:count]
    return X[rows], Y[rows]


def recorded(backend, staleness):
    """Train with pauses; return what the rank saw before each step, and what it took when."""
    model, optimizer = build(backend, staleness=staleness)
    optimizer.bind(model)
    state = optimizer._state
    wait, take, update = state.wait_for_slow_ranks, state._take, state.update
    thetas, arrived, steps_apart = [], [], []

    def waits():
        wait()
        thetas.append(model.local_parameter_shard.copy())
        steps_apart.append(max(optimizer.clocks) - min(optimizer.clocks))

    def takes(rank, message):
        if np.isfinite(message[-1]):
            arrived.append((rank, int(message[-1]) - 1))
        take(rank, message)

    def updates(given, report):
        update(given, report)
        arrived.append((backend.rank, len(thetas) - 1))

    state.wait_for_slow_ranks, state._take, state.update = waits, takes, updates
    pauses = np.random.default_rng(backend.rank)
    for step in range(STEPS):
        time.sleep(pauses.random() * 2e-3)
        optimizer.step(model, *share(step, backend.rank))
    optimizer.settle()
    return thetas, arrived, max(steps_apart), model.get_parameters(), model.engine.own_pieces


@pytest.mark.parametrize(("size", "staleness"), [(1, 2), (2, 1), (3, 4)])
def test_the_replay_of_what_arrived_is_the_textbooks(size, staleness):
    found = ms.run_in_threads(size, recorded, staleness)
    model = plain()
    gradients = {}
    for rank, (thetas, *_) in enumerate(found):
        for step, theta in enumerate(thetas):
            x, y = share(step, rank)
            if len(x):
                mean = model.with_parameters(theta).compute_loss_and_gradients(x, y)[1]
                gradients[rank, step] = mean * len(x), len(x)
            else:
                gradients[rank, step] = np.zeros_like(theta), 0
    expected = model.get_parameters()
    first = expected.copy()
    for _, arrived, _, _, pieces in found:
        assert sorted(arrived) == [(r, s) for r in range(size) for s in range(STEPS)]
        for piece in pieces:
            part, velocity = slice(piece.start, piece.stop), 0.0
            versions = [first[part]]
            for at in range(0, len(arrived), size):
                group = [gradients[which] for which in arrived[at : at + size]]
                weight = sum(w for _, w in group)
                if weight:
                    velocity = 0.9 * velocity + sum(g[part] for g, _ in group) / weight
                    versions.append(versions[-1] - 0.01 * velocity)
            expected[part] = versions[-1]
            for thetas, *_ in found:  # each rank has computed with versions of the owner's
                at = 0
                for theta in thetas:
                    while not np.allclose(theta[part], versions[at], rtol=0, atol=1e-13):
                        at += 1
    for *_, apart, parameters, _ in found:
        np.testing.assert_allclose(parameters, expected, rtol=0, atol=1e-12)
        assert apart <= staleness + 1  # its own step is one further when it is made


class Linear:
    """A loss of which the gradient is the same everywhere: any order of updates ends alike."""

    default_loss_function = None

    def __init__(self):
        self.theta = np.zeros(7)

    def get_parameters(self):
        return self.theta

    def set_parameters(self, theta):
        self.theta = theta

    def compute_loss_and_gradients(self, x, y):
        return float(x.mean(0) @ self.theta), x.mean(0)


@in_worlds(1, 2, 3)
def test_the_order_of_arrival_does_not_matter_to_a_linear_loss(backend):
    model, optimizer = build(backend, SGD(0.5), 3, Linear())
    data = np.random.default_rng(backend.rank).standard_normal((20, 4, 7))
    for half in np.split(data, 2):
        for batch in half:
            optimizer.step(model, batch, batch)
        optimizer.settle()
    everything = backend.all_gather(data.mean(1)[None])
    expected = -0.5 * everything.sum((0, 1)) / backend.world_size
    np.testing.assert_allclose(model.get_parameters(), expected, rtol=0, atol=1e-12)
    assert optimizer.steps == 20
    assert optimizer.clocks == (0,) * backend.world_size


@pytest.mark.parametrize("unit", [1, 1000])
@in_worlds(1, 2, 3)
def test_frozen_parameters_stay(backend, unit):
    rule = Adam(1e-3, parameter_options={"linear0.*": {"frozen": True}})
    model, optimizer = build(backend, rule, unit=unit)
    before = model.get_parameters()
    for step in range(5):
        optimizer.step(model, *share(step, backend.rank))
    optimizer.settle()
    after = model.get_parameters()
    assert (backend.all_gather(after[None]) == after).all()
    assert (after != before).tolist() == [False] * (model.parameter_count - 27) + [True] * 27


@in_worlds(1, 2)
def test_a_table_of_rates_may_end_with_the_last_update(backend):
    model, optimizer = build(backend, SGD([0.1, 0.05].__getitem__))
    for step in range(2):
        optimizer.step(model, *share(step, backend.rank))
    optimizer.settle()
    assert optimizer.steps == 2
    model.check_replicas()


@pytest.mark.usefixtures("messages_only")
@in_worlds(2, 3)
def test_the_messages_of_a_step_have_the_bytes_of_an_all_reduce(backend):
    model, optimizer = build(backend, staleness=3)
    optimizer.bind(model)
    for step in range(4):
        optimizer.step(model, *share(step, backend.rank))
    sent = optimizer._state._group.traffic.total_bytes
    optimizer.settle()
    others = backend.world_size - 1
    # Each of a rank's messages has its weight and its clock, too.
    expected = 4 * 8 * (2 * others * model.parameter_count + 2 * backend.world_size * others)
    assert int(backend.all_reduce(np.array([sent]))[0]) == expected


@in_worlds(1, 2, 3)
def test_a_staleness_of_none_is_ddp(backend):
    model, optimizer = build(backend, Adam(1e-3), 0)
    config = model.sharding_configuration
    other, exact = ms.DDPModel(plain(), config), ms.DDPOptimizer(Adam(1e-3), config)
    for step in range(10):
        x, y = share(step, backend.rank)
        assert optimizer.step(model, x, y) == exact.step(other, x, y)
    assert model.get_parameters().tobytes() == other.get_parameters().tobytes()


@in_worlds(2, 3)
def test_a_fast_rank_goes_on_until_it_is_s_steps_ahead(backend):
    model, optimizer = build(backend, staleness=4)
    optimizer.bind(model)
    last = backend.world_size - 1
    if backend.rank != last:
        for step in range(5):  # it waits for nobody
            optimizer.step(model, *share(step, backend.rank))
        assert optimizer.clocks[last] == 0
    backend.barrier()
    if backend.rank == last:
        optimizer.step(model, *share(0, backend.rank))
    else:
        optimizer.step(model, *share(5, backend.rank))  # waits for the step of the last
        assert optimizer.clocks[last] == 1
    optimizer.settle()  # after six steps of some and one of another
    parameters = model.get_parameters()
    assert (backend.all_gather(parameters[None]) == parameters).all()


@in_worlds(1, 2, 3)
def test_optimize_reports_the_same_on_all_ranks_and_saves(backend, shared_path):
    def run(limit):
        config = ms.ShardingConfiguration(backend)
        optimizer = AsyncSGDOptimizer(Adam(1e-3), config, 2)
        return optimizer.optimize(ms.OptimizationInputData(
            model=plain(), x_train=X, y_train=Y, batch_size=8, max_steps=limit, progress=False,
            checkpoint=shared_path / "run", checkpoint_every=6, patience=50, keep_best=True,
        ))  # fmt: skip

    run(8)
    result = run(12)
    parameters = result.model.get_parameters()
    history = np.array([result.fitness_history])
    assert (backend.all_gather(history) == history).all()
    assert (backend.all_gather(parameters[None]) == parameters).all()


@in_worlds(2, 3)
def test_a_checkpoint_fits_every_strategy(backend, shared_path):
    model, optimizer = build(backend, Adam(1e-3))
    for step in range(6):
        optimizer.step(model, *share(step, backend.rank))
    with pytest.raises(ShardingError, match="a checkpoint needs equal replicas"):
        ms.checkpoint.save(shared_path / "no", model, optimizer)
    optimizer.settle()
    ms.checkpoint.save(shared_path / "yes", model, optimizer)
    again, other = build(backend, Adam(1e-3))
    ms.checkpoint.load(shared_path / "yes", again, other)
    state, same = optimizer.state["first_moment"], other.state["first_moment"]
    assert state.tobytes() == same.tobytes()
    config = model.sharding_configuration
    sharded, fsdp = ms.FSDPModel(plain(), config), ms.FSDPOptimizer(Adam(1e-3), config)
    ms.checkpoint.load(shared_path / "yes", sharded, fsdp)
    assert fsdp.state["first_moment"].tobytes() == state.tobytes()
    assert fsdp.steps == other.steps == optimizer.steps == 6


@pytest.mark.parametrize("wrong", ["nan", "raise"])
def test_a_rank_that_fails_ends_all(wrong):
    def run(backend):
        model, optimizer = build(backend, staleness=2)
        for step in range(9):
            x, y = share(step, backend.rank)
            if backend.rank == 1 and step == 3:
                if wrong == "raise":
                    raise ZeroDivisionError
                x = np.full_like(x, np.nan)
            optimizer.step(model, x, y)
        optimizer.settle()

    error = ZeroDivisionError if wrong == "raise" else NonFiniteLossError
    with pytest.raises(error) as found:
        ms.run_in_threads(3, run)
    assert "raised on rank 1 of 3" in found.value.__notes__


@in_worlds(2)
def test_other_settings_on_one_rank_are_noticed_when_all_meet(backend):
    model, optimizer = build(backend)
    optimizer.bind(model)
    optimizer.wrapped_optimizer.weight_decay = 0.1 * backend.rank
    optimizer.step(model, *share(0, backend.rank))
    with pytest.raises(ShardingError, match=r"weight_decay is 0.0, 0.1"):
        optimizer.settle()


@in_worlds(1)
def test_arguments(backend):
    config = ms.ShardingConfiguration(backend)
    assert AsyncSGDOptimizer(SGD(), config, 3).max_staleness == 3
    for rule, options, error, match in (
        (SGD(), {"allow_staleness": -1}, ValueError, "allow_staleness must be 0 or more"),
        (SGD(), {"allow_staleness": 1, "delay": 1}, ValueError, "give one of them"),
        (SGD(clip_global_norm=1.0), {"allow_staleness": 1}, ValueError, "clip_global_norm needs"),
        (LAMB(), {"allow_staleness": 1}, ValueError, "LAMB needs a norm"),
    ):
        with pytest.raises(error, match=match):
            AsyncSGDOptimizer(rule, config, **options)


@in_worlds(2, 3)
def test_goes_on_with_the_state_of_an_optimizer_that_waits(backend):
    model, optimizer = build(backend, Adam(0.01))
    waiting = ms.DDPOptimizer(Adam(0.01), ms.ShardingConfiguration(backend))
    waiting.step(ms.DDPModel(plain(), waiting.sharding_configuration), X, Y)
    data = waiting.serialize()
    optimizer.bind(model)
    optimizer.deserialize(data)
    assert optimizer.steps == 1
    for name, own in optimizer.state.items():
        for piece in model.engine.pieces.owned:
            np.testing.assert_array_equal(
                own[piece.in_shard], waiting.state[name][piece.start : piece.stop]
            )


class Halves:
    """A black box of float16 whose mean gradient is 1/64."""

    def __init__(self):
        self.theta = np.zeros(6, np.float16)

    def get_parameters(self):
        return self.theta

    def set_parameters(self, theta):
        self.theta = theta

    def compute_loss_and_gradients(self, x, y):
        return 1.0, np.full(6, 1 / 64, np.float16)


@in_worlds(2)
def test_ranks_with_parameters_of_16_bits_count_more_steps_than_such_numbers_can(backend):
    model, optimizer = build(backend, SGD(1.0), model=Halves())
    optimizer.bind(model)
    optimizer._state.clocks = [70_000, 70_000]
    optimizer.step(model, np.zeros(3), None)
    while optimizer.clocks != (70_001, 70_001):
        assert optimizer._state._closed == {backend.rank}
        optimizer._state.wait_for_slow_ranks()
    optimizer.settle()
    np.testing.assert_allclose(model.get_parameters(), -1 / 64, rtol=0.01)
