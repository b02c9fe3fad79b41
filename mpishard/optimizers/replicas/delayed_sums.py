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
    across, parts
        See `SumExchange`; one part of each unit at most.
    layout : StoreLayout
        Where memory is booked.
    delay : int
        0 or more.

    Attributes
    ----------
    pending : int
        Number of gradients whose sums are not used yet; above ``delay`` if one is due.
    length : int
        Number of elements of this rank's parts.
    """

    def __init__(
        self,
        across: CommunicationBackend,
        parts: Sequence[ExchangedPiece],
        layout: StoreLayout,
        delay: int,
    ) -> None:
        super().__init__(across, parts)
        self.is_late = delay > 0
        self.pending = 0
        self._delay = delay
        self.length = sum(part.piece.length for part in parts)
        # The gradient that is due changes places with the new one, so ``delay`` vectors suffice.
        allocate = layout.allocate
        self._ring = [allocate(MemoryCategory.GRADIENTS, self.length) for _ in range(delay)]
        self._works: list[list[Work]] = [[] for _ in self._ring]
        self._stale: list[Work] = []
        self._next = 0  # place of the next gradient; also of the oldest, if all places are in use
        self._shifts = {p.piece.unit.index: p.piece.offset - p.piece.start for p in parts}

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
        vector, place = self._ring[self._next], self._next
        self._works[place] = [
            self.across.all_reduce_async(vector[part.piece.in_shard]) for part in self.parts
        ]
        self._next = (place + 1) % self._delay
        if self.pending <= self._delay:
            for array in values:
                array.fill(0)

    def _take(self, values: Sequence[Array]) -> None:
        """Wait for the oldest sums, and let them change places with ``values``."""
        self._await(self._next)
        vector = self._ring[self._next]
        for part, array in zip(self.parts, values, strict=True):
            own = vector[part.piece.in_shard]
            # In chunks, so that no more memory than a chunk's is needed.
            step = chunk_length(own)
            for start in range(0, int(own.size), step):
                place = slice(start, start + step)
                kept = own[place].copy()
                own[place] = array[place]
                array[place] = kept

    def take_oldest(self, values: Sequence[Array]) -> None:
        """Write the oldest pending sums to ``values``. Collective."""
        self._next, newest = self._places()[0], self._next
        self._take(values)
        self._next = newest
        self.pending -= 1

    def _places(self) -> list[int]:
        """Return the places of the gradients under way, oldest first."""
        return [(self._next - n) % self._delay for n in range(self.pending, 0, -1)]

    def under_way(self, pieces: Sequence[Piece]) -> list[list[Array]]:
        """Return ``pieces`` of the sums of all pending gradients, oldest first. Collective."""
        for place in self._places():
            self._await(place)
        shifts = [self._shifts[piece.unit.index] for piece in pieces]
        return [
            [
                self._ring[place][shift + piece.start : shift + piece.stop]
                for shift, piece in zip(shifts, pieces, strict=True)
            ]
            for place in self._places()
        ]

    def expect(self, pending: int) -> None:
        """Set the number of gradients under way; the caller writes them to `under_way`."""
        self.abandon()
        while self._stale:
            self._stale.pop().wait_until_over()
        for vector in self._ring:
            vector.fill(0)
        self.pending = pending

    def _await(self, place: int) -> None:
        for work in self._works[place]:
            work.wait()
        self._works[place].clear()

    def finish(self) -> None:
        self.pending = min(self.pending, self._delay)

    def abandon(self) -> None:
        # Messages under way cannot be recalled: the next writer to their buffers waits for them.
        for works in self._works:
            self._stale += works
            works.clear()
        self.pending = 0
