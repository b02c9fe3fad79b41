"""Sums of gradients that travel between replicas for some steps."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.base import Array, chunk_length
from mpishard.communication import CommunicationBackend, Work
from mpishard.models import StoreLayout
from mpishard.observe import MemoryCategory
from mpishard.optimizers.replicas.exchanged_passes import ExchangedPiece, SumExchange
from mpishard.sharding import Piece


class DelayedSums(SumExchange):
    """The sums of a step are those of ``delay`` steps before, which have had this time to travel.

    The all-reduce of a step's gradient begins at the end of its backward pass, and is waited for
    ``delay`` steps later. It makes progress whenever this rank communicates or reduces a unit. As
    long as no gradient is due, the sums are zeros. An error drops all gradients under way.

    Parameters
    ----------
    across, pieces
        See `SumExchange`; one of each unit at most.
    layout : StoreLayout
        Where memory is booked.
    delay : int
        0 or more.

    Attributes
    ----------
    pending : int
        Number of gradients whose sums are not used yet; above ``delay`` if one is due.
    length : int
        Number of elements of this rank's pieces.
    """

    def __init__(
        self,
        across: CommunicationBackend,
        pieces: Sequence[ExchangedPiece],
        layout: StoreLayout,
        delay: int,
    ) -> None:
        super().__init__(across, pieces)
        self.is_late = delay > 0
        self.pending = 0
        self._delay = delay
        self.length = sum(sent.piece.length for sent in pieces)
        # The gradient that is due is exchanged for the new one, so ``delay`` vectors suffice.
        allocate = layout.allocate
        self._ring = [allocate(MemoryCategory.GRADIENTS, self.length) for _ in range(delay)]
        # Of each slot, one for each piece: a unit's sums may arrive before those of another.
        self._works: list[list[Work]] = [[] for _ in self._ring]
        self._stale: list[Work] = []
        self._next = 0  # slot of the next gradient; also of the oldest, if all slots are in use
        # From a unit's flat index to the index in a vector of the ring.
        self._shifts = {p.piece.unit.index: p.piece.offset - p.piece.start for p in pieces}

    def exchange(self, values: Sequence[Array]) -> None:
        while self._stale:  # reductions that an error has left under way write to these buffers
            self._stale[0].wait_until_over()
            del self._stale[0]
        self.pending += 1
        if not self._delay:
            for work in [self.across.all_reduce_async(array) for array in values]:
                work.wait()
            return
        self._take(values)
        vector, slot = self._ring[self._next], self._next
        self._works[slot] = [
            self.across.all_reduce_async(vector[sent.piece.in_shard]) for sent in self.pieces
        ]
        self._next = (slot + 1) % self._delay
        # No gradient is due yet, and the ring may still have one that an error has dropped.
        if self.pending <= self._delay:
            for array in values:
                array.fill(0)

    def _take(self, values: Sequence[Array]) -> None:
        """Wait for the oldest sums, and exchange them for ``values``."""
        self._await(self._next)
        vector = self._ring[self._next]
        for sent, array in zip(self.pieces, values, strict=True):
            own = vector[sent.piece.in_shard]
            # In chunks, so that no more memory than a chunk's is needed.
            step = chunk_length(own)
            for start in range(0, int(own.size), step):
                chunk = slice(start, start + step)
                kept = own[chunk].copy()
                own[chunk] = array[chunk]
                array[chunk] = kept

    def take_oldest(self, values: Sequence[Array]) -> None:
        """Write the oldest pending sums to ``values``. Collective."""
        # `_take` reads the next slot, which is the oldest one only if all are in use.
        self._next, newest = self._slots()[0], self._next
        self._take(values)
        self._next = newest
        self.pending -= 1

    def _slots(self) -> list[int]:
        """Return the slots of the gradients under way, oldest first."""
        return [(self._next - n) % self._delay for n in range(self.pending, 0, -1)]

    def under_way(self, pieces: Sequence[Piece]) -> list[list[Array]]:
        """Return ``pieces`` of the sums of all pending gradients, oldest first. Collective."""
        for slot in self._slots():
            self._await(slot)
        shifts = [self._shifts[piece.unit.index] for piece in pieces]
        return [
            [
                self._ring[slot][shift + piece.start : shift + piece.stop]
                for shift, piece in zip(shifts, pieces, strict=True)
            ]
            for slot in self._slots()
        ]

    def expect(self, pending: int) -> None:
        """Set the number of gradients under way; the caller writes them to `under_way`."""
        # Every slot is written anew: messages of dropped gradients must not arrive in them later.
        self.abandon()
        while self._stale:
            self._stale.pop().wait_until_over()
        for vector in self._ring:
            vector.fill(0)
        self.pending = pending

    def _await(self, slot: int) -> None:
        for work in self._works[slot]:
            work.wait()
        self._works[slot].clear()

    def finish(self) -> None:
        # The one that was due is used; before that an error must still be able to drop all.
        self.pending = min(self.pending, self._delay)

    def abandon(self) -> None:
        # Messages under way cannot be recalled: the next writer to their buffers waits for them.
        for works in self._works:
            self._stale += works
            works.clear()
        self.pending = 0
