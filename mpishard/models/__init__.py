"""The sharded model wrappers and the engine behind them."""

from mpishard.models.strategies.ddp import DDPModel
from mpishard.models.strategies.fsdp import FSDPModel
from mpishard.models.strategies.hybrid import HybridShardedModel
from mpishard.models.strategies.pipeline import PipelineParallelModel
from mpishard.models.strategies.tensor import TensorParallelModel
from mpishard.models.strategies.zero import ZeRO1Model, ZeRO2Model, ZeRO3Model
from mpishard.models.wrapper.base import ShardedModelBase

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
