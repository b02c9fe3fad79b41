"""With gradient leaves worlds of 1 to 8 ranks have the same bits."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import threadpoolctl

import mpishard as ms
from mpishard import checkpoint
from mpishard.base.arrays import to_host
from mpishard.base.layout import LeafLayout
from mpishard.communication import CommunicationBackend, run_in_threads
from mpishard.errors import NonFiniteLossError
from mpishard.models.engine import leaves
from mpishard.testing.worlds import in_worlds

LEAVES = 8
WORLDS = (1, 2, 3, 4, 8)
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp")
KINDS = ("tied", "conv", "dropout", "function", "black_box", "tiny")
LIMIT = 0.02  # of the gradient's norm: every step is clipped
CHOICES = {"sgd": {"clip_global_norm": LIMIT}, "adamw": {"clip_global_norm": LIMIT}}
Bits = list[bytes]


@pytest.fixture(autouse=True)
def _one_blas_thread() -> Iterator[None]:
    with threadpoolctl.threadpool_limits(1, "blas"):
        yield


def global_batch(problems: Any, kind: str, step: int, shares: str) -> tuple[Any, Any]:
    """Batches of 7, 9, 11 .. samples for 8 leaves, so that one leaf is empty; or of 16."""
    if shares == "uneven":
        return problems.batch(kind, step)
    x, y = problems.batch(kind, step + 5)
    return x[:16], y[:16]


def build(
    backend: CommunicationBackend,
    problems: Any,
    kind: str,
    strategy: str,
    rule: str,
    unit_size: int = 60,
    gradient_leaves: int | None = LEAVES,
    rule_options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    offload: Sequence[str] = (),
) -> tuple[Any, Any]:
    model_class, optimizer_class = problems.STRATEGIES[strategy]
    config = ms.ShardingConfiguration(
        backend,
        minimum_parameter_group_size=unit_size,
        gradient_leaves=gradient_leaves,
        **{f"cpu_offload_{name}": True for name in offload},
    )
    model = model_class(problems.MODELS[kind](backend.rank, device), config)
    options = CHOICES.get(rule, {}) if rule_options is None else rule_options
    return model, optimizer_class(problems.RULES[rule](**options), config)


def walk(
    problems: Any, kind: str, model: Any, optimizer: Any, shares: str, steps: Iterable[int]
) -> Bits:
    """Loss, norm and weight of each step, and the parameters after it."""
    found = []
    for step in steps:
        x, y = global_batch(problems, kind, step, shares)
        mine = model.batch_indices(len(x))
        report = optimizer.step_report(model, x[mine], y[mine])
        found.append(np.array([report.loss, report.gradient_norm, report.weight]).tobytes())
        found.append(to_host(model.gather_full_parameters()).tobytes())
    return found


def bits(
    backend: CommunicationBackend,
    problems: Any,
    kind: str,
    strategy: str,
    rule: str,
    shares: str = "uneven",
    steps: int = 3,
    **options: Any,
) -> Bits:
    model, optimizer = build(backend, problems, kind, strategy, rule, **options)
    return walk(problems, kind, model, optimizer, shares, range(steps))


@functools.cache
def bits_of(
    problems: Any,
    world_size: int,
    kind: str,
    strategy: str,
    rule: str,
    shares: str = "uneven",
    unit_size: int = 60,
) -> Bits:
    """On threads."""
    every, *others = run_in_threads(
        world_size, bits, problems, kind, strategy, rule, shares, unit_size=unit_size
    )
    assert all(other == every for other in others)
    return every


# ------------------------------------------------------------------------------- the same bits


# All pairs; --full has all triples.
TRIPLES = [
    (strategy, rule, shares)
    for place, strategy in enumerate(STRATEGIES)
    for number, rule in enumerate(("sgd", "adamw"))
    for turn, shares in enumerate(("even", "uneven"))
    if (place + number) % 2 == turn or os.environ.get("MPISHARD_TEST_FULL")
]


@pytest.mark.parametrize(("strategy", "rule", "shares"), TRIPLES)
@in_worlds(*WORLDS)
def test_every_world_and_strategy(
    backend: Any, problems: Any, strategy: str, rule: str, shares: str
) -> None:
    other = 8 if backend.world_size < 8 else 1
    expected = bits_of(problems, other, "mlp", "ddp", rule, shares)
    assert bits(backend, problems, "mlp", strategy, rule, shares) == expected


@pytest.mark.parametrize("path", ["messages", "two nodes"], indirect=True)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@in_worlds(2, 3, 4)
def test_by_messages_and_between_nodes(
    backend: Any, problems: Any, strategy: str, path: str
) -> None:
    """With one unit, and with many units of several lengths."""
    for unit_size in (1, 1000):
        expected = bits_of(problems, 8, "mlp", "ddp", "adamw", unit_size=unit_size)
        found = bits(backend, problems, "mlp", strategy, "adamw", unit_size=unit_size)
        assert found == expected


@pytest.mark.parametrize("kind", KINDS)
@in_worlds(2, 3, 7)
def test_every_kind_of_model(backend: Any, problems: Any, kind: str) -> None:
    for strategy, rule in (("fsdp", "adamw"), ("ddp", "lamb")):
        expected = bits_of(problems, 1, kind, "zero2", rule)
        assert bits(backend, problems, kind, strategy, rule) == expected


@pytest.mark.parametrize("rule", ["sgd", "lamb"])
@in_worlds(4)
def test_norms_of_parameters_too(backend: Any, problems: Any, rule: str) -> None:
    """Some parameters are frozen, so that other ranges count in norms."""
    frozen = {"rule_options": {"parameter_options": {"linear1.*": {"frozen": True}}}}
    for strategy in ("ddp", "fsdp"):
        for options in ({}, frozen):
            (expected,) = run_in_threads(1, bits, problems, "mlp", "fsdp", rule, **options)
            assert bits(backend, problems, "mlp", strategy, rule, **options) == expected


def blocked(layout: LeafLayout, rank: int) -> list[slice]:
    steps = layout.leaves // layout.world_size
    cut = ms.ShardLayout(layout.samples, layout.leaves)
    return [cut.slice(leaf) for leaf in range(rank * steps, (rank + 1) * steps)]


@pytest.mark.parametrize(
    ("strategy", "offload"), [("ddp", ()), ("fsdp", ("optimizer", "gradients", "parameters"))]
)
@in_worlds(2)
def test_on_a_gpu(
    backend: Any, problems: Any, strategy: str, offload: Sequence[str], gpu: Any
) -> None:
    """Sums wait where gradients lie: on the GPU, or in host memory."""
    gpu.cuda.varies = {"sizes"}
    options = {"device": "cuda", "offload": offload}
    (expected,) = run_in_threads(1, bits, problems, "mlp", strategy, "lamb", **options)
    assert bits(backend, problems, "mlp", strategy, "lamb", **options) == expected


def test_losses_go_through_the_tree() -> None:
    """A sum in a row would round differently."""
    parts = [1.0, 1e17, -1e17, 1.0, 2.0, 3.0, 4.0, 5.0]
    weights = list(range(8))

    def body(backend: Any) -> tuple[float, float]:
        config = ms.ShardingConfiguration(backend, gradient_leaves=8)
        mine = slice(backend.rank, 8, {3: 2}.get(backend.world_size, backend.world_size))
        if backend.rank == 2 and backend.world_size == 3:
            return leaves.GradientLeaves(config, backend, np.dtype(np.float64)).total([(0, 0)] * 4)
        own = list(zip(parts[mine], weights[mine], strict=True))
        return leaves.GradientLeaves(config, backend, np.dtype(np.float64)).total(own)

    a, b, c, d, e, f, g, h = parts
    expected = ((a + b) + (c + d)) + ((e + f) + (g + h))
    assert expected != sum(parts)
    for world_size in WORLDS:
        assert run_in_threads(world_size, body) == [(expected, 28.0)] * world_size


def test_leaves_in_blocks_would_give_other_bits(problems: Any, monkeypatch: Any) -> None:
    """This shows that the other tests depend on the order in which ranks take leaves."""
    expected = bits_of(problems, 1, "mlp", "ddp", "sgd", "even")
    cyclic = run_in_threads(2, bits, problems, "mlp", "ddp", "sgd", "even")[0]
    monkeypatch.setattr(LeafLayout, "slices", blocked)
    others = run_in_threads(2, bits, problems, "mlp", "ddp", "sgd", "even")[0]
    assert cyclic == expected
    assert others != expected
    close = [np.frombuffer(found[-1]) for found in (others, expected)]
    np.testing.assert_allclose(*close, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["mlp", "tied", "dropout", "black_box"])
@in_worlds(2, 4)
def test_means_are_those_of_sequential_training(backend: Any, problems: Any, kind: str) -> None:
    """Means over samples or tokens, over leaves that are uneven, one of them empty."""
    for rule, strategy in (("adamw", "fsdp"), ("lamb", "ddp")):
        expected = problems.train_sequentially(kind, problems.textbook(kind, rule), steps=4)
        own = None if rule == "lamb" else {}  # elsewhere the textbook clips nothing
        model, optimizer = build(backend, problems, kind, strategy, rule, rule_options=own)
        for step, (loss, parameters) in enumerate(
            zip(expected.losses, expected.parameters, strict=True)
        ):
            x, y = problems.batch(kind, step)
            mine = model.batch_indices(len(x))
            found = optimizer.step(model, x[mine], y[mine])
            np.testing.assert_allclose(found, loss, rtol=0, atol=1e-12)
            full = model.gather_full_parameters()
            np.testing.assert_allclose(full, parameters, rtol=0, atol=1e-12)


@in_worlds(1, 2, 4)
def test_plain_descent(backend: Any, problems: Any) -> None:
    x, y = problems.batch("mlp", 3)

    def descend(backend: Any) -> bytes:
        model, _ = build(backend, problems, "mlp", "fsdp", "sgd")
        mine = model.batch_indices(len(x))
        model.train(x[mine], y[mine])
        return bytes(model.gather_full_parameters().tobytes())

    assert descend(backend) == run_in_threads(8, descend)[0]


@in_worlds(2, 4)
def test_copies_and_a_changed_set_of_frozen_parameters(backend: Any, problems: Any) -> None:
    def body(backend: Any) -> Bits:
        model, optimizer = build(backend, problems, "mlp", "fsdp", "sgd")
        found = walk(problems, "mlp", model, optimizer, "uneven", range(2))
        copy = model.deep_copy()
        options = {"parameter_options": {"linear0.*": {"frozen": True}}}
        _, other = build(backend, problems, "mlp", "fsdp", "lamb", rule_options=options)
        found += walk(problems, "mlp", copy, other, "uneven", range(2, 4))
        return found + walk(problems, "mlp", model, optimizer, "uneven", range(2, 4))

    assert body(backend) == run_in_threads(1, body)[0]


# --------------------------------------------------------------------------------- going on


@pytest.mark.parametrize(
    ("worlds", "strategies", "rule"),
    [
        ((4, 3, 8), ("fsdp", "ddp", "zero1"), "adamw"),
        ((1, 8, 2), ("zero2", "zero3", "fsdp"), "sgd"),
    ],
)
def test_a_run_continues_in_other_worlds_with_the_same_bits(
    problems: Any, tmp_path: Any, worlds: Any, strategies: Any, rule: str
) -> None:
    def go_on(backend: Any, strategy: str, part: int) -> Bits:
        model, optimizer = build(backend, problems, "dropout", strategy, rule)
        optimizer.bind(model)
        if part:
            checkpoint.load(tmp_path / str(part - 1), model, optimizer)
        found = walk(problems, "dropout", model, optimizer, "uneven", (2 * part, 2 * part + 1))
        checkpoint.save(tmp_path / str(part), model, optimizer)
        return found

    found: Bits = []
    for part, (world, strategy) in enumerate(zip(worlds, strategies, strict=True)):
        found += run_in_threads(world, go_on, strategy, part)[0]
    (undisturbed,) = run_in_threads(1, bits, problems, "dropout", "ddp", rule, steps=6)
    assert found == undisturbed


@in_worlds(2, 4)
def test_a_run_on_threads_continues_under_mpi(
    backend: Any, problems: Any, shared_path: Any
) -> None:
    def first(world: Any) -> None:
        model, optimizer = build(world, problems, "mlp", "fsdp", "adamw")
        walk(problems, "mlp", model, optimizer, "uneven", range(2))
        checkpoint.save(shared_path / "first", model, optimizer)

    if backend.rank == 0:
        run_in_threads(8, first)
    backend.barrier()
    model, optimizer = build(backend, problems, "mlp", "ddp", "adamw")
    checkpoint.load(shared_path / "first", model, optimizer)
    found = walk(problems, "mlp", model, optimizer, "uneven", (2,))
    assert found == bits_of(problems, 1, "mlp", "zero1", "adamw")[4:]


def optimized(backend: Any, problems: Any, strategy: str, **options: Any) -> Any:
    """Train with the loop: shuffled batches of 12, of which the last has 5, and evaluations."""
    x, y = (
        np.concatenate(parts)
        for parts in zip(*(problems.batch("mlp", s) for s in range(3)), strict=True)
    )
    x, y = np.concatenate([x, x + 0.1])[:53], np.concatenate([y, y])[:53]
    model, optimizer = build(backend, problems, "dropout", strategy, "adamw")
    data = ms.OptimizationInputData(
        model=model,
        x_train=x,
        y_train=y,
        x_validation=x[:13],
        y_validation=y[:13],
        batch_size=12,
        epochs=2,
        validate_every=3,
        seed=5,
        progress=False,
        **options,
    )
    result = optimizer.optimize(data)
    return result, model.gather_full_parameters().tobytes()


def test_the_loop_in_other_worlds(problems: Any, tmp_path: Any) -> None:
    whole, expected = run_in_threads(1, optimized, problems, "ddp")[0]
    path = tmp_path / "run"
    stop = {"checkpoint": path, "max_steps": 4}
    first, _ = run_in_threads(4, optimized, problems, "fsdp", **stop)[0]
    rest, parameters = run_in_threads(2, optimized, problems, "zero1", checkpoint=path)[0]
    assert parameters == expected
    assert first.loss_history + rest.loss_history == whole.loss_history
    assert rest.fitness_history == whole.fitness_history
    assert rest.validation_history[-2:] == whole.validation_history[-2:]


# ----------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("world", "what"),
    [
        (9, "has 9: start 8 ranks, or give gradient_leaves=None"),
        (16, "has 16: start 8 ranks, or .*=16 or None"),
    ],
)
def test_worlds_that_cannot_reproduce_are_refused(problems: Any, world: int, what: str) -> None:
    def body(backend: Any) -> int:
        with pytest.raises(ValueError, match=what):
            build(backend, problems, "mlp", "fsdp", "sgd")
        return int(sum(backend.traffic.calls.values()))

    assert run_in_threads(world, body) == [0] * world


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_the_data_axis_only(problems: Any, sizes: Mapping[str, int]) -> None:
    def body(backend: Any) -> int:
        config = ms.ShardingConfiguration(backend, gradient_leaves=8)
        with pytest.raises(
            ValueError,
            match=r"pipeline and tensor axes of 2 ranks would.*size 1",
        ):
            ms.as_distributed(problems.MODELS["mlp"](0), config, "hybrid", **sizes)
        return int(sum(backend.traffic.calls.values()))

    assert run_in_threads(2, body) == [0, 0]


@pytest.mark.parametrize("data_parallel_strategy", ["ddp", "zero2"])
def test_a_mesh_of_data_alone(problems: Any, data_parallel_strategy: str) -> None:
    """Also if a leaf is computed in micro-batches."""

    def body(backend: Any, micro_batch_count: int) -> Bits:
        config = ms.ShardingConfiguration(backend, gradient_leaves=8)
        options = {
            "data_parallel_strategy": data_parallel_strategy,
            "micro_batch_count": micro_batch_count,
        }
        model = ms.as_distributed(problems.MODELS["mlp"](0), config, "hybrid", **options)
        rule = ms.optimizers.SGD(0.01, 0.9, clip_global_norm=LIMIT)
        optimizer = ms.as_distributed(rule, config, "hybrid", **options)
        return walk(problems, "mlp", model, optimizer, "even", range(2))

    for count in (1, 2):
        assert run_in_threads(1, body, count)[0] == run_in_threads(4, body, count)[0]


@pytest.mark.parametrize("choice", ["auto_sync_gradients", "enable_gradient_compression"])
def test_choices_that_change_bits_are_refused_beside_leaves(problems: Any, choice: str) -> None:
    chosen = {choice: choice == "enable_gradient_compression"}

    def body(backend: Any) -> None:
        config = ms.ShardingConfiguration(backend, gradient_leaves=2, **chosen)
        with pytest.raises(ValueError, match=choice):
            ms.as_distributed(problems.MODELS["mlp"](0), config, "ddp")
        model, optimizer = build(backend, problems, "mlp", "ddp", "sgd", gradient_leaves=2)
        setattr(model.sharding_configuration, choice, chosen[choice])
        with pytest.raises(ValueError, match=choice):
            optimizer.step(model, *problems.batch("mlp", 0))

    run_in_threads(2, body)


def test_later_choices_are_refused_before_a_step(problems: Any) -> None:
    x, y = problems.batch("mlp", 3)  # 13 samples

    def body(backend: Any) -> None:
        model, optimizer = build(backend, problems, "mlp", "fsdp", "sgd")
        optimizer.bind(model)
        before = model.gather_full_parameters()
        in_parts = pytest.raises(ValueError, match=r"=8 gives .* accumulate\(\) .* larger batch")
        with in_parts, model.accumulate():
            optimizer.step(model, x, y)
        uneven = slice(0, 4) if backend.rank == 0 else slice(4, 13)
        with pytest.raises(ValueError, match=r"ranks pass \[7, 6\].*were given \[4, 9\]"):
            optimizer.step(model, x[uneven], y[uneven])
        mine = ms.ShardLayout(13, 2).slice(backend.rank)  # the numbers fit, the places do not
        with pytest.raises(ValueError, match=r"begin at \[0, 2\].*with the first at \[0, 7\]"):
            optimizer.step_report(model, x[mine], y[mine], sample_start=mine.start)
        data = ms.OptimizationInputData(
            model=model, x_train=x, y_train=y, local_data=True, progress=False
        )
        with pytest.raises(ValueError, match="local_data"):
            optimizer.optimize(data)
        bad = np.where(np.arange(13)[:, None] == 12, np.nan, x)[model.batch_indices(13)]
        with pytest.raises(NonFiniteLossError, match="ranks \\[1\\]"):
            optimizer.step(model, bad, y[model.batch_indices(13)])
        assert model.gather_full_parameters().tobytes() == before.tobytes()
        assert len(walk(problems, "mlp", model, optimizer, "uneven", range(2))) == 4
        with pytest.raises(TypeError, match="cuts batches into slices"):
            model.engine.leaves.cut({1, 2}, None, None)

    run_in_threads(2, body)


def test_parameters_of_16_bits_are_refused(problems: Any) -> None:
    def body(backend: Any) -> None:
        config = ms.ShardingConfiguration(backend, gradient_leaves=2)
        model = ms.FunctionModel(problems.regression, np.zeros(12, np.float16))
        with pytest.raises(ValueError, match=r"parameters of float16, .* give float32 or float64"):
            ms.as_distributed(model, config, "ddp")

    run_in_threads(1, body)


# ----------------------------------------------------------------- what else decides the bits


def test_differing_numerics_are_named_between_ranks_and_on_loading(
    problems: Any, tmp_path: Any, caplog: Any, monkeypatch: Any
) -> None:
    def save(backend: Any) -> None:
        model, _ = build(backend, problems, "mlp", "fsdp", "sgd")
        model.save_model(tmp_path / "model")

    def load(backend: Any, gradient_leaves: int | None) -> None:
        build(backend, problems, "mlp", "ddp", "sgd", gradient_leaves=gradient_leaves)[
            0
        ].load_model(tmp_path / "model")

    with caplog.at_level(logging.WARNING, "mpishard"):
        run_in_threads(2, save)
        run_in_threads(4, load, 8)
        assert caplog.text == ""
        run_in_threads(2, load, 4)
        run_in_threads(2, load, None)
        fingerprint = leaves.numerics_fingerprint()
        other = {**fingerprint, "numpy": "1.0", "blas_threads": "3"}
        monkeypatch.setattr(leaves, "numerics_fingerprint", lambda: other)
        run_in_threads(1, load, 8)
    four, none, several, elsewhere = (record.message for record in caplog.records)
    assert four.endswith(": gradient_leaves was 8 and is 4")
    assert none.endswith(": gradient_leaves was 8 and is None")
    assert "computed by 3 BLAS threads" in several
    numpy = f"numpy was {np.__version__} and is 1.0"
    assert elsewhere.endswith(f": {numpy}; blas_threads was 1 and is 3")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_compiled_loops_count_in_float32_alone(
    dtype: str, tmp_path: Any, caplog: Any, monkeypatch: Any
) -> None:
    def make(backend: Any, *does: str) -> None:
        config = ms.ShardingConfiguration(backend, gradient_leaves=2)
        model = ms.as_distributed(ms.nn.MLP([2, 3, 1], seed=0, dtype=dtype), config)
        for method in does:
            getattr(model, method)(tmp_path / "model")

    # One is asked for when a model is wrapped, the other when it is saved or loaded.
    loops = iter(["NumPy", "NumPy", "numba 1", "numba 1", "numba 1", "NumPy"])
    fingerprint = leaves.numerics_fingerprint()
    monkeypatch.setattr(
        leaves, "numerics_fingerprint", lambda: {**fingerprint, "loops": next(loops)}
    )
    with caplog.at_level(logging.WARNING, "mpishard"):
        run_in_threads(1, make, "save_model")
        run_in_threads(1, make, "load_model")
        run_in_threads(2, make)
    told = [] if dtype == "float64" else ["loops was NumPy and is numba 1", "by rank, loops is "]
    assert len(caplog.records) == len(told)
    for record, words in zip(caplog.records, told, strict=True):
        assert words in record.message


def test_ranks_with_other_numerics_are_named(problems: Any, caplog: Any, monkeypatch: Any) -> None:
    kernels = iter(["Haswell", "SkylakeX"])
    monkeypatch.setattr(
        leaves, "numerics_fingerprint", lambda: {"blas_threads": "1", "blas_kernel": next(kernels)}
    )
    with caplog.at_level(logging.WARNING, "mpishard"):
        run_in_threads(2, lambda backend: build(backend, problems, "mlp", "ddp", "sgd") and None)
    (record,) = caplog.records
    assert "by rank, blas_kernel is " in record.message


# ----------------------------------------------------------------------------- memory, bytes


@pytest.mark.parametrize("path", ["messages"], indirect=True)
@pytest.mark.parametrize("gradient_leaves", [4, 16])
def test_bytes_and_messages_of_a_step_in_leaves(
    problems: Any, path: str, gradient_leaves: int
) -> None:
    """The bytes of docs/strategies.md, and a few bytes of numbers, equal for each strategy."""

    def sent(backend: Any, strategy: str) -> int:
        model, optimizer = build(backend, problems, "mlp", strategy, "sgd", 1, gradient_leaves)
        walk(problems, "mlp", model, optimizer, "even", range(1))
        x, y = (part[model.batch_indices(16)] for part in global_batch(problems, "mlp", 1, "even"))
        backend.traffic.reset()
        optimizer.step(model, x, y)
        return int(backend.traffic.total_bytes)

    units = [8 * layer.parameter_count for layer in ms.nn.MLP([5, 7, 6, 2]).get_all_layer_info()]
    ranks, passes, size, kept = 4, gradient_leaves // 4, sum(units), units[-1]
    replicated = (passes + 1) * (ranks - 1) * size
    sharded = passes * (ranks - 1) * (3 * (size - kept) + 2 * kept)
    formulae = {"ddp": replicated, "zero1": replicated, "zero2": replicated, "fsdp": sharded}
    found = {s: sum(run_in_threads(ranks, sent, s)) - wanted for s, wanted in formulae.items()}
    assert len(set(found.values())) == 1
    assert 0 < found["ddp"] < 8192


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_sums_wait_in_pieces(problems: Any, strategy: str) -> None:
    """Bytes beside the strategy's: a piece for each level of the tree above the ranks."""

    def held(backend: Any, gradient_leaves: int | None) -> int:
        model, optimizer = build(backend, problems, "mlp", strategy, "sgd", 1, gradient_leaves)
        if gradient_leaves is None:
            x, y = problems.local_batch(backend, "mlp", 1)
            optimizer.step(model, x, y)
        else:
            walk(problems, "mlp", model, optimizer, "uneven", range(1))
        return int(model.memory.as_dict()["gradients"])

    for world_size in (1, 2, 4, 8):
        off = run_in_threads(world_size, held, None)[0]
        on = run_in_threads(world_size, held, LEAVES)[0]
        layers = ms.nn.MLP([5, 7, 6, 2]).get_all_layer_info()
        piece = sum(ms.ShardLayout(layer.parameter_count, world_size).size(0) for layer in layers)
        assert on - off == 8 * piece * (LEAVES // world_size).bit_length() - 8 * piece
