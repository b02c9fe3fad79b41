"""The arguments of an update rule: ranges of parameters, and the values known besides them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np

from mpishard.base import Array, Document, Metadata, is_device_array, lie_end_to_end, stretched
from mpishard.sharding import ParameterEntry, Piece, Unit, cells_of, overlapping

Cell = tuple[str, int]
"""A parameter's name, and the number of its part; see `Segment`."""

_MISSED = "missed"
"""Key, in the numbers of a rule, of the updates that have left parameters out, by their names."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of one parameter that lies in one owned piece: ``[start, stop)`` of the piece.

    If worlds of other sizes must compute the same norms, it is the part that lies in one cell of
    the flat vector, the ``cell``-th of the parameter.
    """

    name: str
    start: int
    stop: int
    cell: int = 0


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """The values that an update may depend on besides its own range.

    ``step`` counts updates from 1. ``gradient_scale`` turns the given gradient, a sum over
    samples, into the clipped mean: ``clip / weight``. ``sum_over_owners`` returns the sum of a
    small vector over all ranks that own a part of the parameters; all of them call it. If each rank
    owns all parameters, it returns its argument. ``parameter_names`` are all names of the model, in
    one order on all ranks, so that such a vector can have a place for each; without them each rank
    owns all parameters. With ``gradient_leaves`` a name appears once for each of its cells, in
    order, and each place receives the sum of the whole parameter, for any number of ranks.
    ``loss`` is the mean loss at the parameters, None if it is not known. ``numbers`` holds the
    values, as JSON, that a rule keeps between updates besides its vectors. It belongs to the
    caller, who saves it with the state. ``missed`` is that of the range: see `OwnedRange`.
    """

    step: int
    learning_rate: float
    gradient_scale: float
    sum_over_owners: Callable[[Array], Array] = lambda vector: vector
    parameter_names: Sequence[str] = ()
    loss: float | None = None
    numbers: Document = field(default_factory=dict)
    missed: int = 0


@dataclass(frozen=True, slots=True)
class OwnedRange:
    """The views that a rule updates: one owned piece in 1-D views of one length.

    ``gradients`` may be read-only. ``state`` has one view per name of `Optimizer.needed_state`;
    ``segments`` name the parameters that the range cuts through. ``missed`` is the number of
    updates that have left these parameters out, because they had no gradient.
    """

    parameters: Array
    gradients: Array
    state: Mapping[str, Array]
    segments: Sequence[Segment]
    missed: int = 0

    def without(
        self, unused: Collection[str], numbers: Mapping[str, object]
    ) -> Iterator[OwnedRange]:
        """Yield the parts outside the parameters ``unused``, each with its number of ``missed``."""

        def missed(segment: Segment) -> int | None:
            return None if segment.name in unused else missed_by(segment.name, numbers)

        for count, group in groupby(self.segments, missed):
            if count is None:
                continue
            segments = [*group]
            start, stop = segments[0].start, segments[-1].stop
            yield OwnedRange(
                self.parameters[start:stop],
                self.gradients[start:stop],
                {name: vector[start:stop] for name, vector in self.state.items()},
                tuple(replace(s, start=s.start - start, stop=s.stop - start) for s in segments),
                count,
            )


def missed_by(name: str, numbers: Metadata) -> int:
    """Return the number of updates that have left a parameter out: see `count_missed`."""
    missed: Mapping[str, int] = numbers.get(_MISSED, {})
    return missed.get(name, 0)


def count_missed(unused: Collection[str], numbers: Document) -> None:
    """Note in a rule's ``numbers`` that an update has left out the parameters ``unused``."""
    if unused:
        before = numbers.get(_MISSED, {})
        numbers[_MISSED] = before | {name: missed_by(name, numbers) + 1 for name in sorted(unused)}


def segments_of(entries: Sequence[ParameterEntry], piece: Piece) -> tuple[Segment, ...]:
    """Return the intersections of the parameters with one owned piece, in order."""
    return tuple(
        Segment(
            e.name, max(e.start, piece.start) - piece.start, min(e.stop, piece.stop) - piece.start
        )
        for e in overlapping(entries, piece.start, piece.stop)
    )


