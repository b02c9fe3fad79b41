"""The sharded model wrappers and the engine behind them."""

from mpishard.models.base import ShardedModelBase
from mpishard.models.ddp import DDPModel
from mpishard.models.fsdp import FSDPModel
from mpishard.models.zero import ZeRO1Model, ZeRO2Model, ZeRO3Model

__all__ = [
    "DDPModel",
    "FSDPModel",
    "ShardedModelBase",
    "ZeRO1Model",
    "ZeRO2Model",
    "ZeRO3Model",
]
