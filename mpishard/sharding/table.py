"""The parameter table: the place of each parameter in a model's flat vector, cut into units.

A unit is gathered and reduced as one; each rank owns a piece of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, Protocol

from mpishard.base import Array, ShardLayout, check_name
from mpishard.sharding.regions import FLAT, Region, whole_box

_DENSE_WORLDS = 8  # up to it, every number of ranks reproduces
_start, _stop = attrgetter("start"), attrgetter("stop")


class ParameterDescription(Protocol):
    """The facts about a parameter that a layer declares, or another program's module has."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes of its dims."""

    @property
    def tied_to(self) -> str | None:
        """Name of the parameter whose values it shares; None for values of its own."""

    @property
    def trainable(self) -> bool:
        """False if training leaves it as it is."""


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """One parameter: its dotted name, its shape, and the flat index of its first element.

    A parameter that is not ``trainable`` never changes: its gradient is 0, and it has no optimizer
    state.

    Raises
    ------
    ValueError
        As `check_name`, and for the name `FLAT`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    trainable: bool = True

    def __post_init__(self) -> None:
        check_name(self.name, "parameter")
        if self.name == FLAT:
            raise ValueError(
                f"parameter name {FLAT!r} is that of the flat vector in checkpoints; choose "
                "another name"
            )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Flat index after the last element."""
        return self.start + self.size

    def region(self, start: int, stop: int) -> Region:
        """Return the flat range ``[start, stop)``, which lies in the parameter, as its region."""
        return Region(self.name, whole_box(self.shape), start - self.start, stop - self.start)

    def view(self, vector: Array) -> Array:
        """Return the parameter in the model's flat ``vector``, in its shape."""
        return vector[self.start : self.stop].reshape(self.shape)


class ParameterTable:
    """The parameters of a model in layer order, end to end without gaps.

    Parameters
    ----------
    parameters : iterable of (str, ParameterDescription)
        Dotted name and description of each parameter, in order. One that is tied to another adds
        no entry: its name stands for the other's.

    Raises
    ------
    ValueError
        If two parameters have one name, or one is tied to a parameter that does not exist or has
        another shape.

    Attributes
    ----------
    entries : tuple of ParameterEntry
        Each parameter once.
    length : int
        Length of the flat vector.
    """

    def __init__(self, parameters: Iterable[tuple[str, ParameterDescription]]) -> None:
        entries: dict[str, ParameterEntry] = {}
        ties: dict[str, tuple[str, tuple[int, ...]]] = {}
        start = 0
        for name, spec in parameters:
            if name in entries or name in ties:
                raise ValueError(f"the model has two parameters named {name!r}")
            # A tie is resolved once, here: units and files know one parameter of one name.
            if spec.tied_to is None:
                entries[name] = ParameterEntry(name, tuple(spec.shape), start, spec.trainable)
                start = entries[name].stop
            else:
                ties[name] = (spec.tied_to, tuple(spec.shape))
        # After the loop above, because a tie may name a parameter that comes later.
        for name, (target, shape) in ties.items():
            if target not in entries:
                raise ValueError(f"parameter {name!r} is tied to {target!r}, which is not there")
            if entries[target].shape != shape:
                raise ValueError(
                    f"parameter {name!r} of shape {shape} is tied to {target!r} of shape "
                    f"{entries[target].shape}"
                )
        # A tied name has no entry: its elements would count and be saved twice.
        self.entries = tuple(entries.values())
        self.length = start
        self._by_name = entries | {name: entries[target] for name, (target, _) in ties.items()}
        # Indexed by layer, because each of thousands of layers may look up its own parameters.
        self._by_layer: dict[str, dict[str, ParameterEntry]] = {}
        for name, entry in self._by_name.items():
            layer, dot, inside = name.partition(".")
            if dot:
                self._by_layer.setdefault(layer, {})[inside] = entry

    def __repr__(self) -> str:
        shown = [f"{entry.name} {entry.shape}" for entry in self.entries[:8]]
        if len(self.entries) > len(shown):
            shown.append(f"... {len(self.entries)} in all")
        return f"ParameterTable({', '.join(shown)})"

    def __getitem__(self, name: str) -> ParameterEntry:
        return self._by_name[name]

    def layer_entries(self, layer: str) -> dict[str, ParameterEntry]:
        """Return parameters of the top-level ``layer``: name inside it -> entry, ties resolved."""
        return self._by_layer.get(layer, {})

    def overlapping(self, start: int, stop: int) -> list[ParameterEntry]:
        """Return the entries that share an element with the flat range ``[start, stop)``."""
        # A parameter without elements shares none, although it may lie in the range.
        return [e for e in overlapping(self.entries, start, stop) if e.size]

    def nested_views(self, vector: Array) -> dict[str, Any]:
        """Return views of ``vector``, shape (length,), shaped as parameters and nested by name."""
        return nested_views(self._by_name, lambda e: vector[e.start : e.stop])


