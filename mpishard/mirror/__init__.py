"""The documented hierarchy: names that exist only because it has them.

The package mirrors a documented class hierarchy. Its native classes are complete without it: they
train, save and communicate. This room has the rest, and nothing native imports it.

* ``interfaces/``: `IFullModel` and the other interfaces. The classes of the package implement them.
* Classes of its own: `CommunicationManager`, `ParameterAnalyzer`, `TrainingBuilder`,
  `OptimizationAlgorithmOptions`.
* ``members/``: the documented members of native classes. ``ms.ShardingConfiguration`` inherits
  ``create_for_low_bandwidth`` from `members.configurations`. A native class names its base in
  `mpishard.base.mirrored`, to which this module offers the classes; each is loaded with the native
  class that it belongs to. So help() and type checkers see them as inherited, and a reader of the
  native class sees what the class does.

`mpishard` loads this module first, and it loads the others when one of their names is needed.
"""

import importlib
from typing import TYPE_CHECKING

from mpishard.base import mirrored

if TYPE_CHECKING:
    from mpishard.mirror.communication_manager import CommunicationManager
    from mpishard.mirror.interfaces import (
        DynamicShapeInfo,
        ICheckpointableModel,
        ICloneable,
        IFeatureAware,
        IFeatureImportance,
        IFullModel,
        IGradientBasedOptimizer,
        IGradientComputable,
        IJitCompilable,
        ILayeredModel,
        ILossFunction,
        IModel,
        IModelSerializer,
        IModelShape,
        IOptimizer,
        IParameterizable,
        IParameterSource,
        IPipelineDecomposableModel,
        IShardedModel,
        IShardedOptimizer,
        LayerCategory,
        LayerInfo,
        ModelMetadata,
        ShardedModel,
    )
    from mpishard.mirror.optimizer_options import (
        AdamOptimizerOptions,
        OptimizationAlgorithmOptions,
    )
    from mpishard.mirror.parameter_analyzer import ParameterAnalyzer, ParameterGroup
    from mpishard.mirror.training_builder import (
        TrainingBuilder,
        as_distributed_for_high_bandwidth,
        as_distributed_for_low_bandwidth,
    )

__all__ = [
    "AdamOptimizerOptions",
    "CommunicationManager",
    "DynamicShapeInfo",
    "ICheckpointableModel",
    "ICloneable",
    "IFeatureAware",
    "IFeatureImportance",
    "IFullModel",
    "IGradientBasedOptimizer",
    "IGradientComputable",
    "IJitCompilable",
    "ILayeredModel",
    "ILossFunction",
    "IModel",
    "IModelSerializer",
    "IModelShape",
    "IOptimizer",
    "IParameterSource",
    "IParameterizable",
    "IPipelineDecomposableModel",
    "IShardedModel",
    "IShardedOptimizer",
    "LayerCategory",
    "LayerInfo",
    "ModelMetadata",
    "OptimizationAlgorithmOptions",
    "ParameterAnalyzer",
    "ParameterGroup",
    "ShardedModel",
    "TrainingBuilder",
    "as_distributed_for_high_bandwidth",
    "as_distributed_for_low_bandwidth",
]

_MODULES = (
    "interfaces",
    "communication_manager",
    "parameter_analyzer",
    "optimizer_options",
    "training_builder",
)
"""The modules of these names, searched in the order of the rooms that they import from."""

_MEMBERS = {
    "configurations": ["ConfigurationPresets"],
    "optimizers": ["OptimizerMembers"],
    "plain_models": ["LayeredModelMembers", "PlainModelMembers"],
    "sharded_models": ["ShardedModelMembers"],
    "sharded_optimizers": ["ShardedOptimizerMembers"],
    "spellings": [
        "LayerSpellings", "OperationSpellings", "RecomputeSpellings", "ReductionSpellings",
        "StrategySpellings",
    ],
}  # fmt: skip
"""Module of ``members/`` -> its classes, each the base of a native class or of enumerations."""

for _module, _names in _MEMBERS.items():
    mirrored.offer(dict.fromkeys(_names, f"mpishard.mirror.members.{_module}"))


def __getattr__(name: str) -> object:
    """Import a name on first use."""
    for module in _MODULES if name in __all__ else ():
        found = vars(importlib.import_module(f"{__name__}.{module}"))
        if name in found:
            globals()[name] = found[name]
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
