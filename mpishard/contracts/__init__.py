"""What native code asks of models and losses, and what models say of themselves.

Begin with ``layered.py``: models that are chains of layers. ``models.py`` has losses, metadata and
shapes. A black box needs only ``get_parameters``, ``set_parameters`` and ``compute_gradients``, and
derives from nothing. The other interfaces of the documented hierarchy are in `mpishard.mirror`.
This room imports only arrays and errors.
"""

from mpishard.contracts.layered import ILayeredModel, LayerCategory, LayerInfo
from mpishard.contracts.models import (
    DynamicShapeInfo,
    ILossFunction,
    ModelMetadata,
    PathLike,
    Saved,
    UserModel,
)

__all__ = [
    "DynamicShapeInfo",
    "ILayeredModel",
    "ILossFunction",
    "LayerCategory",
    "LayerInfo",
    "ModelMetadata",
    "PathLike",
]
