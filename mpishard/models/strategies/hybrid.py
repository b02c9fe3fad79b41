"""Pipeline, tensor and data parallelism at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from mpishard.communication.mesh import AXES
from mpishard.contracts import ModelMetadata
from mpishard.models.strategies.mesh_model import MeshModel
from mpishard.pipeline import ActivationCheckpointConfig, IPipelineSchedule
from mpishard.sharding import ShardingConfiguration

__all__ = ["HybridShardedModel"]


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

    def get_model_metadata(self) -> ModelMetadata:
        metadata = super().get_model_metadata()
        metadata.properties |= self._pipeline_metadata() | self._tensor_metadata()
        return metadata
