"""Stores of parameters: every rank has all, every rank its pieces, or every node all.

`MixedParameters` puts two of them together, for layers that compute in bfloat16.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np

from mpishard.base import Array, ShardLayout, copy_into, round_into
from mpishard.communication import Arena, Work
from mpishard.models.stores.store_layout import StoreLayout, aligned
from mpishard.observe import MemoryCategory
from mpishard.sharding import Piece, Unit


class ParameterStore(ABC):
    """Parameters by unit.

    `unshard` makes a unit's full parameters readable, `reshard` releases them, `prefetch` starts
    the gather that `unshard` would wait for. Every rank makes the same calls in the same order.

    Parameters
    ----------
    layout : StoreLayout
        Units, ranks, and where memory is booked.

    Attributes
    ----------
    local_pieces : tuple of Piece
        Pieces that this rank writes when parameters come from elsewhere, as from a file.
    once_per_node : bool
        Whether all parameters exist once on every node, where its ranks read them.
    owners_only : bool
        Whether only the owner can write a piece, although every rank may read all units.
    is_whole : bool
        Whether every unit can be read at any time, always in the same array.
    in_flight : mapping
        Gathers under way, by index of their unit.
    """

    local_pieces: tuple[Piece, ...]
    once_per_node: bool = False
    owners_only: bool = False
    is_whole: bool = False

    def __init__(self, layout: StoreLayout) -> None:
        self.layout = layout
        self.backend = layout.backend
        self.in_flight: dict[int, Work] = {}

    @property
    def computed(self) -> ParameterStore:
        """The store of the values that are computed with: this one, or that of rounded copies."""
        return self

    @abstractmethod
    def fill(self, unit: Unit, full: Array | None) -> None:
        """Take a unit's first values from ``full`` on rank 0. Collective.

        ``full`` is a host array; None on other ranks.
        """

    def take(self, read: Callable[[int, Array], None]) -> None:
        """Take values that are the same on every rank. Collective.

        ``read(start, out)`` writes the range of this rank's own vector that begins at ``start``.
        """
        for piece, target in zip(self.local_pieces, self.owned(self.local_pieces), strict=True):
            read(piece.start, target)
        self.refresh()

    def refresh(self) -> None:
        """Publish the values that every rank has written to its pieces. Collective."""

    def prefetch(self, unit: Unit) -> None:
        """Begin to make ``unit`` readable, if that takes messages."""

    @abstractmethod
    def unshard(self, unit: Unit) -> Array:
        """Return the unit's parameters, shape (unit.length,), until `reshard`. Read-only."""

    def reshard(self, unit: Unit) -> None:
        """Release the unit's full parameters."""

    def held(self) -> AbstractContextManager[None]:
        """Keep each unit readable in a block from its first `unshard` on, in memory of its own.

        Parameters must not change in the block.
        """
        return nullcontext()

    def read(self, unit: Unit, out: Array) -> None:
        """Copy the unit's values into ``out``, shape (unit.length,). Collective."""
        try:
            out[...] = self.unshard(unit)
        finally:
            self.reshard(unit)

    def abandon(self) -> None:
        """Forget every unit in use, after an error; communicates nothing."""

    def changed(self) -> None:
        """Renew what is derived from parameters, after this rank has written to all of them."""

    def copy_from(self, other: ParameterStore) -> None:
        """Take the values of a store of the same strategy; communicates nothing."""
        for target, values in zip(
            self.owned(self.local_pieces), other.owned(self.local_pieces), strict=True
        ):
            target[...] = values

    @abstractmethod
    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        """Return writable views of ranges that this rank can reach, one per piece."""

    @abstractmethod
    def publish(self, pieces: Sequence[Piece]) -> None:
        """Give the updated owned ``pieces`` to the ranks that read them. Collective."""


class ReplicatedParameters(ParameterStore):
    """Every rank holds all parameters; a unit is a view of them."""

    is_whole = True

    def __init__(self, layout: StoreLayout) -> None:
        super().__init__(layout)
        self.local_pieces = layout.pieces(sharded=False)
        # One vector, so that an update of all units runs over one range.
        self._vector = layout.allocate(MemoryCategory.PARAMETERS, self.layout.length)
        self._slot = layout.private_slot(self._vector)
        # Made once, because layers cache views of these arrays, and renew them for other arrays.
        self._full = [_read_only(self._vector[u.start : u.stop]) for u in layout.units]

    def fill(self, unit: Unit, full: Array | None) -> None:
        target = self._vector[unit.start : unit.stop]
        if full is not None:
            copy_into(target, full)
        self.backend.broadcast(target, root=0, subject=self.layout.subjects[unit.index])

    def unshard(self, unit: Unit) -> Array:
        return self._full[unit.index]

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return [self._vector[p.start : p.stop] for p in pieces]

    def publish(self, pieces: Sequence[Piece]) -> None:
        if self.backend.world_size > 1:
            _gather(self.layout, pieces, self._slot, lambda _: 0)


