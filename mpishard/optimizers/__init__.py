"""Update rules, schedules, sharded optimizers, and the training loop, in four chapters.

`rules` has the arithmetic of updates: begin with `rules.elementwise`. `sharded` runs a rule on the
part of a model that each rank owns: `sharded.base`, and `sharded.strategies` for the table of
strategies. `replicas` has the optimizers whose replicas exchange little, or late. `loop` is
`optimize`: epochs, evaluation, early stopping, checkpoints and resume, in
`loop.loop`. Other modules: `plain` runs a rule on plain models and vectors in one process,
and `minimization` is `minimize`, which runs L-BFGS on a function.

The order is loop, rules, sharded, and plain, replicas or minimization; a chapter imports from those
before it. Only this module joins a rule to its holder in `plain`, because a rule's own `optimize`
runs all other chapters.
"""

from mpishard.optimizers.loop.data import OptimizationInputData
from mpishard.optimizers.loop.evaluation import DatasetResult
from mpishard.optimizers.loop.result import FitDetectionResult, FitType, OptimizationResult
from mpishard.optimizers.minimization import OptimizeResult, minimize
from mpishard.optimizers.plain import PlainTraining
from mpishard.optimizers.replicas.asynchronous import AsyncSGDOptimizer
from mpishard.optimizers.replicas.compression import GradientCompressionOptimizer
from mpishard.optimizers.replicas.local_sgd import LocalSGDOptimizer
from mpishard.optimizers.rules.elementwise import SGD, Adagrad, Adam, AdamW, Lion, RMSprop
from mpishard.optimizers.rules.lamb import LAMB
from mpishard.optimizers.rules.lbfgs import LBFGS
from mpishard.optimizers.rules.options import (
    AdamOptimizerOptions,
    OptimizationAlgorithmOptions,
    no_decay_on_biases_and_norms,
)
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
from mpishard.optimizers.sharded.strategies import (
    DDPOptimizer,
    ElasticOptimizer,
    FSDPOptimizer,
    HybridShardedOptimizer,
    PipelineParallelOptimizer,
    TensorParallelOptimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)

Optimizer.holder_of = PlainTraining

__all__ = [
    "LAMB",
    "LBFGS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamOptimizerOptions",
    "AdamW",
    "AsyncSGDOptimizer",
    "Constant",
    "Cosine",
    "DDPOptimizer",
    "DatasetResult",
    "ElasticOptimizer",
    "Exponential",
    "FSDPOptimizer",
    "FitDetectionResult",
    "FitType",
    "GradientCompressionOptimizer",
    "HybridShardedOptimizer",
    "Lion",
    "LocalSGDOptimizer",
    "OneCycle",
    "OptimizationAlgorithmOptions",
    "OptimizationInputData",
    "OptimizationResult",
    "OptimizeResult",
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
    "minimize",
    "no_decay_on_biases_and_norms",
]
