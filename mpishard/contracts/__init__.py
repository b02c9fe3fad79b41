"""The interfaces of models, losses and optimizers.

The names mirror a documented class hierarchy. A class implements what it can do: members that a
model cannot fulfil raise, naming the interface, when they are first called. A black box needs
only ``get_parameters``, ``set_parameters`` and ``compute_gradients``, and need not derive from
anything here.
"""

from mpishard.contracts.features import IFeatureAware, IFeatureImportance
from mpishard.contracts.layered import (
    ILayeredModel,
    IPipelineDecomposableModel,
    LayerCategory,
    LayerInfo,
)
from mpishard.contracts.losses import ILossFunction
from mpishard.contracts.metadata import ModelMetadata
from mpishard.contracts.models import (
    ICloneable,
    IFullModel,
    IGradientComputable,
    IJitCompilable,
    IModel,
)
from mpishard.contracts.optimizers import IGradientBasedOptimizer, IOptimizer, IShardedOptimizer
from mpishard.contracts.parameters import IParameterizable, IParameterSource
from mpishard.contracts.serialization import ICheckpointableModel, IModelSerializer, PathLike
from mpishard.contracts.shapes import DynamicShapeInfo, IModelShape
from mpishard.contracts.sharded import IShardedModel, ShardedModel

__all__ = [
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
    "PathLike",
    "ShardedModel",
]
