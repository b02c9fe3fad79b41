"""Who holds gradients, and when they are reduced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from mpishard.arrays import Array, array_namespace, chunk_length
from mpishard.communication import Work
from mpishard.layout import ShardLayout
from mpishard.models.holdings import Holdings
from mpishard.observe.ledger import MemoryCategory
from mpishard.sharding import Piece, Unit

__all__ = [
    "GradientStore",
    "NodeGradients",
    "ReplicatedGradients",
    "ScatteredGradients",
    "ShardedGradients",
    "squared_norm",
]


class GradientStore(ABC):
    """Gradients by unit: `gradient` to add into, `reduce` when a backward pass is done with it.

    A *round* is what one update uses: one backward pass, or several that accumulate. `begin`
    opens a backward pass, `settle` ends it.

    Parameters
    ----------
    holdings : Holdings
        Units, ranks, and where memory is booked.
    """

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self.backend = holdings.backend
        self._is_first = True
        self._is_last = True

    def begin(self, *, is_first: bool, is_last: bool, defer: bool = False) -> None:
        """Open a backward pass: whether it is its round's first, and its last.

        ``defer`` keeps a pass's gradients local until the round's last.
        """
        self._is_first, self._is_last = is_first, is_last

    def gradient(self, unit: Unit) -> Array:
        """The unit's full gradient, shape (unit.length,), to add into until `reduce`."""
        array, is_empty = self.target(unit)
        if is_empty:
            array.fill(0)
        return array

    @abstractmethod
    def target(self, unit: Unit) -> tuple[Array, bool]:
        """As `gradient`, and whether it holds nothing yet, of which it tells once.

        Then whoever asks clears or writes all of it.
        """

    @abstractmethod
    def reduce(self, unit: Unit) -> None:
        """Say that this rank has added all that it will to ``unit`` in this pass."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for the reductions of this pass."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop what the round has added, after an error; communicates nothing.

        Reductions under way may still use their buffers: the next pass waits for them.
        """

    def finish(self) -> None:
        """Hear that this rank is through with the round's reduced gradients."""

    @abstractmethod
    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        """The reduced gradients of ``pieces``: sums over ranks and over the round's passes.

        Read-only where other ranks read them too.
        """


