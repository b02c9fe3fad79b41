"""Units, which are gathered and reduced as one, and the pieces of them that a rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mpishard.layout import ShardLayout

__all__ = [
    "Piece",
    "Unit",
    "build_units",
    "cells_of",
    "cut_at_cells",
    "owned_pieces",
    "pieces_within",
]


@dataclass(frozen=True, slots=True)
class Unit:
    """The parameters of consecutive layers: flat range ``[start, stop)``, layers first to last."""

    index: int
    start: int
    stop: int
    first_layer: int
    last_layer: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of one unit.

    ``start`` and ``stop`` are flat indices; ``offset`` is where the piece begins in the rank's
    shard, which is all its pieces end to end.
    """

    unit: Unit
    start: int
    stop: int
    offset: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def in_shard(self) -> slice:
        """The piece as a slice of the rank's shard."""
        return slice(self.offset, self.offset + self.length)


def build_units(layer_sizes: Sequence[int], minimum_size: int) -> tuple[Unit, ...]:
    """Merge consecutive layers until each unit has ``minimum_size`` elements.

    A layer is never cut. Layers left over at the end that do not reach the minimum join the unit
    before them. Layers without parameters belong to the unit that is open where they stand.

    Parameters
    ----------
    layer_sizes : sequence of int
        Number of parameters of each layer, in order.
    minimum_size : int
        Elements below which a unit is not closed; 1 or more.

    Raises
    ------
    ValueError
        If no layer has a parameter, or ``minimum_size`` is below 1.

    Examples
    --------
    >>> [(u.start, u.stop) for u in build_units([5, 2, 9, 0, 1], 6)]
    [(0, 7), (7, 17)]
    """
    if minimum_size < 1:
        raise ValueError(f"the minimum size of a unit must be 1 or more, got {minimum_size}")
    total = sum(layer_sizes)
    if total == 0:
        raise ValueError("the model has no parameters")
    bounds: list[list[int]] = []  # start, stop, first layer, last layer
    start = position = first = 0
    for layer, size in enumerate(layer_sizes):
        position += size
        if position - start >= minimum_size:
            bounds.append([start, position, first, layer])
            start, first = position, layer + 1
    if not bounds:
        bounds.append([0, 0, 0, 0])
    # Layers left over at the end join the last unit.
    bounds[-1][1], bounds[-1][3] = total, len(layer_sizes) - 1
    return tuple(Unit(index, *bound) for index, bound in enumerate(bounds))


def owned_pieces(units: Sequence[Unit], world_size: int, rank: int) -> tuple[Piece, ...]:
    """The piece of each unit that ``rank`` owns: its `ShardLayout` range of every unit."""
    pieces = []
    offset = 0
    for unit in units:
        mine = ShardLayout(unit.length, world_size).slice(rank)
        pieces.append(Piece(unit, unit.start + mine.start, unit.start + mine.stop, offset))
        offset += mine.stop - mine.start
    return tuple(pieces)


def pieces_within(pieces: Sequence[Piece], ranges: Sequence[tuple[int, int]]) -> tuple[Piece, ...]:
    """The parts of ``pieces`` that lie in flat ``ranges`` ``(start, stop)``, in order.

    Both are in flat order. The parts stand end to end: their ``offset`` is where they begin then.

    Examples
    --------
    >>> unit = Unit(0, 0, 10, 0, 0)
    >>> parts = pieces_within([Piece(unit, 0, 5, 0), Piece(unit, 5, 10, 5)], [(2, 7), (9, 10)])
    >>> [(p.start, p.stop, p.offset) for p in parts]
    [(2, 5, 0), (5, 7, 3), (9, 10, 5)]
    """
    found = []
    offset = 0
    for piece in pieces:
        for start, stop in ranges:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                found.append(Piece(piece.unit, first, last, offset))
                offset += last - first
    return tuple(found)


def cells_of(unit: Unit, leaves: int) -> list[tuple[int, int]]:
    """The flat ranges ``(start, stop)`` between any two cuts of a unit, in order.

    Of each, one rank owns all in every world of 1, 2, 4 .. ``leaves`` ranks. They are needed
    because the pieces of those worlds are not nested: 10 elements are cut at 5 for two ranks, and
    at 3, 6 and 8 for four.

    Parameters
    ----------
    unit : Unit
        Unit that is cut.
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
