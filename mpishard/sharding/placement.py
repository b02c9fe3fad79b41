"""Placements: the parameters of a rank's own flat vector, and their boxes in the model."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mpishard.base import Array, ShardLayout, array_namespace, copy_into
from mpishard.sharding.regions import (
    FLAT,
    Box,
    Region,
    box_shape,
    put_region,
    take_region,
    whole_box,
)
from mpishard.sharding.table import ParameterEntry, overlapping

_LEAST_RANGE = 1 << 14  # elements of the shortest range that is divided among writers


@dataclass(frozen=True, slots=True)
class LocalParameter:
    """A rank's part of one parameter.

    Parameters
    ----------
    entry : ParameterEntry
        The parameter's name, the shape of the slice, and its start in the rank's own flat vector.
    boxes : tuple of Box
        The boxes of the model's parameter that make up the slice, stacked along dim 0. A slice of
        queries, keys and values has three.
    is_counted : bool
        Whether this rank, of all that hold the same slice, counts it in norms and sums.
    written : tuple of (int, int), optional
        The elements ``[start, stop)`` of the slice that this rank, of all that hold it, writes to
        files: see `range_to_write`. Default: all if the slice is counted, else none.
    """

    entry: ParameterEntry
    boxes: tuple[Box, ...]
    is_counted: bool = True
    written: tuple[int, int] | None = None

    @property
    def written_range(self) -> tuple[int, int]:
        """The range of the rank's own flat vector, ``[start, stop)``, that it writes."""
        # Without a given range the rank that counts a parameter writes all of it.
        low, high = self.written or (0, self.entry.size if self.is_counted else 0)
        # In the own vector, as pieces are: a save cuts both in one way.
        return self.entry.start + low, self.entry.start + high


