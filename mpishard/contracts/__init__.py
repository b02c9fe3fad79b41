"""The interfaces of models, losses and optimizers.

The names mirror a documented class hierarchy. A class implements the members that it can. A member
that a model does not implement raises an error, which names the interface, when it is called. A
black box needs only ``get_parameters``, ``set_parameters`` and ``compute_gradients``, and need not
derive from these classes.

Begin with ``parameters.py``, a model as a flat vector. ``models.py`` has the other interfaces of
models, ``layered.py`` models that are chains of layers, ``optimizers.py`` optimizers. This room
imports only arrays and errors.
"""

from mpishard.contracts.layered import (
    ILayeredModel,
    IPipelineDecomposableModel,
    LayerCategory,
    LayerInfo,
)
from mpishard.contracts.models import (
    DynamicShapeInfo,
    ICloneable,
    IFeatureAware,
    IFeatureImportance,
    IFullModel,
    IGradientComputable,
    IJitCompilable,
    ILossFunction,
    IModel,
    IModelShape,
    IShardedModel,
    ModelMetadata,
    Saved,
    ShardedModel,
    UserModel,
)
from mpishard.contracts.optimizers import IGradientBasedOptimizer, IOptimizer, IShardedOptimizer
from mpishard.contracts.parameters import (
    ICheckpointableModel,
    IModelSerializer,
    IParameterizable,
    IParameterSource,
    PathLike,
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
    "PathLike",
    "ShardedModel",
]
