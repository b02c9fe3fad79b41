"""The arguments of an update rule: views of pieces, and the values known besides them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np

from mpishard.base import Array, Document, is_device_array, lie_end_to_end, stretched
from mpishard.sharding import ParameterEntry, Piece, Unit, common_pieces, overlapping

SegmentKey = tuple[str, int]
"""A parameter's name, and the number of its segment; see `Segment`."""

Numbers = Document
"""Values, as JSON, that a rule keeps between updates besides its vectors."""

_MISSED = "missed"
"""Key, in the numbers of a rule, of the updates that have left parameters out, by their names."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The elements of one parameter that lie in one owned piece: ``[start, stop)`` of the piece.

    With ``gradient_leaves`` a parameter may have several segments in a piece: `FixedSegments` cuts
    it at the same elements in every world. ``number`` counts them from the parameter's first one.
    """

    name: str
    start: int
    stop: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """The values that an update may depend on besides its own piece.

    ``step`` counts updates from 1. ``gradient_scale`` turns the given gradient, a sum over
    samples, into the clipped mean: ``clip / weight``. ``sum_over_owners`` returns the sum of a
    small vector over all ranks that own some of the parameters; all of them call it. If each rank
    owns all parameters, it returns its argument. ``parameter_names`` are all names of the model, in
    one order on all ranks, so that such a vector can have a row for each; without them each rank
    owns all parameters. With ``gradient_leaves`` a name appears once for each of its segments, in
    order, and each row receives the sum of the whole parameter, for any number of ranks.
    ``loss`` is the mean loss at the parameters, None if it is not known. ``numbers`` belongs to
    the caller, who saves it with the state. ``missed`` is that of the piece: see `PieceViews`.
    In `Optimizer.update` the learning rate and ``weight_decay`` are those of the piece, by the
    rule's ``parameter_options``.
    """

    step: int
    learning_rate: float
    gradient_scale: float
    sum_over_owners: Callable[[Array], Array] = lambda vector: vector
    parameter_names: Sequence[str] = ()
    loss: float | None = None
    numbers: Numbers = field(default_factory=dict)
    missed: int = 0
    weight_decay: float = 0.0


@dataclass(frozen=True, slots=True)
class PieceViews:
    """The views that a rule updates: one owned piece in 1-D views of one length.

    ``gradients`` may be read-only. ``state`` has one view per name of `Optimizer.needed_state`;
    ``segments`` name the parameters that the piece cuts through. ``missed`` is the number of
    updates that have left these parameters out, because they had no gradient.
    """

    parameters: Array
    gradients: Array
    state: Mapping[str, Array]
    segments: Sequence[Segment]
    missed: int = 0

    def without(self, unused: Collection[str], numbers: Numbers) -> Iterator[PieceViews]:
        """Yield views without the parameters ``unused``, one for each number of ``missed``."""
        if not unused and _MISSED not in numbers:  # as in nearly all steps
            yield self
            return

        def missed(segment: Segment) -> int | None:
            return None if segment.name in unused else missed_by(segment.name, numbers)

        for count, group in groupby(self.segments, missed):
            if count is None:
                continue
            # Neighbours with one count stay one range, so that a rule runs once for all of them.
            segments = [*group]
            yield replace(self.cut(segments[0].start, segments[-1].stop), missed=count)

    def cut(self, start: int, stop: int) -> PieceViews:
        """Return the views of elements ``[start, stop)``, which are those of whole segments."""
        if stop - start == self.parameters.size:  # as in nearly all pieces
            return self
        return PieceViews(
            self.parameters[start:stop],
            self.gradients[start:stop],
            {name: vector[start:stop] for name, vector in self.state.items()},
            tuple(
                replace(s, start=s.start - start, stop=s.stop - start)
                for s in self.segments
                if start <= s.start < stop
            ),
            self.missed,
        )


def missed_by(name: str, numbers: Numbers) -> int:
    """Return the number of updates that have left a parameter out: see `count_missed`."""
    missed: Mapping[str, int] = numbers.get(_MISSED, {})
    return missed.get(name, 0)


def count_missed(unused: Collection[str], numbers: Numbers) -> None:
    """Note in a rule's ``numbers`` that an update has left out the parameters ``unused``."""
    if unused:
        before = numbers.get(_MISSED, {})
        # Sorted, so that all ranks save the same JSON.
        numbers[_MISSED] = before | {name: missed_by(name, numbers) + 1 for name in sorted(unused)}


