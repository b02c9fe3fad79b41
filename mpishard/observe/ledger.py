"""The memory ledger: bytes that a rank holds, by purpose."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from enum import StrEnum
from typing import Any

import numpy as np

from mpishard.arrays import Array, is_device_array
from mpishard.devices import HOST, Device


class Place(StrEnum):
    """Host or GPU memory."""

    HOST = "host"
    DEVICE = "device"  # of a GPU


class MemoryCategory(StrEnum):
    """The purposes of memory."""

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
        # By category, and by category and place.
        self._held: Counter[_Key] = Counter()
        self._peak: Counter[_Key] = Counter()

    def allocate(
        self, category: MemoryCategory, length: int, dtype: np.dtype[Any], device: Device = HOST
    ) -> Array:
        """An uninitialised vector of ``length`` elements on ``device``, under ``category``."""
        array = device.namespace.empty(length, dtype)
        self.book(category, array, array.nbytes)
        return array

    def book(self, category: MemoryCategory, array: Array, nbytes: int) -> None:
        """Count ``nbytes`` of ``array`` until it is garbage: this rank's part of shared memory."""
        place = Place.DEVICE if is_device_array(array) else Place.HOST
        with self._lock:
            for key in (category, (category, place)):
                self._held[key] += nbytes
                self._peak[key] = max(self._peak[key], self._held[key])
        weakref.finalize(array, self._free, category, place, nbytes).atexit = False

    def _free(self, category: MemoryCategory, place: Place, nbytes: int) -> None:
        with self._lock:
            self._held[category] -= nbytes
            self._held[category, place] -= nbytes

    def held(self, category: MemoryCategory, place: Place | str | None = None) -> int:
        """Bytes held now; in ``place``, ``"host"`` or ``"device"``, or both together."""
        return self._held[_key(category, place)]

    def peak(self, category: MemoryCategory, place: Place | str | None = None) -> int:
        """Most bytes held at once since construction or `reset_peaks`, as `held`."""
        return self._peak[_key(category, place)]

    def reset_peaks(self) -> None:
        """Start measuring peaks from the bytes that are held now."""
        self._peak = Counter(self._held)

    @property
    def total(self) -> int:
        """Bytes held in all categories together."""
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, int]:
        """Bytes held now, by category name; categories that hold nothing are left out."""
        return {
            str(key): held
            for key, held in tuple(self._held.items())
            if held and isinstance(key, MemoryCategory)
        }

    def __repr__(self) -> str:
        held = ", ".join(f"{name} {nbytes:,} B" for name, nbytes in self.as_dict().items())
        return f"{type(self).__name__}({held or 'nothing held'})"


_Key = MemoryCategory | tuple[MemoryCategory, Place]


def _key(category: MemoryCategory, place: Place | str | None) -> _Key:
    return category if place is None else (category, Place(place))