def joined(ranges: Sequence[OwnedRange]) -> list[OwnedRange]:
    """Return the ranges; on a GPU those that lie end to end as one, which one kernel updates.

    They do if each of their arrays does: pieces of units, for example, that fill a flat vector.
    """
    found: list[OwnedRange] = []
    for owned in ranges:
        if found and is_device_array(owned.parameters) and _are_neighbours(found[-1], owned):
            found[-1] = _join(found[-1], owned)
        else:
            found.append(owned)
    return found


def _are_neighbours(first: OwnedRange, second: OwnedRange) -> bool:
    pairs = zip(_arrays_of(first), _arrays_of(second), strict=True)
    return all(lie_end_to_end(a, b) for a, b in pairs)


def _arrays_of(owned: OwnedRange) -> list[Array]:
    return [owned.parameters, owned.gradients, *owned.state.values()]


def _join(first: OwnedRange, second: OwnedRange) -> OwnedRange:
    start = int(first.parameters.size)
    length = start + int(second.parameters.size)
    moved = (replace(s, start=s.start + start, stop=s.stop + start) for s in second.segments)
    return OwnedRange(
        stretched(first.parameters, length),
        stretched(first.gradients, length),
        {name: stretched(array, length) for name, array in first.state.items()},
        (*first.segments, *moved),
    )


def places_of(ranges: Sequence[OwnedRange], context: UpdateContext) -> dict[Cell, int]:
    """Return the place of each cell of the parameters in a vector that is summed over ranks."""
    if not context.parameter_names:
        cells = dict.fromkeys((s.name, s.cell) for owned in ranges for s in owned.segments)
    else:
        seen: Counter[str] = Counter()
        cells = {}
        for name in context.parameter_names:
            cells[name, seen[name]] = None
            seen[name] += 1
    return {cell: place for place, cell in enumerate(cells)}


class ParameterCells:
    """The parts of a model's parameters that lie in one cell each, in flat order.

    A norm that is summed by cells has the same bits in every world.

    Parameters
    ----------
    entries : sequence of ParameterEntry
        All parameters.
    units : sequence of Unit
        The ranges that are cut among the ranks.
    leaves : int
        ``gradient_leaves``: see `mpishard.sharding.cells_of`.

    Attributes
    ----------
    names : list of str
        The parameter's name of each part.
    """

    def __init__(
        self, entries: Sequence[ParameterEntry], units: Sequence[Unit], leaves: int
    ) -> None:
        cuts = sorted({start for unit in units for start, _ in cells_of(unit, leaves)})
        self.names: list[str] = []
        self._starts: list[int] = []
        self._firsts: list[int] = []  # the first part of each parameter
        for entry in (e for e in entries if e.size):
            inside = cuts[bisect_right(cuts, entry.start) : bisect_left(cuts, entry.stop)]
            self._firsts.append(len(self.names))
            self._starts += [entry.start, *inside]
            self.names += [entry.name] * (1 + len(inside))

    def cut(self, segments: Sequence[Segment], piece: Piece) -> tuple[Segment, ...]:
        """Return the segments of an owned piece, each cut into its parts."""
        found = []
        for segment in segments:
            low, high = piece.start + segment.start, piece.start + segment.stop
            first, stop = bisect_right(self._starts, low), bisect_left(self._starts, high)
            # Parts are numbered from the first one of their parameter, equally in every world.
            of_parameter = self._firsts[bisect_right(self._firsts, first - 1) - 1]
            bounds = [low, *self._starts[first:stop], high]
            for number, (start, end) in enumerate(pairwise(bounds), start=first - 1 - of_parameter):
                part = Segment(segment.name, start - piece.start, end - piece.start, number)
                found.append(part)
        return tuple(found)

    def totals(self, rows: Array) -> Array:
        """Return for each part the sum of its parameter's rows, of shape (len(names), n)."""
        ends = [*self._firsts[1:], len(self.names)]
        # One sum per parameter, in the order of its cells, which no owner changes.
        sums = np.add.reduceat(rows, self._firsts, axis=0)
        counts = [end - first for first, end in zip(self._firsts, ends, strict=True)]
        return np.repeat(sums, counts, axis=0)
