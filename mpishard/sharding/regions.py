"""Boxes of a tensor, and regions: row-major ranges of boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType

from mpishard.base import Array, copy_into

FLAT = "<flat vector>"
"""Name of the model's flat vector in a `Region`. No parameter has it."""

Box = tuple[tuple[int, int], ...]
"""A hyperrectangle of a tensor: the range ``(start, stop)`` of each dim."""


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor of ``shape``."""
    return tuple((0, int(size)) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the sizes of the dims of a box."""
    return tuple([stop - start for start, stop in box])


def shared_box(one: Box, other: Box) -> Box | None:
    """Return the box that two boxes of a tensor share; None if they share no element."""
    shared = tuple(
        (max(low, other_low), min(high, other_high))
        for (low, high), (other_low, other_high) in zip(one, other, strict=True)
    )
    # A tensor without dims has one element, which every box of it shares.
    return shared if all(low < high for low, high in shared) else None


def box_within(box: Box, outer: Box | None = None) -> tuple[slice | EllipsisType, ...]:
    """Return ``box`` as an index of an array that is ``outer``, or the whole tensor.

    The result is a view, also of an array without dims.
    """
    starts = [0] * len(box) if outer is None else [low for low, _ in outer]
    cut = (slice(low - s, high - s) for (low, high), s in zip(box, starts, strict=True))
    # With the ellipsis an array without dims gives a view; `array[()]` would give a number.
    return (*cut, ...)


def join_dims(boxes: Sequence[Box]) -> list[Box]:
    """Return boxes with fewer dims: a dim in which all boxes agree joins the dim before it.

    The elements of each box, and the row-major order in it, stay the same.

    Examples
    --------
    >>> join_dims([((0, 4), (1, 3)), ((2, 6), (1, 3))])
    [((0, 8),), ((4, 12),)]
    """
    # Fewer dims mean fewer boxes for a region, and longer runs of memory for each.
    joined: list[list[tuple[int, int]]] = [[] for _ in boxes]
    for dim, ranges in enumerate(zip(*boxes, strict=True)):
        low, high = ranges[0]
        # All boxes take the same part of this dim, which scales the dim before it.
        if dim and all(other == (low, high) for other in ranges):
            for box in joined:
                box[-1] = (box[-1][0] * (high - low), box[-1][1] * (high - low))
        else:
            for box, own in zip(joined, ranges, strict=True):
                box.append(own)
    return [tuple(box) for box in joined]


@dataclass(frozen=True, slots=True)
class Region:
    """The elements ``[start, stop)``, in row-major order, of a box of the tensor ``name``.

    The tensor is a parameter or, with the name `FLAT`, the model's flat vector.
    """

    # A range of a box, and not of the tensor: a piece may begin in the middle of a slice's row.
    name: str
    box: Box
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> Region:
        """All of the tensor ``name``."""
        return cls(name, whole_box(shape), 0, math.prod(shape))

    def __str__(self) -> str:
        box = ", ".join(f"{low}:{high}" for low, high in self.box)
        return f"{self.name}[{box}][{self.start}:{self.stop}]"


def boxes_of(region: Region) -> Iterator[tuple[Box, slice]]:
    """Yield the boxes that make up a region, in the order of its values.

    There are at most 2d - 1 of them in a tensor of d dims: an incomplete first row, whole rows, an
    incomplete last row. An incomplete row is, again, a region of a box of one dim less.

    Yields
    ------
    box : Box
        Box of the tensor.
    part : slice
        Indices of the box in the region's values: all of it, in row-major order.

    Examples
    --------
    >>> region = Region("weight", ((0, 4), (2, 5)), 1, 10)
    >>> [(box, part.start, part.stop) for box, part in boxes_of(region)]
    [(((0, 1), (3, 5)), 0, 2), (((1, 3), (2, 5)), 2, 8), (((3, 4), (2, 3)), 8, 9)]
    """
    position = 0
    for box in _split(region.box, region.start, region.stop):
        size = math.prod(box_shape(box))
        yield box, slice(position, position + size)
        position += size


def _split(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield the elements ``[start, stop)`` of ``box`` as boxes, in order."""
    if start >= stop:
        return
    # Ends the recursion, too: a box without dims has one element.
    if stop - start == math.prod(box_shape(box)):
        yield box
        return
    top, columns = box[0][0], box[1:]
    row = math.prod(box_shape(columns))
    first, last = -(-start // row), stop // row  # the rows that are whole
    if first > last:  # it begins and ends inside one row
        for rest in _split(columns, start - last * row, stop - last * row):
            yield ((top + last, top + first), *rest)
        return
    for rest in _split(columns, start - (first - 1) * row, row):
        yield ((top + first - 1, top + first), *rest)
    if first < last:
        yield ((top + first, top + last), *columns)
    for rest in _split(columns, 0, stop - last * row):
        yield ((top + last, top + last + 1), *rest)


def put_region(values: Array, region: Region, tensor: Array) -> None:
    """Write a region's values, shape (region.length,), into its C-contiguous tensor."""
    for part, target in _pairs(values, region, tensor):
        copy_into(target, part)


def take_region(tensor: Array, region: Region, out: Array) -> None:
    """Write a region's values from its C-contiguous tensor into ``out``, shape (region.length,)."""
    for part, source in _pairs(out, region, tensor):
        copy_into(part, source)


def _pairs(values: Array, region: Region, tensor: Array) -> Iterator[tuple[Array, Array]]:
    """Yield views of a region's values, and of the same elements in its tensor."""
    # If the box is the whole tensor, the region is one run of memory.
    if box_shape(region.box) == tensor.shape:
        yield values, tensor.reshape(-1)[region.start : region.stop]
        return
    # Copied box by box: no index of single elements is made, which would take more memory.
    for box, part in boxes_of(region):
        yield values[part].reshape(box_shape(box)), tensor[box_within(box)]
