"""Stores of gradients: the time of each reduction, and the memory of the result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import ml_dtypes
import numpy as np

from mpishard.base import (
    Array,
    ShardLayout,
    array_namespace,
    chunk_length,
    is_device_array,
    to_host,
)
from mpishard.communication import Arena, Work
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe import MemoryCategory
from mpishard.sharding import Piece, Unit

ACCUMULATION = np.dtype(np.float32)
"""Dtype in which the ranks' bfloat16 contributions are summed."""

_COMPRESSED = np.dtype(ml_dtypes.bfloat16)

_GiveBack = Callable[[], None]


@dataclass(frozen=True, slots=True)
class BackwardPass:
    """One backward pass of a round.

    Parameters
    ----------
    is_first, is_last : bool
        Whether the pass is the first, and the last, of its round.
    defer : bool
        Keep its gradients on this rank until the round's last pass.
    compresses : bool
        Send gradients as bfloat16.
    """

    is_first: bool
    is_last: bool
    defer: bool = False
    compresses: bool = False


class GradientStore(ABC):
    """Gradients by unit: `gradient` to add into, `reduce` when a backward pass is done with it.

    A *round* is the backward passes that one update uses: one, or several that accumulate. `begin`
    opens a backward pass, and `await_reductions` ends it.

    Parameters
    ----------
    layout : StoreLayout
        Units, ranks, and where memory is booked. Units that are frozen there have no gradient,
        and no method may be called with them.

    Attributes
    ----------
    in_flight : deque
        Reductions under way.
    """

    def __init__(self, layout: StoreLayout) -> None:
        self.layout = layout
        self.backend = layout.backend
        self.in_flight: deque[_Reduction] = deque()
        # Reductions that an error has left under way; they still use their buffers.
        self._stale: list[_Reduction] = []
        self._compression: CompressionBuffers | None = None
        self._is_last = True

    def begin(self, this: BackwardPass) -> None:
        """Open a backward pass."""
        # Each is removed only after its wait: if the wait raises, the next pass waits again.
        while self._stale:
            self._stale[0].work.wait_until_over()
            self._stale[0].give_back()
            del self._stale[0]
        self._is_last = this.is_last
        # The choice may change between steps; without it the buffers' memory is free.
        if not this.compresses:
            self._compression = None
        elif self._compression is None:
            self._compression = self._make_buffers()

    @property
    def reduces_at_once(self) -> bool:
        """True if each micro-batch's gradient is reduced, so that no full gradient is kept."""
        return False

    @property
    def sends_now(self) -> bool:
        """True if `reduce` sends in this pass."""
        return self._is_last

    @abstractmethod
    def _make_buffers(self) -> CompressionBuffers:
        """Make buffers in which gradients travel as bfloat16. Collective."""

    def gradient(self, unit: Unit) -> Array:
        """Return the unit's full gradient, shape (unit.length,), to add into until `reduce`."""
        array, is_empty = self.target(unit)
        if is_empty:
            array.fill(0)
        return array

    @abstractmethod
    def target(self, unit: Unit) -> tuple[Array, bool]:
        """Return the gradient buffer, and True if this pass is the first to write to it.

        The first writer must overwrite the buffer, because it holds old values.
        """

    @abstractmethod
    def reduce(self, unit: Unit) -> None:
        """Reduce ``unit``: this rank adds nothing more to it in this pass."""

    def await_reductions(self) -> None:
        """Wait for the reductions of this pass."""
        while self.in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        # Removed only after its wait: if the wait raises, `abandon` must still find it.
        reduction = self.in_flight[0]
        reduction.finish()
        self.in_flight.popleft()

    def abandon(self) -> None:
        """Drop the round's gradients, after an error; communicates nothing.

        Reductions under way may still use their buffers: the next pass waits for them.
        """
        self._stale += self.in_flight
        self.in_flight.clear()

    def finish(self) -> None:
        """Let the reduced gradients be overwritten: this rank has read them."""

    def await_readers(self) -> None:
        """Wait until all ranks have read this rank's gradients of the last step."""

    def spread(self) -> None:
        """Give every rank the sums that only their owners have, if it needs them. Collective."""

    @abstractmethod
    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        """Return the reduced gradients of ``pieces``: sums over ranks and the round's passes.

        The arrays are read-only if other ranks read them, too.
        """