class NodeParameters(ParameterStore):
    """A node's ranks share one copy of all parameters: a unit is a view of it.

    Each rank owns its pieces there, and updates them in place. On one node nothing is ever copied,
    and each parameter exists once; with several nodes `publish` sends each piece once to each of
    the other nodes.

    Parameters
    ----------
    layout : StoreLayout
        Units, ranks, and where memory is booked.
    arena : Arena
        One vector for each node, with `length_for` elements.
    """

    once_per_node = True
    is_whole = True

    def __init__(self, layout: StoreLayout, arena: Arena) -> None:
        super().__init__(layout)
        self.local_pieces = layout.pieces()
        # The ledger's share: this rank's pieces, and an equal part of those of other nodes. So the
        # shares of a node's ranks add up to all parameters.
        here = sum(
            ShardLayout(unit.length, self.backend.world_size).size(rank)
            for unit in layout.units
            for rank in self.backend.peers
        )
        elsewhere = ShardLayout(layout.length - here, len(self.backend.peers))
        share = sum(p.length for p in self.local_pieces) + elsewhere.size(self.backend.local_rank)
        layout.book(MemoryCategory.PARAMETERS, arena.mine, share)
        self._arena, self._vector = arena, arena.mine
        self._is_on_one_node = self.backend.node_count == 1
        self._shifts: list[int] = []
        position = 0
        for unit in layout.units:
            self._shifts.append(position - unit.start)
            position += aligned(unit.length, layout.dtype)
        self._full = [_read_only(self._view(u, u.start, u.stop)) for u in layout.units]

    @staticmethod
    def length_for(layout: StoreLayout) -> int:
        """Return the length of the vector: each unit begins on a cache line."""
        return sum(aligned(unit.length, layout.dtype) for unit in layout.units)

    def fill(self, unit: Unit, full: Array | None) -> None:
        # Scattered, so that rank 0 is the only one that ever holds the whole unit.
        counts = ShardLayout(unit.length, self.backend.world_size).sizes
        (mine,) = self.owned([self.local_pieces[unit.index]])
        subject = self.layout.subjects[unit.index]
        mine[...] = self.backend.scatter(full, root=0, counts=counts, subject=subject)
        self.publish([self.local_pieces[unit.index]])

    def refresh(self) -> None:
        self.publish(self.local_pieces)

    def unshard(self, unit: Unit) -> Array:
        return self._full[unit.index]

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return [self._view(p.unit, p.start, p.stop) for p in pieces]

    def publish(self, pieces: Sequence[Piece]) -> None:
        """Wait until all ranks have written their pieces, and fetch those of other nodes."""
        # On one node all ranks read the values in place: after a barrier they are complete.
        if self._is_on_one_node:
            self.backend.barrier(subject=self.layout.subject)
        else:
            _gather(self.layout, pieces, self._arena, lambda unit: self._shifts[unit.index])

    def _view(self, unit: Unit, start: int, stop: int) -> Array:
        shift = self._shifts[unit.index]
        return self._vector[start + shift : stop + shift]


class UnitBuffers:
    """Buffers for whole units: each kept unit has its own, all others share those that are free.

    Parameters
    ----------
    layout : StoreLayout
        Units, and where memory is booked.

    Attributes
    ----------
    shared_length : int
        Length of a shared buffer: that of the longest unit that is not kept, so that each fits.
    kept : dict of int to Arena
        Buffers of kept units, by index; made when they are first taken.
    free : list of Arena
        Shared buffers that no unit uses now.
    """

    def __init__(self, layout: StoreLayout) -> None:
        self._layout = layout
        # A buffer of the longest kept unit would be too long for all others.
        passing = [unit.length for unit in layout.units if unit.index not in layout.kept]
        self.shared_length = max(passing, default=0)
        self.kept: dict[int, Arena] = {}
        self.free: list[Arena] = []

    def take(self, unit: Unit) -> Arena:
        """Return a buffer for ``unit``, at least as long as the unit, until `give`."""
        if unit.index in self._layout.kept:
            if unit.index not in self.kept:
                self.kept[unit.index] = self._allocate(unit.length)
            return self.kept[unit.index]
        # Any free one fits, because all are as long as the longest unit that is not kept.
        if self.free:
            return self.free.pop()
        return self._allocate(self.shared_length)

    def give(self, index: int, buffer: Arena) -> None:
        """Make the buffer of a unit available to others; a kept unit's stays its own."""
        if index not in self._layout.kept:
            self.free.append(buffer)

    def _allocate(self, length: int) -> Arena:
        layout = self._layout
        return layout.private_slot(layout.allocate(MemoryCategory.GATHERED, length))


