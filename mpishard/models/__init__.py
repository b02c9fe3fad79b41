"""Sharded models: strategies, the surface that users see, and the engine behind it.

To learn how FSDP works, read `strategies/data_parallel`, `wrapper/base`, `engine/engine` and
`programs/chain`. Chapters, each of which imports only those before it: `stores` hold parameters
and gradients, `programs` compute, the `engine` steps, the `wrapper` is the surface, and
`strategies` say what is sharded.
"""

from mpishard.models.strategies.data_parallel import (
    DDPModel,
    FSDPModel,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
)
from mpishard.models.strategies.mesh_parallel import (
    HybridShardedModel,
    PipelineParallelModel,
    TensorParallelModel,
)
from mpishard.models.wrapper.base import ShardedModelBase
from mpishard.models.wrapper.paged import PagedModel

__all__ = [
    "DDPModel",
    "FSDPModel",
    "HybridShardedModel",
    "PagedModel",
    "PipelineParallelModel",
    "ShardedModelBase",
    "TensorParallelModel",
    "ZeRO1Model",
    "ZeRO2Model",
    "ZeRO3Model",
]