def overlapping(
    entries: Sequence[ParameterEntry], start: int, stop: int
) -> Sequence[ParameterEntry]:
    """Return those of sorted ``entries`` that begin before ``stop`` and end after ``start``."""
    # An empty range may lie inside of an entry, which bisection alone would return.
    if start >= stop:
        return ()
    # By bisection, because a model of thousands of layers calls this for each of its units.
    first = bisect_right(entries, start, key=_stop)
    return entries[first : bisect_left(entries, stop, key=_start)]


def nested_views(
    entries: Mapping[str, ParameterEntry], find: Callable[[ParameterEntry], Array]
) -> dict[str, Any]:
    """Return arrays for ``entries``, in their shapes and nested as by `nested`.

    ``find`` returns the 1-D array that holds an entry's elements.
    """
    return nested({name: find(entry).reshape(entry.shape) for name, entry in entries.items()})


def nested(values: Mapping[str, object]) -> dict[str, Any]:
    """Return values by dotted name as nested dicts.

    Examples
    --------
    >>> nested({"linear.weight": 1, "linear.bias": 2, "scale": 3})
    {'linear': {'weight': 1, 'bias': 2}, 'scale': 3}
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        # Layers read their parameters as nested dicts, and files name them with dots.
        *path, last = name.split(".")
        inner = result
        for word in path:
            inner = inner.setdefault(word, {})
        inner[last] = value
    return result


@dataclass(frozen=True, slots=True)
class Unit:
    """The parameters of consecutive layers: flat range ``[start, stop)``, layers first to last."""

    index: int
    start: int
    stop: int
    # A layer is never cut, so that a range of layers says which are computed with the unit.
    first_layer: int
    last_layer: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def entries_of(self, entries: Sequence[ParameterEntry]) -> list[ParameterEntry]:
        """Return those of ``entries``, which are in flat order, that lie in the unit."""
        first = bisect_left(entries, self.start, key=_start)
        # `bisect_right`, because a parameter without elements may lie at the unit's end.
        last = bisect_right(entries, self.stop, key=_start)
        return [entry for entry in entries[first:last] if entry.stop <= self.stop]


def first_names(units: Sequence[Unit], entries: Sequence[ParameterEntry]) -> list[str]:
    """Return the name of the first parameter of each unit, for messages; empty if it has none."""
    return [next((entry.name for entry in unit.entries_of(entries)), "") for unit in units]


def unit_at(units: Sequence[Unit], index: int) -> Unit:
    """Return the unit with the flat ``index``; ``units`` are in flat order and have no gaps."""
    return units[bisect_right(units, index, key=_start) - 1]


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's part of one unit.

    ``start`` and ``stop`` are flat indices; ``offset`` is the index at which the piece begins in
    the rank's shard, which is all its pieces end to end.
    """

    unit: Unit
    start: int
    stop: int
    # Kept, because the sum of the pieces before it would be made anew for each access.
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

    A layer is never cut. Layers at the end that do not reach the minimum join the unit before them.
    Layers without parameters belong to the unit that is open when they come.

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
    # Refused here, because a store without units would fail only in a collective.
    total = sum(layer_sizes)
    if total == 0:
        raise ValueError("the model has no parameters")
    bounds: list[list[int]] = []  # start, stop, first layer, last layer
    start = position = first = 0
    for layer, size in enumerate(layer_sizes):
        position += size
        # A unit is closed by the first layer that fills it, which bounds the memory of a gathered
        # unit.
        if position - start >= minimum_size:
            bounds.append([start, position, first, layer])
            start, first = position, layer + 1
    if not bounds:
        bounds.append([0, 0, 0, 0])
    # The layers after the last unit join it.
    bounds[-1][1], bounds[-1][3] = total, len(layer_sizes) - 1
    return tuple(Unit(index, *bound) for index, bound in enumerate(bounds))


