"""Check that the pieces of a tensor have each of its elements exactly once."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from mpishard.base import CheckpointError
from mpishard.sharding import (
    Box,
    Region,
    box_shape,
    boxes_of,
    join_dims,
    shared_box,
    whole_box,
)

_MOST_CUT_DIMS = 8  # A box of d dims has 2**d corners, so that memory and time are limited.


def check_region(region: Region, shape: Sequence[int]) -> None:
    """Refuse a region that is not a part of a tensor of ``shape``.

    Raises
    ------
    ValueError
        If the box is outside the tensor, the range is outside the box, or the region is empty.
    """
    fits = len(region.box) == len(shape)
    if fits:
        for (low, high), size in zip(region.box, shape, strict=True):
            fits = fits and 0 <= low < high <= size
    if not (fits and 0 <= region.start < region.stop <= math.prod(box_shape(region.box))):
        raise ValueError(f"{region} is not a part of a tensor of shape {tuple(shape)}")


def check_coverage(
    kind: str, name: str, shape: Sequence[int], pieces: Sequence[tuple[str, Region]]
) -> None:
    """Refuse pieces that do not have every element of a tensor exactly once.

    Time and memory depend on the number of pieces, and not on the number of elements.

    Parameters
    ----------
    kind, name : str
        Kind and name of the tensor, for the message.
    shape : sequence of int
        Shape of the tensor.
    pieces : sequence of (str, Region)
        File and region of each piece.

    Raises
    ------
    CheckpointError
        If no piece, or more than one, has an element. The message names the first such elements in
        row-major order.
    """
    # The most common case is one piece with all elements. An empty piece is refused below.
    if len(pieces) == 1 and pieces[0][1].length and pieces[0][1] == Region.whole(name, shape):
        return
    try:
        for _, region in pieces:
            check_region(region, shape)
    except ValueError as error:
        raise CheckpointError(f"{kind}: {error}") from None
    fault = _first_fault(whole_box(shape), [region for _, region in pieces])
    if fault is None:
        return
    start, stop, count = fault
    if count == 0:
        raise CheckpointError(f"{kind}: nothing holds elements {start} to {stop} of {name}")
    times = "twice" if count == 2 else f"{count} times"
    element = Region(name, whole_box(shape), start, start + 1)
    ((place, _),) = boxes_of(element)
    holders = [
        file
        for file, region in pieces
        if any(shared_box(box, place) is not None for box, _ in boxes_of(region))
    ]
    raise CheckpointError(
        f"{kind}: elements {start} to {stop} of {name} are held {times}, "
        f"by {' and '.join(holders[:2])}{' and others' * (count > 2)}"
    )


def _first_fault(whole: Box, regions: Sequence[Region]) -> tuple[int, int, int] | None:
    """Return the first run of elements that no piece, or several, have: start, stop, their number.

    Let f(element) be the number of pieces that have the element, minus 1. The mixed differences of
    f along all dims are 0 except at corners of boxes. f(element) is the sum of the differences at
    all places that do not come after the element in any dim. Therefore f is 0 everywhere if all
    differences are 0. Otherwise f equals the difference at the first place, in row-major order,
    that has one. It stays the same in that row up to the next such place.
    """
    if math.prod(box_shape(whole)) == 0:
        return None
    # Most tensors are divided into ranges of one box. Their joined ranges are the whole tensor.
    regions = list(_join_ranges(regions))
    if [r.box for r in regions] == [whole] and regions[0].length == math.prod(box_shape(whole)):
        return None
    # Joined dims make fewer corners. A tensor of shape () is treated as one of shape (1,).
    whole, *boxes = join_dims([box or ((0, 1),) for box in (whole, *(r.box for r in regions))])
    if len(whole) > _MOST_CUT_DIMS:
        raise CheckpointError(
            f"{regions[0].name} is cut along {len(whole)} dims; {_MOST_CUT_DIMS} are the most"
        )
    signs = [(-1) ** corner.bit_count() for corner in range(1 << len(whole))]
    differences: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for corner, sign in zip(itertools.product(*whole), signs, strict=True):
        differences[corner] -= sign
    for region, box in zip(regions, boxes, strict=True):
        for part, _ in boxes_of(Region(region.name, box, region.start, region.stop)):
            for corner, sign in zip(itertools.product(*part), signs, strict=True):
                differences[corner] += sign
    places = [place for place, difference in differences.items() if difference]
    if not places:
        return None
    first = min(places)
    # The differences of a row sum to 0, so that the row has a later place with a difference.
    run = min(p[-1] for p in places if p[:-1] == first[:-1] and p > first) - first[-1]
    start = 0
    for (_, size), index in zip(whole, first, strict=True):
        start = start * size + index
    return start, start + run, 1 + differences[first]


def _join_ranges(regions: Sequence[Region]) -> Iterator[Region]:
    """Yield the same elements in fewer regions, with consecutive ranges of a box joined."""
    joined: Region | None = None
    for region in sorted(regions, key=lambda region: (region.box, region.start)):
        if joined is None or (joined.box, joined.stop) != (region.box, region.start):
            if joined is not None:
                yield joined
            joined = region
        else:
            joined = Region(region.name, region.box, joined.start, region.stop)
    if joined is not None:
        yield joined
