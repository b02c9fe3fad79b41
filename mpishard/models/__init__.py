"""The sharded model wrappers and the engine behind them."""

from mpishard.models.base import ShardedModelBase
from mpishard.models.ddp import DDPModel
from mpishard.models.fsdp import FSDPModel

__all__ = ["DDPModel", "FSDPModel", "ShardedModelBase"]
