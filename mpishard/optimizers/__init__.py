"""Update rules, schedules, and the sharded optimizer wrappers."""

from mpishard.optimizers.loop.data import OptimizationInputData
from mpishard.optimizers.loop.evaluation import DatasetResult
from mpishard.optimizers.loop.result import FitDetectionResult, FitType, OptimizationResult
from mpishard.optimizers.rules.algorithm_options import (
    AdamOptimizerOptions,
    OptimizationAlgorithmOptions,
)
from mpishard.optimizers.rules.elementwise import SGD, Adagrad, Adam, AdamW, Lion, RMSprop
from mpishard.optimizers.rules.lamb import LAMB
from mpishard.optimizers.rules.options import no_decay_on_biases_and_norms
from mpishard.optimizers.rules.ranges import OwnedRange, Segment, UpdateContext
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.rules.schedules import (
    Constant,
    Cosine,
    Exponential,
    OneCycle,
    StepDecay,
    WarmUp,
)
from mpishard.optimizers.sharded.base import ShardedOptimizerBase
from mpishard.optimizers.sharded.ddp import DDPOptimizer
from mpishard.optimizers.sharded.fsdp import FSDPOptimizer
from mpishard.optimizers.sharded.mesh import (
    HybridShardedOptimizer,
    PipelineParallelOptimizer,
    TensorParallelOptimizer,
)
from mpishard.optimizers.sharded.zero import ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamOptimizerOptions",
    "AdamW",
    "Constant",
    "Cosine",
    "DDPOptimizer",
    "DatasetResult",
    "Exponential",
    "FSDPOptimizer",
    "FitDetectionResult",
    "FitType",
    "HybridShardedOptimizer",
    "Lion",
    "OneCycle",
    "OptimizationAlgorithmOptions",
    "OptimizationInputData",
    "OptimizationResult",
    "Optimizer",
    "OwnedRange",
    "PipelineParallelOptimizer",
    "RMSprop",
    "Segment",
    "ShardedOptimizerBase",
    "StepDecay",
    "TensorParallelOptimizer",
    "UpdateContext",
    "WarmUp",
    "ZeRO1Optimizer",
    "ZeRO2Optimizer",
    "ZeRO3Optimizer",
    "no_decay_on_biases_and_norms",
]
