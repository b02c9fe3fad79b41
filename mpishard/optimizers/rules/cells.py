"""Parameters in cells, so that a norm of a parameter is the same bits in every world."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from mpishard.arrays import Array
from mpishard.optimizers.rules.options import Segment
from mpishard.sharding import ParameterEntry, Piece, Unit, cells_of

__all__ = ["ParameterCells"]


class ParameterCells:
    """The parts of a model's parameters that lie in one cell each, in flat order.

    Parameters
    ----------
    entries : sequence of ParameterEntry
        All parameters.
    units : sequence of Unit
        What is cut among the ranks.
    leaves : int
        ``gradient_leaves``: see `mpishard.sharding.cells_of`.

    Attributes
    ----------
    names : list of str
        Of each part the parameter's name.
    """

    def __init__(
        self, entries: Sequence[ParameterEntry], units: Sequence[Unit], leaves: int
    ) -> None:
        cuts = sorted({start for unit in units for start, _ in cells_of(unit, leaves)})
        self.names: list[str] = []
        self._starts: list[int] = []
        self._firsts: list[int] = []  # of each parameter, the first of its parts
        for entry in (e for e in entries if e.size):
            inside = cuts[bisect_right(cuts, entry.start) : bisect_left(cuts, entry.stop)]
            self._firsts.append(len(self.names))
            self._starts += [entry.start, *inside]
            self.names += [entry.name] * (1 + len(inside))

    def cut(self, segments: Sequence[Segment], piece: Piece) -> tuple[Segment, ...]:
        """The segments of an owned piece, each cut into the parts that it consists of."""
        found = []
        for segment in segments:
            low, high = piece.start + segment.start, piece.start + segment.stop
            first, stop = bisect_right(self._starts, low), bisect_left(self._starts, high)
            of_parameter = self._firsts[bisect_right(self._firsts, first - 1) - 1]
            bounds = [low, *self._starts[first:stop], high]
            for number, (start, end) in enumerate(pairwise(bounds), start=first - 1 - of_parameter):
                part = Segment(segment.name, start - piece.start, end - piece.start, number)
                found.append(part)
        return tuple(found)

    def totals(self, rows: Array) -> Array:
        """Of each part the sum of its parameter's rows, of shape (len(names), n)."""
        ends = [*self._firsts[1:], len(self.names)]
        sums = np.add.reduceat(rows, self._firsts, axis=0)
        counts = [end - first for first, end in zip(self._firsts, ends, strict=True)]
        return np.repeat(sums, counts, axis=0)
