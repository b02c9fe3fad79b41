"""The sharded model wrappers and the engine behind them."""

from mpishard.models.base import ShardedModelBase
from mpishard.models.ddp import DDPModel
from mpishard.models.fsdp import FSDPModel
from mpishard.models.hybrid import HybridShardedModel
from mpishard.models.pipeline import PipelineParallelModel
from mpishard.models.tensor import TensorParallelModel
from mpishard.models.zero import ZeRO1Model, ZeRO2Model, ZeRO3Model

__all__ = [
    "DDPModel",
    "FSDPModel",
    "HybridShardedModel",
    "PipelineParallelModel",
    "ShardedModelBase",
    "TensorParallelModel",
    "ZeRO1Model",
    "ZeRO2Model",
    "ZeRO3Model",
]
