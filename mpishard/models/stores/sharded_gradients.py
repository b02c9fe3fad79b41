"""Gradients that are sharded: every rank holds its pieces alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.communication import Arena, Work
from mpishard.models.stores.gradient_store import (
    ACCUMULATION,
    BackwardPass,
    CompressionBuffers,
    GradientStore,
    encode,
)
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe.ledger import MemoryCategory
from mpishard.sharding import Piece, Unit

__all__ = ["ShardedGradients"]


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
        # By unit: what this rank owns of it, and how far the shard lies behind the flat vector.
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
        self._deferred: dict[int, Arena] = {}
        self._is_deferring = self._defers = False
        self._stale: list[_Scatter] = []
        self._scratch: list[Array] = []
        self._reduced: set[int] = set()

    @staticmethod
    def slot_length(layout: StoreLayout) -> int:
        """Elements of the longest unit that is trained."""
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
        while self._unbooked:
            slot = self._unbooked.pop()
            self.layout.book(MemoryCategory.FULL_GRADIENTS, slot.mine, self._slot_length)
        while self._stale:
            self._stale[0].work.wait()
            self._let_go(self._stale[0])
            del self._stale[0]
        self._defers = this.defer
        # The round's last pass reduces all that earlier ones have added.
        self._is_deferring = this.defer and not this.is_last
        if this.is_first:
            self._reduced.clear()

    def target(self, unit: Unit) -> tuple[Array, bool]:
        buffer = self._deferred.get(unit.index)
        if buffer is None:
            buffer = self._open.get(unit.index)
        if buffer is not None:
            return buffer.mine[: unit.length], False
        if self._is_deferring:
            array = self.layout.allocate(MemoryCategory.FULL_GRADIENTS, unit.length)
            buffer = self._deferred[unit.index] = self.layout.private_slot(array)
        else:
            buffer = self._open[unit.index] = self._take_slot()
        return buffer.mine[: unit.length], True

    def reduce(self, unit: Unit) -> None:
        full = self.gradient(unit)
        if self._is_deferring:
            return
        slot = self._open.pop(unit.index, None)
        carrier = self._deferred.pop(unit.index, slot)
        compression, compressed = self._compression, None
        if compression is not None:
            compressed = compression.take()
            while compressed is None:
                self._finish_oldest()
                compressed = compression.take()
            encode(full, compressed.mine[: unit.length])
            carrier = compressed
            # The rounded copy travels, so that the next unit can use the full buffer at once.
            if slot is not None:
                self._free.append(slot)
                slot = None
        # Later micro-batches add to the sum; the first one of a round replaces the last round's.
        adds = unit.index in self._reduced
        self._reduced.add(unit.index)
        target = self._view(self._pieces[unit.index])
        # A sum that is added to another lands in a buffer of its own first.
        is_direct = not adds
        if compressed is not None:
            is_direct &= isinstance(target, np.ndarray) and target.dtype == ACCUMULATION
        extra = None if is_direct else self._take_scratch(wide=compressed is not None)
        out = target if extra is None else extra[: target.size]
        assert carrier is not None
        work = carrier.reduce_into(out, slice(unit.length))
        self.in_flight.append(_Scatter(unit, work, slot, compression, compressed, extra, adds))

    def settle(self) -> None:
        while self.in_flight:
            self._finish_oldest()

    def abandon(self) -> None:
        self._free += self._open.values()
        self._open.clear()
        self._deferred.clear()
        self._scratch.clear()
        if self.in_flight:
            # They go on writing to what is no longer looked at.
            self._shard = None
        self._stale += self.in_flight
        self.in_flight.clear()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return [self._view(p) for p in pieces]

    def own_sums(self) -> list[Array]:
        """The sums of this pass of all pieces that this rank owns, to be written to."""
        return [self.shard]

    def _view(self, piece: Piece) -> Array:
        shift = self._shifts[piece.unit.index]
        return self.shard[piece.start + shift : piece.stop + shift]

    def _finish_oldest(self) -> None:
        # Removed after its wait: if that raises, `abandon` must know of it.
        scatter = self.in_flight[0]
        scatter.work.wait()
        self.in_flight.popleft()
        if scatter.extra is not None:
            target = self._view(self._pieces[scatter.unit.index])
            values = array_namespace(target).asarray(scatter.extra[: target.size])
            if scatter.adds:
                target += values
            else:
                target[...] = values
            self._scratch.append(scatter.extra)
        self._let_go(scatter)

    def _let_go(self, scatter: _Scatter) -> None:
        if scatter.slot is not None:
            self._free.append(scatter.slot)
        if scatter.compression is not None and scatter.compressed is not None:
            scatter.compression.give(scatter.compressed)

    def _take_slot(self) -> Arena:
        # Two buffers suffice unless tied weights hold one open: then wait for the reduction
        # that is under way before taking a third.
        if not self._free and self._slot_count >= self.SLOTS and self.in_flight:
            self._finish_oldest()
        if self._free:
            return self._free.pop()
        self._slot_count += 1
        array = self.layout.allocate(MemoryCategory.FULL_GRADIENTS, self._slot_length)
        return self.layout.private_slot(array)

    def _take_scratch(self, *, wide: bool) -> Array:
        """A buffer for one piece, in the dtype of the gradient, or in that of the sum."""
        dtype = ACCUMULATION if wide else self.layout.dtype
        for index, buffer in enumerate(self._scratch):
            if buffer.dtype == dtype:
                return self._scratch.pop(index)
        length = max(piece.length for piece in self._pieces.values())
        if wide:  # in host memory, as what is summed
            return self.layout.ledger.allocate(MemoryCategory.SCRATCH, length, dtype)
        return self.layout.allocate(MemoryCategory.SCRATCH, length)


@dataclass(frozen=True, slots=True)
class _Scatter:
    """A reduction under way, and the buffers that it reads and writes until it is through."""

    unit: Unit
    work: Work
    slot: Arena | None
    compression: CompressionBuffers | None
    compressed: Arena | None
    extra: Array | None
    adds: bool
