"""Gradients that every rank has whole, in one vector: reduced in it, or in a node's memory."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.base import Array, ShardLayout, is_device_array
from mpishard.communication import Arena, Work
from mpishard.models.stores.gradient_store import (
    ACCUMULATION,
    BackwardPass,
    CompressionBuffers,
    GradientStore,
    Reduction,
    encode,
)
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe import MemoryCategory
from mpishard.sharding import Piece, Unit


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

    def _reduce(self, unit: Unit, full: Array, carrier: Arena, part: slice) -> Reduction:
        """Begin to reduce ``part`` of ``carrier``, in which the unit's gradient travels."""
        travels = carrier.mine[part]
        # The model's and the unit's number go along: another model's call is refused by name.
        work = carrier.reduce_in_place(part, subject=self.layout.subjects[unit.index])
        return Reduction(work, full, full if carrier is self._slot else travels)

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

    def _reduce(self, unit: Unit, full: Array, carrier: Arena, part: slice) -> Reduction:
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
        return Reduction(work, mine, result)

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

    def _reduce(self, unit: Unit, full: Array, carrier: Arena, part: slice) -> Reduction:
        piece = self._pieces[unit.index]
        mine = slice(piece.start - unit.start, piece.stop - unit.start)
        # With compression the sum is rounded to bfloat16 in its buffer, as where it travels: all
        # ways of reducing give the same bits.
        result = carrier.mine[part][mine]
        work = carrier.reduce_into(result, part, subject=self.layout.subjects[unit.index])
        return Reduction(work, result if carrier is self._slot else full[mine], result)

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