def owned_pieces(units: Sequence[Unit], world_size: int, rank: int) -> tuple[Piece, ...]:
    """Return the piece of each unit that ``rank`` owns: its `ShardLayout` range of the unit."""
    # By unit and not by the whole vector, so that a gathered unit needs no other one.
    pieces = []
    offset = 0
    for unit in units:
        # Each unit is cut separately, so that it can be gathered without the others.
        mine = ShardLayout(unit.length, world_size).slice(rank)
        pieces.append(Piece(unit, unit.start + mine.start, unit.start + mine.stop, offset))
        # All pieces end to end are the shard: one allocation, and one range for rules.
        offset += mine.stop - mine.start
    return tuple(pieces)


def pieces_within(pieces: Sequence[Piece], ranges: Sequence[tuple[int, int]]) -> tuple[Piece, ...]:
    """Return the parts of ``pieces`` that lie in flat ``ranges`` ``(start, stop)``, in order.

    Both are in flat order. The ``offset`` of a part is its start among all parts end to end.

    Examples
    --------
    >>> unit = Unit(0, 0, 10, 0, 0)
    >>> parts = pieces_within([Piece(unit, 0, 5, 0), Piece(unit, 5, 10, 5)], [(2, 7), (9, 10)])
    >>> [(p.start, p.stop, p.offset) for p in parts]
    [(2, 5, 0), (5, 7, 3), (9, 10, 5)]
    """
    # Each piece with all ranges: there are few of both, and a sweep would need two cursors.
    found = []
    offset = 0
    for piece in pieces:
        for start, stop in ranges:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                found.append(Piece(piece.unit, first, last, offset))
                offset += last - first
    return tuple(found)


def reproducing_worlds(leaves: int) -> list[int]:
    """Return the numbers of ranks that get the same bits with ``gradient_leaves=leaves``.

    They are 1 to 8 and the powers of two above, up to ``leaves``. To cover all numbers up to
    ``leaves`` would need about ``leaves`` squared common pieces.

    Examples
    --------
    >>> reproducing_worlds(4), reproducing_worlds(32)
    ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8, 16, 32])
    """
    # All small worlds, because a small job may have to go on with one rank less.
    return [n for n in range(1, leaves + 1) if n <= _DENSE_WORLDS or not n & (n - 1)]


def common_pieces(unit: Unit, leaves: int) -> list[tuple[int, int]]:
    """Return the flat ranges ``(start, stop)`` that no world cuts, in order; end to end the unit.

    In each of the `reproducing_worlds` one rank owns all of such a range. They are needed because
    the pieces of those worlds are not nested: 10 elements are cut at 5 for two ranks, at 4 and 7
    for three, and at 3, 6 and 8 for four.

    Parameters
    ----------
    unit : Unit
        Unit that is cut.
    leaves : int
        The largest world, a power of two.

    Examples
    --------
    >>> common_pieces(Unit(0, 100, 110, 0, 0), 4)
    [(100, 103), (103, 104), (104, 105), (105, 106), (106, 107), (107, 108), (108, 110)]
    """
    # Short units have equal cuts in several worlds: a set keeps each once.
    cuts = {unit.start, unit.stop}
    for world in reproducing_worlds(leaves):
        layout = ShardLayout(unit.length, world)
        cuts.update(unit.start + layout.start(rank) for rank in range(world))
    return list(pairwise(sorted(cuts)))


def cut_into_common_pieces(pieces: Sequence[Piece], leaves: int) -> tuple[Piece, ...]:
    """Return ``pieces``, each cut into its `common_pieces`, in order.

    The ``offset`` of a common piece is its start among ``pieces`` end to end.
    """
    found = []
    for piece in pieces:
        for start, stop in common_pieces(piece.unit, leaves):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                found.append(Piece(piece.unit, first, last, piece.offset + first - piece.start))
    return tuple(found)
