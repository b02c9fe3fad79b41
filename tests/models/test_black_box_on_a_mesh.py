"""A black box on a mesh trains as in one process, and its vector lies as the documents say.

Every rank computes the whole batch of its data coordinate, and owns a part of the flat vector:
`ShardLayout` over the pipeline axis, then of that range over the tensor axis.
"""

from __future__ import annotations

import logging
import os
from itertools import cycle, product
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.arrays import to_host
from mpishard.communication import ProcessMesh, run_in_threads
from mpishard.errors import PeerError
from mpishard.layout import ShardLayout
from mpishard.models import HybridShardedModel, PipelineParallelModel, TensorParallelModel
from mpishard.models.stores.vector import placed_range
from mpishard.observe.ledger import MemoryCategory
from mpishard.optimizers import HybridShardedOptimizer
from mpishard.sharding import ParameterEntry, ShardingConfiguration
from mpishard.testing.worlds import in_worlds

WORLDS = (1, 2, 3, 4, 5, 6, 7, 8)
KINDS = ("function", "black_box", "autograd", "one_number")
is_full = bool(os.environ.get("MPISHARD_TEST_FULL"))
DATA = ("ddp", "zero1", "zero2", "fsdp")


def meshes(world_size: int) -> list[tuple[int, int, int]]:
    """All (pipeline, tensor, data) that make up a world."""
    sizes = range(1, world_size + 1)
    return [m for m in product(sizes, repeat=3) if np.prod(m) == world_size]


def rows() -> list[tuple[Any, ...]]:
    """Every mesh with two of the kinds, or with all; the other choices go round."""
    ways = list(product(DATA, ("sgd", "adamw", "lamb"), ("off", "on", "deferred")))
    generator = np.random.default_rng(0)
    kinds, found = cycle(KINDS), []
    for world_size in WORLDS:
        for mesh in meshes(world_size):
            for kind in KINDS if is_full else (next(kinds), next(kinds)):
                for number in range(36) if is_full else generator.integers(0, 36, 1):
                    path = ("arena", "messages", "two nodes")[number % 3 - len(found) % 3]
                    found.append((world_size, mesh, kind, *ways[number], path))
    return found


