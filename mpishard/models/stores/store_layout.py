"""The layout that the stores of one model on one rank share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import DTypeLike

from mpishard.base import HOST, Array, Device, DType, ShardLayout
from mpishard.communication import Arena, CommunicationBackend, unit_subject
from mpishard.observe import MemoryCategory, MemoryLedger
from mpishard.sharding import Piece, Unit, owned_pieces

_LINE_BYTES = 64


def aligned(length: int, dtype: DType) -> int:
    """Return ``length``, rounded up so that the next vector begins on a cache line of its own."""
    line = max(1, _LINE_BYTES // dtype.itemsize)
    return -(-length // line) * line


@dataclass(frozen=True)
class StoreLayout:
    """The division of a flat vector, the ranks that take part, and the ledger of memory.

    Parameters
    ----------
    units : tuple of Unit
        Ranges that are gathered and reduced as one, in order.
    kept : frozenset of int
        Indices of the units that stay unsharded from forward to backward.
    dtype : numpy.dtype
        Dtype of parameters, gradients and state.
    backend : CommunicationBackend
        The ranks.
    ledger : MemoryLedger
        Counts the bytes that this rank holds.
    arena : bool
        Whether memory that a node's ranks share may be used. To allocate it is collective.
    frozen : frozenset of int
        Indices of the units without a trained parameter: they have no gradient.
    device : Device
        Device that computes the model.
    is_on_host : bool
        Whether vectors lie in host memory, even if a GPU computes.
    subject : int
        The model's number in collectives: `CommunicationBackend.number_model`.
    """

    units: tuple[Unit, ...]
    kept: frozenset[int]
    dtype: DType
    backend: CommunicationBackend
    ledger: MemoryLedger
    arena: bool = True
    frozen: frozenset[int] = frozenset()
    device: Device = HOST
    is_on_host: bool = False
    subject: int = 0

    @property
    def is_alone_on_gpu(self) -> bool:
        """True if one rank holds all in the memory of a GPU: its shard is the whole vector."""
        return self.backend.world_size == 1 and self.device.is_gpu and not self.is_on_host

    @property
    def on_host(self) -> StoreLayout:
        """The same layout in host memory: pinned if a GPU computes, so that copies are fast."""
        return replace(self, is_on_host=True)

    @cached_property
    def subjects(self) -> tuple[int, ...]:
        """The number of each unit in collectives, so that ranks cannot mix it with others."""
        return tuple(unit_subject(self.subject, unit.index) for unit in self.units)

    @property
    def trained_units(self) -> tuple[Unit, ...]:
        """The units that have a gradient, in order."""
        return tuple(unit for unit in self.units if unit.index not in self.frozen)

    @property
    def length(self) -> int:
        """Length of this rank's own flat vector."""
        return self.units[-1].stop if self.units else 0

    def pieces(self, *, sharded: bool = True) -> tuple[Piece, ...]:
        """Return the rank's piece of each unit; every unit whole unless ``sharded``."""
        if sharded:
            return owned_pieces(self.units, self.backend.world_size, self.backend.rank)
        return owned_pieces(self.units, 1, 0)

    def pieces_of_all(self) -> tuple[Piece, ...]:
        """Return the pieces of all owners, in flat order: the flat vector, cut by unit and owner.

        Their ``offset`` is their start in the flat vector.
        """
        pieces, start = [], 0
        for unit in self.units:
            # Sizes of all ranks at once: there may be a million pieces.
            for size in ShardLayout(unit.length, self.backend.world_size).sizes:
                pieces.append(Piece(unit, start, start + size, start))
                start += size
        return tuple(pieces)

    def allocate(self, category: MemoryCategory, length: int) -> Array:
        """Return an uninitialised vector, booked under ``category``."""
        if not (self.is_on_host and self.device.is_gpu):
            return self.ledger.allocate(category, length, self.dtype, self.device)
        # Only pinned memory is copied to a GPU without a detour through a driver's buffer.
        array = self.device.pinned(length, self.dtype)
        self.ledger.book(category, array, array.nbytes)
        return array

    def allocate_arena(
        self, length: int, dtype: DTypeLike | None = None, *, once_per_node: bool = False
    ) -> Arena | None:
        """Return zeros of ``length`` that the ranks of this node share; None if they cannot.

        Collective. They take no memory until they are first written, and nothing is booked. GPU
        memory is never shared, and host memory that is shared is not pinned. ``once_per_node`` as
        in `CommunicationBackend.allocate_arena`.
        """
        if not self.arena or (self.device.is_gpu and not self.is_on_host):
            return None
        dtype = np.dtype(self.dtype if dtype is None else dtype)
        # A stage of a pipeline may have no parameters.
        length = max(1, length)
        return self.backend.allocate_arena(length, dtype, once_per_node=once_per_node)

    def allocate_slots(
        self, length: int, count: int, dtype: DTypeLike | None = None
    ) -> list[Arena] | None:
        """Return ``count`` vectors of ``length`` for each rank of this node, which all can read.

        Collective, and nothing is booked, as `allocate_arena`; None if they share no memory.
        """
        dtype = np.dtype(self.dtype if dtype is None else dtype)
        # Vectors on cache lines of their own: ranks that write side by side share none.
        stride = aligned(max(1, length), dtype)
        arena = self.allocate_arena(stride * count, dtype)
        # None on all ranks of the node together: they have agreed on it.
        if arena is None:
            return None
        return [arena.part(start, length) for start in range(0, stride * count, stride)]

    def private_slot(self, array: Array) -> Arena:
        """Return the slot of a rank that shares no memory: it has ``array`` alone."""
        # An arena, so that stores reduce in one way with and without shared memory.
        return Arena(self.backend, {self.backend.rank: array})

    def book(self, category: MemoryCategory, array: Array, length: int) -> None:
        """Book ``length`` elements of shared memory as this rank's, until it is garbage."""
        # The booking ends when `owner` is garbage: it lives as long as any view of its memory.
        owner = array if array.base is None or not hasattr(array.base, "base") else array.base
        self.ledger.book(category, owner, length * array.dtype.itemsize)