class ReplicatedGradients(GradientStore):
    """Every rank holds the full gradient; it is all-reduced in the round's last pass.

    Earlier passes only add on this rank, so that accumulation sends nothing. With compression the
    sum is rounded to bfloat16 as well, because it travels, too.

    Parameters
    ----------
    layout : StoreLayout
        See `GradientStore`.
    slot : Arena, optional
        The memory of the gradient; by default this rank's alone, made when first needed.
    """

    def __init__(self, layout: StoreLayout, slot: Arena | None = None) -> None:
        super().__init__(layout)
        self._slot = slot
        # Shared memory takes no bytes until it is written, and is booked then.
        self._is_booked = slot is None
        self._touched: set[int] = set()
        self._compressed: Arena | None = None
        self._shifts: dict[int, int] = {}
        position = 0
        # Frozen units have no place in the vector: later units move up.
        for unit in layout.trained_units:
            self._shifts[unit.index] = position - unit.start
            position += unit.length

    @staticmethod
    def length_for(layout: StoreLayout) -> int:
        """Return the length of the vector: all units that are trained, end to end."""
        return sum(unit.length for unit in layout.trained_units)

    @property
    def vector(self) -> Array:
        """The full gradient, shape (`length_for`,)."""
        return self._carrier.mine

    @property
    def _carrier(self) -> Arena:
        """The memory that is reduced."""
        if self._slot is None:
            length = self.length_for(self.layout)
            array = self.layout.allocate(MemoryCategory.GRADIENTS, length)
            self._slot = self.layout.private_slot(array)
        return self._slot

    def begin(self, this: BackwardPass) -> None:
        super().begin(this)
        if not self._is_booked:
            self._is_booked = True
            self.layout.book(MemoryCategory.GRADIENTS, self.vector, int(self.vector.size))
        if this.is_first:
            self._touched.clear()

    def _make_buffers(self) -> CompressionBuffers:
        # One buffer as long as the vector: units travel from it side by side.
        compression = CompressionBuffers(self.layout, self.length_for(self.layout), 1)
        self._compressed = compression.free.pop()
        return compression

    def target(self, unit: Unit) -> tuple[Array, bool]:
        is_empty = unit.index not in self._touched
        # The first writer of a round overwrites: zeroing the vector would be one more pass over
        # memory.
        self._touched.add(unit.index)
        return self.vector[self._range_of(unit, unit.start, unit.stop)], is_empty

    def reduce(self, unit: Unit) -> None:
        # Gradients of several passes are added here and travel once.
        if not self._is_last:
            return
        full, part = self.gradient(unit), self._range_of(unit, unit.start, unit.stop)
        carrier = self._carrier
        if self._compression is not None:
            assert self._compressed is not None
            carrier = self._compressed
            encode(full, carrier.mine[part])
        # It travels while backward computes the gradients of earlier layers.
        self.in_flight.append(self._reduce(unit, full, carrier, part))

    def _reduce(self, unit: Unit, full: Array, carrier: Arena, part: slice) -> _Reduction:
        """Begin to reduce ``part`` of ``carrier``, in which the unit's gradient travels."""
        travels = carrier.mine[part]
        # The model's and the unit's number go along: another model's call is refused by name.
        work = carrier.reduce_in_place(part, subject=self.layout.subjects[unit.index])
        return _Reduction(work, full, full if carrier is self._slot else travels)

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return self.local(pieces)

    def local(self, pieces: Sequence[Piece]) -> list[Array]:
        """Return the rank's own gradients of ``pieces``, reduced or not."""
        return [self.vector[self._range_of(p.unit, p.start, p.stop)] for p in pieces]

    def _range_of(self, unit: Unit, start: int, stop: int) -> slice:
        """Return the indices of the flat range ``[start, stop)`` of ``unit`` in the vector."""
        shift = self._shifts[unit.index]
        return slice(start + shift, stop + shift)