def build(
    backend: Any, problems: Any, kind: str, mesh: tuple[int, int, int], rule: str = "sgd",
    rule_options: Any = None, **options: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Model and optimizer; each rank's plain model has values of its own: rank 0's count."""
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = HybridShardedModel(problems.MODELS[kind](backend.rank), config, *mesh, **options)
    optimizer = HybridShardedOptimizer(problems.RULES[rule](**(rule_options or {})), config, *mesh)
    return model, optimizer


def local_batch(
    model: Any, problems: Any, kind: str, step: int, part: int = 0, of: int = 1
) -> tuple[Any, Any]:
    """What the data rank has of the global batch, or of a part of it."""
    x, y = problems.batch(kind, step)
    start, stop = (len(x) * index // of for index in (part, part + 1))
    x, y = x[start:stop], y[start:stop]
    mine = problems.part(len(x), of * step + part, model.data_rank, model.data_size)
    return x[mine], y[mine]


def update(model: Any, optimizer: Any, problems: Any, kind: str, step: int, how: str) -> float:
    if how == "off":
        return float(optimizer.step(model, *local_batch(model, problems, kind, step)))
    with model.accumulate(defer=how == "deferred"):
        for part in (0, 1):
            optimizer.step(model, *local_batch(model, problems, kind, step, part, 3))
    return float(optimizer.step(model, *local_batch(model, problems, kind, step, 2, 3)))


@pytest.mark.parametrize(
    ("world_size", "mesh", "kind", "data", "rule", "accumulation", "path"), rows(),
    indirect=["path"],
)  # fmt: skip
@in_worlds()
def test_trains_as_one_process_does(
    backend: Any, problems: Any, mesh: Any, kind: str, data: str, rule: str, accumulation: str,
    path: str, record_property: Any,
) -> None:  # fmt: skip
    expected = problems.train_sequentially(kind, problems.textbook(kind, rule))
    model, optimizer = build(backend, problems, kind, mesh, rule, data_parallel_strategy=data)
    largest = 0.0
    for step in range(5):
        loss = update(model, optimizer, problems, kind, step, accumulation)
        np.testing.assert_allclose(loss, expected.losses[step], rtol=0, atol=1e-12)
        everywhere = [to_host(model.gather_full_parameters())]
        if kind != "autograd":  # whose own vector lies in the store's memory
            everywhere.append(model.wrapped_model.get_parameters())
        for actual in everywhere:
            largest = max(largest, np.abs(actual - expected.parameters[step]).max())
    assert largest < 1e-12
    record_property("largest difference of a black box on a mesh", float(largest))


# -------------------------------------------------------------------------------------- what lies


class Ten:
    """Ten parameters, and no samples: what a rank owns of them."""

    def __init__(self, length: int = 10) -> None:
        self.theta = np.arange(float(length))

    def get_parameters(self) -> Any:
        return self.theta

    def set_parameters(self, theta: Any) -> None:
        self.theta = theta

    def compute_gradients(self, x: Any, y: Any) -> Any:
        return x.sum() * np.ones_like(self.theta)


def documented(length: int, mesh: ProcessMesh) -> tuple[int, int]:
    """Written anew: the pipeline's range, and of that the tensor rank's; remainders first."""
    start, stop = 0, length
    for size, rank in (
        (mesh.pipeline_size, mesh.pipeline_rank), (mesh.tensor_size, mesh.tensor_rank),
    ):  # fmt: skip
        base, rest = divmod(stop - start, size)
        start, stop = (
            start + rank * base + min(rank, rest),
            start + (rank + 1) * base + min(rank + 1, rest),
        )
    return start, stop


@pytest.mark.parametrize("length", [1, 2, 10, 17])
@in_worlds(2, 3, 4, 6)
def test_the_vector_is_divided_by_the_documented_arithmetic(backend: Any, length: int) -> None:
    for sizes in meshes(backend.world_size):
        model = HybridShardedModel(Ten(length), ShardingConfiguration(backend), *sizes)
        start, stop = documented(length, model.mesh)
        is_divided = model.mesh.model_size > 1
        if is_divided:
            assert model.owned_ranges == (((start, stop),) if start < stop else ())
        np.testing.assert_array_equal(
            model.local_parameter_shard, np.arange(float(length))[start:stop]
        )
        assert model._shard_size == len(model.local_parameter_shard)
        assert model.parameter_count == length
        np.testing.assert_array_equal(model.get_parameters(), np.arange(float(length)))


def test_10_over_3_are_4_3_3() -> None:
    def ranges(backend: Any) -> Any:
        config = ShardingConfiguration(backend)
        kinds = PipelineParallelModel, TensorParallelModel
        return [kind(Ten(), config).owned_ranges for kind in kinds]

    expected = [((0, 4),)] * 2, [((4, 7),)] * 2, [((7, 10),)] * 2
    assert run_in_threads(3, ranges) == list(expected)


def test_tensor_ranks_divide_what_their_stage_has_wherever_the_ranks_stand() -> None:
    def ranges(backend: Any) -> Any:
        model = HybridShardedModel(
            Ten(), ShardingConfiguration(backend), 2, 2, 2, order=("data", "tensor", "pipeline")
        )
        model.train(np.ones((1, 1)) * (1 + model.data_rank), None)
        mesh = model.mesh
        where = mesh.pipeline_rank, mesh.tensor_rank, mesh.data_rank
        return where, model.owned_ranges[0], model.get_parameters()

    own = {(0, 0): (0, 3), (0, 1): (3, 5), (1, 0): (5, 8), (1, 1): (8, 10)}
    for (pipeline, tensor, _), found, theta in run_in_threads(8, ranges):
        assert found == own[pipeline, tensor]
        # Gradients 1 and 2 of one sample each, at the default rate.
        np.testing.assert_allclose(theta, np.arange(10.0) - 0.01 * 1.5, rtol=0, atol=1e-15)


def test_a_range_is_cut_into_boxes_row_by_row() -> None:
    entries = [
        ParameterEntry("a", (2, 3, 4), 0),
        ParameterEntry("b", (), 24),
        ParameterEntry("c", (5,), 25),
    ]
    full = np.arange(30.0)
    for start in range(31):
        for stop in range(start, 31):
            placement = placed_range(entries, start, stop)
            assert placement.own_length == stop - start
            own = placement.part(full, 0, stop - start)
            np.testing.assert_array_equal(own, full[start:stop])
            back = np.full(30, -1.0)
            placement.put(own, 0, back)
            inside = (full >= start) & (full < stop)
            np.testing.assert_array_equal(back, np.where(inside, full, -1))


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("kind", ["function", "autograd"])
@in_worlds(4, 8)
def test_a_rank_holds_its_part_of_gradient_and_state(
    backend: Any, problems: Any, kind: str, data: str, messages_only: None
) -> None:
    mesh = 2, 1, backend.world_size // 2
    model, optimizer = build(backend, problems, kind, mesh, "adamw", data_parallel_strategy=data)
    optimizer.step(model, *local_batch(model, problems, kind, 0))
    start, stop = documented(model.parameter_count, model.mesh)
    part = 8 * (stop - start)
    share = 8 * ms.ShardLayout(stop - start, mesh[2]).size(model.data_rank)
    ledger = model.memory
    assert ledger.held(MemoryCategory.PARAMETERS) == part
    state = part if data == "ddp" else share
    assert ledger.held(MemoryCategory.OPTIMIZER_STATE) == 2 * state
    is_sharded = data in ("zero2", "fsdp")
    assert ledger.held(MemoryCategory.GRADIENTS) == (share if is_sharded else part)
    # What computes where it is told is told of a vector of ours.
    whole = 8 * model.parameter_count if kind == "autograd" else 0
    assert ledger.held(MemoryCategory.GATHERED) == whole


# ------------------------------------------------------------------------------------ what is sent


def sent(backend: Any, links: Any, call: Any, *arguments: Any) -> int:
    """Bytes that a call sends over these communicators, all ranks together."""
    for link in links:
        link.traffic.reset()
    call(*arguments)
    mine = sum(link.traffic.total_bytes for link in links)
    return int(backend.all_reduce(np.array([mine]))[0])


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("kind", ["function", "autograd"])
@in_worlds(2, 3, 4)
def test_bytes_of_a_step(
    backend: Any, problems: Any, kind: str, data: str, messages_only: None
) -> None:
    """2 (D - 1) S on the data axis, and D (R - 1) S to put the parts of D replicas together.

    S are the bytes of all parameters, R the ranks of a replica. Beside them the ranks compare
    the batches and the results of each replica, and all add up the step's totals. That depends on
    no sizes.
    """
    for mesh in meshes(backend.world_size):
        model, optimizer = build(
            backend, problems, kind, mesh, "adamw", data_parallel_strategy=data
        )
        optimizer.bind(model)
        links = {id(b): b for b in (backend, model.mesh.data, model.mesh.model)}.values()
        share, replicas = model.mesh.model_size, mesh[2]
        small = sent(backend, links, backend.all_reduce, np.zeros(7))
        if share > 1:
            marks = np.zeros((1, 4), np.int64)
            small += sent(backend, links, model.mesh.model.all_gather, marks)
            small += sent(backend, links, model.mesh.model.all_gather, np.zeros((1, 3)))
            if replicas > 1:
                small += sent(backend, links, backend.all_gather, marks)
        size = model.parameter_count * model.dtype.itemsize
        for step in range(2):
            batch = local_batch(model, problems, kind, step)
            found = sent(backend, links, optimizer.step, model, *batch)
            assert found - small == (2 * (replicas - 1) + replicas * (share - 1)) * size


# ----------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("kind", ["function", "autograd"])
@pytest.mark.parametrize("data", ["zero1", "fsdp"])
def test_one_warning_says_what_to_implement(
    caplog: pytest.LogCaptureFixture, problems: Any, kind: str, data: str
) -> None:
    def wrap(backend: Any, *mesh: int) -> Any:
        model = HybridShardedModel(
            problems.MODELS[kind](0), ShardingConfiguration(backend), *mesh, micro_batch_count=4,
            data_parallel_strategy=data,
        )  # fmt: skip
        return model.get_model_metadata().properties, model.estimated_bubble_fraction

    with caplog.at_level(logging.INFO, "mpishard"):
        found = run_in_threads(4, wrap, 2, 1, 2)
    (message,) = [record.getMessage() for record in caplog.records]
    for words in ("HybridShardedModel", "2 pipeline x 1 tensor x 2 data", "ILayeredModel",
                  "each rank computes the whole batch, in 4 micro-batches"):  # fmt: skip
        assert words in message
    for properties, bubble in found:
        assert properties["ComputePartitioned"] is False
        assert (properties["ParametersSharded"], properties["ParametersReplicated"]) == (
            False,
            True,
        )
        assert properties["OptimizerStateSharded"] is properties["GradientsSharded"] is True
        assert properties["PartitionLog"] == []
        assert (properties["MicroBatchCount"], properties["Schedule"]) == (4, None)
        assert bubble == 0
    assert [properties["ShardSize"] for properties, _ in found] == (
        [6, 6, 6, 6] if kind == "function" else [26, 26, 25, 25]
    )


class Seen(Ten):
    """The gradient of a mean; keeps the number of samples of each computation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def compute_loss_and_gradients(self, x: Any, y: Any) -> Any:
        self.seen.append(len(x))
        return float(x.mean() * self.theta.sum()), x.mean() * np.ones_like(self.theta)


@pytest.mark.parametrize("mesh", [(2, 2, 1), (2, 1, 2), (1, 1, 4)])
@in_worlds(4)
def test_a_black_box_computes_its_batch_in_micro_batches(backend: Any, mesh: Any) -> None:
    config, x = ShardingConfiguration(backend), np.arange(1.0, 12)[:, None]
    models, plain = [], [Seen(), Seen()]
    for each, count in zip(plain, (1, 3), strict=True):
        models.append(HybridShardedModel(each, config, *mesh, micro_batch_count=count))
    whole, model = models
    mine = x[model.batch_indices(len(x))]
    for _ in range(2):
        with whole.accumulate(), model.accumulate():
            added = [each.train(mine, None) for each in models]
        stepped = [each.train(mine, None) for each in models]
        np.testing.assert_allclose(*added, rtol=1e-12)
        np.testing.assert_allclose(*stepped, rtol=1e-12)
    expected = np.arange(10.0) - 2 * config.learning_rate * x.mean()
    np.testing.assert_allclose(model.get_parameters(), expected, rtol=1e-12)
    np.testing.assert_allclose(whole.get_parameters(), expected, rtol=1e-12)
    counts = list(ShardLayout(len(mine), 3).sizes)
    assert (plain[0].seen, plain[1].seen) == ([len(mine)] * 4, [n for n in counts if n] * 4)
    assert repr(model).endswith("computed whole, 3 micro-batches)")


def test_a_schedule_for_a_black_box_is_refused() -> None:
    def wrap(backend: Any) -> None:
        PipelineParallelModel(Ten(), ShardingConfiguration(backend), 2, schedule="1f1b")

    with pytest.raises(ValueError, match=r"schedule 1F1B orders .* Ten is a black box, which each"):
        run_in_threads(2, wrap)


def test_recomputation_is_refused() -> None:
    def wrap(backend: Any) -> None:
        options = {"checkpoint_config": ms.pipeline.ActivationCheckpointConfig(enabled=True)}
        PipelineParallelModel(Ten(), ShardingConfiguration(backend), **options)

    with pytest.raises(NotImplementedError, match=r"Ten is a black box.*ILayeredModel"):
        run_in_threads(2, wrap)


@in_worlds(4)
def test_ranks_of_a_replica_must_be_given_one_batch(backend: Any) -> None:
    model = HybridShardedModel(Ten(), ShardingConfiguration(backend), 2, 1, 2)
    x = np.ones((2, 1)) * (1 + model.mesh.pipeline_rank)  # by pipeline coordinate, on all replicas
    for given, words in (
        (x, "checksums"),
        (x[: 1 + model.mesh.pipeline_rank], "rank 2: 2 samples"),
    ):
        with pytest.raises(ValueError, match=f"{words}.*Divide samples by data_rank and data_size"):
            model.train(given, None)
    assert model.get_parameters().tolist() == list(range(10))
    model.train(np.ones((1, 1)), None)  # and goes on


def of_rank(backend: Any, what: str) -> ms.FunctionModel:
    """A function whose loss or gradient depends on the rank of a replica."""
    odd = float(backend.rank % 2)

    def fun(theta: Any, x: Any, y: Any) -> tuple[float, Any]:
        gradient = np.arange(1.0, 10_001.0) / 10_000
        if what == "exchanged elements" and odd:
            gradient[[10, 9000]] = gradient[[9000, 10]]
        elif what == "gradient":
            gradient += odd
        elif what == "one element":
            gradient[5000] += odd * 1e-3
        return 3.0 + (what == "loss") * odd, gradient * (1 + 1e-14 * odd)

    return ms.FunctionModel(fun, np.zeros(10_000))


@pytest.mark.parametrize("what", ["gradient", "loss", "exchanged elements", "one element"])
@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 1, 1), (2, 1, 2)])
@in_worlds(2, 4)
def test_a_result_that_depends_on_the_rank_is_refused(
    backend: Any, mesh: tuple[int, int, int], what: str
) -> None:
    if np.prod(mesh) != backend.world_size:
        pytest.skip("another world")
    order = ("data", "pipeline", "tensor")
    fun = of_rank(backend, what)
    model = HybridShardedModel(fun, ShardingConfiguration(backend), *mesh, order=order)
    with pytest.raises(ms.errors.ShardingError, match=r"their results differ: rank \d: loss sum 6"):
        model.train(np.ones((2, 1)), np.ones((2, 1)))
    assert not model.get_parameters().any()


