"""Arrays that have a shape and an address, and no memory: pages that nobody touches."""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any, Self

import numpy as np

from mpishard.base import HOST, Array, Device, DType
from mpishard.observe import MemoryCategory, MemoryLedger
from mpishard.planning.jobs import UnplannableError

# Python has no name for Linux's flag before 3.13; other systems reserve nothing.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


class ReservedArray(np.memmap):
    """An array of zeros whose pages the system would only make if they were read.

    It is a map, as of a file, because that is the one kind of array besides NumPy's own that every
    function of the package takes. Writes are dropped, and a copy is another reserved array.
    """

    def __new__(cls, shape: int | tuple[int, ...], dtype: DType) -> Self:
        """Reserve an array."""
        dims = (shape,) if isinstance(shape, int) else shape
        nbytes = math.prod(dims) * dtype.itemsize
        # Without a reservation of swap space, so that the size may exceed that of all memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        try:
            memory = mmap.mmap(-1, max(1, nbytes), flags)
        except OSError as error:
            raise UnplannableError(
                f"this system does not reserve {nbytes / 2**30:.3g} GiB of address space, which "
                f"takes no memory ({error}): `ulimit -v` and vm.overcommit_memory=2 limit it; plan "
                "on another machine, or with more ranks"
            ) from None
        return np.ndarray.__new__(cls, dims, dtype, buffer=memory)

    _mmap = None

    def __array_finalize__(self, other: Any) -> None:
        """Do nothing: a view needs no attribute of a file."""

    def __setitem__(self, index: Any, value: Any) -> None:
        """Drop the values."""

    def __iadd__(self, other: Any) -> Self:  # type: ignore[misc]
        return self

    def fill(self, value: Any) -> None:
        """Drop the value."""

    def copy(self, order: Any = "C") -> ReservedArray:
        """Return another reserved array."""
        return ReservedArray(self.shape, self.dtype)


class ReservedLedger(MemoryLedger):
    """A ledger whose arrays take no memory."""

    def allocate(
        self, category: MemoryCategory, length: int, dtype: DType, device: Device = HOST
    ) -> Array:
        """Reserve a vector, and count it."""
        array = ReservedArray(length, np.dtype(dtype))
        self.book(category, array, array.nbytes)
        return array
