"""Every layer split over all ranks."""

from __future__ import annotations

from typing import Any, ClassVar

from mpishard.contracts import ModelMetadata
from mpishard.models.strategies.mesh_model import MeshModel
from mpishard.pipeline import ActivationCheckpointConfig
from mpishard.sharding import ShardingConfiguration

__all__ = ["TensorParallelModel"]


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

    def __init__(
        self,
        wrapped_model: Any,
        config: ShardingConfiguration,
        *,
        sequence_parallel: bool = False,
        checkpoint_config: ActivationCheckpointConfig | None = None,
    ) -> None:
        super().__init__(
            wrapped_model, config, pipeline=1, tensor=world_size_of(config), data=1,
            sequence_parallel=sequence_parallel, checkpoint_config=checkpoint_config,
        )  # fmt: skip

    def get_model_metadata(self) -> ModelMetadata:
        metadata = super().get_model_metadata()
        metadata.properties |= self._tensor_metadata()
        return metadata


def world_size_of(config: Any) -> int:
    """The number of ranks; 1 if ``config`` is none, which the base class refuses."""
    return (
        config.communication_backend.world_size if isinstance(config, ShardingConfiguration) else 1
    )
