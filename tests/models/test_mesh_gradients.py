"""Gradients, rules and frozen parameters on meshes: the members that a step is made of."""

from __future__ import annotations

import fnmatch
import itertools
import os
from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.errors import ShardingError
from mpishard.models import HybridShardedModel
from mpishard.optimizers import LAMB, SGD, HybridShardedOptimizer, OneCycle
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

CASES = [
    (2, (2, 1, 1), {"schedule": "zb-v"}),
    (2, (1, 2, 1), {"sequence_parallel": True}),
    (3, (3, 1, 1), {"schedule": "zb-h1"}),
    (3, (1, 3, 1), {}),
    (4, (2, 2, 1), {"schedule": "1f1b"}),
    (4, (2, 1, 2), {"schedule": "interleaved", "data_parallel_strategy": "fsdp"}),
    (4, (2, 1, 2), {"schedule": "zb-v", "data_parallel_strategy": "ddp"}),
    (4, (1, 2, 2), {"data_parallel_strategy": "zero2"}),
    (4, (4, 1, 1), {"schedule": "looped-bfs"}),
    (8, (2, 2, 2), {"schedule": "zb-h2", "data_parallel_strategy": "fsdp"}),
]  # fmt: skip
# Without those that divide the same axes as another one, but with --full.
by_case = pytest.mark.parametrize(
    ("world_size", "mesh", "options"),
    CASES if os.environ.get("MPISHARD_TEST_FULL") else [CASES[i] for i in (0, 3, 4, 5, 7, 9)],
)
RATE = 1e-3
FOUND: dict[Any, Any] = {}


def build(
    backend: Any, problems: Any, mesh: Any, options: Any, rule: Any = None, kind: str = "tied",
    **config: Any,
) -> tuple[Any, Any]:  # fmt: skip
    configuration = ShardingConfiguration(
        backend, learning_rate=RATE, minimum_parameter_group_size=40, **config
    )
    plain = problems.MODELS[kind](backend.rank) if isinstance(kind, str) else kind()
    model = HybridShardedModel(plain, configuration, *mesh, **{"micro_batch_count": 3, **options})
    return model, HybridShardedOptimizer(rule or SGD(RATE, 0.9), configuration, *mesh)


def local(model: Any, problems: Any, step: int = 0, kind: str = "tied") -> tuple[Any, Any]:
    x, y = problems.batch(kind, step)
    mine = problems.part(len(x), step, model.data_rank, model.data_size)
    return x[mine], y[mine]


def gradient(problems: Any, x: Any, y: Any, theta: Any = None) -> Any:
    """Sequences of a plain model; all ranks pass the same arguments."""
    key = tuple(None if array is None else array.tobytes() for array in (x, y, theta))
    if key not in FOUND:
        plain = problems.MODELS["tied"](0)
        if theta is not None:
            plain.set_parameters(theta)
        FOUND[key] = plain.compute_gradients(x, y)
    return FOUND[key].copy()


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@by_case
@in_worlds()
def test_each_data_rank_has_the_plain_gradient_of_its_batch(
    backend: Any, problems: Any, mesh: Any, options: Any
) -> None:
    model, optimizer = build(backend, problems, mesh, options)
    theta = model.get_parameters()
    for step in range(2):
        x, y = local(model, problems, step)
        x, y = (x, y) if len(x) else tuple(v[:1] for v in problems.batch("tied", step))
        for _ in range(2):
            close(model.compute_gradients(x, y), gradient(problems, x, y))
    # Of no sample, nothing; with another loss, that one's.
    close(model.compute_gradients(x[:0], y[:0]), np.zeros(model.parameter_count))
    smooth = nn.CrossEntropy(label_smoothing=0.2, ignore_index=-1)
    plain = problems.MODELS["tied"](0)
    close(model.compute_gradients(x, y, smooth), plain.compute_gradients(x, y, smooth))
    np.testing.assert_array_equal(model.get_parameters(), theta)
    # It leaves nothing behind that a step or a round would find.
    with model.accumulate():
        optimizer.step(model, *local(model, problems, 0))
        model.compute_gradients(x, y)
    optimizer.step(model, *[v[:0] for v in local(model, problems, 0)])
    close(model.get_parameters(), theta - RATE * gradient(problems, *problems.batch("tied", 0)))


