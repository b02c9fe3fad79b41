"""Gradients that are summed leaf by leaf, in a tree that the number of ranks does not change."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.arrays import Array
from mpishard.communication import ReductionOperation
from mpishard.communication.contract.reduction import TreeReducer
from mpishard.models.stores.gradient_store import (
    CompressionBuffers,
    GradientStore,
    ScatteredGradients,
)
from mpishard.models.stores.sharded_gradients import ShardedGradients
from mpishard.observe.ledger import MemoryCategory
from mpishard.sharding import Piece, Unit

__all__ = ["LeafGradients"]


class LeafGradients(GradientStore):
    """Every pass is one leaf of each rank, reduced at once: a whole subtree of all leaves.

    Of P ranks each makes V/P passes. What a pass leaves with the owner of a piece is the sum of P
    adjacent leaves, and the owner combines these sums as a binary counter adds ones: a sum waits
    at its level until another of as many leaves comes. So the tree over V leaves is the same for
    every P, and the owner keeps log2(V/P) + 1 buffers as long as its pieces.

    The ranks of a step meet before its first pass (`GradientLeaves.cut`), so that nobody writes
    before all have read what the last step left, and `finish` has nothing to do.

    Parameters
    ----------
    inner : ScatteredGradients or ShardedGradients
        Holds a pass's gradients, and reduces them.
    gathers : bool
        Whether every rank needs all pieces of the result, and ``inner`` has its own alone.
    """

    def __init__(self, inner: ScatteredGradients | ShardedGradients, *, gathers: bool) -> None:
        super().__init__(inner.layout)
        self._inner = inner
        self.in_flight = inner.in_flight
        self._gathers = gathers
        self._waiting: list[list[Array]] = []  # of ever fewer leaves
        self._free: list[list[Array]] = []
        self._done = 0  # passes of this round
        self._reducer = TreeReducer()

    def begin(
        self, *, is_first: bool, is_last: bool, defer: bool = False, compresses: bool = False
    ) -> None:
        self._is_last = is_last
        if is_first:
            self._done = 0
            self._free += self._waiting
            self._waiting.clear()
        self._inner.begin(is_first=True, is_last=True)

    @property
    def sends_now(self) -> bool:
        return True

    def _make_buffers(self) -> CompressionBuffers:
        return self._inner._make_buffers()

    def target(self, unit: Unit) -> tuple[Array, bool]:
        return self._inner.target(unit)

    def reduce(self, unit: Unit) -> None:
        self._inner.reduce(unit)

    def settle(self) -> None:
        self._inner.settle()
        own = self._inner.own_sums()
        total, carry = own, self._done
        # A binary counter of leaves: two sums of as many leaves become one, as in the tree of
        # reductions, and the last lands in the arrays of `inner`.
        while carry & 1:
            left = self._waiting.pop()
            out, spare = (own, left) if self._is_last else (left, total)
            for first, second, result in zip(left, total, out, strict=True):
                self._reducer.reduce([first, second], ReductionOperation.SUM, out=result)
            if spare is not own:
                self._free.append(spare)
            total = out
            carry >>= 1
        self._done += 1
        if not self._is_last:
            self._waiting.append(self._kept(own) if total is own else total)
        elif self._gathers:
            assert isinstance(self._inner, ScatteredGradients)
            self._inner.spread()

    def _kept(self, own: list[Array]) -> list[Array]:
        """A copy of what the next pass overwrites."""
        if not self._free:
            allocate = self.layout.allocate
            self._free.append([allocate(MemoryCategory.GRADIENTS, int(a.size)) for a in own])
        kept = self._free.pop()
        for target, values in zip(kept, own, strict=True):
            target[...] = values
        return kept

    def abandon(self) -> None:
        self._inner.abandon()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return self._inner.owned(pieces)