@in_worlds(2)
def test_rounding_of_another_machine_is_no_difference(backend: Any) -> None:
    model = HybridShardedModel(of_rank(backend, "rounding"), ShardingConfiguration(backend), 2, 1)
    model.train(np.ones((2, 1)), np.ones((2, 1)))
    assert model.get_parameters()[-1] == pytest.approx(-0.01)


@in_worlds(2, 4)
def test_a_partition_strategy_deals_the_flat_vector(backend: Any) -> None:
    fun = ms.FunctionModel(lambda theta, x, y: (0.0, np.ones(300)), np.arange(300.0))
    strategy = ms.pipeline.LoadBalancedPartitionStrategy([0, 100, 200])
    model = HybridShardedModel(
        fun, ShardingConfiguration(backend), 2, backend.world_size // 2, 1,
        partition_strategy=strategy,
    )  # fmt: skip
    sizes = [size for _, size in strategy.compute_partition(300, 2)]
    assert sizes == [100, 200]
    held = ms.ShardLayout(sizes[model.mesh.pipeline_rank], model.mesh.tensor_size)
    assert model.local_parameter_shard.size == held.size(model.mesh.tensor_rank)
    assert "computed whole" in repr(model)
    model.train(np.ones((2, 1)), np.ones((2, 1)))
    np.testing.assert_allclose(model.get_parameters(), np.arange(300.0) - 0.01, rtol=1e-14)