@by_case
@in_worlds()
def test_gradients_are_applied_and_the_last_one_can_be_read(
    backend: Any, problems: Any, mesh: Any, options: Any
) -> None:
    model, optimizer = build(backend, problems, mesh, options)
    with pytest.raises(RuntimeError, match="before any gradient"):
        model.synchronize_gradients()
    theta = model.get_parameters()
    g = gradient(problems, *problems.batch("tied", 0))
    model.apply_gradients(g, 0.5)
    close(model.get_parameters(), theta - 0.5 * g)
    model.set_parameters(theta)
    optimizer.apply_gradients(g, model)
    optimizer.apply_gradients(2 * g, model)
    close(model.get_parameters(), theta - RATE * g - RATE * (0.9 * g + 2 * g))
    with pytest.raises(ShardingError, match="the gradient of the last step is not available"):
        _ = optimizer.last_computed_gradients
    with pytest.raises(ValueError, match="differ between ranks"):
        model.apply_gradients(g + backend.rank, 0.5)
    theta = model.get_parameters()
    optimizer.step(model, *local(model, problems, 1))
    x, y = problems.batch("tied", 1)
    expected = gradient(problems, x, y, theta)
    pieces = [
        (start, stop)
        for piece in model.engine.pieces.owned
        for start, stop in model.engine.placement.ranges(piece.start, piece.stop)
    ]
    told = optimizer.last_computed_gradients
    close(told, np.concatenate([expected[a:b] for a, b in pieces] or [expected[:0]]))
    model.synchronize_gradients()
    theta = model.get_parameters()
    loss = model.train(*local(model, problems, 0))
    plain = problems.MODELS["tied"](0)
    plain.set_parameters(theta)
    total, g = plain.compute_loss_and_gradients(*problems.batch("tied", 0))
    close(loss, total)
    close(model.get_parameters(), theta - RATE * g)


@by_case
@in_worlds()
def test_an_error_inside_a_round_drops_it(
    backend: Any, problems: Any, mesh: Any, options: Any
) -> None:
    expected = problems.train_sequentially("tied", problems.TEXTBOOK["sgd"])
    model, optimizer = build(backend, problems, mesh, options)

    def fail(error: type[Exception], *, defer: bool) -> None:
        with model.accumulate(defer=defer):
            optimizer.step(model, *local(model, problems, 3))
            if error is ValueError:
                optimizer.step(model, np.zeros((2, 3, 4), int), np.zeros((2, 3, 4), int))
            raise error("mine")

    for defer in (False, True):
        with pytest.raises(ArithmeticError, match="mine"):
            fail(ArithmeticError, defer=defer)
        with pytest.raises(ValueError, match="shape"):
            fail(ValueError, defer=defer)
    with model.accumulate():
        optimizer.step(model, *local(model, problems, 3))
        for refused in (
            lambda: model.set_parameters(np.zeros(model.parameter_count)),
            lambda: model.apply_gradients(np.zeros(model.parameter_count), 0.1),
        ):
            with pytest.raises(ShardingError, match="not allowed during accumulation"):
                refused()
        model.engine.abandon()
    for step in range(2):
        close(optimizer.step(model, *local(model, problems, step)), expected.losses[step])
    close(model.get_parameters(), expected.parameters[1])


@pytest.mark.parametrize(("world_size", "mesh"), [(2, (2, 1, 1)), (2, (1, 2, 1)), (4, (2, 1, 2))])
@in_worlds()
def test_updates_of_each_rank_alone_are_refused(backend: Any, problems: Any, mesh: Any) -> None:
    with pytest.raises(ValueError, match="auto_sync_gradients=False"):
        build(backend, problems, mesh, {}, auto_sync_gradients=False)
    model, optimizer = build(backend, problems, mesh, {"data_parallel_strategy": "ddp"})
    theta = model.get_parameters()
    optimizer.step(model, *local(model, problems, 0))
    model.set_parameters(theta)
    model.sharding_configuration.auto_sync_gradients = False
    for refused in (
        lambda: optimizer.step(model, *local(model, problems, 0)),
        lambda: model.train(*local(model, problems, 0)),
    ):
        with pytest.raises(ValueError, match="auto_sync_gradients=False"):
            refused()
    np.testing.assert_array_equal(model.get_parameters(), theta)
    model.sharding_configuration.auto_sync_gradients = True
    model.train(*local(model, problems, 0))
    close(model.get_parameters(), theta - RATE * gradient(problems, *problems.batch("tied", 0)))


