"""What the stores of one model on one rank have in common."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.devices import HOST, Device
from mpishard.layout import ShardLayout
from mpishard.observe.ledger import MemoryCategory, MemoryLedger
from mpishard.sharding import Piece, Unit, owned_pieces

__all__ = ["Holdings", "aligned"]


_LINE_BYTES = 64


def aligned(length: int, dtype: np.dtype[Any]) -> int:
    """``length``, rounded up so that the next vector begins on a cache line of its own."""
    line = max(1, _LINE_BYTES // dtype.itemsize)
    return -(-length // line) * line


@dataclass(frozen=True, slots=True)
class Holdings:
    """How a flat vector is divided, who takes part, and where memory is booked.

    Parameters
    ----------
    units : tuple of Unit
        What is gathered and reduced as one, in order.
    kept : frozenset of int
        Indices of the units that stay unsharded from forward to backward.
    dtype : numpy.dtype
        Of parameters, gradients and state.
    backend : CommunicationBackend
        How the ranks talk.
    ledger : MemoryLedger
        Counts what is held.
    arena : bool
        Whether memory that a node's ranks share may be used. To allocate it is collective.
    frozen : frozenset of int
        Indices of the units of which nothing is trained: they have no gradient.
    device : Device
        Where the model computes.
    is_on_host : bool
        Whether what is held lies in host memory all the same.
    """

    units: tuple[Unit, ...]
    kept: frozenset[int]
    dtype: np.dtype[Any]
    backend: CommunicationBackend
    ledger: MemoryLedger
    arena: bool = True
    frozen: frozenset[int] = frozenset()
    device: Device = HOST
    is_on_host: bool = False

    @property
    def on_host(self) -> Holdings:
        """The same, held in host memory: pinned where a GPU computes, so that copies are fast."""
        return replace(self, is_on_host=True)

    @property
    def trained_units(self) -> tuple[Unit, ...]:
        """The units that have a gradient, in order."""
        return tuple(unit for unit in self.units if unit.index not in self.frozen)

    @property
    def length(self) -> int:
        """Length of this rank's own flat vector."""
        return self.units[-1].stop if self.units else 0

    def pieces(self, *, sharded: bool = True) -> tuple[Piece, ...]:
        """What this rank owns of each unit; every unit whole where nothing is sharded."""
        if sharded:
            return owned_pieces(self.units, self.backend.world_size, self.backend.rank)
        return owned_pieces(self.units, 1, 0)

    def pieces_of_all(self) -> tuple[Piece, ...]:
        """What each rank owns of each unit, in flat order: the flat vector, cut by owner.

        Their ``offset`` is where they begin in the flat vector.
        """
        return tuple(
            Piece(unit, unit.start + part.start, unit.start + part.stop, unit.start + part.start)
            for unit in self.units
            for layout in [ShardLayout(unit.length, self.backend.world_size)]
            for part in map(layout.slice, range(self.backend.world_size))
        )

    def allocate(self, category: MemoryCategory, length: int) -> Array:
        """An uninitialised vector, booked under ``category``."""
        if not (self.is_on_host and self.device.is_gpu):
            return self.ledger.allocate(category, length, self.dtype, self.device)
        array = self.device.pinned(length, self.dtype)
        self.ledger.book(category, array, array.nbytes)
        return array

    def allocate_arena(self, length: int, dtype: DTypeLike | None = None) -> Array | None:
        """Zeros that the ranks of this node share, shape (length,); None where they cannot.

        Collective. They take no memory until they are first written, and nothing is booked. GPU
        memory is never shared, and host memory that is shared is not pinned.
        """
        if not self.arena or (self.device.is_gpu and not self.is_on_host):
            return None
        # A stage of a pipeline may have no parameters.
        return self.backend.allocate_shared(max(1, length), self.dtype if dtype is None else dtype)

    def allocate_slots(
        self, length: int, count: int, dtype: DTypeLike | None = None
    ) -> list[list[Array]] | None:
        """``count`` vectors of ``length`` for each rank of this node, which all can read.

        Collective, and nothing is booked, as `allocate_arena`.

        Returns
        -------
        list of list of Array, or None
            By local rank, then by slot; None where the ranks share no memory.
        """
        dtype = np.dtype(self.dtype if dtype is None else dtype)
        stride = aligned(max(1, length), dtype)
        # As long on every node as the largest needs, because lengths must agree; what no rank
        # writes takes no memory.
        most = max(self.backend.nodes.count(node) for node in self.backend.nodes)
        peers = len(self.backend.peers)
        shared = self.allocate_arena(stride * count * most, dtype)
        if shared is None:
            return None
        starts = range(0, stride * count * peers, stride)
        vectors = [shared[start : start + length] for start in starts]
        return [vectors[peer * count : (peer + 1) * count] for peer in range(peers)]

    def book(self, category: MemoryCategory, array: Array, length: int) -> None:
        """Book ``length`` elements of shared memory as this rank's, until it is garbage."""
        self.ledger.book(category, _owner(array), length * array.dtype.itemsize)


def _owner(array: Array) -> Array:
    """The array whose memory ``array`` is a view of, which lives as long as any of its views."""
    return array if array.base is None or not hasattr(array.base, "base") else array.base
