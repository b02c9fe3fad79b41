"""Split layers: each rank of a tensor group holds a slice of their parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from mpishard.base import NAMESPACES, Array, DType, ShardLayout, require_type
from mpishard.communication import CommunicationBackend
from mpishard.contracts import Saved
from mpishard.nn import Layer, Parameters, ParameterSpec, SavedActivations
from mpishard.sharding import Box, box_shape, whole_box


@dataclass(frozen=True, slots=True)
class DimSplit:
    """Partition of a dim of ``parts`` blocks, each distributed over the ranks in runs of elements.

    If queries, keys and values are side by side, there are three blocks, and a run is an attention
    head. `ShardLayout` distributes the runs of each block over the ranks. A rank therefore has the
    same number of runs of each block.

    Parameters
    ----------
    size : int
        Number of elements of the dim.
    world_size : int
        Number of ranks.
    parts : int or tuple of int
        Number of blocks of equal size. A tuple is for blocks of different sizes with the same
        number of runs: it has the size of a run of each block in units of ``multiple``. For
        attention in which 4 heads of queries share one head of keys and values it is (4, 1, 1).
    multiple : int
        Number of elements of a run.

    Raises
    ------
    ValueError
        If the sizes do not divide, or a block has fewer runs than there are ranks.

    Examples
    --------
    >>> split = DimSplit(12, world_size=2, parts=2, multiple=2)
    >>> [split.ranges(rank) for rank in range(2)]
    [((0, 4), (6, 10)), ((4, 6), (10, 12))]
    >>> split = DimSplit(12, world_size=2, parts=(4, 1, 1))
    >>> [split.ranges(rank) for rank in range(2)]
    [((0, 4), (8, 9), (10, 11)), ((4, 8), (9, 10), (11, 12))]
    """

    size: int
    world_size: int
    parts: int | tuple[int, ...] = 1
    multiple: int = 1

    def __post_init__(self) -> None:
        if min(self._widths, default=0) < 1 or self.multiple < 1:
            raise ValueError(
                f"parts and multiple must be 1 or more, got {self.parts} and {self.multiple}"
            )
        if self.size % (sum(self._widths) * self.multiple):
            raise ValueError(
                f"{self.size} elements do not make {self.parts} equal parts of runs of "
                f"{self.multiple}"
            )
        # A rank without a run would have empty matrices, and still take part in all collectives.
        if self._runs.length < self.world_size:
            raise ValueError(
                f"{self._runs.length} runs of {self.multiple} elements cannot be divided among "
                f"{self.world_size} ranks, each of which needs one: use {self._runs.length} ranks "
                "or fewer, or leave the layer whole"
            )

    @property
    def _widths(self) -> tuple[int, ...]:
        """The size of a run in each block, in units of ``multiple``."""
        return (1,) * self.parts if isinstance(self.parts, int) else self.parts

    @property
    def _runs(self) -> ShardLayout:
        return ShardLayout(self.size // (sum(self._widths) * self.multiple), self.world_size)

    def within_block(self, rank: int) -> tuple[int, int]:
        """Return the range ``(start, stop)`` of ``rank`` in a block with runs of ``multiple``."""
        runs = self._runs.slice(rank)
        return runs.start * self.multiple, runs.stop * self.multiple

    def ranges(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the dim that ``rank`` has, one for each part."""
        low, high = self.within_block(rank)
        block = self._runs.length * self.multiple
        starts = itertools.accumulate((width * block for width in self._widths), initial=0)
        return tuple(
            (start + width * low, start + width * high)
            # `starts` has one number more than there are blocks: the end of the last.
            for start, width in zip(starts, self._widths, strict=False)
        )

    def local_size(self, rank: int) -> int:
        """Return the number of elements of the dim that ``rank`` has."""
        low, high = self.within_block(rank)
        return sum(self._widths) * (high - low)

    def require_local(self, owner: str, shape: tuple[int, ...], rank: int) -> None:
        """Raise a ValueError, naming ``owner``, if a sample's last dim is not that of ``rank``."""
        local = self.local_size(rank)
        if not shape or shape[-1] != local:
            raise ValueError(
                f"{owner} needs an input whose last dim is {local} of {self.size} on rank {rank} "
                f"of {self.world_size}, got sample shape {shape}"
            )

    def take(self, x: Array, rank: int) -> Array:
        """Return the slice of x, shape (..., size), that ``rank`` has, as a C-contiguous array.

        If there is one rank and x is C-contiguous, it is x itself.
        """
        xp = NAMESPACES[type(x)]
        if self.world_size == 1:
            return xp.ascontiguousarray(x)
        own = [x[..., low:high] for low, high in self.ranges(rank)]
        # A collective or a product follows, which would copy a strided view itself.
        return xp.ascontiguousarray(own[0]) if len(own) == 1 else xp.concatenate(own, axis=-1)

    def gather(self, backend: CommunicationBackend, x: Array) -> Array:
        """Return the whole array (..., size) from each rank's slice x of its last dim. Collective.

        This takes one all-gather and one copy.
        """
        xp = NAMESPACES[type(x)]
        rows = math.prod(x.shape[:-1])
        # all_gather joins the ranks' arrays end to end; the loop puts them side by side.
        # One dim, because ranks may have widths that differ by a run.
        flat = backend.all_gather(xp.ascontiguousarray(x).reshape(-1))
        whole = xp.empty((rows, self.size), dtype=x.dtype)
        start = 0
        for rank in range(self.world_size):
            stop = start + rows * self.local_size(rank)
            theirs = flat[start:stop].reshape(rows, self.local_size(rank))
            column = 0
            for low, high in self.ranges(rank):
                whole[:, low:high] = theirs[:, column : column + high - low]
                column += high - low
            start = stop
        return whole.reshape(*x.shape[:-1], self.size)


