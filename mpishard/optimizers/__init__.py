"""Update rules, schedules, and the sharded optimizer wrappers."""

from mpishard.optimizers.adamw import AdamW
from mpishard.optimizers.data import OptimizationInputData
from mpishard.optimizers.ddp import DDPOptimizer
from mpishard.optimizers.evaluation import DatasetResult
from mpishard.optimizers.fsdp import FSDPOptimizer
from mpishard.optimizers.optimizer import Optimizer, UpdateContext
from mpishard.optimizers.options import Segment
from mpishard.optimizers.result import FitDetectionResult, FitType, OptimizationResult
from mpishard.optimizers.schedules import Constant, Cosine, WarmUp
from mpishard.optimizers.sgd import SGD
from mpishard.optimizers.sharded import ShardedOptimizerBase
from mpishard.optimizers.zero import ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer

__all__ = [
    "SGD",
    "AdamW",
    "Constant",
    "Cosine",
    "DDPOptimizer",
    "DatasetResult",
    "FSDPOptimizer",
    "FitDetectionResult",
    "FitType",
    "OptimizationInputData",
    "OptimizationResult",
    "Optimizer",
    "Segment",
    "ShardedOptimizerBase",
    "UpdateContext",
    "WarmUp",
    "ZeRO1Optimizer",
    "ZeRO2Optimizer",
    "ZeRO3Optimizer",
]
