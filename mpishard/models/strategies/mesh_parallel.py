"""Strategies on a mesh: tensor and pipeline parallelism, and both with data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from mpishard.communication.mesh import AXES
from mpishard.models.strategies.mesh_model import MeshModel
from mpishard.pipeline import ActivationCheckpointConfig, IPipelineSchedule
from mpishard.sharding import ShardingConfiguration

__all__ = ["HybridShardedModel", "PipelineParallelModel", "TensorParallelModel"]


class HybridShardedModel(MeshModel):
    """Layers dealt to pipeline stages, split over the tensor axis, replicated over the data axis.

    Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021 (arXiv:2104.04473). A rank holds its stages' layers alone, and of those
    that split its slice; the data axis runs one of the data-parallel strategies on it.

    Parameters
    ----------
    wrapped_model : object
        A layered model; or a black box, whose flat vector is cut over the pipeline axis, and each
        part over the tensor axis. A rank owns its part, the part's gradient and optimizer state;
        the object keeps all parameters, put together after each update, and computes the whole
        batch on each rank, at once: schedule, micro-batches and sequence have no effect on it.
    config : ShardingConfiguration
        Backend and choices.
    pipeline_parallel_size, tensor_parallel_size : int
        Sizes of these axes.
    data_parallel_size : int
        Size of the data axis; -1 takes what is left of the world.
    micro_batch_count : int
        M, into how many parts along the batch dim a rank's batch is cut. They may differ by one
        sample; losses are weighted sums, so the result is that of one batch.
    schedule : IPipelineSchedule or str, optional
        In which order stages work, by default `GPipeSchedule`; or its name, as in
        ``mpishard plan schedule``.
    partition_strategy : IPipelinePartitionStrategy, callable or sequence of float, optional
        How layers are dealt: by default so that the largest stage has the fewest FLOPs; or a cost
        of each layer, or a function of its `LayerInfo` that gives it. Rank 0's decides.
    checkpoint_config : ActivationCheckpointConfig, optional
        Activations that are computed again in backward and not kept.
    sequence_parallel : bool
        Whether what lies between split layers is divided along the sequence over the tensor axis
        (Korthikanti et al., 2022, arXiv:2205.05198): the same bytes travel, and norms, dropout and
        their activations are 1/N on each rank.
    data_parallel_strategy : {"zero1", "zero2", "fsdp", "ddp"}
        Strategy of the data axis. Under "zero2" and "fsdp" each micro-batch's gradient is reduced
        at once, and "fsdp" gathers for each.
    order : sequence of str
        The axes, slowest first: see `ProcessMesh`.

    Raises
    ------
    TypeError, ValueError
        For arguments of another type, sizes that do not make up the world, a micro-batch count
        below 1, before anything is communicated.
    NotImplementedError
        For activation checkpointing of a black box.
    """

    strategy: ClassVar[str] = "3D-Parallelism (Hybrid)"

    def __init__(
        self,
        wrapped_model: Any,
        config: ShardingConfiguration,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = -1,
        *,
        micro_batch_count: int = 1,
        schedule: IPipelineSchedule | str | None = None,
        partition_strategy: Any = None,
        checkpoint_config: ActivationCheckpointConfig | None = None,
        sequence_parallel: bool = False,
        data_parallel_strategy: str = "zero1",
        order: Sequence[str] = AXES,
    ) -> None:
        super().__init__(
            wrapped_model,
            config,
            pipeline=pipeline_parallel_size,
            tensor=tensor_parallel_size,
            data=data_parallel_size,
            micro_batch_count=micro_batch_count,
            schedule=schedule,
            partition_strategy=partition_strategy,
            checkpoint_config=checkpoint_config,
            sequence_parallel=sequence_parallel,
            data_parallel_strategy=data_parallel_strategy,
            order=order,
        )


class PipelineParallelModel(MeshModel):
    """Each rank holds some consecutive layers, and works on one micro-batch after the other.

    Huang et al., "GPipe", 2019 (arXiv:1811.06965), and the schedules that came after it. Outputs
    travel to the next stage and gradients back; nothing else does, but the copies of a tied
    parameter's gradient. All ranks must be given the same batch. It is the mesh (W, 1, 1) of
    `HybridShardedModel`.

    Parameters
    ----------
    wrapped_model : object
        A layered model, or a black box; see `HybridShardedModel`.
    config : ShardingConfiguration
        Backend and choices.
    micro_batch_count : int
        M, into how many parts along the batch dim the batch is cut.
    partition_strategy, schedule, checkpoint_config
        See `HybridShardedModel`.
    """

    strategy: ClassVar[str] = "PipelineParallel"
    _tells_of_tensor_axis: ClassVar[bool] = False

    def __init__(
        self,
        wrapped_model: Any,
        config: ShardingConfiguration,
        micro_batch_count: int = 1,
        *,
        partition_strategy: Any = None,
        schedule: IPipelineSchedule | str | None = None,
        checkpoint_config: ActivationCheckpointConfig | None = None,
    ) -> None:
        super().__init__(
            wrapped_model, config, pipeline=_world_size_of(config), tensor=1, data=1,
            micro_batch_count=micro_batch_count, schedule=schedule,
            partition_strategy=partition_strategy, checkpoint_config=checkpoint_config,
        )  # fmt: skip


class TensorParallelModel(MeshModel):
    """Each rank computes its slice of every layer that splits, and all compute one batch.

    Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section 3: linear layers in pairs, the
    first split by outputs and the second by inputs, attention by heads, embedding and
    cross-entropy by vocabulary. For each pair one all-reduce of the output in forward, one of the
    input's gradient in backward.

    All ranks must be given the same batch. It is the mesh (1, W, 1) of `HybridShardedModel`.

    Parameters
    ----------
    wrapped_model : object
        A layered model, or a black box; see `HybridShardedModel`.
    config : ShardingConfiguration
        Backend and choices.
    sequence_parallel, checkpoint_config
        See `HybridShardedModel`.
    """

    strategy: ClassVar[str] = "TensorParallel"
    _tells_of_pipeline: ClassVar[bool] = False

    def __init__(
        self,
        wrapped_model: Any,
        config: ShardingConfiguration,
        *,
        sequence_parallel: bool = False,
        checkpoint_config: ActivationCheckpointConfig | None = None,
    ) -> None:
        super().__init__(
            wrapped_model, config, pipeline=1, tensor=_world_size_of(config), data=1,
            sequence_parallel=sequence_parallel, checkpoint_config=checkpoint_config,
        )  # fmt: skip


def _world_size_of(config: Any) -> int:
    """Return the number of ranks; 1 for another type, which the base class refuses."""
    is_right = isinstance(config, ShardingConfiguration)
    return config.communication_backend.world_size if is_right else 1
