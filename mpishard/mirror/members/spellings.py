"""Members of enumerations in the spelling of the mirrored hierarchy.

A class here lists the names that an enumeration has beside its own: each is the member of the same
letters, such as ``BackwardInput`` for ``BACKWARD_INPUT``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from mpishard.communication import ReductionOperation
    from mpishard.contracts import LayerCategory
    from mpishard.distributed import DistributedStrategy
    from mpishard.pipeline import PipelineOperationType, RecomputeStrategy

__all__ = [
    "LayerSpellings",
    "OperationSpellings",
    "RecomputeSpellings",
    "ReductionSpellings",
    "StrategySpellings",
]


class _Spellings:
    """Base of the classes below: it gives an enumeration the names that they list."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        members: dict[str, Any] = getattr(cls, "_member_map_", {})
        plain = {name.replace("_", ""): member for name, member in members.items()}
        for name in cls.__mro__[1].__annotations__ if members else ():
            member = plain[name.upper()]
            setattr(cls, name, member)
            members[name] = member  # so that cls["Sum"] finds it


class ReductionSpellings(_Spellings):
    """Names of a `mpishard.ReductionOperation`."""

    Sum: ClassVar[ReductionOperation]
    Product: ClassVar[ReductionOperation]
    Min: ClassVar[ReductionOperation]
    Max: ClassVar[ReductionOperation]
    Average: ClassVar[ReductionOperation]


class StrategySpellings(_Spellings):
    """Names of a `mpishard.DistributedStrategy`."""

    ZeRO1: ClassVar[DistributedStrategy]
    ZeRO2: ClassVar[DistributedStrategy]
    ZeRO3: ClassVar[DistributedStrategy]
    TensorParallel: ClassVar[DistributedStrategy]
    PipelineParallel: ClassVar[DistributedStrategy]
    Hybrid: ClassVar[DistributedStrategy]


class OperationSpellings(_Spellings):
    """Names of a `mpishard.pipeline.PipelineOperationType`."""

    Forward: ClassVar[PipelineOperationType]
    Backward: ClassVar[PipelineOperationType]
    BackwardInput: ClassVar[PipelineOperationType]
    BackwardWeight: ClassVar[PipelineOperationType]


class RecomputeSpellings(_Spellings):
    """Names of a `mpishard.pipeline.RecomputeStrategy`."""

    Selective: ClassVar[RecomputeStrategy]
    Full: ClassVar[RecomputeStrategy]


class LayerSpellings(_Spellings):
    """Names of a `mpishard.contracts.LayerCategory`."""

    Dense: ClassVar[LayerCategory]
    Convolution: ClassVar[LayerCategory]
    Pooling: ClassVar[LayerCategory]
    Normalization: ClassVar[LayerCategory]
    Activation: ClassVar[LayerCategory]
    Attention: ClassVar[LayerCategory]
    Embedding: ClassVar[LayerCategory]
    Regularization: ClassVar[LayerCategory]
    Reshape: ClassVar[LayerCategory]
    Composite: ClassVar[LayerCategory]
    Other: ClassVar[LayerCategory]
