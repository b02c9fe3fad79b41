"""What a layer is of which each rank of a tensor group holds a slice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpishard.communication import CommunicationBackend
from mpishard.nn.layer import Initializer, Layer, ParameterSpec
from mpishard.sharding import Box, whole_box
from mpishard.sharding.regions import box_shape

__all__ = ["TensorParallelLayer"]


class TensorParallelLayer(Layer):
    """A layer whose parameters are slices of a whole layer's.

    It holds no arrays. `parameters` are the slices that this rank has; their first values are
    those slices of the first values that the whole layer would have. All ranks of the group call
    it together and, unless it says otherwise, on the same samples.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.

    Raises
    ------
    TypeError
        For no backend.
    """

    def __init__(self, backend: CommunicationBackend) -> None:
        if not isinstance(backend, CommunicationBackend):
            raise TypeError(f"backend must be a CommunicationBackend, got {type(backend).__name__}")
        self.backend = backend

    @property
    def whole_parameters(self) -> Mapping[str, ParameterSpec]:
        """The parameters of the whole layer, in table order; none, unless a layer has some."""
        return {}

    def boxes(self, name: str) -> tuple[Box, ...]:
        """What this rank holds of the whole parameter ``name``: boxes one below the other.

        All of it, unless a layer splits it.
        """
        return (whole_box(self.whole_parameters[name].shape),)

    def is_split(self, name: str) -> bool:
        """Whether the ranks hold different slices of ``name``; where not, all hold all of it."""
        shape = self.whole_parameters[name].shape
        return sum(math.prod(box_shape(box)) for box in self.boxes(name)) != math.prod(shape)

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """The slices that this rank has."""
        return {
            name: slice_of(spec, self.boxes(name)) for name, spec in self.whole_parameters.items()
        }


def slice_of(spec: ParameterSpec, boxes: tuple[Box, ...]) -> ParameterSpec:
    """The parameter that holds ``boxes`` of another, one below the other along dim 0."""
    first, *others = (box_shape(box) for box in boxes)
    shape = (first[0] + sum(other[0] for other in others), *first[1:])
    return replace(spec, shape=shape, initializer=_sliced(spec.initializer, spec.shape, boxes))


def _sliced(
    initializer: Initializer, whole: tuple[int, ...], boxes: tuple[Box, ...]
) -> Initializer:
    def initialize(generator: np.random.Generator, _: tuple[int, ...]) -> np.ndarray[Any, Any]:
        full = initializer(generator, whole)
        parts = [full[tuple(slice(low, high) for low, high in box)] for box in boxes]
        return np.concatenate(parts)

    return initialize