def range_to_write(size: int, turn: int, holder: int, holder_count: int) -> tuple[int, int]:
    """Return the elements that one of several ranks writes, of values that all of them hold.

    Together they write each element once. Large values are divided among them. Small ones are
    written by one rank, in turn, so that all ranks write about as many bytes.

    Parameters
    ----------
    size : int
        Number of elements.
    turn : int
        Index of these values among all that the ranks hold: 0, 1, and so on.
    holder, holder_count : int
        Index of this rank among them, and their number.

    Returns
    -------
    start, stop : int
        The range of elements; empty if this rank writes none.

    Examples
    --------
    >>> [range_to_write(300_000, 0, holder, 3) for holder in range(3)]
    [(0, 100000), (100000, 200000), (200000, 300000)]
    >>> [range_to_write(512, 4, holder, 3) for holder in range(3)]
    [(0, 0), (0, 512), (0, 0)]
    """
    # A range below `_LEAST_RANGE` elements is not worth a write of its own.
    layout = ShardLayout(size, min(holder_count, max(1, size // _LEAST_RANGE)))
    # Each turn begins with another writer, so that small values are divided among the ranks.
    index = (holder - turn) % holder_count
    if index >= layout.world_size:
        return 0, 0
    return layout.start(index), layout.start(index) + layout.size(index)


class Placement:
    """Relates a rank's own flat vector to the model's: the position of each element there.

    Parameters
    ----------
    entries : sequence of ParameterEntry
        The model's parameters, in its flat order.
    local_parameters : sequence of LocalParameter
        Parameters that this rank holds, in the order of its own flat vector.

    Attributes
    ----------
    entries, local_parameters : tuple
        As given.
    length : int
        Length of the model's flat vector.
    own_length : int
        Length of this rank's own flat vector.
    is_whole : bool
        Whether the rank's own flat vector is the model's, and the rank counts and writes all of it.

    Raises
    ------
    ValueError
        If a local parameter is none of the model's, or its boxes do not have its shape.
    """

    def __init__(
        self, entries: Sequence[ParameterEntry], local_parameters: Sequence[LocalParameter]
    ) -> None:
        self.entries = tuple(entries)
        self.local_parameters = tuple(local_parameters)
        self.length = self.entries[-1].stop if self.entries else 0
        # For bisection: the own vector has the local parameters end to end.
        self._stops = [local.entry.stop for local in self.local_parameters]
        self.own_length = self._stops[-1] if self.local_parameters else 0
        # A cache, because checkpoints cut the same ranges at each save.
        self._cuts: dict[tuple[int, int, bool], list[tuple[Region, slice]]] = {}
        self._origin = {entry.name: entry for entry in self.entries}
        # A tensor rank may hold whole parameters, and leave counting or writing to another one.
        self.is_whole = [local.entry for local in self.local_parameters] == list(
            self.entries
        ) and all(
            local.is_counted and local.written_range == (local.entry.start, local.entry.stop)
            for local in self.local_parameters
        )
        for local in self.local_parameters:
            if local.entry.name not in self._origin:
                raise ValueError(f"there is no parameter {local.entry.name!r} to hold a slice of")
            # Wrong boxes would write other parameters' elements to a checkpoint, without an error.
            size = sum(math.prod(box_shape(box)) for box in local.boxes)
            if size != local.entry.size:
                raise ValueError(
                    f"the boxes {local.boxes} of {local.entry.name} have {size} elements, its "
                    f"slice of shape {local.entry.shape} has {local.entry.size}"
                )

    @classmethod
    def whole(cls, entries: Sequence[ParameterEntry], *, is_counted: bool = True) -> Placement:
        """Return the placement of a rank whose own flat vector is the model's.

        Without ``is_counted`` another rank, which holds the same, counts and writes all of it.
        """
        # A rank that repeats another's work holds all, and counts none of it.
        return cls(entries, [LocalParameter(e, (whole_box(e.shape),), is_counted) for e in entries])

    @property
    def counted_ranges(self) -> list[tuple[int, int]]:
        """Ranges ``(start, stop)`` of the rank's own flat vector that it counts in norms."""
        counted = (local.entry for local in self.local_parameters if local.is_counted)
        return [(entry.start, entry.stop) for entry in counted]

    @property
    def written_ranges(self) -> list[tuple[int, int]]:
        """Ranges ``(start, stop)`` of the rank's own flat vector that it writes to files."""
        ranges = (local.written_range for local in self.local_parameters)
        return [(start, stop) for start, stop in ranges if start < stop]

    def local(self, full: Array, start: int, stop: int) -> Array:
        """Return the rank's own range ``[start, stop)`` of the model's vector.

        Shape (stop - start,). It is a view if the rank's own flat vector is the model's.
        """
        if self.is_whole:
            return full[start:stop]
        # A copy: boxes of a split parameter do not lie end to end in the model's vector.
        out = array_namespace(full).empty(stop - start, full.dtype)
        self.take(full, start, out)
        return out

    def ranges(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the model's flat vector in the rank's own range ``[start, stop)``."""
        for region, _ in self.regions(start, stop):
            yield from _flat_ranges(self._origin[region.name], region)

    def regions(
        self, start: int, stop: int, *, written: bool = False
    ) -> Iterator[tuple[Region, slice]]:
        """Yield the parts of the range ``[start, stop)`` of the rank's own flat vector, in order.

        Parameters
        ----------
        start, stop : int
            In the rank's own flat vector.
        written : bool
            Leave out elements that another rank writes to files.

        Yields
        ------
        region : Region
            Region of the model's parameters.
        part : slice
            Its indices in the range.
        """
        # By bisection, because a rank may hold thousands of parameters, and most ranges are short.
        index = bisect.bisect_right(self._stops, start)
        for local in itertools.islice(self.local_parameters, index, None):
            position = local.entry.start
            if position >= stop:
                return
            # Of several ranks that hold a parameter, each writes a part, or nothing.
            first, last = local.written_range if written else (position, local.entry.stop)
            # Both the requested range and the range that this rank writes may cut a box.
            first, last = max(start, first), min(stop, last)
            # Boxes are stacked along dim 0: each follows the one before it in the own vector.
            for box in local.boxes:
                size = math.prod(box_shape(box))
                low, high = max(first, position), min(last, position + size)
                if low < high:
                    region = Region(local.entry.name, box, low - position, high - position)
                    yield region, slice(low - start, high - start)
                position += size

    def cut(
        self, parts: Iterable[tuple[int, Array]], *, written: bool = False
    ) -> list[tuple[Region, Array]]:
        """Return views of parts of the rank's own flat vector, each with its region.

        The regions are of the model's flat vector if that is the rank's own, and otherwise of
        single parameters, as those of `regions`.

        Parameters
        ----------
        parts : iterable of (int, Array)
            Start of each part in the rank's own flat vector, and its elements, 1-D.
        written : bool
            As for `regions`.
        """
        if self.is_whole:
            # One region for all parameters of a part, of which a model may have many thousands.
            box = ((0, self.length),)
            return [
                (Region(FLAT, box, start, start + int(array.size)), array)
                for start, array in parts
                if array.size
            ]
        pieces = []
        for start, array in parts:
            key = (start, start + int(array.size), written)
            if key not in self._cuts:
                # Bounds alone are kept, and no arrays: these change from save to save.
                self._cuts[key] = list(self.regions(key[0], key[1], written=written))
            pieces += [(region, array[part]) for region, part in self._cuts[key]]
        return pieces

    def take(self, full: Array, start: int, out: Array) -> None:
        """Fill ``out`` with the rank's own range that begins at ``start``, from the model's vector.

        Parameters
        ----------
        full : Array
            Shape (length,), on any device.
        start : int
            In the rank's own flat vector.
        out : Array
            1-D.
        """
        if self.is_whole:
            copy_into(out, full[start : start + int(out.size)])
            return
        for region, part in self.regions(start, start + int(out.size)):
            take_region(self._origin[region.name].view(full), region, out[part])

    def put(self, own: Array, start: int, full: Array) -> None:
        """Write the rank's own range into the model's vector: the opposite of `take`."""
        for region, part in self.regions(start, start + int(own.size)):
            put_region(own[part], region, self._origin[region.name].view(full))


def by_parameter(
    pieces: Iterable[tuple[Region, Array]], entries: Sequence[ParameterEntry]
) -> Iterator[tuple[Region, Array]]:
    """Yield pieces of single parameters: regions of the flat vector are cut at their bounds.

    Parameters
    ----------
    pieces : iterable of (Region, Array)
        Each region and its values, 1-D.
    entries : sequence of ParameterEntry
        The parameters along the flat vector, in order. Elements of others are left out.
    """
    for region, values in pieces:
        if region.name != FLAT:
            yield region, values
            continue
        for entry in overlapping(entries, region.start, region.stop):
            low, high = max(entry.start, region.start), min(entry.stop, region.stop)
            if low < high:
                part = values[low - region.start : high - region.start]
                yield entry.region(low, high), part


def _flat_ranges(entry: ParameterEntry, region: Region) -> Iterator[tuple[int, int]]:
    """Yield the flat ranges of a region, in order; adjacent ones are joined."""
    shape = box_shape(region.box)
    # Trailing dims that the box takes whole make one run with the dim before them.
    joined = len(shape)
    run = 1
    while joined and shape[joined - 1] == entry.shape[joined - 1]:
        joined -= 1
        run *= shape[joined]
    if joined:
        joined -= 1
        run *= shape[joined]
    if not run:
        return
    # In elements of the whole parameter, which is contiguous in the model's vector.
    strides = [math.prod(entry.shape[dim + 1 :]) for dim in range(len(shape))]
    for number, outer in enumerate(itertools.product(*(range(n) for n in shape[:joined]))):
        low = max(region.start - number * run, 0)
        high = min(region.stop - number * run, run)
        if low < high:
            index = [*outer, *([0] * (len(shape) - joined))]
            offsets = (
                (box[0] + i) * stride
                for box, i, stride in zip(region.box, index, strides, strict=True)
            )
            first = entry.start + sum(offsets)
            yield first + low, first + high