class Backwards(ms.pipeline.IPipelinePartitionStrategy):
    def compute_partition(self, total_parameters: int, num_stages: int) -> Any:
        return [(total_parameters // 2, total_parameters), (0, total_parameters // 2)]


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Backwards(), r"assigns 10 parameters to 2 stages as \(start, size\) \[\(5, 10\)"),
        ([1.0, 2.0], "costs of layers, but Ten is a black box without layers"),
    ],
)
def test_a_partition_that_does_not_fit_a_black_box_is_refused(strategy: Any, words: str) -> None:
    def wrap(backend: Any) -> None:
        PipelineParallelModel(Ten(), ShardingConfiguration(backend), partition_strategy=strategy)

    with pytest.raises(ValueError, match=words):
        run_in_threads(2, wrap)


@in_worlds(2)
def test_what_is_no_array_is_compared_by_its_length(backend: Any) -> None:
    class Words(Ten):
        def compute_gradients(self, x: Any, y: Any) -> Any:
            return np.full(10, float(len(x[0])))

    model = TensorParallelModel(Words(), ShardingConfiguration(backend))
    model.train(["four"], None)
    np.testing.assert_allclose(model.get_parameters(), np.arange(10.0) - 0.04, atol=1e-15)
    with pytest.raises(ValueError, match=r"rank 0: 1 samples.*rank 1: 2 samples"):
        model.train(["four"] * (1 + backend.rank), None)


