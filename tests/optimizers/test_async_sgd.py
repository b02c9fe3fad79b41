"""Gradients that are applied some steps later, against a textbook version in one process."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from computed_once import computed_once
from layouts import wrap
from textbook_steps import steps_for

import mpishard as ms
from mpishard import nn
from mpishard.errors import CheckpointError, NonFiniteLossError, ShardingError
from mpishard.optimizers import LBFGS, SGD, Adam, AsyncSGDOptimizer
from mpishard.testing.worlds import in_worlds

generator = np.random.default_rng(5)
X = generator.standard_normal((29, 6))
Y = np.sin(X[:, :3])


def plain():
    return nn.MLP([6, 8, 3], activation="tanh", seed=2)


def build(backend, rule=None, *, unit=1, layout="ddp", **options):
    model, strategy = wrap(backend, plain(), layout, unit)
    return model, AsyncSGDOptimizer(
        rule or SGD(1e-3, momentum=0.9), model.sharding_configuration, strategy=strategy, **options
    )


def share(step, rank, size):
    """Return uneven batches, other ones in each step; in each fifth the last rank has none."""
    cuts = [k * 29 // size + (0 < k < size) for k in range(size + 1)]
    rows = np.random.default_rng(step).permutation(29)[: 29 - step % 3]
    rows = rows[cuts[rank] : cuts[rank + 1]]
    if step % 5 == 3 and rank == size - 1 > 0:
        rows = rows[:0]
    return X[rows], Y[rows]


def train(backend, model, optimizer, first, last):
    place = model.data_rank, model.data_size
    return [optimizer.step(model, *share(step, *place)) for step in range(first, last)]


LAYOUTS = [
    (1, "ddp"), (3, "ddp"), (2, "zero1/1"), (4, "ddp/2"), (4, "zero2/2"), (6, "fsdp/3"),
    (4, "1x2"), (4, "2x1"), (8, "1x2x2 fsdp"),
]  # fmt: skip
in_layouts = pytest.mark.parametrize(
    ("world_size", "layout"), [(1, "ddp"), (3, "ddp"), (4, "ddp/2"), (4, "fsdp/2"), (4, "1x2")]
)


@computed_once
def textbook(rule, delay, size, steps):
    """Return parameters and losses."""
    model, gradients, losses = plain(), [], []
    theta = model.get_parameters()
    first, second = np.zeros_like(theta), np.zeros_like(theta)
    for step in range(steps):
        parts = [share(step, rank, size) for rank in range(size)]
        x, y = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        loss, gradient = model.with_parameters(theta).compute_loss_and_gradients(x, y)
        losses.append(loss)
        gradients.append(gradient)
        if step < delay:
            continue
        gradient, number = gradients[step - delay], step - delay + 1
        if rule == "sgd":
            first = 0.9 * first + gradient
            theta = theta - 1e-3 * first
        else:
            first = 0.9 * first + 0.1 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            mean = first / (1 - 0.9**number)
            theta = theta - 1e-3 * mean / (np.sqrt(second / (1 - 0.999**number)) + 1e-8)
    return theta, losses


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
@in_worlds()
def test_many_steps_are_the_textbooks_on_every_rank(backend, rule, delay, layout):
    given = Adam(1e-3) if rule == "adam" else None
    unit = 1 if delay < 3 else 1000
    model, optimizer = build(backend, given, unit=unit, layout=layout, allow_staleness=delay)
    steps = steps_for(backend.world_size)
    losses = train(backend, model, optimizer, 0, steps)
    expected = textbook(rule, delay, model.data_size, steps)
    parameters = model.get_parameters()
    np.testing.assert_allclose(parameters, expected[0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(losses, expected[1], rtol=0, atol=1e-12)
    assert optimizer.steps == steps - delay
    assert (backend.all_gather(parameters[None]) == parameters).all()
    model.check_replicas()


@pytest.mark.parametrize(("world_size", "layout"), [(1, "ddp"), (3, "ddp"), (4, "fsdp/2")])
@in_worlds()
def test_a_gradient_travels_while_the_next_steps_are_computed(backend, layout):
    model, optimizer = build(backend, layout=layout, allow_staleness=2)
    train(backend, model, optimizer, 0, 5)
    assert optimizer._state.sums.pending == 2
    length = sum(piece.length for piece in model.engine.layout.pieces())
    mine = model.parameter_count if layout == "ddp" else length
    assert model.memory.held("gradients") == 3 * 8 * mine


@pytest.mark.usefixtures("messages_only")
@pytest.mark.parametrize(
    ("world_size", "layout"), [(1, "ddp"), (3, "ddp"), (4, "ddp/2"), (6, "fsdp/3"), (4, "1x2")]
)
@in_worlds()
def test_a_step_sends_the_bytes_of_ddp(backend, layout):
    model, optimizer = build(backend, layout=layout, allow_staleness=2)
    optimizer.bind(model)
    across = model.engine.replica.across
    across.traffic.reset()
    backend.all_reduce(np.zeros(7))
    small = across.traffic.total_bytes
    across.traffic.reset()
    train(backend, model, optimizer, 0, 4)
    optimizer._state.sums.under_way(())  # waits for the last two
    mine = np.array([across.traffic.total_bytes - 4 * small, optimizer._state.sums.length])
    sent, length = map(int, backend.all_reduce(mine))
    assert sent == 4 * 2 * (across.world_size - 1) * 8 * length // across.world_size
    if layout != "1x2":  # a mesh holds some parameters twice
        ranks = backend.world_size // across.world_size
        assert length * ranks == model.parameter_count * backend.world_size


@pytest.mark.parametrize("stop", [1, 7])
@in_layouts
@in_worlds()
def test_a_checkpoint_has_the_gradients_under_way(backend, shared_path, stop, layout):
    model, optimizer = build(backend, Adam(1e-3), layout=layout, allow_staleness=2)
    train(backend, model, optimizer, 0, stop)
    ms.checkpoint.save(shared_path / "run", model, optimizer)
    train(backend, model, optimizer, stop, 12)
    again, other = build(backend, Adam(1e-3), layout=layout, allow_staleness=2)
    train(backend, again, other, 0, 4)  # of which nothing is left
    ms.checkpoint.load(shared_path / "run", again, other)
    assert other._state.sums.pending == min(stop, 2)
    train(backend, again, other, stop, 12)
    assert again.get_parameters().tobytes() == model.get_parameters().tobytes()


def test_any_number_of_ranks_continues_with_pending_gradients(tmp_path):
    def run(backend, first, last, layout="ddp", delay=2):
        model, optimizer = build(backend, Adam(1e-3), layout=layout, allow_staleness=delay)
        optimizer.bind(model)
        if first:
            ms.checkpoint.load(tmp_path / "run", model, optimizer)
        for step in range(first, last):
            rows = ms.ShardLayout(29, model.data_size).slice(model.data_rank)
            order = np.random.default_rng(step).permutation(29)[rows]
            optimizer.step(model, X[order], Y[order])
        if not first:
            ms.checkpoint.save(tmp_path / "run", model, optimizer)
        return model.get_parameters()

    for world, written in ((3, "ddp"), (4, "fsdp/2"), (4, "1x2")):
        ms.run_in_threads(world, run, 0, 5, written)
        expected = ms.run_in_threads(1, run, 5, 9)[0]
        for size, layout in (
            (4, "ddp"),
            (6, "zero2/3"),
            (4, "ddp/2"),
            (4, "2x1"),
            (4, "1x2x2 zero1"),
        ):
            found = ms.run_in_threads(size, run, 5, 9, layout)[0]
            np.testing.assert_allclose(found, expected, atol=1e-14)
    fewer = ms.run_in_threads(2, run, 5, 5, "ddp", 1)  # takes the newest one of two
    assert np.array_equal(*fewer)


@in_worlds(1, 2, 3)
def test_any_optimizer_continues_once_pending_gradients_are_applied(backend, shared_path):
    data = {"model": plain(), "x_train": X, "y_train": Y, "batch_size": 8, "progress": False}
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    made = AsyncSGDOptimizer(Adam(1e-3), config, allow_staleness=2)
    made.optimize(ms.OptimizationInputData(**data, max_steps=3, checkpoint=shared_path / "run"))
    model, optimizer = build(backend, Adam(1e-3), allow_staleness=2)
    assert optimizer.apply_pending_gradients() == 0  # no step yet
    position = ms.checkpoint.load(shared_path / "run", model, optimizer)
    other, exact = ms.DDPModel(plain(), config), ms.DDPOptimizer(Adam(1e-3), config)
    with pytest.raises(CheckpointError, match="delayed0"):
        ms.checkpoint.load(shared_path / "run", other, exact)
    with pytest.raises(CheckpointError, match=r"'delayed0'.*: to load that, call bind\(model\)"):
        AsyncSGDOptimizer(Adam(1e-3), config, allow_staleness=2).load_model(shared_path / "run")
    assert optimizer.apply_pending_gradients() == 2
    assert (optimizer.steps, optimizer.apply_pending_gradients()) == (3, 0)
    ms.checkpoint.save(shared_path / "all", model, optimizer, metadata=position)
    data["model"] = other
    result = exact.optimize(
        ms.OptimizationInputData(**data, max_steps=5, resume=shared_path / "all")
    )
    assert len(result.loss_history) == 2


@pytest.mark.parametrize("rule", ["sgd", "adam"])
@in_layouts
@in_worlds()
def test_pending_gradients_are_applied_as_by_later_steps(backend, layout, rule):
    model, optimizer = build(
        backend, Adam(1e-3) if rule == "adam" else None, layout=layout, allow_staleness=2
    )
    train(backend, model, optimizer, 0, 12)
    assert optimizer.apply_pending_gradients() == 2
    # As the textbook's 14th step, which applies the 12th gradient.
    expected = textbook(rule, 2, model.data_size, 14)[0]
    np.testing.assert_allclose(model.get_parameters(), expected, rtol=0, atol=1e-12)
    train(backend, model, optimizer, 0, 2)
    assert optimizer.steps == 12


def test_without_pending_gradients_the_schedule_is_not_called():
    def body(backend):
        model, optimizer = build(backend, SGD(lambda step: [0.1][step]), allow_staleness=2)
        train(backend, model, optimizer, 0, 1)
        return optimizer.apply_pending_gradients(), optimizer.apply_pending_gradients()

    assert ms.run_in_threads(1, body) == [(1, 0)]


@pytest.mark.parametrize("layout", ["ddp/2", "fsdp/2", "1x2"])
@in_worlds(4)
def test_without_delay_a_given_gradient_is_applied_at_once(backend, layout):
    model, optimizer = build(backend, SGD(0.1), layout=layout, allow_staleness=0)
    for _ in range(2):
        before = model.get_parameters()
        gradient = np.arange(before.size, dtype=float)
        optimizer.apply_gradients(gradient, model)
        np.testing.assert_allclose(
            model.get_parameters(), before - 0.1 * gradient, rtol=0, atol=1e-12
        )
        train(backend, model, optimizer, 0, 1)
    assert optimizer.steps == 4


@in_worlds(2)
def test_ranks_with_other_pending_gradients_are_refused(backend):
    model, optimizer = build(backend, allow_staleness=2)
    train(backend, model, optimizer, 0, 3)
    if backend.rank == 1:
        model.engine.abandon()
    with pytest.raises(ShardingError, match=r"other gradients under way; by rank, .*2, 0"):
        optimizer.apply_pending_gradients()


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "ddp"), (3, "ddp"), (4, "zero2")])
@in_worlds()
def test_optimize_resumes_to_the_same_bits(backend, strategy, shared_path):
    def run(limit, folder):
        size = None if strategy == "ddp" else 2
        config = ms.ShardingConfiguration(backend, replica_size=size)
        optimizer = AsyncSGDOptimizer(Adam(1e-3), config, allow_staleness=2, strategy=strategy)
        return optimizer.optimize(ms.OptimizationInputData(
            model=plain(), x_train=X, y_train=Y, x_validation=X, y_validation=Y, batch_size=8,
            validate_every=4, max_steps=limit, progress=False, checkpoint=shared_path / folder,
            checkpoint_every=5, keep_best=True, digest_every=3,
        ))  # fmt: skip

    whole = run(12, "whole")
    run(10, "parts")
    rest = run(12, "parts")
    assert rest.loss_history == whole.loss_history[10:]
    assert rest.validation_history == whole.validation_history


@pytest.mark.parametrize(("world_size", "layout"), [(2, "ddp"), (3, "ddp"), (4, "fsdp/2")])
@in_worlds()
def test_an_error_drops_the_gradients_under_way_on_all_ranks(backend, layout):
    model, optimizer = build(backend, layout=layout, allow_staleness=2)
    train(backend, model, optimizer, 0, 4)
    before = model.get_parameters()
    x, y = share(4, backend.rank, backend.world_size)
    bad = np.full_like(x, np.nan) if backend.rank == 1 else x
    with pytest.raises(NonFiniteLossError, match=r"the loss of ranks \[1\]"):
        optimizer.step(model, bad, y)
    train(backend, model, optimizer, 4, 6)
    assert (model.get_parameters() == before).all()
    train(backend, model, optimizer, 6, 7)
    assert (model.get_parameters() != before).any()


@in_worlds(2, 3)
def test_a_rank_that_has_dropped_its_gradients_alone_is_noticed(backend):
    model, optimizer = build(backend, allow_staleness=2)
    train(backend, model, optimizer, 0, 4)
    if backend.rank == 1:
        with pytest.raises(ZeroDivisionError), model.accumulate():
            raise ZeroDivisionError
    with pytest.raises(ShardingError, match="gradients under way is 2, 0"):
        train(backend, model, optimizer, 4, 5)
    train(backend, model, optimizer, 5, 9)


@pytest.mark.parametrize("call", ["step", "expect"])
def test_a_buffer_is_written_to_when_its_dropped_message_has_ended(call):
    made = []

    class Message:
        def __init__(self, array):
            self.array, self.sent, self.has_ended = array, array.copy(), False
            made.append(self)

        def wait_until_over(self):
            assert (self.array == self.sent).all(), "its buffer was written to"
            self.has_ended = True

        wait = wait_until_over

    def body(backend):
        model, optimizer = build(backend, allow_staleness=2)
        optimizer.bind(model)
        sums = model.engine.passes.exchange
        sums.across = SimpleNamespace(all_reduce_async=Message, progress=lambda: None)
        train(backend, model, optimizer, 0, 2)
        with pytest.raises(ZeroDivisionError), model.accumulate():
            raise ZeroDivisionError
        dropped = list(made)
        assert dropped
        assert not any(message.has_ended for message in dropped)
        if call == "step":
            train(backend, model, optimizer, 2, 3)
        else:
            sums.expect(0)
        assert all(message.has_ended for message in dropped)

    ms.run_in_threads(1, body)


@pytest.mark.parametrize(("world_size", "layout"), [(1, "ddp"), (2, "ddp"), (4, "fsdp/2")])
@in_worlds()
def test_accumulated_batches_are_one_step(backend, layout):
    model, optimizer = build(backend, SGD(0.05), layout=layout, allow_staleness=1)
    other, second = build(backend, SGD(0.05), layout=layout, allow_staleness=1)
    for step in range(6):
        x, y = share(step, backend.rank, 2 * backend.world_size)
        with model.accumulate():
            optimizer.step(model, x[:1], y[:1])
        optimizer.step(model, x[1:], y[1:])
        second.step(other, x, y)
    np.testing.assert_allclose(model.get_parameters(), other.get_parameters(), atol=1e-12)


@in_worlds(2)
def test_settings_must_agree(backend):
    model, optimizer = build(backend, allow_staleness=1 + backend.rank)
    with pytest.raises(ValueError, match="allow_staleness is 1, 2"):
        optimizer.bind(model)


@in_worlds(1)
def test_arguments_and_members(backend):
    config = ms.ShardingConfiguration(backend)
    optimizer = AsyncSGDOptimizer(SGD(), config, allow_staleness=2)
    assert optimizer.max_staleness == 2
    assert [optimizer.should_sync(n) for n in range(4)] == [True, False, False, True]
    assert AsyncSGDOptimizer(SGD(), config).should_sync(1)
    for call, error, match in (
        (lambda: optimizer.should_sync(-1), ValueError, "iteration must be 0 or more"),
        (lambda: AsyncSGDOptimizer(SGD(), config, -1), ValueError, "must be 0 or more"),
        (
            lambda: AsyncSGDOptimizer(SGD(), config, 1001),
            ValueError,
            "allow_staleness must be 0 to 1000 steps, got 1001: each rank keeps",
        ),
        (lambda: AsyncSGDOptimizer(SGD(), config, 1.5), TypeError, "must be an integ"),
        (
            lambda: AsyncSGDOptimizer(LBFGS(), config, 1),
            ValueError,
            "LBFGS compares .* gradients come late",
        ),
    ):
        with pytest.raises(error, match=match):
            call()
    replicas = ms.ShardingConfiguration(backend, replica_size=1)
    with pytest.raises(ValueError, match="give ShardingConfiguration"):
        AsyncSGDOptimizer(SGD(), config, allow_staleness=1, strategy="zero2")
    with pytest.raises(ValueError, match="is one replica of all ranks"):
        AsyncSGDOptimizer(SGD(), replicas, strategy="fsdp").bind(ms.FSDPModel(plain(), config))
    with pytest.raises(ValueError, match="GradientCompressionOptimizer"):
        ms.FSDPOptimizer(SGD(), replicas).bind(ms.FSDPModel(plain(), replicas))
    model = ms.FSDPModel(plain(), config)
    with pytest.raises(ShardingError, match="AsyncSGDOptimizer updates DDPModel"):
        optimizer.step(model, X, Y)
    for options in ({"gradient_leaves": 2}, {"enable_gradient_compression": True}):
        other = ms.ShardingConfiguration(backend, **options)
        with pytest.raises(ValueError, match=next(iter(options))):
            AsyncSGDOptimizer(SGD(), other, allow_staleness=1).bind(ms.DDPModel(plain(), other))
    model, optimizer = build(backend, allow_staleness=1)
    optimizer.step(model, X, Y)
    for refused in (
        lambda: optimizer.last_computed_gradients,
        lambda: optimizer.apply_gradients(model.get_parameters(), model),
    ):
        with pytest.raises(NotImplementedError, match="way"):
            refused()
    with pytest.raises(ShardingError, match="AsyncSGDOptimizer has not yet applied all gradients"):
        model.train(X, Y)
    with pytest.raises(ShardingError, match="AsyncSGDOptimizer trains this model"):
        ms.DDPOptimizer(SGD(), config).step(model, X, Y)
    optimizer.reset()
    ms.DDPOptimizer(SGD(), model.sharding_configuration).step(model, X, Y)
