"""The memory ledger: bytes that a rank holds, by what they are for."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from enum import StrEnum
from typing import Any

import numpy as np

from mpishard.arrays import Array

__all__ = ["MemoryCategory", "MemoryLedger"]


class MemoryCategory(StrEnum):
    """What memory is held for."""

    PARAMETERS = "parameters"  # what the rank owns, or the replica
    GRADIENTS = "gradients"  # reduced gradients that wait for the update
    OPTIMIZER_STATE = "optimizer_state"
    GATHERED = "gathered"  # full parameters of the units in use
    FULL_GRADIENTS = "full_gradients"  # a unit's gradient before it is reduced
    BEST_PARAMETERS = "best_parameters"  # what a training loop keeps of its best evaluation
    SCRATCH = "scratch"


class MemoryLedger:
    """Allocates arrays and counts their bytes until they are freed.

    Counts are of what is really allocated: an entry leaves the ledger when its array is garbage,
    not when somebody says so.
    """

    def __init__(self) -> None:
        # The last view of shared memory may be let go by another thread, or by the garbage
        # collector while this one holds the lock.
        self._lock = threading.RLock()
        self._held: Counter[MemoryCategory] = Counter()
        self._peak: Counter[MemoryCategory] = Counter()

    def allocate(self, category: MemoryCategory, length: int, dtype: np.dtype[Any]) -> Array:
        """An uninitialised 1-D array of ``length`` elements, counted under ``category``."""
        array = np.empty(length, dtype)
        self.book(category, array, array.nbytes)
        return array

    def book(self, category: MemoryCategory, array: Array, nbytes: int) -> None:
        """Count ``nbytes`` of ``array`` until it is garbage: this rank's part of shared memory."""
        with self._lock:
            self._held[category] += nbytes
            self._peak[category] = max(self._peak[category], self._held[category])
        weakref.finalize(array, self._free, category, nbytes).atexit = False

    def _free(self, category: MemoryCategory, nbytes: int) -> None:
        with self._lock:
            self._held[category] -= nbytes

    def held(self, category: MemoryCategory) -> int:
        """Bytes held now."""
        return self._held[category]

    def peak(self, category: MemoryCategory) -> int:
        """Most bytes held at once since construction or `reset_peaks`."""
        return self._peak[category]

    def reset_peaks(self) -> None:
        """Start measuring peaks from what is held now."""
        self._peak = Counter(self._held)

    @property
    def total(self) -> int:
        """Bytes held in all categories together."""
        return sum(self._held.values())

    def as_dict(self) -> dict[str, int]:
        """Bytes held now, by category name; categories that hold nothing are left out."""
        return {str(category): held for category, held in self._held.items() if held}
