"""A black box on a mesh trains as in one process: pipeline and tensor ranks repeat the work."""

from __future__ import annotations

import logging
import os
from itertools import cycle, product
from typing import Any

import layouts
import numpy as np
import pytest

import mpishard as ms
from mpishard.base.arrays import to_host
from mpishard.communication import run_in_threads
from mpishard.errors import PeerError
from mpishard.models import HybridShardedModel, PipelineParallelModel, TensorParallelModel
from mpishard.observe.ledger import MemoryCategory
from mpishard.optimizers import (
    GradientCompressionOptimizer,
    HybridShardedOptimizer,
    LocalSGDOptimizer,
)
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

WORLDS = (1, 2, 3, 4, 8)
KINDS = ("function", "black_box", "autograd", "one_number")
is_full = bool(os.environ.get("MPISHARD_TEST_FULL"))
DATA = ("ddp", "zero1", "zero2", "fsdp")


def meshes(world_size: int) -> list[tuple[int, int, int]]:
    """All (pipeline, tensor, data) that make up a world."""
    sizes = range(1, world_size + 1)
    return [m for m in product(sizes, repeat=3) if np.prod(m) == world_size]


def rows() -> list[tuple[Any, ...]]:
    """Every mesh with two of the kinds, or with all; the other choices alternate."""
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
    backend: Any,
    problems: Any,
    kind: str,
    mesh: tuple[int, int, int],
    rule: str = "sgd",
    rule_options: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Model and optimizer. Each rank's plain model has other values, and rank 0's are used."""
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = HybridShardedModel(problems.MODELS[kind](backend.rank), config, *mesh, **options)
    optimizer = HybridShardedOptimizer(problems.RULES[rule](**(rule_options or {})), config, *mesh)
    return model, optimizer


def local_batch(
    model: Any, problems: Any, kind: str, step: int, part: int = 0, of: int = 1
) -> tuple[Any, Any]:
    """Samples of the data rank in the global batch, or in a part of it."""
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
    assert model.check_replicas() > 0 or model.mesh.model_size == 1
    record_property("largest difference of a black box on a mesh", float(largest))


class Ten:
    """Ten parameters, and a gradient that depends on samples alone."""

    def __init__(self) -> None:
        self.theta = np.arange(10.0)

    def get_parameters(self) -> Any:
        return self.theta

    def set_parameters(self, theta: Any) -> None:
        self.theta = theta

    def compute_gradients(self, x: Any, y: Any) -> Any:
        return x.sum() * np.ones_like(self.theta)


@pytest.mark.parametrize("data", DATA)
@in_worlds(2, 3, 4)
def test_losses_norms_and_samples_are_counted_once(backend: Any, problems: Any, data: str) -> None:
    plain = problems.MODELS["function"](0)
    x, y = problems.batch("function", 0)
    loss, gradient = plain.compute_loss_and_gradients(x, y)
    for mesh in meshes(backend.world_size):
        model, optimizer = build(backend, problems, "function", mesh, data_parallel_strategy=data)
        mine = model.batch_indices(len(x))
        found = [*model.evaluate(x[mine], y[mine]), *model.loss_and_gradients(x[mine], y[mine])]
        report = optimizer.step_report(model, x[mine], y[mine])
        found += [report.loss, report.weight, report.gradient_norm]
        expected = loss, len(x), loss, gradient, loss, len(x), np.linalg.norm(gradient)
        for actual, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("kind", ["function", "autograd"])
@in_worlds(4, 8)
def test_gradient_and_state_are_sharded_over_the_data_axis(
    backend: Any, problems: Any, kind: str, data: str, messages_only: None
) -> None:
    mesh = 2, 1, backend.world_size // 2
    model, optimizer = build(backend, problems, kind, mesh, "adamw", data_parallel_strategy=data)
    optimizer.step(model, *local_batch(model, problems, kind, 0))
    length = model.parameter_count
    whole = 8 * length
    units = [ms.ShardLayout(unit.length, mesh[2]) for unit in model.units]
    share = 8 * sum(unit.size(model.data_rank) for unit in units)
    ledger = model.memory
    assert model.owned_ranges == ((0, length),)
    assert ledger.held(MemoryCategory.PARAMETERS) == whole
    state = whole if data == "ddp" else share
    assert ledger.held(MemoryCategory.OPTIMIZER_STATE) == 2 * state
    is_sharded = data in ("zero2", "fsdp")
    assert ledger.held(MemoryCategory.GRADIENTS) == (share if is_sharded else whole)


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
    """2 (D - 1) S on each of the data axes, S being the bytes of all parameters.

    Beside them the ranks compare the batches that they repeat, and all add up the step's totals.
    That depends on no sizes.
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
            if replicas > 1:
                small += sent(backend, links, backend.all_gather, marks)
        size = model.parameter_count * model.dtype.itemsize
        for step in range(2):
            batch = local_batch(model, problems, kind, step)
            found = sent(backend, links, optimizer.step, model, *batch)
            assert found - small == share * 2 * (replicas - 1) * size


# ----------------------------------------------------------------------------------- what is said