class ShardedParameters(ParameterStore):
    """Every rank holds its pieces; a unit is gathered into a pooled buffer while it is used.

    Kept units, used from forward to backward, have buffers of their own. All others share two:
    one for the unit in use, one for the unit that is on its way. With several nodes the ranks of
    each share these buffers, so that a piece travels once to each node.
    """

    # The unit in use, and the one that is prefetched meanwhile.
    _SLOTS = 2

    def __init__(self, layout: StoreLayout) -> None:
        super().__init__(layout)
        self.local_pieces = layout.pieces()
        self._shard = layout.allocate(
            MemoryCategory.PARAMETERS, sum(p.length for p in self.local_pieces)
        )
        self._pool = pool = UnitBuffers(layout)
        self._buffers: dict[int, Arena] = {}
        self._holds = False
        # Gathers that an error has left under way, and the buffers that they write to.
        self._stale: list[tuple[Work, int, Arena]] = []
        # Buffers for gathered units, if a node's ranks can share them.
        lengths = {index: layout.units[index].length for index in sorted(layout.kept)}
        slots = [pool.shared_length] * (self._SLOTS if pool.shared_length else 0)
        total = sum(aligned(n, layout.dtype) for n in [*lengths.values(), *slots])
        arena = layout.allocate_arena(total, once_per_node=True)
        if arena is None:
            return
        # Each rank of the node books an equal part, so that their sum is what the node holds.
        layout.book(MemoryCategory.GATHERED, arena.mine, total // len(self.backend.peers))
        position = 0
        for index, length in lengths.items():
            pool.kept[index] = arena.part(position, length)
            position += aligned(length, layout.dtype)
        for length in slots:
            pool.free.append(arena.part(position, length))
            position += aligned(length, layout.dtype)

    @property
    def resident(self) -> frozenset[int]:
        """Indices of the units that are unsharded, or on their way."""
        return frozenset(self._buffers)

    def fill(self, unit: Unit, full: Array | None) -> None:
        counts = ShardLayout(unit.length, self.backend.world_size).sizes
        subject = self.layout.subjects[unit.index]
        piece = self.backend.scatter(full, root=0, counts=counts, subject=subject)
        copy_into(self._shard[self.local_pieces[unit.index].in_shard], piece)

    def prefetch(self, unit: Unit) -> None:
        if unit.index in self._buffers:
            return
        while self._stale:
            work, index, free = self._stale[0]
            work.wait_until_over()
            # Removed only after its wait: if the wait raises, the next gather waits again.
            del self._stale[0]
            self._pool.give(index, free)
        # Held units would exhaust the pool, which keeps what it allocates.
        if self._holds and unit.index not in self.layout.kept:
            own = self.layout.allocate(MemoryCategory.GATHERED, unit.length)
            buffer = self.layout.private_slot(own)
        else:
            buffer = self._pool.take(unit)
        # Noted before the gather begins, so that `abandon` finds the buffer after an error in it.
        piece = self._shard[self.local_pieces[unit.index].in_shard]
        self._buffers[unit.index] = buffer
        self.in_flight[unit.index] = buffer.gather_in_place(
            piece, slice(unit.length), subject=self.layout.subjects[unit.index]
        )

    def unshard(self, unit: Unit) -> Array:
        # This begins nothing if the unit was prefetched.
        self.prefetch(unit)
        work = self.in_flight.pop(unit.index, None)
        if work is not None:
            work.wait()
        # Read-only: a rank may change its own pieces, and a write to the copy would be lost.
        return _read_only(self._buffers[unit.index].mine[: unit.length])

    def reshard(self, unit: Unit) -> None:
        if self._holds:
            return
        buffer = self._buffers.pop(unit.index, None)
        work = self.in_flight.pop(unit.index, None)
        if work is not None:
            work.wait()
        if buffer is not None:
            self._pool.give(unit.index, buffer)

    @contextmanager
    def held(self) -> Iterator[None]:
        self._holds = True
        try:
            yield
        finally:
            self.abandon()
            self._holds = False

    def abandon(self) -> None:
        # A gather under way may still write to its buffer: the next one waits for it.
        for index, buffer in self._buffers.items():
            work = self.in_flight.get(index)
            if self._holds and index not in self.layout.kept:
                continue  # not the pool's; a gather under way keeps the memory that it writes
            if work is not None:
                self._stale.append((work, index, buffer))
            else:
                self._pool.give(index, buffer)
        self.in_flight.clear()
        self._buffers.clear()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        views = []
        for piece in pieces:
            whole = self.local_pieces[piece.unit.index]
            start = whole.offset + piece.start - whole.start
            views.append(self._shard[start : start + piece.length])
        return views

    def publish(self, pieces: Sequence[Piece]) -> None:
        """Do nothing: the next `unshard` gathers the owners' pieces."""
        # A gathered copy would show the parameters of before the update.
        assert not self._buffers, "a unit is still unsharded at the update"


class MixedParameters(ParameterStore):
    """Float32 *masters*, which updates change, and bfloat16 copies, which layers compute with.

    The owner of a piece rounds it after its update, and copies are published as parameters of any
    dtype are. If a node's ranks share memory, copies exist once per node; between nodes they have
    half the bytes. If every rank updates all parameters, each has copies of its own. Micikevicius
    et al., "Mixed Precision Training", ICLR 2018 (arXiv:1710.03740), section 3.1: without masters,
    updates smaller than half a spacing of the rounded parameter are lost.

    Parameters
    ----------
    layout : StoreLayout
        Layout of the masters, in float32.
    masters : ParameterStore
        Holds all of them on every rank, or each rank's pieces.
    copies : ParameterStore
        The same parameters as bfloat16.
    """

    def __init__(
        self, layout: StoreLayout, masters: ParameterStore, copies: ParameterStore
    ) -> None:
        super().__init__(layout)
        self.local_pieces = masters.local_pieces
        self.in_flight = copies.in_flight
        self.is_whole = copies.is_whole
        # A rank with all masters rounds them itself, which sends nothing.
        self.owners_only = not isinstance(masters, ReplicatedParameters)
        self._masters = masters
        self._copies = copies

    @property
    def computed(self) -> ParameterStore:
        return self._copies

    def fill(self, unit: Unit, full: Array | None) -> None:
        self._masters.fill(unit, full)
        self._round([self.local_pieces[unit.index]])

    def refresh(self) -> None:
        self._masters.refresh()
        self._round(self.local_pieces)

    def prefetch(self, unit: Unit) -> None:
        self._copies.prefetch(unit)

    def unshard(self, unit: Unit) -> Array:
        return self._copies.unshard(unit)

    def reshard(self, unit: Unit) -> None:
        self._copies.reshard(unit)

    def held(self) -> AbstractContextManager[None]:
        return self._copies.held()

    def read(self, unit: Unit, out: Array) -> None:
        # A reader of the model gets the float32 parameters, and not their rounded copies.
        self._masters.read(unit, out)

    def abandon(self) -> None:
        self._masters.abandon()
        self._copies.abandon()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return self._masters.owned(pieces)

    def publish(self, pieces: Sequence[Piece]) -> None:
        self._masters.publish(pieces)
        self._round(pieces)

    def changed(self) -> None:
        # Owners have rounded and published their pieces already.
        if not self.owners_only:
            self._round(self.local_pieces)

    def copy_from(self, other: ParameterStore) -> None:
        assert isinstance(other, MixedParameters)
        # Both, without rounding again: a copy of a model communicates nothing.
        self._masters.copy_from(other._masters)
        self._copies.copy_from(other._copies)

    def _round(self, pieces: Sequence[Piece]) -> None:
        """Round masters that this rank holds. Collective if only their owners do."""
        masters, copies = self._masters.owned(pieces), self._copies.owned(pieces)
        for master, copy in zip(masters, copies, strict=True):
            # By the owner and before publishing: all ranks compute with the same copies.
            round_into(copy, master)
        if self.owners_only:
            self._copies.publish(pieces)


def _gather(
    layout: StoreLayout, pieces: Sequence[Piece], arena: Arena, shift_of: Callable[[Unit], int]
) -> None:
    """Give every rank the owners' pieces. Collective.

    ``shift_of`` returns the distance of a unit's place in the arena from its flat range.
    """
    # All pieces at once: the messages of one unit overlap those of the next.
    works = []
    for piece in pieces:
        unit, shift = piece.unit, shift_of(piece.unit)
        own = arena.mine[piece.start + shift : piece.stop + shift]
        whole = slice(unit.start + shift, unit.stop + shift)
        works.append(arena.gather_in_place(own, whole, subject=layout.subjects[unit.index]))
    for work in works:
        work.wait()


def _read_only(array: Array) -> Array:
    if isinstance(array, np.ndarray):  # CuPy arrays have no such flag
        array.flags.writeable = False
    return array
