"""Update rules, schedules and sharded optimizers, in three chapters.

`rules` has the arithmetic of updates: begin with `rules.elementwise`; `rules.plain` runs a rule on
plain models and vectors in one process. `sharded` runs a rule on the part of a model that each rank
owns: `sharded.base`, and `sharded.strategies` for the table of strategies. `replicas` has the
optimizers whose replicas exchange little, or late. A chapter imports from those before it. The
training loop is in the room above, `mpishard.training`.
"""

from mpishard.optimizers.replicas.asynchronous import AsyncSGDOptimizer
from mpishard.optimizers.replicas.compression import GradientCompressionOptimizer
from mpishard.optimizers.replicas.local_sgd import LocalSGDOptimizer
from mpishard.optimizers.rules.compiled import uses_numba
from mpishard.optimizers.rules.elementwise import SGD, Adagrad, Adam, AdamW, Lion, RMSprop
from mpishard.optimizers.rules.lamb import LAMB
from mpishard.optimizers.rules.lbfgs import LBFGS
from mpishard.optimizers.rules.options import (
    AdamOptimizerOptions,
    OptimizationAlgorithmOptions,
    ParameterOptions,
    no_decay_on_biases_and_norms,
)
from mpishard.optimizers.rules.pieces import (
    PieceViews,
    Segment,
    UpdateContext,
    count_missed,
    missed_by,
)
from mpishard.optimizers.rules.plain import refuse_sharded
from mpishard.optimizers.rules.rule import JointRule, Optimizer
from mpishard.optimizers.rules.schedules import (
    Constant,
    Cosine,
    Exponential,
    OneCycle,
    StepDecay,
    WarmUp,
)
from mpishard.optimizers.rules.strong_wolfe import StrongWolfe
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
    "ElasticOptimizer",
    "Exponential",
    "FSDPOptimizer",
    "GradientCompressionOptimizer",
    "HybridShardedOptimizer",
    "Lion",
    "LocalSGDOptimizer",
    "OneCycle",
    "OptimizationAlgorithmOptions",
    "Optimizer",
    "PieceViews",
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
