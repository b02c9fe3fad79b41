"""Distributed training for models whose parameters are plain vectors.

>>> import mpishard as ms
>>> ms.ShardLayout(10, 3).sizes
(4, 3, 3)
"""

import importlib

from mpishard import blas  # isort: skip  # noqa: F401 - before NumPy is loaded
from mpishard import checkpoint, contracts, data, nn, optimizers, pipeline, tensor
from mpishard.adapters import FunctionModel
from mpishard.communication import (
    CommunicationBackend,
    CommunicationManager,
    InMemoryCommunicationBackend,
    MPICommunicationBackend,
    ProcessMesh,
    ReductionOperation,
    init,
    run_in_threads,
)
from mpishard.distributed import (
    DistributedStrategy,
    as_distributed,
    as_distributed_for_high_bandwidth,
    as_distributed_for_low_bandwidth,
    launch,
)
from mpishard.layout import ShardLayout
from mpishard.models import (
    DDPModel,
    FSDPModel,
    HybridShardedModel,
    PipelineParallelModel,
    ShardedModelBase,
    TensorParallelModel,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
)
from mpishard.optimizers import (
    DDPOptimizer,
    FSDPOptimizer,
    HybridShardedOptimizer,
    OptimizationInputData,
    OptimizationResult,
    PipelineParallelOptimizer,
    ShardedOptimizerBase,
    TensorParallelOptimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpishard.sharding import ParameterAnalyzer, ParameterGroup, ShardingConfiguration

__version__ = "0.1.0"

__all__ = [
    "CommunicationBackend",
    "CommunicationManager",
    "DDPModel",
    "DDPOptimizer",
    "DistributedStrategy",
    "FSDPModel",
    "FSDPOptimizer",
    "FunctionModel",
    "HybridShardedModel",
    "HybridShardedOptimizer",
    "InMemoryCommunicationBackend",
    "MPICommunicationBackend",
    "OptimizationInputData",
    "OptimizationResult",
    "ParameterAnalyzer",
    "ParameterGroup",
    "PipelineParallelModel",
    "PipelineParallelOptimizer",
    "ProcessMesh",
    "ReductionOperation",
    "ShardLayout",
    "ShardedModelBase",
    "ShardedOptimizerBase",
    "ShardingConfiguration",
    "TensorParallelModel",
    "TensorParallelOptimizer",
    "ZeRO1Model",
    "ZeRO1Optimizer",
    "ZeRO2Model",
    "ZeRO2Optimizer",
    "ZeRO3Model",
    "ZeRO3Optimizer",
    "as_distributed",
    "as_distributed_for_high_bandwidth",
    "as_distributed_for_low_bandwidth",
    "checkpoint",
    "contracts",
    "data",
    "init",
    "launch",
    "nn",
    "optimizers",
    "pipeline",
    "run_in_threads",
    "tensor",
]


def __getattr__(name: str) -> object:
    """``mpishard.testing``, which running programs do without, on first use."""
    if name == "testing":
        return importlib.import_module("mpishard.testing")
    raise AttributeError(f"module 'mpishard' has no attribute {name!r}")
