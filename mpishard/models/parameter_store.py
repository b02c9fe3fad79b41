"""Who holds parameters: every rank all of them, or every rank its pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from mpishard.arrays import Array
from mpishard.communication import Work
from mpishard.layout import ShardLayout
from mpishard.models.holdings import Holdings
from mpishard.observe.ledger import MemoryCategory
from mpishard.sharding import Piece, Unit

__all__ = ["ParameterStore", "ReplicatedParameters", "ShardedParameters"]


class ParameterStore(ABC):
    """Parameters by unit.

    `unshard` makes a unit's full parameters readable, `reshard` lets them go, `prefetch` starts
    what `unshard` would wait for. Every rank makes the same calls in the same order.

    Parameters
    ----------
    holdings : Holdings
        Units, ranks, and where memory is booked.
    """

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self.backend = holdings.backend

    @property
    @abstractmethod
    def shard(self) -> Array:
        """What this rank holds, end to end."""

    @abstractmethod
    def fill(self, unit: Unit, full: Array | None) -> None:
        """Take a unit's first values from rank 0, where ``full`` holds them. Collective."""

    @abstractmethod
    def take(self, full: Array) -> None:
        """Take values from the full vector, which is the same on every rank."""

    @abstractmethod
    def prefetch(self, unit: Unit) -> None:
        """Begin to make ``unit`` readable, where that takes messages."""

    @abstractmethod
    def unshard(self, unit: Unit) -> Array:
        """The unit's parameters, shape (unit.length,), until `reshard`. Read-only."""

    @abstractmethod
    def reshard(self, unit: Unit) -> None:
        """Let the unit's full parameters go."""

    def abandon(self) -> None:
        """Forget every unit in use, after an error; communicates nothing."""

    @abstractmethod
    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        """Writable views of the owned ranges, one per piece."""

    @abstractmethod
    def publish(self, pieces: Sequence[Piece]) -> None:
        """Make updates of the owned ``pieces`` known to whoever reads them."""


class ReplicatedParameters(ParameterStore):
    """Every rank holds all parameters; a unit is a view of them."""

    def __init__(self, holdings: Holdings) -> None:
        super().__init__(holdings)
        self._vector = holdings.allocate(MemoryCategory.PARAMETERS, self.holdings.length)

    @property
    def shard(self) -> Array:
        return self._vector

    def fill(self, unit: Unit, full: Array | None) -> None:
        target = self._vector[unit.start : unit.stop]
        if full is not None:
            target[...] = full
        self.backend.broadcast(target, root=0)

    def take(self, full: Array) -> None:
        self._vector[...] = full

    def prefetch(self, unit: Unit) -> None:
        pass

    def unshard(self, unit: Unit) -> Array:
        return _read_only(self._vector[unit.start : unit.stop])

    def reshard(self, unit: Unit) -> None:
        pass

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return [self._vector[p.start : p.stop] for p in pieces]

    def publish(self, pieces: Sequence[Piece]) -> None:
        if self.backend.world_size == 1:
            return
        works = [
            self.backend.all_gather_async(
                self._vector[p.start : p.stop], out=self._vector[p.unit.start : p.unit.stop]
            )
            for p in pieces
        ]
        for work in works:
            work.wait()


class ShardedParameters(ParameterStore):
    """Every rank holds its pieces; a unit is gathered into a pooled buffer while it is used.

    Kept units, used from forward to backward, have buffers of their own. All others share two:
    one for the unit in use, one for the unit that is on its way.
    """

    def __init__(self, holdings: Holdings) -> None:
        super().__init__(holdings)
        self.pieces = holdings.pieces()
        self.kept = holdings.kept
        self._shard = holdings.allocate(
            MemoryCategory.PARAMETERS, sum(p.length for p in self.pieces)
        )
        passing = [unit.length for unit in self.holdings.units if unit.index not in self.kept]
        self._slot_length = max(passing, default=0)
        self._free: list[Array] = []
        self._kept_buffers: dict[int, Array] = {}
        self._buffers: dict[int, Array] = {}
        self._works: dict[int, Work] = {}

    @property
    def shard(self) -> Array:
        return self._shard

    @property
    def resident(self) -> frozenset[int]:
        """Indices of the units that are unsharded, or on their way."""
        return frozenset(self._buffers)

    def fill(self, unit: Unit, full: Array | None) -> None:
        counts = ShardLayout(unit.length, self.backend.world_size).sizes
        piece = self.backend.scatter(full, root=0, counts=counts)
        self._shard[self.pieces[unit.index].in_shard] = piece

    def take(self, full: Array) -> None:
        for piece in self.pieces:
            self._shard[piece.in_shard] = full[piece.start : piece.stop]

    def prefetch(self, unit: Unit) -> None:
        if unit.index in self._buffers:
            return
        buffer = self._take_buffer(unit)
        piece = self._shard[self.pieces[unit.index].in_shard]
        self._buffers[unit.index] = buffer
        self._works[unit.index] = self.backend.all_gather_async(piece, out=buffer[: unit.length])

    def unshard(self, unit: Unit) -> Array:
        self.prefetch(unit)
        work = self._works.pop(unit.index, None)
        if work is not None:
            work.wait()
        return _read_only(self._buffers[unit.index][: unit.length])

    def reshard(self, unit: Unit) -> None:
        buffer = self._buffers.pop(unit.index, None)
        work = self._works.pop(unit.index, None)
        if work is not None:
            work.wait()
        if buffer is not None and unit.index not in self.kept:
            self._free.append(buffer)

    def abandon(self) -> None:
        # A gather under way may still write to its buffer, so none of them is used again.
        self._works.clear()
        self._buffers.clear()
        self._kept_buffers.clear()
        self._free.clear()

    def owned(self, pieces: Sequence[Piece]) -> list[Array]:
        return [self._shard[p.in_shard] for p in pieces]

    def publish(self, pieces: Sequence[Piece]) -> None:
        """Nothing to tell: the next `unshard` gathers what the owners hold."""
        assert not self._buffers, "a unit is still unsharded at the update"

    def _take_buffer(self, unit: Unit) -> Array:
        if unit.index in self.kept:
            buffer = self._kept_buffers.get(unit.index)
            if buffer is None:
                buffer = self.holdings.allocate(MemoryCategory.GATHERED, unit.length)
                self._kept_buffers[unit.index] = buffer
            return buffer
        if self._free:
            return self._free.pop()
        return self.holdings.allocate(MemoryCategory.GATHERED, self._slot_length)


def _read_only(array: Array) -> Array:
    if isinstance(array, np.ndarray):  # CuPy arrays have no such flag
        array.flags.writeable = False
    return array