# -------------------------------------------------------------------------------- what is frozen

FROZEN = {
    "the first stage": ["embedding*", "position*", "block0*"],
    "the last stage": ["block1*", "norm*"],
    "the tied parameter": ["embedding.weight"],
    "biases": ["*.bias"],
    "all but one": ["block*", "norm*", "embedding*"],
}


# Each case with two of them, and each of them with several cases.
PAIRS = [
    (*case, what)
    for place, case in enumerate(CASES)
    for number, what in enumerate(FROZEN)
    if (number - place) % len(FROZEN) < 2
]


@pytest.mark.parametrize(("world_size", "mesh", "options", "what"), PAIRS)
@in_worlds()
def test_frozen_parameters_stay_and_add_to_no_norm(
    backend: Any, problems: Any, mesh: Any, options: Any, what: str
) -> None:
    entries = problems.MODELS["tied"](0).parameter_table.entries
    patterns = [p for p in FROZEN[what] if fnmatch.filter([e.name for e in entries], p)]
    frozen = [e for e in entries if any(fnmatch.fnmatch(e.name, p) for p in patterns)]
    assert 0 < len(frozen) < len(entries)
    limit = 1e-3  # so low that every step is clipped
    rule = SGD(
        RATE,
        0.9,
        clip_global_norm=limit,
        parameter_options={pattern: {"frozen": True} for pattern in patterns},
    )

    theta = problems.MODELS["tied"](0).get_parameters()
    velocity = np.zeros_like(theta)
    mask = np.ones(len(theta))
    for entry in frozen:
        mask[entry.start : entry.stop] = 0
    expected = []
    for step in range(2):
        g = gradient(problems, *problems.batch("tied", step), theta) * mask
        assert np.linalg.norm(g) > limit
        velocity = 0.9 * velocity + g * (limit / np.linalg.norm(g))
        theta = theta - RATE * velocity
        expected.append(theta)

    model, optimizer = build(backend, problems, mesh, options, rule)
    for step in range(2):
        optimizer.step(model, *local(model, problems, step))
        close(model.get_parameters(), expected[step])
    x, y = problems.batch("tied", 0)
    g = gradient(problems, x, y, theta)
    close(model.compute_gradients(x, y), g * mask)
    optimizer.apply_gradients(g, model)
    norm = np.linalg.norm(g * mask)
    theta = theta - RATE * (0.9 * velocity + g * mask * (limit / norm))
    close(model.get_parameters(), theta)


# ---------------------------------------------------------------------------------------- rules


@by_case
@in_worlds()
def test_rules_see_the_models_parameters_whole(
    backend: Any, problems: Any, mesh: Any, options: Any
) -> None:
    """Trust ratios, the global norm, decay groups and schedules, together."""
    entries = tuple(problems.MODELS["tied"](0).parameter_table.entries)
    update = problems.lamb(entries, 0.01, "block0", ".bias")
    expected = problems.train_sequentially("tied", update, steps=3)
    rule = LAMB(
        RATE,
        weight_decay=0.1,
        clip_global_norm=0.01,
        parameter_options={"*.bias": {"weight_decay": 0.0}, "block0*": {"frozen": True}},
    )
    model, optimizer = build(backend, problems, mesh, options, rule)
    for step in range(3):
        close(optimizer.step(model, *local(model, problems, step)), expected.losses[step])
        close(model.get_parameters(), expected.parameters[step])
    full = model.get_parameters()  # whoever holds an element holds the same
    own = [full[start:stop] for start, stop in model.owned_ranges]
    np.testing.assert_array_equal(model.local_parameter_shard, np.concatenate(own))