class ReplicatedGradients(GradientStore):
    """Every rank holds the full gradient; it is all-reduced in the round's last pass.

    Earlier passes only add locally, so that accumulation sends nothing.

    Parameters
    ----------
    holdings : Holdings
        Units, ranks, and where memory is booked.
    vector : Array, optional
        Where the gradient lies; by default in memory of this rank alone, made when first needed.
    """

    def __init__(self, holdings: Holdings, vector: Array | None = None) -> None:
        super().__init__(holdings)
        self._vector = vector
        self._is_booked = vector is None
        self._touched: set[int] = set()
        self._works: list[Work] = []
        self._stale: list[Work] = []

    @property
    def vector(self) -> Array:
        """The full gradient, shape (length of the flat vector,)."""
        if self._vector is None:
            self._vector = self.holdings.allocate(MemoryCategory.GRADIENTS, self.holdings.length)
        return self._vector

    def begin(self, *, is_first: bool, is_last: bool, defer: bool = False) -> None:
        super().begin(is_first=is_first, is_last=is_last, defer=defer)
        if not self._is_booked:
            self._is_booked = True
            self.holdings.book(MemoryCategory.GRADIENTS, self.vector, self.holdings.length)
        while self._stale:
            self._stale[0].wait()
            del self._stale[0]
        if is_first:
            self._touched.clear()

    def target(self, unit: Unit) -> tuple[Array, bool]:
        is_empty = unit.index not in self._touched
        self._touched.add(unit.index)
        return self.vector[unit.start : unit.stop], is_empty

    def reduce(self, unit: Unit) -> None:
        if self._is_last:
            self._works.append(self._reduce(unit, self.gradient(unit)))

    def _reduce(self, unit: Unit, full: Array) -> Work:
        return self.backend.all_reduce_async(full)

    def settle(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()

    def abandon(self) -> None:
        self._stale += self._works
        self._works.clear()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return [self.vector[p.start : p.stop] for p in pieces]


class ScatteredGradients(ReplicatedGradients):
    """Every rank holds a full gradient; reduced, only the pieces that it owns are the sum's.

    They are reduce-scattered in the round's last pass, each into its place in the full vector, so
    that what ZeRO-1 sends is half of an all-reduce and it needs no other memory.
    """

    def __init__(self, holdings: Holdings, vector: Array | None = None) -> None:
        super().__init__(holdings, vector)
        self._pieces = holdings.pieces()

    def _reduce(self, unit: Unit, full: Array) -> Work:
        piece = self._pieces[unit.index]
        mine = full[piece.start - unit.start : piece.stop - unit.start]
        return self.backend.reduce_scatter_async(full, out=mine)


class NodeGradients(ScatteredGradients):
    """Replicated gradients of ranks that are all on one node: each reads the others' in place.

    Reduced, each piece stands once, in the vector of the rank that owns it, and every rank updates
    its parameters from there. Nothing is copied; a fence keeps the next round from writing before
    all have read.

    Parameters
    ----------
    holdings : Holdings
        Units, ranks, and where memory is booked.
    vectors : sequence of Array
        The full gradient of each rank, which all of them can read.
    """

    def __init__(self, holdings: Holdings, vectors: Sequence[Array]) -> None:
        super().__init__(holdings, vectors[holdings.backend.rank])
        self._vectors = vectors
        self._reading: Work | None = None

    def target(self, unit: Unit) -> tuple[Array, bool]:
        if self._reading is not None:
            self._reading.wait()
            self._reading = None
        return super().target(unit)

    def finish(self) -> None:
        self._reading = self.backend.barrier_async()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        """Of each piece, which must be one rank's, what its owner holds. Read-only."""
        views = []
        for piece in pieces:
            layout = ShardLayout(piece.unit.length, self.backend.world_size)
            owner = layout.owner(piece.start - piece.unit.start) if piece.length else 0
            view = self._vectors[owner][piece.start : piece.stop]
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
    holdings : Holdings
        Units, ranks, and where memory is booked.
    slots : sequence of Array, optional
        `SLOTS` buffers of `slot_length`, in memory that other ranks can read; by default they are
        this rank's alone, made when first needed.
    """

    SLOTS = 2

    def __init__(self, holdings: Holdings, slots: Sequence[Array] = ()) -> None:
        super().__init__(holdings)
        self.pieces = holdings.pieces()
        self._shard: Array | None = None
        self._slot_length = self.slot_length(holdings)
        self._free: list[Array] = list(slots)
        self._slot_count = len(slots)
        self._unbooked = list(slots)
        self._open: dict[int, Array] = {}
        self._deferred: dict[int, Array] = {}
        self._is_deferring = False
        self._in_flight: deque[tuple[Unit, Work, Array | None, Array | None]] = deque()
        self._stale: list[tuple[Work, Array | None]] = []
        self._scratch: list[Array] = []
        self._reduced: set[int] = set()

    @staticmethod
    def slot_length(holdings: Holdings) -> int:
        """Elements of the longest unit."""
        return max(unit.length for unit in holdings.units)

    @property
    def shard(self) -> Array:
        """Reduced gradients of all owned pieces, end to end."""
        if self._shard is None:
            length = sum(p.length for p in self.pieces)
            self._shard = self.holdings.allocate(MemoryCategory.GRADIENTS, length)
        return self._shard

    def begin(self, *, is_first: bool, is_last: bool, defer: bool = False) -> None:
        super().begin(is_first=is_first, is_last=is_last, defer=defer)
        while self._unbooked:
            slot = self._unbooked.pop()
            self.holdings.book(MemoryCategory.FULL_GRADIENTS, slot, self._slot_length)
        while self._stale:
            work, slot = self._stale[0]
            work.wait()
            del self._stale[0]
            if slot is not None:
                self._free.append(slot)
        self._is_deferring = defer and not is_last
        if is_first:
            self._reduced.clear()

    def target(self, unit: Unit) -> tuple[Array, bool]:
        buffer = self._deferred.get(unit.index)
        if buffer is None:
            buffer = self._open.get(unit.index)
        if buffer is not None:
            return buffer[: unit.length], False
        if self._is_deferring:
            buffer = self._deferred[unit.index] = self.holdings.allocate(
                MemoryCategory.FULL_GRADIENTS, unit.length
            )
        else:
            buffer = self._open[unit.index] = self._take_slot()
        return buffer[: unit.length], True

    def reduce(self, unit: Unit) -> None:
        full = self.gradient(unit)
        if self._is_deferring:
            return
        slot = self._open.pop(unit.index, None)
        self._deferred.pop(unit.index, None)
        target = self.shard[self.pieces[unit.index].in_shard]
        extra = self._take_scratch() if unit.index in self._reduced else None
        self._reduced.add(unit.index)
        out = target if extra is None else extra[: target.size]
        work = self.backend.reduce_scatter_async(full, out=out)
        self._in_flight.append((unit, work, slot, extra))

    def settle(self) -> None:
        while self._in_flight:
            self._finish_oldest()

    def abandon(self) -> None:
        self._free += self._open.values()
        self._open.clear()
        self._deferred.clear()
        self._scratch.clear()
        if self._in_flight:
            # They go on writing to what is no longer looked at.
            self._shard = None
        self._stale += [(work, slot) for _, work, slot, _ in self._in_flight]
        self._in_flight.clear()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return [self.shard[p.in_shard] for p in pieces]

    def _finish_oldest(self) -> None:
        unit, work, slot, extra = self._in_flight[0]
        work.wait()
        self._in_flight.popleft()
        if extra is not None:
            target = self.shard[self.pieces[unit.index].in_shard]
            target += extra[: target.size]
            self._scratch.append(extra)
        if slot is not None:
            self._free.append(slot)

    def _take_slot(self) -> Array:
        # Two buffers suffice unless tied weights hold one open: then wait for the reduction
        # that is under way before taking a third.
        if not self._free and self._slot_count >= self.SLOTS and self._in_flight:
            self._finish_oldest()
        if self._free:
            return self._free.pop()
        self._slot_count += 1
        return self.holdings.allocate(MemoryCategory.FULL_GRADIENTS, self._slot_length)

    def _take_scratch(self) -> Array:
        if self._scratch:
            return self._scratch.pop()
        length = max(p.length for p in self.pieces)
        return self.holdings.allocate(MemoryCategory.SCRATCH, length)


def squared_norm(arrays: Sequence[Array]) -> float:
    """Sum of squares of all elements, chunk by chunk, the chunks added in float64."""
    total = 0.0
    for array in arrays:
        xp = array_namespace(array)
        step = chunk_length(array)
        for start in range(0, int(array.size), step):
            chunk = array[start : start + step]
            total += float(xp.dot(chunk, chunk))
    return total
