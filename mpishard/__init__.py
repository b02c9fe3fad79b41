"""Distributed training for models whose parameters are plain vectors.

>>> import mpishard as ms
>>> ms.ShardLayout(10, 3).sizes
(4, 3, 3)
"""

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING

from mpishard.base import settings

importlib.import_module("mpishard.mirror")  # before the native classes, which it adds members to

if TYPE_CHECKING:
    from mpishard import (
        callbacks,
        checkpoint,
        contracts,
        data,
        mirror,
        nn,
        optimizers,
        pipeline,
        tensor,
    )
    from mpishard.adapters import FunctionModel
    from mpishard.base import ShardLayout
    from mpishard.communication import (
        CommunicationBackend,
        InMemoryCommunicationBackend,
        MPICommunicationBackend,
        NCCLCommunicationBackend,
        ProcessMesh,
        ReductionOperation,
        init,
        run_in_threads,
    )
    from mpishard.distributed import (
        DistributedStrategy,
        as_distributed,
        launch,
        register_strategy,
    )
    from mpishard.exports import export_onnx, load_gpt2, save_gpt2
    from mpishard.mirror import (
        CommunicationManager,
        ParameterAnalyzer,
        ParameterGroup,
        TrainingBuilder,
        as_distributed_for_high_bandwidth,
        as_distributed_for_low_bandwidth,
    )
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
        AsyncSGDOptimizer,
        DDPOptimizer,
        ElasticOptimizer,
        FSDPOptimizer,
        GradientCompressionOptimizer,
        HybridShardedOptimizer,
        LocalSGDOptimizer,
        PipelineParallelOptimizer,
        ShardedOptimizerBase,
        TensorParallelOptimizer,
        ZeRO1Optimizer,
        ZeRO2Optimizer,
        ZeRO3Optimizer,
    )
    from mpishard.planning import plan_memory
    from mpishard.sharding import ShardingConfiguration
    from mpishard.training import OptimizationInputData, OptimizationResult, minimize

__version__ = "0.1.0"

__all__ = [
    "AsyncSGDOptimizer",
    "CommunicationBackend",
    "CommunicationManager",
    "DDPModel",
    "DDPOptimizer",
    "DistributedStrategy",
    "ElasticOptimizer",
    "FSDPModel",
    "FSDPOptimizer",
    "FunctionModel",
    "GradientCompressionOptimizer",
    "HybridShardedModel",
    "HybridShardedOptimizer",
    "InMemoryCommunicationBackend",
    "LocalSGDOptimizer",
    "MPICommunicationBackend",
    "NCCLCommunicationBackend",
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
    "TrainingBuilder",
    "ZeRO1Model",
    "ZeRO1Optimizer",
    "ZeRO2Model",
    "ZeRO2Optimizer",
    "ZeRO3Model",
    "ZeRO3Optimizer",
    "as_distributed",
    "as_distributed_for_high_bandwidth",
    "as_distributed_for_low_bandwidth",
    "callbacks",
    "checkpoint",
    "contracts",
    "data",
    "export_onnx",
    "init",
    "launch",
    "load_gpt2",
    "minimize",
    "mirror",
    "nn",
    "optimizers",
    "pipeline",
    "plan_memory",
    "register_strategy",
    "run_in_threads",
    "save_gpt2",
    "tensor",
]

_ROOMS = (
    "base", "mirror", "communication", "sharding", "models", "optimizers", "training", "adapters",
    "distributed", "exports", "planning",
)  # fmt: skip
"""Rooms that define public names. They are loaded on first use (SPEC 1 of Scientific Python).

A process that only communicates, or prints a plan, does not wait for models and optimizers. The
rooms are searched in this order, in which each imports from those before it.
"""


@functools.cache  # it takes 2 ms to find that all are there
def load_rooms() -> None:
    """Import all public names, because threads that import at the same time may deadlock."""
    for name in __all__:
        __getattr__(name)


def __getattr__(name: str) -> object:
    """Import a public name, or a room or module of the package, on first use."""
    if not name.startswith("_") and importlib.util.find_spec(f"mpishard.{name}") is not None:
        return importlib.import_module(f"mpishard.{name}")
    for room in _ROOMS if name in __all__ else ():
        module = importlib.import_module(f"mpishard.{room}")
        if hasattr(module, name):
            found: object = getattr(module, name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'mpishard' has no attribute {name!r}")


def __dir__() -> list[str]:
    # Modules that need an optional package are left out: help() imports all names.
    return sorted({*globals(), *__all__, *_ROOMS, "errors", "observe", "testing"})


if settings.launcher_variable() is not None:
    # On a rank an exception ends the job, and preemption signals are received, from here on.
    importlib.import_module("mpishard.communication")
