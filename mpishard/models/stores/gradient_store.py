"""The interface of stores of gradients, a reduction under way, and gradients as bfloat16."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from mpishard.base import (
    Array,
    array_namespace,
    chunk_length,
    to_host,
)
from mpishard.communication import Work
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe import MemoryCategory
from mpishard.sharding import Piece, Unit

ACCUMULATION = np.dtype(np.float32)
"""Dtype in which the ranks' bfloat16 contributions are summed."""

_COMPRESSED = np.dtype(ml_dtypes.bfloat16)

GiveBack = Callable[[], None]


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
        self.in_flight: deque[Reduction] = deque()
        # Reductions that an error has left under way; they still use their buffers.
        self._stale: list[Reduction] = []
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
class Reduction:
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
    loans: Sequence[GiveBack] = ()

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
