"""The interfaces of models, losses and optimizers.

A class implements the members that it can. A member that a model does not implement raises an
error, which names the interface, when it is called. Nothing must derive from these classes.

Begin with ``parameters.py``, a model as a flat vector. ``models.py`` has the other interfaces of
models, ``optimizers.py`` those of optimizers. `mpishard.contracts` has those that native code
needs; they are offered here, too.
"""

from mpishard.contracts import (
    DynamicShapeInfo,
    ILayeredModel,
    ILossFunction,
    LayerCategory,
    LayerInfo,
    ModelMetadata,
)
from mpishard.mirror.interfaces.models import (
    ICloneable,
    IFeatureAware,
    IFeatureImportance,
    IFullModel,
    IGradientComputable,
    IJitCompilable,
    IModel,
    IModelShape,
    IPipelineDecomposableModel,
    IShardedModel,
    ShardedModel,
)
from mpishard.mirror.interfaces.optimizers import (
    IGradientBasedOptimizer,
    IOptimizer,
    IShardedOptimizer,
)
from mpishard.mirror.interfaces.parameters import (
    ICheckpointableModel,
    IModelSerializer,
    IParameterizable,
    IParameterSource,
)

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
    "ShardedModel",
]
