"""Options of a mesh: costs, names, an optimizer's options; warnings and descriptions."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.communication import run_in_threads
from mpishard.errors import ShardingError
from mpishard.models import (
    FSDPModel,
    HybridShardedModel,
    PipelineParallelModel,
    TensorParallelModel,
)
from mpishard.optimizers import (
    SGD,
    HybridShardedOptimizer,
    PipelineParallelOptimizer,
    TensorParallelOptimizer,
)
from mpishard.pipeline import (
    ActivationCheckpointConfig,
    GPipeSchedule,
    UniformPartitionStrategy,
    schedule_by_name,
)
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

X, Y = np.ones((4, 5)), np.ones((4, 2))


def mlp() -> nn.MLP:
    return nn.MLP([5, 7, 6, 2], "tanh", seed=1)


# -------------------------------------------------------------------------- costs of the layers


@in_worlds(2)
def test_costs_are_an_array_as_well_as_a_list(backend: Any) -> None:
    config = ShardingConfiguration(backend)
    for costs in (np.array([1, 1, 1, 9, 1]), [1, 1, 1, 9, 1]):
        model = PipelineParallelModel(mlp(), config, 2, partition_strategy=costs)
        assert model.stage_layers == ((0, 3), (3, 5))
    with pytest.raises(TypeError, match=r"one cost for each layer, got an array of shape \(5, 1\)"):
        PipelineParallelModel(mlp(), config, 2, partition_strategy=np.ones((5, 1)))
    for answer in ("3", None):
        message = (
            rf"layer 0, 'linear0', .*partition_strategy gives must be a number, got {answer!r}"
        )
        with pytest.raises(TypeError, match=message):
            PipelineParallelModel(
                mlp(), config, 2, partition_strategy=lambda info, answer=answer: answer
            )


# ------------------------------------------------------------------------ options of an optimizer

WRONG = [
    ({"foo": 3}, TypeError, "HybridShardedOptimizer takes no foo; it takes micro_batch_count, sch"),
    ({"micro_batches": 3}, TypeError, "did you mean micro_batch_count"),
    ({"schedule": "foo"}, ValueError, "schedule must be one of gpipe"),
    ({"schedule": GPipeSchedule}, TypeError, r"schedule .*: pass GPipeSchedule\(\), not the class"),
    (
        {"data_parallel_strategy": "nonsense"},
        ValueError,
        "data_parallel_strategy 'nonsense'; there",
    ),
    ({"micro_batch_count": -3}, ValueError, "micro_batch_count must be 1 or more, got -3"),
    ({"sequence_parallel": "yes"}, TypeError, "sequence_parallel must be True or False, got 'yes'"),
    ({"checkpoint_config": 7}, TypeError, "must be an ActivationCheckpointConfig, got 7"),
    ({"checkpoint_config": ActivationCheckpointConfig}, TypeError, r"pass ActivationC.*Config\(\)"),
    (
        {"partition_strategy": UniformPartitionStrategy},
        TypeError,
        r"pass UniformPart.*Strategy\(\)",
    ),
    ({"order": 3}, TypeError, "order must name"),
    ({"pipeline_parallel_size": 0}, ValueError, "pipeline_parallel_size must be 1 or more, got 0"),
    ({"tensor_parallel_size": 1.5}, TypeError, "tensor_parallel_size must be an integer, got 1.5"),
    ({"data_parallel_size": 0}, ValueError, "data_parallel_size must be 1 or more, or -1 .* got 0"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG)
@in_worlds(1)
def test_an_optimizer_checks_its_options_as_the_model_does(
    backend: Any, options: Any, kind: Any, message: str
) -> None:
    config = ShardingConfiguration(backend)
    with pytest.raises(kind, match=message):
        HybridShardedOptimizer(SGD(0.1), config, **options)
    if not {"foo", "micro_batches"} & set(options):  # Python names those
        with pytest.raises(kind, match=message):
            HybridShardedModel(mlp(), config, **options)


@in_worlds(1)
def test_an_optimizer_takes_what_its_model_takes(backend: Any) -> None:
    config = ShardingConfiguration(backend)
    with pytest.raises(TypeError, match="takes no schedule; it takes sequence_parallel, check"):
        TensorParallelOptimizer(SGD(0.1), config, schedule="1f1b")
    with pytest.raises(ValueError, match="num_micro_batches 2 and micro_batch_count 3 are two"):
        PipelineParallelOptimizer(SGD(0.1), config, 2, micro_batch_count=3)
    assert PipelineParallelOptimizer(SGD(0.1), config, micro_batch_count=3).num_micro_batches == 3


@in_worlds(2)
def test_an_optimizer_with_other_options_than_the_models_is_refused(backend: Any) -> None:
    config = ShardingConfiguration(backend)
    options = {
        "micro_batch_count": 2, "schedule": "1f1b", "data_parallel_strategy": "fsdp",
        "sequence_parallel": False,
    }  # fmt: skip
    model = HybridShardedModel(mlp(), config, 2, **options)
    for changed, message in [
        ({"micro_batch_count": 1}, "made with micro_batch_count 1, and the model with 2"),
        ({"schedule": "gpipe"}, "schedule GPipe of 1 stage per rank, and the model with 1F1B of 1"),
        ({"data_parallel_strategy": "zero2"}, "data_parallel_strategy zero2, .* with fsdp"),
        ({"sequence_parallel": True}, "sequence_parallel True, and the model with False"),
    ]:
        optimizer = HybridShardedOptimizer(SGD(0.1), config, 2, **changed)
        with pytest.raises(ShardingError, match=message):
            optimizer.step(model, X, Y)
    for same in ({}, options, {"data_parallel_strategy": "zero3"}):
        HybridShardedOptimizer(SGD(0.1), config, 2, **same).step(model, X, Y)


# ----------------------------------------------------------------------------- names that are near


@pytest.mark.parametrize("name", ["ZB_H1", "zb h1", "zbh1", "ZB-H1"])
def test_dashes_and_blanks_in_a_schedules_name_do_not_count(name: str) -> None:
    assert schedule_by_name(name).name == schedule_by_name("zb-h1").name


@in_worlds(1)
def test_a_misspelt_option_is_answered_with_the_nearest_name(backend: Any) -> None:
    with pytest.raises(ValueError, match=r"got 'interleave'; did you mean interleaved\?"):
        schedule_by_name("interleave")
    for thing in (mlp(), SGD(0.1)):
        with pytest.raises(TypeError, match=r"takes no micro_batches;.* mean micro_batch_count\?"):
            ms.as_distributed(thing, backend, "pipeline", micro_batches=3)


# ------------------------------------------------------------------------------ what a model says


def said_by(caplog: Any, world_size: int, make: Any) -> list[str]:
    """Log lines of a model that each rank makes."""
    caplog.clear()

    def body(backend: Any) -> None:
        make(ShardingConfiguration(backend))

    with caplog.at_level(logging.INFO, "mpishard"):
        run_in_threads(world_size, body)
    return [record.getMessage() for record in caplog.records]


def test_one_warning_names_idle_axes(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = said_by(caplog, 2, lambda config: PipelineParallelModel(mlp(), config))
    assert said.startswith("PipelineParallelModel(MLP, 2 pipeline x 1 tensor x 1 data")
    assert "one after the other: bubble 50 %; give micro_batch_count, about 8" in said
    (said,) = said_by(caplog, 4, lambda config: PipelineParallelModel(nn.MLP([5, 4, 2]), config, 9))
    assert said.endswith(": 1 of 4 stages has no layers: the model has 3")

    def layers_without_parts() -> nn.Model:
        return nn.Model(nn.Sequential(nn.LayerNorm(5), nn.Tanh()), nn.MSE(), input_shape=(5,))

    (said,) = said_by(caplog, 2, lambda config: TensorParallelModel(layers_without_parts(), config))
    assert "every layer is whole on every rank of the tensor axis: " in said
    for make in (
        lambda config: PipelineParallelModel(mlp(), config, 4),
        lambda config: TensorParallelModel(mlp(), config),
        lambda config: HybridShardedModel(mlp(), config),
    ):
        assert said_by(caplog, 2, make) == []


GPT = {"vocabulary_size": 12, "context_length": 8, "width": 8, "heads": 4, "layers": 2}


@pytest.mark.parametrize(
    ("world_size", "make", "expected"),
    [
        (8, lambda c: HybridShardedModel(
            nn.GPT(**GPT), c, 2, 2, micro_batch_count=4, schedule="1f1b"),
         "HybridShardedModel(GPT, 2 pipeline x 2 tensor x 2 data, 1F1B, 4 micro-batches)"),
        (2, lambda c: TensorParallelModel(nn.GPT(**GPT), c),
         "TensorParallelModel(GPT, 1 pipeline x 2 tensor x 1 data, 1 micro-batch)"),
        (2, lambda c: FSDPModel(nn.GPT(**GPT), c), "FSDPModel(GPT, 2 ranks)"),
        (1, lambda c: FSDPModel(mlp(), c), "FSDPModel(MLP, 1 rank)"),
    ],
)  # fmt: skip
def test_repr(world_size: int, make: Any, expected: str) -> None:
    def body(backend: Any) -> str:
        return repr(make(ShardingConfiguration(backend)))

    assert run_in_threads(world_size, body) == [expected] * world_size


# ---------------------------------------------------------------------- a layer that tells untruths


class Rounds(nn.Tanh):
    """A layer that returns another dtype than its model's."""

    def forward(self, p: Any, x: Any, ctx: Any) -> Any:
        y, saved = super().forward(p, x, ctx)
        return y.astype(np.float16), saved


def test_an_output_that_was_not_announced_names_the_stages_layers() -> None:
    def body(backend: Any) -> None:
        chain = nn.Sequential(
            {"a": nn.Linear(5, 5), "b": nn.Tanh(), "c": Rounds(), "d": nn.Linear(5, 2)}
        )
        plain = nn.Model(chain, nn.MSE(), input_shape=(5,))
        model = PipelineParallelModel(
            plain, ShardingConfiguration(backend), 2, partition_strategy=[1, 1, 1, 3]
        )
        model.predict(X)

    message = r"virtual stage 0 \(layers 'a' to 'c'\) of rank 0 gave float16\[2, 5\] .*announced"
    with pytest.raises(ValueError, match=message):
        run_in_threads(2, body)