class TensorParallelLayer(Layer):
    """Base of layers whose parameters are slices of a whole layer's parameters.

    Such a layer holds no arrays. `parameters` are the slices of this rank; their initial values are
    slices of the initial values of the whole layer. All ranks of the group must call the layer
    together and, unless its docstring says otherwise, on the same samples.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`.
    """

    computes_bfloat16 = True

    def __init__(self, backend: CommunicationBackend) -> None:
        require_type("backend", backend, CommunicationBackend)
        self.backend = backend

    @property
    def whole_parameters(self) -> Mapping[str, ParameterSpec]:
        """Parameters of the whole layer, in table order. The default is none."""
        return {}

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return this rank's boxes of the whole parameter ``name``, in the order of their rows.

        The default is the whole parameter.
        """
        return (whole_box(self.whole_parameters[name].shape),)

    def is_split(self, name: str) -> bool:
        """True if the ranks hold different slices of ``name``, False if all hold all of it."""
        shape = self.whole_parameters[name].shape
        # By sizes, because boxes of a rank do not overlap.
        return sum(math.prod(box_shape(box)) for box in self.boxes(name)) != math.prod(shape)

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Slices of the parameters that this rank has."""
        return {
            name: slice_of(spec, self.boxes(name)) for name, spec in self.whole_parameters.items()
        }


class SplitLayer(TensorParallelLayer):
    """Base of layers that compute a part of another layer, with the shapes and input of that layer.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    whole : Layer
        The whole layer.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`.
    """

    def __init__(self, backend: CommunicationBackend, whole: Layer) -> None:
        super().__init__(backend)
        self.whole = whole

    @property
    def whole_parameters(self) -> Mapping[str, ParameterSpec]:
        """Parameters of the whole layer."""
        return self.whole.parameters

    @property
    def is_random(self) -> bool:
        """True if the whole layer is random."""
        return self.whole.is_random

    @property
    def takes_integers(self) -> bool:
        """True if the whole layer takes integers."""
        return self.whole.takes_integers

    def check_input(self, x: Array) -> None:
        """Refuse what the whole layer refuses."""
        self.whole.check_input(x)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the whole layer's output shape."""
        return self.whole.output_shape(input_shape)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Return the whole layer's operations for an input of this shape."""
        return self.whole.estimated_flops(input_shape)

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return the whole layer's for an input of this shape."""
        return self.whole.saved_activations(input_shape, dtype)

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array | None, Saved]:
        """Return the whole layer's input gradient for ``saved`` and ``dy``, and its pending."""
        return self.whole.backward_input(p, saved, dy)


def slice_of(spec: ParameterSpec, boxes: tuple[Box, ...]) -> ParameterSpec:
    """Return the description of a parameter that has ``boxes`` of another, joined along dim 0."""
    first, *others = (box_shape(box) for box in boxes)
    shape = (first[0] + sum(other[0] for other in others), *first[1:])

    def initialize(generator: np.random.Generator, _: tuple[int, ...]) -> Array:
        # The whole parameter is made and then cut, so that values do not depend on the world size.
        full = spec.initializer(generator, spec.shape)
        parts = [full[tuple(slice(low, high) for low, high in box)] for box in boxes]
        return np.concatenate(parts)

    # The name stays the whole parameter's, and with it the key of its random numbers.
    return replace(spec, shape=shape, initializer=initialize)
