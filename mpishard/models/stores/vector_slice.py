"""The part of a flat vector that a rank of a mesh owns, cut without regard to what lies in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mpishard.communication import ProcessMesh
from mpishard.layout import ShardLayout
from mpishard.sharding import Box, ParameterEntry, Placement, Slice

__all__ = ["own_range", "placed_range"]


def own_range(length: int, mesh: ProcessMesh) -> tuple[int, int]:
    """The range that a rank owns: a tensor rank's part of its pipeline rank's part.

    Both by `ShardLayout`, so the ranges of a replica's ranks lie end to end; ranks that differ in
    their data coordinate own the same.
    """
    stage = ShardLayout(length, mesh.pipeline_size)
    part = ShardLayout(stage.size(mesh.pipeline_rank), mesh.tensor_size)
    start = stage.start(mesh.pipeline_rank) + part.start(mesh.tensor_rank)
    return start, start + part.size(mesh.tensor_rank)


def placed_range(entries: Sequence[ParameterEntry], start: int, stop: int) -> Placement:
    """The placement of a rank whose own flat vector is the range ``[start, stop)`` of the model's.

    Examples
    --------
    >>> entries = [ParameterEntry("w", (2, 3), 0), ParameterEntry("b", (3,), 6)]
    >>> slices = placed_range(entries, 2, 7).slices
    >>> [(held.entry.name, held.entry.start, held.boxes) for held in slices]
    [('w', 0, (((0, 1), (2, 3)), ((1, 2), (0, 3)))), ('b', 4, (((0, 1),),))]
    """
    slices = []
    for entry in entries:
        low, high = max(start, entry.start), min(stop, entry.stop)
        if low < high:
            own = ParameterEntry(entry.name, (high - low,), low - start, entry.trainable)
            boxes = tuple(_boxes(entry.shape, low - entry.start, high - entry.start))
            slices.append(Slice(own, boxes))
    return Placement(entries, slices)


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that the elements ``[start, stop)`` of a tensor, in row-major order, make up."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the rows that are whole lie between
    if first > last:  # within one row
        for box in _boxes(shape[1:], start - last * row, stop - last * row):
            yield ((last, last + 1), *box)
        return
    for box in _boxes(shape[1:], start - (first - 1) * row, row if start < first * row else 0):
        yield ((first - 1, first), *box)
    if first < last:
        yield ((first, last), *((0, size) for size in shape[1:]))
    for box in _boxes(shape[1:], 0, stop - last * row):
        yield ((last, last + 1), *box)
