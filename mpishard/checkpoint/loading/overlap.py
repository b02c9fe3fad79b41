"""The common part of two regions of a tensor, and copies of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.sharding.regions import (
    Box,
    Region,
    blocks_of,
    box_shape,
    box_within,
    join_dims,
    shared_box,
)

__all__ = ["Overlap", "overlaps"]

_BLOCK = 1 << 22  # elements that are read at a time
_RUN = 1 << 14  # elements in a row for which a read of their own pays


@dataclass(frozen=True, slots=True)
class Overlap:
    """A box that is part of a stored region and of a requested one.

    Parameters
    ----------
    shared : Box
        The elements.
    source, target : Box
        The boxes of the two regions that contain them.
    source_start : int
        Start of ``source`` in the stored values.
    target_part : slice
        Range of ``target`` in the requested values.
    """

    shared: Box
    source: Box
    source_start: int
    target: Box
    target_part: slice

    @property
    def source_span(self) -> slice:
        """Range of the stored values from the first of the elements to the last."""
        first = last = 0
        for (low, high), (start, stop) in zip(self.shared, self.source, strict=True):
            first = first * (stop - start) + low - start
            last = last * (stop - start) + high - 1 - start
        return slice(self.source_start + first, self.source_start + last + 1)

    def copy(self, values: Any, out: Array) -> None:
        """Copy the elements from the stored values to the requested ones.

        Parameters
        ----------
        values : sliceable
            The stored region, of which ``values[start:stop]`` reads a range: a NumPy array.
        out : Array
            The requested region, 1-D.
        """
        view = out[self.target_part].reshape(box_shape(self.target))
        _copy(
            values, self.source_start, box_shape(self.source),
            tuple(
                (low - start, high - start)
                for (low, high), (start, _) in zip(self.shared, self.source, strict=True)
            ),
            view[box_within(self.shared, self.target)],
        )  # fmt: skip


def overlaps(source: Region, target: Region) -> Iterator[Overlap]:
    """Yield the common parts of two regions of one tensor."""
    if source.box == target.box:  # the common case: both are ranges of one vector
        low, high = max(source.start, target.start), min(source.stop, target.stop)
        if low < high:
            stored, wanted = ((source.start, source.stop),), ((target.start, target.stop),)
            yield Overlap(((low, high),), stored, 0, wanted, slice(0, target.length))
        return
    if shared_box(source.box, target.box) is None:
        return
    source_box, target_box = join_dims([source.box, target.box])
    blocks = list(blocks_of(Region(target.name, target_box, target.start, target.stop)))
    for box, part in blocks_of(Region(source.name, source_box, source.start, source.stop)):
        for other, other_part in blocks:
            shared = shared_box(box, other)
            if shared is not None:
                yield Overlap(shared, box, part.start, other, other_part)


def _copy(values: Any, offset: int, shape: tuple[int, ...], box: Box, out: Array) -> None:
    """Copy the ``box`` of the array of ``shape`` that lies in ``values`` from ``offset`` on.

    Whole rows are read, a block at a time. If rows are long and little of each is requested, each
    row is read as an array of its own.
    """
    (low, high), *columns = box
    row = math.prod(shape[1:])
    needed = math.prod(box_shape(tuple(columns)))
    # To read long rows whole costs more than a seek for each.
    if row > _BLOCK or (needed >= _RUN and 2 * needed <= row):
        for index in range(low, high):
            _copy(values, offset + index * row, shape[1:], tuple(columns), out[index - low])
        return
    inner = tuple(slice(first, last) for first, last in columns)
    step = _BLOCK // row
    for first in range(low, high, step):
        last = min(first + step, high)
        block = values[offset + first * row : offset + last * row].reshape(-1, *shape[1:])
        chosen = block[(slice(None), *inner)]
        out[first - low : last - low] = array_namespace(out).asarray(chosen)