def test_an_exception_in_one_box_ends_all_ranks(problems: Any) -> None:
    ends = {}

    def body(backend: Any) -> None:
        def fun(theta: Any, x: Any, y: Any) -> Any:
            if backend.rank == 1 and theta[0] != 0:
                raise ZeroDivisionError("in the user's function")
            return 1.0, np.ones(3)

        model = HybridShardedModel(
            ms.FunctionModel(fun, np.zeros(3)), ShardingConfiguration(backend), 2, 1, 2
        )
        try:
            for _ in range(3):
                model.train(np.ones(1), np.ones(1))
        except Exception as error:
            ends[backend.rank] = type(error), model.engine.step_number
            raise

    with pytest.raises(ZeroDivisionError, match="in the user's function"):
        run_in_threads(4, body, timeout=5)
    peers = dict.fromkeys((0, 2, 3), (PeerError, 1))
    assert ends == {1: (ZeroDivisionError, 1)} | peers


@in_worlds(2, 4)
def test_a_gradient_that_is_not_finite_changes_nothing(backend: Any) -> None:
    """Also where only another rank's part of it is."""
    mesh = 1, 2, backend.world_size // 2

    def fun(theta: Any, x: Any, y: Any) -> Any:
        return 1.0, np.append(np.ones(9), np.nan)

    model = HybridShardedModel(
        ms.FunctionModel(fun, np.zeros(10)), ShardingConfiguration(backend), *mesh
    )
    with pytest.raises(ms.errors.NonFiniteLossError):
        model.train(np.ones(1), np.ones(1))
    assert not model.get_parameters().any()
