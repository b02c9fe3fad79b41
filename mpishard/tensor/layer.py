"""Layers of which each rank of a tensor group holds a slice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.communication import CommunicationBackend
from mpishard.layout import ShardLayout
from mpishard.nn.layers.layer import Layer, ParameterSpec
from mpishard.sharding import Box, whole_box
from mpishard.sharding.regions import box_shape

__all__ = ["DimSplit", "TensorParallelLayer"]


@dataclass(frozen=True, slots=True)
class DimSplit:
    """A dim of ``parts`` equal blocks, each of which is dealt in runs of ``multiple`` elements.

    Queries, keys and values side by side are three blocks, and a run is an attention head. The
    runs of each block go to the ranks as `ShardLayout` deals them, so that a rank has as much
    of each block.

    Parameters
    ----------
    size : int
        Elements of the dim.
    world_size : int
        Ranks.
    parts : int
        Blocks.
    multiple : int
        Elements of a run.

    Raises
    ------
    ValueError
        If the sizes do not divide, or a block has fewer runs than there are ranks.

    Examples
    --------
    >>> split = DimSplit(12, world_size=2, parts=2, multiple=2)
    >>> [split.ranges(rank) for rank in range(2)]
    [((0, 4), (6, 10)), ((4, 6), (10, 12))]
    """

    size: int
    world_size: int
    parts: int = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.parts < 1 or self.multiple < 1:
            raise ValueError(
                f"parts and multiple must be 1 or more, got {self.parts} and {self.multiple}"
            )
        if self.size % (self.parts * self.multiple):
            raise ValueError(
                f"{self.size} elements do not make {self.parts} equal parts of runs of "
                f"{self.multiple}"
            )
        if self._runs.length < self.world_size:
            raise ValueError(
                f"{self._runs.length} runs of {self.multiple} elements cannot be dealt to "
                f"{self.world_size} ranks, each of which needs one: use {self._runs.length} ranks "
                "or fewer, or leave the layer whole"
            )

    @property
    def block(self) -> int:
        """Elements of a part."""
        return self.size // self.parts

    @property
    def _runs(self) -> ShardLayout:
        return ShardLayout(self.block // self.multiple, self.world_size)

    def within_block(self, rank: int) -> tuple[int, int]:
        """The range ``(start, stop)`` of each block that ``rank`` has."""
        runs = self._runs.slice(rank)
        return runs.start * self.multiple, runs.stop * self.multiple

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The ranges of the dim that ``rank`` has, one for each part."""
        low, high = self.within_block(rank)
        return tuple((p * self.block + low, p * self.block + high) for p in range(self.parts))

    def local_size(self, rank: int) -> int:
        """Elements of the dim that ``rank`` has."""
        low, high = self.within_block(rank)
        return self.parts * (high - low)

    def take(self, x: Array, rank: int) -> Array:
        """The slice of x (..., size) that ``rank`` has: C-contiguous; x itself if it is all."""
        low, high = self.within_block(rank)
        blocks = x.reshape(*x.shape[:-1], self.parts, self.block)[..., low:high]
        own = array_namespace(x).ascontiguousarray(blocks)
        return own.reshape(*x.shape[:-1], self.local_size(rank))

    def gather(self, backend: CommunicationBackend, x: Array) -> Array:
        """The whole (..., size), of each rank's last dim. Collective; one message, one copy."""
        xp = array_namespace(x)
        rows = math.prod(x.shape[:-1])
        flat = backend.all_gather(xp.ascontiguousarray(x).reshape(-1))
        whole = xp.empty((rows, self.parts, self.block), dtype=x.dtype)
        start = 0
        for rank in range(self.world_size):
            low, high = self.within_block(rank)
            stop = start + rows * self.local_size(rank)
            whole[:, :, low:high] = flat[start:stop].reshape(rows, self.parts, high - low)
            start = stop
        return whole.reshape(*x.shape[:-1], self.size)


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
        """Boxes of this rank in the whole parameter ``name``, one below the other.

        All of it, unless a layer splits it.
        """
        return (whole_box(self.whole_parameters[name].shape),)

    def is_split(self, name: str) -> bool:
        """True if the ranks hold different slices of ``name``; if not, all hold all of it."""
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

    def initialize(generator: np.random.Generator, _: tuple[int, ...]) -> np.ndarray[Any, Any]:
        # The whole parameter is made and cut, so that values do not depend on the world size.
        full = spec.initializer(generator, spec.shape)
        parts = [full[tuple(slice(low, high) for low, high in box)] for box in boxes]
        return np.concatenate(parts)

    return replace(spec, shape=shape, initializer=initialize)