@pytest.mark.parametrize("order", list(itertools.permutations(("pipeline", "tensor", "data"))))
@pytest.mark.parametrize(("world_size", "mesh"), [(8, (2, 2, 2))])
@in_worlds()
def test_axes_come_in_any_order(backend: Any, problems: Any, mesh: Any, order: Any) -> None:
    entries = tuple(problems.MODELS["tied"](0).parameter_table.entries)
    expected = problems.train_sequentially("tied", problems.lamb(entries, 0.01), steps=3)
    options = {"schedule": "1f1b", "data_parallel_strategy": "fsdp", "order": order}
    model, optimizer = build(backend, problems, mesh, options, problems.RULES["lamb"]())
    for step in range(2):
        close(optimizer.step(model, *local(model, problems, step)), expected.losses[step])
    close(model.get_parameters(), expected.parameters[1])
    x, _ = problems.batch("tied", 0)
    for root in range(backend.world_size):
        with model.unsharded(root) as plain:
            assert (plain is not None) == (backend.rank == root)
            if plain is not None:
                close(plain.get_parameters(), expected.parameters[1])
    plain = problems.MODELS["tied"](0).with_parameters(expected.parameters[1])
    close(model.predict(x), plain.predict(x))
    other = (x + (backend.rank == 1)) % 11
    pattern = rf"rank {backend.world_size - 1}: |rank 1: "
    with pytest.raises(ValueError, match=pattern):
        optimizer.step(model, other, other)


@by_case
@in_worlds()
def test_each_element_is_owned_once(backend: Any, problems: Any, mesh: Any, options: Any) -> None:
    """Each element counts once in sums of squares, and is written once to files."""
    model, optimizer = build(backend, problems, mesh, options, LAMB(RATE))
    optimizer.bind(model)
    engine = model.engine
    names = [entry.name for entry in model.parameter_entries]
    counts = np.zeros((len(names), 2))
    for segment in (segment for segments, _ in optimizer._state.views for segment in segments):
        counts[names.index(segment.name)] += segment.stop - segment.start
    found = engine.sum_over_owners(counts)
    sizes = [entry.size for entry in model.parameter_entries]
    np.testing.assert_array_equal(found, np.column_stack([sizes, sizes]))
    written = sum(piece.length for piece in engine.pieces.to_write(engine.program))
    counted = sum(piece.length for piece in engine.pieces.counted)
    total = backend.all_reduce(np.array([written, counted]))
    assert total.tolist() == [sum(sizes), sum(sizes)]


@by_case
@in_worlds()
def test_values_are_clipped_and_rates_scheduled(
    backend: Any, problems: Any, mesh: Any, options: Any
) -> None:
    limit = 1e-3
    schedule = OneCycle(RATE, 4)
    model, optimizer = build(backend, problems, mesh, options, SGD(schedule, clip_value=limit))
    theta = model.get_parameters()
    for step in range(3):
        g = gradient(problems, *problems.batch("tied", step), theta)
        assert (np.abs(g) > limit).any()
        theta = theta - schedule(step) * np.clip(g, -limit, limit)
        assert optimizer.get_current_learning_rate() == schedule(step)
        optimizer.step(model, *local(model, problems, step))
        close(model.get_parameters(), theta)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize(("world_size", "mesh"), [(4, (2, 1, 2)), (4, (1, 2, 2))])
@in_worlds()
def test_gradients_are_compressed_on_the_data_axis(
    backend: Any, problems: Any, mesh: Any, strategy: str
) -> None:
    moved = []
    for compress in (False, True):
        model, _ = build(
            backend, problems, mesh, {"data_parallel_strategy": strategy, "schedule": "1f1b"},
            enable_gradient_compression=compress,
        )  # fmt: skip
        start = model.get_parameters()
        for _ in range(2):
            model.set_parameters(start)
            model.train(*local(model, problems, 1))
        moved.append(model.get_parameters() - start)
    difference = np.abs(moved[1] - moved[0]).max()
    assert difference < 0.02 * np.abs(moved[0]).max()
    assert difference > 0
    full = model.get_parameters()  # whoever holds an element holds the same
    own = [full[start:stop] for start, stop in model.owned_ranges]
    np.testing.assert_array_equal(model.local_parameter_shard, np.concatenate(own))