class ScatteredGradients(ReplicatedGradients):
    """Every rank holds a full gradient, in which only the pieces that it owns become sums.

    The round's last pass reduce-scatters each unit into its own place in the full vector. So ZeRO-1
    sends half of an all-reduce for it, and needs no other memory.

    Parameters
    ----------
    layout, slot
        See `ReplicatedGradients`.
    spreads : bool
        Whether every rank needs all sums, which `spread` gives it.
    """

    def __init__(
        self, layout: StoreLayout, slot: Arena | None = None, *, spreads: bool = False
    ) -> None:
        super().__init__(layout, slot)
        self._pieces = layout.pieces()
        self._spreads = spreads

    def _reduce(self, unit: Unit, full: Array, carrier: Arena, part: slice) -> _Reduction:
        piece = self._pieces[unit.index]
        # The sum replaces this rank's own part, which no later reduction reads.
        mine = full[piece.start - unit.start : piece.stop - unit.start]
        # bfloat16 contributions are summed in float32: in place, if the gradient has that dtype.
        is_direct = carrier is self._slot or (
            not is_device_array(mine) and mine.dtype == ACCUMULATION
        )
        result = mine
        if not is_direct:
            allocate = self.layout.ledger.allocate
            result = allocate(MemoryCategory.SCRATCH, piece.length, ACCUMULATION)
        work = carrier.reduce_into(result, part, subject=self.layout.subjects[unit.index])
        return _Reduction(work, mine, result)

    def own_sums(self) -> list[Array]:
        """Return writable views of this pass's sums of all pieces that this rank owns."""
        frozen = self.layout.frozen
        return self.local([p for p in self._pieces if p.unit.index not in frozen])

    def spread(self) -> None:
        for piece in self._pieces if self._spreads else ():
            if piece.unit.index in self.layout.frozen:
                continue
            full = self.vector[self._range_of(piece.unit, piece.unit.start, piece.unit.stop)]
            own = full[piece.start - piece.unit.start : piece.stop - piece.unit.start]
            self.backend.all_gather(own, out=full, subject=self.layout.subjects[piece.unit.index])


class NodeGradients(ScatteredGradients):
    """Replicated gradients of ranks that are all on one node: each reads the others' in place.

    A reduced piece exists once, in the vector of the rank that owns it, and every rank updates its
    parameters from there. Nothing is copied. A fence keeps the next round from writing to a vector
    before all ranks have read it.

    Parameters
    ----------
    layout : StoreLayout
        See `GradientStore`.
    slot : Arena
        The full gradient of each rank, which all of them can read.
    """

    def __init__(self, layout: StoreLayout, slot: Arena) -> None:
        super().__init__(layout, slot)
        self._reading: Work | None = None

    def target(self, unit: Unit) -> tuple[Array, bool]:
        self.await_readers()
        return super().target(unit)

    def await_readers(self) -> None:
        if self._reading is not None:
            self._reading.wait_until_over()
            self._reading = None

    def _reduce(self, unit: Unit, full: Array, carrier: Arena, part: slice) -> _Reduction:
        piece = self._pieces[unit.index]
        mine = slice(piece.start - unit.start, piece.stop - unit.start)
        # With compression the sum is rounded to bfloat16 in its buffer, as where it travels: all
        # ways of reducing give the same bits.
        result = carrier.mine[part][mine]
        work = carrier.reduce_into(result, part, subject=self.layout.subjects[unit.index])
        return _Reduction(work, result if carrier is self._slot else full[mine], result)

    def finish(self) -> None:
        # The next pass waits for it, in `target`: nothing writes to the gradient before.
        self._reading = self._carrier.fence(subject=self.layout.subject)

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        """Return the owner's view of each piece, which must be one rank's. Read-only."""
        views = []
        for piece in pieces:
            # Only the owner's memory has the sum, and the other ranks read it there.
            layout = ShardLayout(piece.unit.length, self.backend.world_size)
            owner = layout.owner(piece.start - piece.unit.start) if piece.length else 0
            view = self._carrier.of(owner)[self._range_of(piece.unit, piece.start, piece.stop)]
            # A rule that wrote here would change what other ranks still read.
            view.flags.writeable = False
            views.append(view)
        return views


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
        self._whole: dict[int, slice] = {}  # the unit's range in a pooled buffer
        position = 0
        for piece in layout.pieces():
            if piece.unit.index not in layout.frozen:
                self._pieces[piece.unit.index] = piece
                self._whole[piece.unit.index] = slice(piece.unit.length)
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
            return slot.mine[self._whole[unit.index]], False
        slot = self._open[unit.index] = self._take_slot()
        target = slot.mine[self._whole[unit.index]]
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
        loans: list[_GiveBack] = [partial(self._free.append, slot)]
        compression, whole = self._compression, self._whole[unit.index]
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
        self.in_flight.append(_Reduction(work, target, result, adds, loans))

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


