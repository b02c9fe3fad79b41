"""Distributed training for models whose parameters are plain vectors.

>>> import mpishard as ms
>>> ms.ShardLayout(10, 3).sizes
(4, 3, 3)
"""

import importlib

from mpishard import blas  # isort: skip  # noqa: F401 - before NumPy is loaded
from mpishard import checkpoint, contracts, data, nn, optimizers
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
    ShardedModelBase,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
)
from mpishard.optimizers import (
    DDPOptimizer,
    FSDPOptimizer,
    OptimizationInputData,
    OptimizationResult,
    ShardedOptimizerBase,
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
    "InMemoryCommunicationBackend",
    "MPICommunicationBackend",
    "OptimizationInputData",
    "OptimizationResult",
    "ParameterAnalyzer",
    "ParameterGroup",
    "ProcessMesh",
    "ReductionOperation",
    "ShardLayout",
    "ShardedModelBase",
    "ShardedOptimizerBase",
    "ShardingConfiguration",
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
    "run_in_threads",
]


def __getattr__(name: str) -> object:
    """``mpishard.testing``, which running programs do without, on first use."""
    if name == "testing":
        return importlib.import_module("mpishard.testing")
    raise AttributeError(f"module 'mpishard' has no attribute {name!r}")