@pytest.mark.parametrize("kind", ["function", "autograd"])
def test_one_warning_names_the_remedy(
    caplog: pytest.LogCaptureFixture, problems: Any, kind: str
) -> None:
    def wrap(backend: Any, *mesh: int) -> Any:
        model = HybridShardedModel(problems.MODELS[kind](0), ShardingConfiguration(backend), *mesh)
        return model.get_model_metadata().properties, model.estimated_bubble_fraction

    with caplog.at_level(logging.INFO, "mpishard"):
        found = run_in_threads(4, wrap, 2, 1, 2)
    (message,) = [record.getMessage() for record in caplog.records]
    for words in (
        "HybridShardedModel",
        "2 pipeline x 1 tensor x 2 data",
        "ILayeredModel",
        "the 2 ranks of the pipeline and tensor axes repeat",
        "'fsdp'",
    ):
        assert words in message
    for properties, bubble in found:
        for name in (
            "ComputePartitioned", "ParametersSharded", "ParametersOncePerNode",
            "SupportsDecomposedBackward",
        ):  # fmt: skip
            assert properties[name] is False
        assert properties["OptimizerStateSharded"] is properties["ParametersReplicated"] is True
        assert properties["PartitionLog"] == []
        for name in ("Schedule", "PartitionStrategy", "PartitioningStyle"):
            assert properties[name] is None
        assert (properties["MicroBatchCount"], bubble) == (1, 0)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"micro_batch_count": 2}, "micro_batch_count=2 "),
        ({"schedule": "1f1b"}, "schedule='1F1B' "),
        ({"partition_strategy": ms.pipeline.UniformPartitionStrategy()}, "partition_strategy "),
        ({"partition_strategy": [1.0, 2.0], "micro_batch_count": 4},
         "micro_batch_count=4, partition_strategy "),
        ({"sequence_parallel": True}, "sequence_parallel=True "),
    ],
)  # fmt: skip
def test_options_that_divide_layers_are_refused(mesh: Any, options: Any, words: str) -> None:
    def wrap(backend: Any) -> None:
        HybridShardedModel(Ten(), ShardingConfiguration(backend), *mesh, **options)

    with pytest.raises(ValueError, match=f"^{words}.* Ten, .* a black box.*ILayeredModel"):
        run_in_threads(2, wrap)


def test_recomputation_is_refused() -> None:
    def wrap(backend: Any) -> None:
        options = {"checkpoint_config": ms.pipeline.ActivationCheckpointConfig(enabled=True)}
        PipelineParallelModel(Ten(), ShardingConfiguration(backend), **options)

    with pytest.raises(ValueError, match=r"checkpoint_config .* Ten, .* black box.*ILayeredModel"):
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


@in_worlds(2, 4)
def test_repeated_results_that_differ_are_found_by_comparing_replicas(backend: Any) -> None:
    def fun(theta: Any, x: Any, y: Any) -> tuple[float, Any]:
        return 0.0, theta + backend.rank // (backend.world_size // 2)

    mesh = 2, 1, backend.world_size // 2
    model = HybridShardedModel(
        ms.FunctionModel(fun, np.zeros(10)), ShardingConfiguration(backend), *mesh
    )
    assert model.check_replicas() == 1
    model.train(np.ones((2, 1)), np.ones((2, 1)))
    with pytest.raises(ms.errors.ReplicaError, match="parameter 'parameters' of rank"):
        model.check_replicas()


def wrapped_apart(backend: Any, problems: Any, layout: str, wrapper: str) -> tuple[Any, Any]:
    plain = problems.MODELS["function"](backend.rank)
    model, strategy = layouts.wrap(backend, plain, layout)
    rule, config = ms.optimizers.SGD(0.1, momentum=0.9), model.sharding_configuration
    if wrapper == "local-sgd":
        options = {"synchronization_period": 2, "exchange": "bfloat16", "strategy": strategy}
        return model, LocalSGDOptimizer(rule, config, **options)
    options = {"method": "int8", "strategy": strategy}
    return model, GradientCompressionOptimizer(rule, config, **options)


@pytest.mark.parametrize("wrapper", ["compression", "local-sgd"])
@pytest.mark.parametrize(("layout", "alone"), [("2x1", "ddp"), ("1x2x2 fsdp", "fsdp/2")])
def test_ranks_that_repeat_work_exchange_the_same_codes(
    problems: Any, shared_path: Any, layout: str, alone: str, wrapper: str
) -> None:
    """Two replicas with repeated work have the bits of replicas without it."""

    def train(backend: Any, layout: str) -> Any:
        def steps(model: Any, optimizer: Any, *numbers: int) -> None:
            for step in numbers:
                optimizer.step(model, *local_batch(model, problems, "function", step))

        model, optimizer = wrapped_apart(backend, problems, layout, wrapper)
        steps(model, optimizer, 0, 1)
        folder = shared_path / layout
        ms.checkpoint.save(folder, model, optimizer)
        steps(model, optimizer, 2, 3)
        other, go_on = wrapped_apart(backend, problems, layout, wrapper)
        ms.checkpoint.load(folder, other, go_on)
        steps(other, go_on, 2, 3)
        assert other.check_replicas() == 1
        np.testing.assert_array_equal(other.get_parameters(), model.get_parameters())
        return model.get_parameters()

    few = 2 if alone == "ddp" else 4
    expected, *_ = run_in_threads(few, train, alone)
    for found in run_in_threads(2 * few, train, layout):
        np.testing.assert_array_equal(found, expected)


@in_worlds(2)
def test_batches_that_are_no_arrays_are_compared_by_length(backend: Any) -> None:
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
    mesh = 1, 2, backend.world_size // 2

    def fun(theta: Any, x: Any, y: Any) -> Any:
        return 1.0, np.append(np.ones(9), np.nan)

    model = HybridShardedModel(
        ms.FunctionModel(fun, np.zeros(10)), ShardingConfiguration(backend), *mesh
    )
    with pytest.raises(ms.errors.NonFiniteLossError):
        model.train(np.ones(1), np.ones(1))
    assert not model.get_parameters().any()