def segments_of(entries: Sequence[ParameterEntry], piece: Piece) -> tuple[Segment, ...]:
    """Return the intersections of the parameters with one owned piece, in order."""
    return tuple(
        Segment(
            e.name, max(e.start, piece.start) - piece.start, min(e.stop, piece.stop) - piece.start
        )
        for e in overlapping(entries, piece.start, piece.stop)
    )


def joined(pieces: Sequence[PieceViews]) -> list[PieceViews]:
    """Return the pieces; on a GPU those that lie end to end as one, which one kernel updates.

    They do if each of their arrays does: those of units, for example, that fill a flat vector.
    """
    found: list[PieceViews] = []
    for owned in pieces:
        # On the host nothing is joined: a chunk of a piece fits the cache in any case.
        if found and is_device_array(owned.parameters) and _are_neighbours(found[-1], owned):
            found[-1] = _join(found[-1], owned)
        else:
            found.append(owned)
    return found


def _are_neighbours(first: PieceViews, second: PieceViews) -> bool:
    pairs = zip(_arrays_of(first), _arrays_of(second), strict=True)
    return first.missed == second.missed and all(lie_end_to_end(a, b) for a, b in pairs)


def _arrays_of(owned: PieceViews) -> list[Array]:
    return [owned.parameters, owned.gradients, *owned.state.values()]


def _join(first: PieceViews, second: PieceViews) -> PieceViews:
    start = int(first.parameters.size)
    length = start + int(second.parameters.size)
    moved = (replace(s, start=s.start + start, stop=s.stop + start) for s in second.segments)
    return PieceViews(
        stretched(first.parameters, length),
        stretched(first.gradients, length),
        {name: stretched(array, length) for name, array in first.state.items()},
        (*first.segments, *moved),
        first.missed,
    )


def rows_of(pieces: Sequence[PieceViews], context: UpdateContext) -> dict[SegmentKey, int]:
    """Return the row of each segment of the parameters in an array that is summed over ranks."""
    if not context.parameter_names:
        keys = dict.fromkeys((s.name, s.number) for owned in pieces for s in owned.segments)
    else:
        # A rank owns few of them, but its array needs a row for all: the ranks add row by row.
        seen: Counter[str] = Counter()
        keys = {}
        for name in context.parameter_names:
            keys[name, seen[name]] = None
            seen[name] += 1
    return {key: row for row, key in enumerate(keys)}


class FixedSegments:
    """The segments of a model's parameters, cut at the same elements in every world, in flat order.

    A norm that is summed by these segments has the same bits in every world.

    Parameters
    ----------
    entries : sequence of ParameterEntry
        All parameters.
    units : sequence of Unit
        The units that are divided among the ranks.
    leaves : int
        ``gradient_leaves``: see `mpishard.sharding.common_pieces`.

    Attributes
    ----------
    names : list of str
        The parameter's name of each segment.
    """

    def __init__(
        self, entries: Sequence[ParameterEntry], units: Sequence[Unit], leaves: int
    ) -> None:
        cuts = sorted({start for unit in units for start, _ in common_pieces(unit, leaves)})
        self.names: list[str] = []
        self._starts: list[int] = []
        self._firsts: list[int] = []  # index of the first segment of each parameter
        # A parameter without elements lies in no piece, and would have no segment to count from.
        for entry in (e for e in entries if e.size):
            inside = cuts[bisect_right(cuts, entry.start) : bisect_left(cuts, entry.stop)]
            self._firsts.append(len(self.names))
            self._starts += [entry.start, *inside]
            self.names += [entry.name] * (1 + len(inside))

    def cut(self, segments: Sequence[Segment], piece: Piece) -> tuple[Segment, ...]:
        """Return the segments of an owned piece, each cut where every world cuts it."""
        found = []
        for segment in segments:
            low, high = piece.start + segment.start, piece.start + segment.stop
            first, stop = bisect_right(self._starts, low), bisect_left(self._starts, high)
            # Numbered from the first one of the parameter, which is the same in every world.
            of_parameter = self._firsts[bisect_right(self._firsts, first - 1) - 1]
            bounds = [low, *self._starts[first:stop], high]
            for number, (start, end) in enumerate(pairwise(bounds), start=first - 1 - of_parameter):
                found.append(Segment(segment.name, start - piece.start, end - piece.start, number))
        return tuple(found)

    def totals(self, rows: Array) -> Array:
        """Return for each segment the sum of its parameter's rows, of shape (len(names), n)."""
        ends = [*self._firsts[1:], len(self.names)]
        # One sum per parameter, in the order of its segments, which no owner changes.
        sums = np.add.reduceat(rows, self._firsts, axis=0)
        counts = [end - first for first, end in zip(self._firsts, ends, strict=True)]
        return np.repeat(sums, counts, axis=0)
