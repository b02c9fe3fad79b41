"""Gradients of which every rank keeps its pieces; full ones live in a few pooled buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from mpishard.base import Array, is_device_array
from mpishard.communication import Arena
from mpishard.models.stores.gradient_store import (
    ACCUMULATION,
    BackwardPass,
    CompressionBuffers,
    GiveBack,
    GradientStore,
    Reduction,
    encode,
)
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe import MemoryCategory
from mpishard.sharding import Piece, Unit


class ShardedGradients(GradientStore):
    """Every rank holds the reduced gradient of its pieces.

    A unit's full gradient lives in one of a few pooled buffers from the first layer of backward
    that touches it until its reduce-scatter is through; the full gradient of the model never
    exists. With ``defer`` a round's passes add into full local gradients instead, which trades
    memory for messages.

    Parameters
    ----------
    layout : StoreLayout
        See `GradientStore`.
    slots : sequence of Arena, optional
        `SLOTS` buffers of `slot_length`, in memory that other ranks can read; by default they are
        this rank's alone, made when first needed.
    """

    # One for the unit that backward adds to, one for the unit whose reduction is under way.
    SLOTS = 2

    def __init__(self, layout: StoreLayout, slots: Sequence[Arena] = ()) -> None:
        super().__init__(layout)
        # By unit: this rank's piece, and the distance of its start in the shard from its start in
        # the flat vector.
        self._pieces: dict[int, Piece] = {}
        self._shifts: dict[int, int] = {}
        position = 0
        for piece in layout.pieces():
            if piece.unit.index not in layout.frozen:
                self._pieces[piece.unit.index] = piece
                self._shifts[piece.unit.index] = position - piece.start
                position += piece.length
        self._shard_length = position
        self._shard: Array | None = None
        self._slot_length = self.slot_length(layout)
        self._free: list[Arena] = list(slots)
        self._slot_count = len(slots)
        self._unbooked = list(slots)
        self._open: dict[int, Arena] = {}
        self._deferred: dict[int, Array] = {}
        self._is_deferring = self._defers = False
        self._scratch: list[Array] = []
        self._reduced: set[int] = set()

    @staticmethod
    def slot_length(layout: StoreLayout) -> int:
        """Return the length of the longest unit that is trained."""
        return max((unit.length for unit in layout.trained_units), default=0)

    @property
    def shard(self) -> Array:
        """Reduced gradients of all owned pieces, end to end."""
        if self._shard is None:
            self._shard = self.layout.allocate(MemoryCategory.GRADIENTS, self._shard_length)
        return self._shard

    @property
    def reduces_at_once(self) -> bool:
        return not self._defers

    @property
    def sends_now(self) -> bool:
        return not self._is_deferring

    def _make_buffers(self) -> CompressionBuffers:
        return CompressionBuffers(self.layout, self._slot_length, self.SLOTS)

    def begin(self, this: BackwardPass) -> None:
        super().begin(this)
        self._defers = this.defer
        # The round's last pass reduces all that earlier ones have added.
        self._is_deferring = this.defer and not this.is_last
        if this.is_first:
            self._reduced.clear()

    def target(self, unit: Unit) -> tuple[Array, bool]:
        earlier = self._deferred.get(unit.index)
        if self._is_deferring:
            if earlier is not None:
                return earlier, False
            # Of the unit's own length: it is kept for the round, and the pooled ones go on.
            array = self.layout.allocate(MemoryCategory.FULL_GRADIENTS, unit.length)
            self._deferred[unit.index] = array
            return array, True
        slot = self._open.get(unit.index)
        if slot is not None:
            return slot.mine[: unit.length], False
        slot = self._open[unit.index] = self._take_slot()
        target = slot.mine[: unit.length]
        if earlier is not None:
            # A round's sum travels as any gradient does. Otherwise ranks with different rounds
            # would issue different calls, and no count of batches could be compared.
            target[...] = earlier
            del self._deferred[unit.index]
        return target, earlier is None

    def reduce(self, unit: Unit) -> None:
        full = self.gradient(unit)
        if self._is_deferring:
            return
        carrier = slot = self._open.pop(unit.index)
        loans: list[GiveBack] = [partial(self._free.append, slot)]
        compression, whole = self._compression, slice(unit.length)
        if compression is not None:
            while not compression.free:
                self._finish_oldest()
            carrier = compression.free.pop()
            encode(full, carrier.mine[whole])
            # The rounded copy travels, so that the next unit can use the full buffer at once.
            self._free.append(slot)
            loans = [partial(compression.free.append, carrier)]
        # Later micro-batches add to the sum; the first one of a round replaces the last round's.
        adds = unit.index in self._reduced
        self._reduced.add(unit.index)
        target = result = self._view(self._pieces[unit.index])
        # A sum that is added to another needs a buffer of its own first.
        is_direct = not adds
        if compression is not None:
            is_direct &= not is_device_array(target) and target.dtype == ACCUMULATION
        if not is_direct:
            scratch = self._take_scratch(wide=compression is not None)
            loans.append(partial(self._scratch.append, scratch))
            result = scratch[: target.size]
        work = carrier.reduce_into(result, whole, subject=self.layout.subjects[unit.index])
        self.in_flight.append(Reduction(work, target, result, adds, loans))

    def abandon(self) -> None:
        self._free += self._open.values()
        self._open.clear()
        self._deferred.clear()
        self._scratch.clear()
        if self.in_flight:
            # Reductions under way go on writing to the old shard, so that a new one is needed.
            self._shard = None
        super().abandon()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return [self._view(p) for p in pieces]

    def own_sums(self) -> list[Array]:
        """Return writable views of this pass's sums of all pieces that this rank owns."""
        return [self.shard]

    def _view(self, piece: Piece) -> Array:
        shift = self._shifts[piece.unit.index]
        return self.shard[piece.start + shift : piece.stop + shift]

    def _take_slot(self) -> Arena:
        # Two buffers suffice unless tied weights hold one open: then wait for the reduction
        # that is under way before taking a third.
        if not self._free and self._slot_count >= self.SLOTS and self.in_flight:
            self._finish_oldest()
        if self._free:
            slot = self._free.pop()
            # Shared memory takes no bytes until it is written: one unit never needs two slots.
            if slot in self._unbooked:
                self._unbooked.remove(slot)
                self.layout.book(MemoryCategory.FULL_GRADIENTS, slot.mine, self._slot_length)
            return slot
        self._slot_count += 1
        array = self.layout.allocate(MemoryCategory.FULL_GRADIENTS, self._slot_length)
        return self.layout.private_slot(array)

    def _take_scratch(self, *, wide: bool) -> Array:
        """Return a buffer for one piece, in the gradient's dtype, or with ``wide`` the sum's."""
        dtype = ACCUMULATION if wide else self.layout.dtype
        # Of two dtypes, if compression was turned on or off between steps.
        for index, buffer in enumerate(self._scratch):
            if buffer.dtype == dtype:
                return self._scratch.pop(index)
        length = max(piece.length for piece in self._pieces.values())
        if wide:  # in host memory, where bfloat16 contributions are summed
            return self.layout.ledger.allocate(MemoryCategory.SCRATCH, length, dtype)
        return self.layout.allocate(MemoryCategory.SCRATCH, length)
