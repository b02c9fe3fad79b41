"""Mistakes on a mesh: one clear message on every rank, nothing changed, and the next step works."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.communication import run_in_threads
from mpishard.contracts import ILossFunction
from mpishard.errors import NonFiniteLossError, PeerError, ShardingError
from mpishard.models import HybridShardedModel, PipelineParallelModel, TensorParallelModel
from mpishard.optimizers import (
    SGD,
    HybridShardedOptimizer,
    PipelineParallelOptimizer,
    TensorParallelOptimizer,
)
from mpishard.pipeline import ActivationCheckpointConfig, GPipeSchedule
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

MESHES = [
    (2, (2, 1, 1)), (2, (1, 2, 1)), (3, (3, 1, 1)), (4, (2, 2, 1)), (4, (2, 1, 2)), (4, (1, 2, 2))
]  # fmt: skip
by_mesh = pytest.mark.parametrize(("world_size", "mesh"), MESHES)


def build(backend: Any, mesh: Any, plain: Any = None, **options: Any) -> tuple[Any, Any]:
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1)
    plain = nn.MLP([5, 7, 6, 2], "tanh", seed=1) if plain is None else plain
    options = {"micro_batch_count": 3, "schedule": "1f1b", **options}
    model = HybridShardedModel(plain, config, *mesh, **options)
    return model, HybridShardedOptimizer(SGD(0.1), config, *mesh)


def batch(model: Any) -> tuple[Any, Any]:
    x = np.random.default_rng(model.data_rank).standard_normal((6, 5))
    return x, np.sin(x[:, :2])


def still_works(model: Any, optimizer: Any, before: Any) -> None:
    """Check that nothing has changed, and that the next step is like a first one."""
    np.testing.assert_array_equal(model.get_parameters(), before)
    x, y = batch(model)
    plain = nn.MLP([5, 7, 6, 2], "tanh", seed=1)
    plain.set_parameters(before)
    batches = model.mesh.data.all_gather(x)
    gradient = plain.compute_gradients(batches, np.sin(batches[:, :2]))
    optimizer.step(model, x, y)
    np.testing.assert_allclose(model.get_parameters(), before - 0.1 * gradient, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------- when it is made

MADE = [
    ({"wrapped_model": None}, TypeError, "got None"),
    ({"config": None}, TypeError, "ShardingConfiguration"),
    ({"pipeline_parallel_size": 0}, ValueError, "pipeline_parallel_size must be 1 or more, got 0"),
    ({"tensor_parallel_size": 3}, ValueError, "3 does not divide the world of 2"),
    ({"pipeline_parallel_size": 2, "data_parallel_size": 2}, ValueError, "= 4, and the world"),
    ({"tensor_parallel_size": 1.5}, TypeError, "tensor"),
    ({"micro_batch_count": 0}, ValueError, "micro_batch_count must be 1 or more, got 0"),
    ({"micro_batch_count": "2"}, TypeError, "micro_batch_count"),
    ({"schedule": "3f2b"}, ValueError, "3f2b"),
    ({"schedule": 3}, TypeError, "schedule must be"),
    ({"schedule": GPipeSchedule}, TypeError, "schedule must be"),
    ({"data_parallel_strategy": "zero7"}, ValueError, "unknown data_parallel_strategy 'zero7'"),
    ({"data_parallel_strategy": None}, ValueError, "unknown data_parallel_strategy"),
    ({"sequence_parallel": "yes"}, TypeError, "sequence_parallel"),
    ({"order": ("data", "data", "tensor")}, ValueError, "order must name"),
    ({"order": None}, TypeError, "order must name"),
    ({"partition_strategy": [1.0]}, ValueError, "each of 5 layers, got 1"),
    ({"partition_strategy": GPipeSchedule}, TypeError, "partition_strategy must be"),
    ({"partition_strategy": 3}, TypeError, "partition_strategy must be"),
    ({"checkpoint_config": 3}, TypeError, "checkpoint_config"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "kind", "message"), MADE)
@in_worlds(2)
def test_meshes_that_cannot_be_made_are_refused(
    backend: Any, changed: Any, kind: Any, message: str
) -> None:
    plain = nn.MLP([5, 7, 6, 2], "tanh", seed=1)
    given = {"wrapped_model": plain, "config": ShardingConfiguration(backend), **changed}
    with pytest.raises(kind, match=message):
        HybridShardedModel(**given)
    backend.barrier()
    model, optimizer = build(backend, (2, 1, 1), plain)  # which is nobody else's
    still_works(model, optimizer, model.get_parameters())


@pytest.mark.parametrize(
    "model_class", [HybridShardedModel, PipelineParallelModel, TensorParallelModel]
)
@in_worlds(2)
def test_none_is_refused_by_each(backend: Any, model_class: Any) -> None:
    with pytest.raises(TypeError, match="got None"):
        model_class(None, ShardingConfiguration(backend))
    with pytest.raises(TypeError, match="ShardingConfiguration, got NoneType"):
        model_class(nn.MLP([2, 1]), None)
    optimizers = HybridShardedOptimizer, PipelineParallelOptimizer, TensorParallelOptimizer
    for optimizer_class in optimizers:
        with pytest.raises(TypeError, match="got None"):
            optimizer_class(None, ShardingConfiguration(backend))
        with pytest.raises(TypeError, match="ShardingConfiguration, got NoneType"):
            optimizer_class(SGD(0.1), None)
    with pytest.raises(ValueError, match="num_micro_batches must be 1 or more, got 0"):
        PipelineParallelOptimizer(SGD(0.1), ShardingConfiguration(backend), 0)
    with pytest.raises(ValueError, match="does not divide the world of 2"):
        HybridShardedOptimizer(SGD(0.1), ShardingConfiguration(backend), 3)


def recompute(rank: int) -> Any:
    return ActivationCheckpointConfig(enabled=bool(rank))


AXES = ("pipeline", "tensor", "data")
GPT = {"vocabulary_size": 8, "context_length": 4, "width": 4, "heads": 2, "layers": 1}
# What each of two ranks passes, and what they are told.
DIFFERENT = {
    "widths": (lambda r: {"wrapped_model": nn.MLP([5, 7 + r, 2])}, "parameters is 58, 66"),
    "depths": (
        lambda r: {"wrapped_model": nn.MLP([5, *[7] * (1 + 3 * r), 2])}, "layers is 3, 9"
    ),
    "layers": (
        lambda r: {"wrapped_model": nn.MLP([5, 7, 2], ["tanh", "relu"][r])}, "layer 1 is Tanh, ReLU"
    ),
    "losses": (
        lambda r: {"wrapped_model": nn.MLP([5, 7, 2], loss=[nn.MSE(), nn.MAE()][r])},
        "loss is MSE, MAE",
    ),
    "dropout": (
        lambda r: {"wrapped_model": nn.GPT(**GPT, dropout=0.1 + r / 10)}, r"rate is 0\.1, 0\.2"
    ),
    "dtypes": (
        lambda r: {"wrapped_model": nn.MLP([5, 7, 2], dtype=["float32", "float64"][r])},
        "dtype is float32, float64",
    ),
    "schedules": (lambda r: {"schedule": ["1f1b", "gpipe"][r]}, "schedule is 1F1B, GPipe"),
    "virtual stages": (
        lambda r: {"schedule": ["1f1b", "interleaved"][r]}, "virtual_stages_per_rank is 1, 2"
    ),
    "micro-batches": (lambda r: {"micro_batch_count": 2 + r}, "micro_batch_count is 2, 3"),
    "meshes": (
        lambda r: {"pipeline_parallel_size": 2 - r, "tensor_parallel_size": 1 + r},
        "mesh is 2 x 1 x 1, 1 x 2 x 1",
    ),
    "data axes": (lambda r: {"pipeline_parallel_size": 2 - r}, "mesh is 2 x 1 x 1, 1 x 1 x 2"),
    "orders": (lambda r: {"order": AXES[:: 1 - 2 * r]}, "order is"),
    "data strategies": (
        lambda r: {"pipeline_parallel_size": 1, "data_parallel_strategy": ["fsdp", "ddp"][r]},
        "data_parallel_strategy is fsdp, ddp",
    ),
    "sequences": (lambda r: {"sequence_parallel": bool(r)}, "sequence_parallel is False, True"),
    "recomputation": (lambda r: {"checkpoint_config": recompute(r)}, "checkpoint_config is "),
    "unit sizes": (lambda r: {"config": 1 + 50 * r}, "minimum_parameter_group_size is 1, 51"),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENT)
@in_worlds(2)
def test_options_that_differ_between_ranks_are_named(backend: Any, what: str) -> None:
    change, message = DIFFERENT[what]
    changed = change(backend.rank)
    size = changed.pop("config", 1)
    given = {
        "wrapped_model": nn.MLP([5, 7, 6, 2], "tanh", seed=1),
        "config": ShardingConfiguration(backend, minimum_parameter_group_size=size),
        "pipeline_parallel_size": 2,
        "micro_batch_count": 3,
        **changed,
    }
    with pytest.raises(ValueError, match=f"every rank must.*{message}"):
        HybridShardedModel(**given)
    model, optimizer = build(backend, (2, 1, 1), nn.MLP([5, 7, 6, 2], "tanh", seed=1))
    still_works(model, optimizer, model.get_parameters())


# --------------------------------------------------------------------------------------- batches


@by_mesh
@in_worlds()
def test_batches_that_differ_within_a_replica_are_refused_everywhere(
    backend: Any, mesh: Any
) -> None:
    model, optimizer = build(backend, mesh)
    before = model.get_parameters()
    x, y = batch(model)
    other = backend.rank == 0  # the replicas without it hear of it too
    for given in (
        (x + other, y),
        (x, y + other),
        (x[: 6 - other], y[: 6 - other]),
        (x.astype(np.float32) if other else x, y),
    ):
        for call in (
            lambda given=given: optimizer.step(model, *given),
            lambda given=given: model.train(*given),
        ):
            with pytest.raises(ValueError, match=r"must be given the same.* 0.*Divide samples by"):
                call()
    with model.accumulate():
        optimizer.step(model, x, y)
        with pytest.raises(ValueError, match="must be given the same"):
            optimizer.step(model, x + other, y)
    still_works(model, optimizer, before)


@by_mesh
@in_worlds()
def test_batches_that_do_not_fit_the_model_are_refused(backend: Any, mesh: Any) -> None:
    model, optimizer = build(backend, mesh)
    before = model.get_parameters()
    x, y = batch(model)
    calls = sum(group.traffic.total_bytes for group in (backend, model.mesh.model))
    for given, kind, message in [
        ((None, y), TypeError, "NoneType"),
        ((x, None), TypeError, "MSE needs targets"),
        ((x[:, :4], y), ValueError, r"4|\(6, 4\)"),
        ((x, y[:5]), ValueError, "6 samples and y has 5"),
        ((x, y[:, :1]), ValueError, "2"),
        ((x[0], y), ValueError, "shape"),
    ]:
        for call in (
            lambda given=given: optimizer.step(model, *given),
            lambda given=given: model.train(*given),
            lambda given=given: model.compute_gradients(*given),
        ):
            with pytest.raises(kind, match=message):
                call()
    with pytest.raises(ValueError, match=r"shape|4"):
        model.predict(x[:, :4])
    now = sum(group.traffic.total_bytes for group in (backend, model.mesh.model))
    assert now == calls
    still_works(model, optimizer, before)


@by_mesh
@in_worlds()
def test_any_number_of_rows_is_predicted(backend: Any, mesh: Any) -> None:
    model, _ = build(backend, mesh, micro_batch_count=4)
    plain = nn.MLP([5, 7, 6, 2], "tanh", seed=1)
    x, y = batch(model)
    for rows in (0, 1, 3, 6, 0):
        actual = model.predict(x[:rows])
        np.testing.assert_allclose(actual, plain.predict(x[:rows]), rtol=0, atol=1e-12)
        assert actual.shape == (rows, 2)
    for rows in (1, 3):
        _, gradient = plain.compute_loss_and_gradients(x[:rows], y[:rows])
        np.testing.assert_allclose(
            model.compute_gradients(x[:rows], y[:rows]), gradient, rtol=0, atol=1e-12
        )


GPTS = {"vocabulary_size": 12, "context_length": 8, "width": 8, "heads": 4, "layers": 2}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("world_size", "mesh"), [(2, (1, 2, 1)), (3, (3, 1, 1)), (4, (2, 2, 1))])
@in_worlds()
def test_other_sequence_lengths(backend: Any, mesh: Any, sequence_parallel: bool) -> None:
    plain = nn.GPT(**GPTS, dtype="float64", seed=3)
    expected = plain.deep_copy()
    model, optimizer = build(backend, mesh, plain, sequence_parallel=sequence_parallel)
    tokens = np.random.default_rng(0).integers(0, 12, (4, 8))
    for length in (8, 2, 6):
        x, y = tokens[:, :length], tokens[:, :length][:, ::-1]
        np.testing.assert_allclose(model.predict(x), expected.predict(x), rtol=0, atol=1e-12)
        gradient = expected.compute_gradients(x, y)
        np.testing.assert_allclose(model.compute_gradients(x, y), gradient, rtol=0, atol=1e-12)
    before = model.get_parameters()
    for length in (9, 7, 5):
        x = np.zeros((4, length), int)
        if length == 9:
            with pytest.raises(ValueError, match="9"):
                model.predict(x)
        elif sequence_parallel and mesh[1] > 1:
            for call in (
                lambda x=x: model.predict(x),
                lambda x=x: optimizer.step(model, x, x),
                lambda x=x: model.compute_gradients(x, x),
            ):
                with pytest.raises(ValueError, match=rf"{length} is no multiple of {mesh[1]}"):
                    call()
    y = np.zeros((4, 8), int)
    for call in (
        lambda: optimizer.step(model, y, y + 12),
        lambda: optimizer.step(model, y + 12, y),
    ):
        with pytest.raises(ValueError, match="12"):
            call()
    np.testing.assert_array_equal(model.get_parameters(), before)
    optimizer.step(model, tokens, tokens)


# ------------------------------------------------------------------------------ errors in a step


@by_mesh
@in_worlds()
def test_a_loss_that_is_not_a_number_stops_every_rank(backend: Any, mesh: Any) -> None:
    model, optimizer = build(backend, mesh)
    before = model.get_parameters()
    x, y = batch(model)
    given = x.copy()
    if model.data_rank == model.data_size - 1:
        given[4, 2] = np.nan
    for _ in range(2):
        with pytest.raises(NonFiniteLossError, match="step 1: the loss of data ranks"):
            optimizer.step(model, given, y)
    still_works(model, optimizer, before)


@by_mesh
@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_an_error_of_one_rank_raises_on_all(world_size: int, mesh: Any, where: str) -> None:
    """In the second micro-batch, with messages on their way."""
    began = {}

    def body(backend: Any) -> str:
        model, optimizer = build(backend, mesh)
        optimizer.step(model, *batch(model))
        program = model.engine.program
        if (
            backend.rank == 0
            if where == "forward"
            else program.replica.reports_loss and model.data_rank == 0
        ):
            chain = program.chains[-1]
            calls = [0]
            name = "backward" if where == "backward" else "forward"
            owner = model.engine.loss if where == "loss" else chain
            original = getattr(owner, name)

            def fail(*args: Any, **named: Any) -> Any:
                calls[0] += 1
                if calls[0] == 2:
                    began[0] = time.perf_counter()
                    raise ArithmeticError("here, in micro-batch 2")
                return original(*args, **named)

            if where == "loss" and mesh[1] == 1:
                model.engine.loss = Failing(fail, original)
            elif where == "loss":
                owner, name = chain, "forward"
                original = chain.forward
                chain.forward = fail
            else:
                setattr(owner, name, fail)
        try:
            optimizer.step(model, *batch(model))
        except PeerError as error:
            assert time.perf_counter() - began[0] < 1
            return str(error)
        raise AssertionError("nothing was raised")

    with pytest.raises(ArithmeticError, match="micro-batch 2"):
        run_in_threads(world_size, body)


class Failing(ILossFunction):
    """A loss with another forward."""

    def __init__(self, forward: Any, original: Any) -> None:
        self._forward, self._inner = forward, nn.MSE()

    def check_target(self, shape: Any, target: Any) -> None:
        self._inner.check_target(shape, target)

    def forward(self, prediction: Any, target: Any, **options: Any) -> Any:
        return self._forward(prediction, target, **options)

    def backward(self, saved: Any) -> Any:
        return self._inner.backward(saved)


@pytest.mark.parametrize(("world_size", "mesh"), [(2, (2, 1, 1)), (4, (2, 1, 2)), (4, (1, 2, 2))])
@in_worlds()
def test_an_optimizer_of_another_mesh_is_refused(backend: Any, mesh: Any) -> None:
    model, optimizer = build(backend, mesh)
    config = model.sharding_configuration
    before = model.get_parameters()
    for other, kind, message in [
        (HybridShardedOptimizer(SGD(0.1), config), ShardingError, "the optimizer's 1 x 1"),
        (TensorParallelOptimizer(SGD(0.1), config), ShardingError, "TensorParallelModel"),
        (PipelineParallelOptimizer(SGD(0.1), config), ShardingError, "PipelineParallelModel"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=message):
            other.step(model, *batch(model))
        with pytest.raises(kind, match=message):
            other.apply_gradients(np.zeros(model.parameter_count), model)
    pipeline = PipelineParallelModel(nn.MLP([5, 7, 6, 2]), config, 2)
    with pytest.raises(ShardingError, match="made with micro_batch_count 3, and the model with 2"):
        PipelineParallelOptimizer(SGD(0.1), config, 3).step(pipeline, *batch(model))
    with pytest.raises(ShardingError, match=r"HybridShardedModel.*PipelineParallelModel"):
        optimizer.step(pipeline, *batch(model))
    still_works(model, optimizer, before)
