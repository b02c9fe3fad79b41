"""Update rules, schedules, and the sharded optimizer wrappers."""

from mpishard.optimizers.adagrad import Adagrad
from mpishard.optimizers.adam import Adam
from mpishard.optimizers.adamw import AdamW
from mpishard.optimizers.algorithm_options import (
    AdamOptimizerOptions,
    OptimizationAlgorithmOptions,
)
from mpishard.optimizers.data import OptimizationInputData
from mpishard.optimizers.ddp import DDPOptimizer
from mpishard.optimizers.evaluation import DatasetResult
from mpishard.optimizers.fsdp import FSDPOptimizer
from mpishard.optimizers.lamb import LAMB
from mpishard.optimizers.lion import Lion
from mpishard.optimizers.mesh import (
    HybridShardedOptimizer,
    PipelineParallelOptimizer,
    TensorParallelOptimizer,
)
from mpishard.optimizers.optimizer import Optimizer
from mpishard.optimizers.options import Segment, no_decay_on_biases_and_norms
from mpishard.optimizers.ranges import OwnedRange, UpdateContext
from mpishard.optimizers.result import FitDetectionResult, FitType, OptimizationResult
from mpishard.optimizers.rmsprop import RMSprop
from mpishard.optimizers.schedules import (
    Constant,
    Cosine,
    Exponential,
    OneCycle,
    StepDecay,
    WarmUp,
)
from mpishard.optimizers.sgd import SGD
from mpishard.optimizers.sharded import ShardedOptimizerBase
from mpishard.optimizers.zero import ZeRO1Optimizer, ZeRO2Optimizer, ZeRO3Optimizer

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
