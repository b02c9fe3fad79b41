"""Layers dealt to stages, a stage to each rank."""

from __future__ import annotations

from typing import Any, ClassVar

from mpishard.contracts import ModelMetadata
from mpishard.models.strategies.mesh_model import MeshModel
from mpishard.models.strategies.tensor import world_size_of
from mpishard.pipeline import ActivationCheckpointConfig, IPipelineSchedule
from mpishard.sharding import ShardingConfiguration

__all__ = ["PipelineParallelModel"]


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
            wrapped_model, config, pipeline=world_size_of(config), tensor=1, data=1,
            micro_batch_count=micro_batch_count, schedule=schedule,
            partition_strategy=partition_strategy, checkpoint_config=checkpoint_config,
        )  # fmt: skip

    def get_model_metadata(self) -> ModelMetadata:
        metadata = super().get_model_metadata()
        metadata.properties |= self._pipeline_metadata()
        return metadata
