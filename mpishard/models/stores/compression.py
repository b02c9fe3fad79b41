"""Gradients as bfloat16, on their way to the ranks that sum them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mpishard.arrays import Array, chunk_length, to_host
from mpishard.communication import Arena
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.observe.ledger import MemoryCategory

__all__ = ["ACCUMULATION", "CompressionBuffers", "encode"]

ACCUMULATION = np.dtype(np.float32)
"""In what the ranks' contributions are summed."""

_COMPRESSED = np.dtype(ml_dtypes.bfloat16)


class CompressionBuffers:
    """Host buffers in which gradients travel as bfloat16, half or a quarter of their bytes.

    bfloat16 has the range of float32, so that sums over samples need no scaling, and 8 bits of
    mantissa (Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019). The buffers
    lie in memory that a node's ranks share, where they can: the same bits are summed there.

    Parameters
    ----------
    layout : StoreLayout
        Units, ranks, and where memory is booked. To make the buffers is collective.
    length : int
        Elements of each buffer.
    count : int
        Number of buffers.
    """

    def __init__(self, layout: StoreLayout, length: int, count: int) -> None:
        slots = layout.on_host.allocate_slots(length, count, _COMPRESSED)
        if slots is None:
            book = layout.ledger.allocate
            arrays = [book(MemoryCategory.SCRATCH, length, _COMPRESSED) for _ in range(count)]
            self._free = [layout.private_slot(array) for array in arrays]
            return
        self._free = slots
        for compressed in slots:
            layout.book(MemoryCategory.SCRATCH, compressed.mine, length)

    def take(self) -> Arena | None:
        """A buffer, until `give`; None where all are in use."""
        return self._free.pop() if self._free else None

    def give(self, compressed: Arena) -> None:
        """Let a buffer be used again."""
        self._free.append(compressed)


def encode(gradient: Array, compressed: Array) -> None:
    """Round ``gradient``, shape (n,), to the nearest bfloat16 into ``compressed``, shape (n,)."""
    source = to_host(gradient)
    step = chunk_length(source)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN stay what they are
        for start in range(0, int(source.size), step):
            compressed[start : start + step] = source[start : start + step]
