"""Ranges of the flat vector that no world cuts, so that sums over them are the same in each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from mpishard.layout import ShardLayout
from mpishard.sharding.units import Piece, Unit

__all__ = ["cells_of", "cut_at_cells"]


def cells_of(unit: Unit, leaves: int) -> list[tuple[int, int]]:
    """The flat ranges ``(start, stop)`` between any two cuts of a unit, in order.

    Of each, one rank owns all in every world of 1, 2, 4 .. ``leaves`` ranks. They are needed
    because the pieces of those worlds are not nested: 10 elements are cut at 5 for two ranks, and
    at 3, 6 and 8 for four.

    Parameters
    ----------
    unit : Unit
        What is cut.
    leaves : int
        The largest world, a power of two.

    Examples
    --------
    >>> cells_of(Unit(0, 100, 110, 0, 0), 4)
    [(100, 103), (103, 105), (105, 106), (106, 108), (108, 110)]
    """
    cuts = {unit.start, unit.stop}
    for world in (1 << level for level in range(leaves.bit_length())):
        layout = ShardLayout(unit.length, world)
        cuts.update(unit.start + layout.start(rank) for rank in range(world))
    return list(pairwise(sorted(cuts)))


def cut_at_cells(pieces: Sequence[Piece], leaves: int) -> tuple[Piece, ...]:
    """The parts of ``pieces`` that lie in one cell each, in order.

    Their ``offset`` is where they begin in what ``pieces`` are end to end.
    """
    found = []
    for piece in pieces:
        for start, stop in cells_of(piece.unit, leaves):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                found.append(Piece(piece.unit, first, last, piece.offset + first - piece.start))
    return tuple(found)
