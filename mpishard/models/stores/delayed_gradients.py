"""Gradients that every rank holds whole, and whose sums are used some steps later."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.arrays import Array, array_namespace
from mpishard.communication import Work
from mpishard.models.stores.gradient_store import (
    BackwardPass,
    CompressionBuffers,
    ReplicatedGradients,
)
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe.ledger import MemoryCategory
from mpishard.sharding import Piece, Unit

__all__ = ["DelayedGradients"]


class DelayedGradients(ReplicatedGradients):
    """Every rank holds the full gradients of the last steps; each has ``delay`` steps to travel.

    The all-reduce of a step's gradient begins in its backward pass, and is waited for ``delay``
    steps later. It goes on whenever this rank communicates or is done with a unit. As long as no
    gradient is due, `owned` is zeros. An error drops all gradients under way.

    Parameters
    ----------
    layout : StoreLayout
        See `GradientStore`.
    delay : int
        1 or more.

    Attributes
    ----------
    pending : int
        Number of gradients whose sums are not used yet; above ``delay`` if one is due.
    """

    is_late = True

    def __init__(self, layout: StoreLayout, delay: int) -> None:
        super().__init__(layout)
        self.pending = 0
        self._delay = delay
        length = self.length_for(layout)
        # One more than are under way, because backward writes another meanwhile.
        arrays = [layout.allocate(MemoryCategory.GRADIENTS, length) for _ in range(delay + 1)]
        self._ring = [layout.private_slot(array) for array in arrays]
        self._works: list[list[Work]] = [[] for _ in self._ring]
        self._next = 0  # the place of the gradient that is computed now, or in the next step

    def _places(self) -> list[int]:
        """Return the places of the pending gradients in the ring, oldest first."""
        return [(self._next - n) % len(self._ring) for n in range(self.pending, 0, -1)]

    def parts(self, pieces: Sequence[Piece]) -> list[list[Array]]:
        """Return ``pieces`` of the sums of all pending gradients, oldest first. Collective."""
        for place in self._places():
            self._await(place)
        return [self._cut(place, pieces) for place in self._places()]

    def expect(self, pending: int) -> None:
        """Let ``pending`` gradients, at most ``delay``, be under way, to be written to `parts`."""
        self.abandon()
        self._await_stale()
        self.pending = pending

    def _cut(self, place: int, pieces: Sequence[Piece]) -> list[Array]:
        vector = self._ring[place].mine
        return [vector[self._place(p.unit, p.start, p.stop)] for p in pieces]

    def _await(self, place: int) -> None:
        for work in self._works[place]:
            work.wait()
        self._works[place].clear()

    def begin(self, this: BackwardPass) -> None:
        self._slot = self._ring[self._next]
        super().begin(this)

    def _make_buffers(self) -> CompressionBuffers:
        raise AssertionError("the optimizer refuses bfloat16 on the wire")

    def reduce(self, unit: Unit) -> None:
        super().reduce(unit)
        self.backend.progress()  # of earlier steps, too: MPI moves nothing unless it is called

    def settle(self) -> None:
        if not self._is_last:
            return
        self._works[self._next] = [reduction.work for reduction in self.in_flight]
        self.in_flight.clear()
        self._next = (self._next + 1) % len(self._ring)
        self.pending += 1
        if self.pending > self._delay:
            self._await(self._places()[0])

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        if self.pending > self._delay:
            return self._cut(self._places()[0], pieces)
        xp = array_namespace(self.vector)
        # Views of one zero: a gradient that is not there takes no memory.
        zero = xp.zeros(1, self.layout.dtype)
        return [xp.broadcast_to(zero, (piece.length,)) for piece in pieces]

    def finish(self) -> None:
        self.pending = min(self.pending, self._delay)

    def abandon(self) -> None:
        super().abandon()
        # Messages under way cannot be recalled: who writes to their buffers next waits for them.
        for works in self._works:
            self._stale += works
            works.clear()
        self.pending = 0