class WrappedGradients(GradientStore):
    """A store that leaves gradients and reductions to another one, where a subclass does not.

    Parameters
    ----------
    inner : GradientStore
        The other store.
    layout : StoreLayout, optional
        Default: that of ``inner``.
    """

    def __init__(self, inner: GradientStore, layout: StoreLayout | None = None) -> None:
        super().__init__(layout or inner.layout)
        self._inner = inner
        # The same deque: the layers' loop asks the outer store whether anything is under way.
        self.in_flight = inner.in_flight

    def begin(self, this: BackwardPass) -> None:
        self._inner.begin(this)

    @property
    def reduces_at_once(self) -> bool:
        return self._inner.reduces_at_once

    @property
    def sends_now(self) -> bool:
        return self._inner.sends_now

    def _make_buffers(self) -> CompressionBuffers:
        return self._inner._make_buffers()

    def target(self, unit: Unit) -> tuple[Array, bool]:
        return self._inner.target(unit)

    def reduce(self, unit: Unit) -> None:
        self._inner.reduce(unit)

    def await_reductions(self) -> None:
        self._inner.await_reductions()

    def abandon(self) -> None:
        self._inner.abandon()

    def finish(self) -> None:
        self._inner.finish()

    def await_readers(self) -> None:
        self._inner.await_readers()

    def spread(self) -> None:
        self._inner.spread()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return self._inner.owned(pieces)


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A reduction under way.

    Parameters
    ----------
    work : Work
        The reduction.
    target, result : Array
        The gradient that takes the result, and the array to which the reduction writes it: the same
        object, or a buffer that is copied or added.
    adds : bool
        Whether the gradient is a sum, to which the result is added.
    loans : sequence of callable
        Each makes a buffer free again, which the reduction uses until its end.
    """

    work: Work
    target: Array
    result: Array
    adds: bool = False
    loans: Sequence[_GiveBack] = ()

    def finish(self) -> None:
        target = self.target
        self.work.wait()
        if self.result is not target:
            # A sum of bfloat16 contributions was made on the host, also for a GPU's gradient.
            values = array_namespace(target).asarray(self.result)
            if self.adds:
                target += values
            else:
                target[...] = values
        self.give_back()

    def give_back(self) -> None:
        for give_back in self.loans:
            give_back()


class CompressionBuffers:
    """Host buffers in which gradients travel as bfloat16, half or a quarter of their bytes.

    bfloat16 has the range of float32, so that sums over samples need no scaling, and 8 bits of
    mantissa (Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019). If a node's
    ranks share memory, the buffers lie in it; the sums have the same bits either way.

    Parameters
    ----------
    layout : StoreLayout
        Units, ranks, and where memory is booked. To make the buffers is collective.
    length : int
        Elements of each buffer.
    count : int
        Number of buffers.

    Attributes
    ----------
    free : list of Arena
        The buffers that no gradient uses now.
    """

    def __init__(self, layout: StoreLayout, length: int, count: int) -> None:
        slots = layout.on_host.allocate_slots(length, count, _COMPRESSED)
        if slots is None:
            book = layout.ledger.allocate
            arrays = [book(MemoryCategory.SCRATCH, length, _COMPRESSED) for _ in range(count)]
            self.free = [layout.private_slot(array) for array in arrays]
            return
        self.free = slots
        for compressed in slots:
            layout.book(MemoryCategory.SCRATCH, compressed.mine, length)


def encode(gradient: Array, compressed: Array) -> None:
    """Round ``gradient``, shape (n,), to the nearest bfloat16 into ``compressed``, shape (n,)."""
    source = to_host(gradient)
    # In chunks that fit the cache, because the conversion makes a temporary array.
    step = chunk_length(source)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN stay what they are
        for start in range(0, int(source.size), step):
            compressed[start : start + step] = source[start : start + step]
