"""Whether pieces make up a tensor: each element once."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from mpishard.errors import CheckpointError
from mpishard.sharding.regions import (
    Box,
    Region,
    blocks_of,
    box_shape,
    join_dims,
    shared_box,
    whole_box,
)

__all__ = ["check_coverage", "check_region"]

_MOST_CUT_DIMS = 8  # a box of d dims has 2**d corners


def check_region(region: Region, shape: Sequence[int]) -> None:
    """Refuse what is no part of a tensor of ``shape``.

    Raises
    ------
    ValueError
        Where the box is outside the tensor, the range outside the box, or there is nothing in it.
    """
    fits = len(region.box) == len(shape)
    if fits:
        for (low, high), size in zip(region.box, shape, strict=True):
            fits = fits and 0 <= low < high <= size
    if not (fits and 0 <= region.start < region.stop <= math.prod(box_shape(region.box))):
        raise ValueError(f"{region} is no part of a tensor of shape {tuple(shape)}")


def check_coverage(
    kind: str, name: str, shape: Sequence[int], pieces: Sequence[tuple[str, Region]]
) -> None:
    """Refuse pieces that do not hold every element of a tensor exactly once.

    Takes time in proportion to the number of pieces, and no memory for elements.

    Parameters
    ----------
    kind, name : str
        What the tensor is, for the message.
    shape : sequence of int
        The tensor's.
    pieces : sequence of (str, Region)
        File and region of each.

    Raises
    ------
    CheckpointError
        Naming the first elements, in row-major order, that nobody holds or several hold.
    """
    try:
        for _, region in pieces:
            check_region(region, shape)
    except ValueError as error:
        raise CheckpointError(f"{kind}: {error}") from None
    fault = _first_fault(whole_box(shape), [region for _, region in pieces])
    if fault is None:
        return
    start, stop, held = fault
    if held == 0:
        raise CheckpointError(f"{kind}: nothing holds elements {start} to {stop} of {name}")
    holders = [file for file, region in pieces if _holds(region, shape, start)]
    raise CheckpointError(
        f"{kind}: elements {start} to {stop} of {name} are held {_times(held)}, "
        f"by {' and '.join(holders[:2])}{' and others' * (held > 2)}"
    )


def _first_fault(whole: Box, regions: Sequence[Region]) -> tuple[int, int, int] | None:
    """The first run of elements that are not held once: start, stop, how often they are held.

    Take the function that says of each element how often it is held, less 1. Its differences along
    all dims are 0 but at corners of boxes, and it is their sum over all places that are nowhere
    behind an element; so it is 0 everywhere if they are. Of all places where they are not, the
    first in row-major order is behind no other: there the function is the difference itself. It
    then stays the same in that row up to the next such place.
    """
    if math.prod(box_shape(whole)) == 0:
        return None
    regions = list(_join_ranges(regions))
    if [r.box for r in regions] == [whole] and regions[0].length == math.prod(box_shape(whole)):
        return None
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
        for block, _ in blocks_of(Region(region.name, box, region.start, region.stop)):
            for corner, sign in zip(itertools.product(*block), signs, strict=True):
                differences[corner] += sign
    places = [place for place, difference in differences.items() if difference]
    if not places:
        return None
    first = min(places)
    run = min(p[-1] for p in places if p[:-1] == first[:-1] and p > first) - first[-1]
    start = 0
    for (_, size), index in zip(whole, first, strict=True):
        start = start * size + index
    return start, start + run, 1 + differences[first]


def _join_ranges(regions: Sequence[Region]) -> Iterator[Region]:
    """The same elements in fewer regions: one for those that follow each other in a box."""
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


def _holds(region: Region, shape: Sequence[int], element: int) -> bool:
    """Whether an element, counted in row-major order, is in a region."""
    place = []
    for size in reversed(shape):
        element, index = divmod(element, size)
        place.append((index, index + 1))
    return any(shared_box(box, tuple(reversed(place))) is not None for box, _ in blocks_of(region))


def _times(number: int) -> str:
    return "twice" if number == 2 else f"{number} times"
