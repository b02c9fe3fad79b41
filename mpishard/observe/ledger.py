"""The memory ledger: bytes that a rank holds, by purpose."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from enum import StrEnum

from mpishard.base import HOST, Array, Device, DType, is_device_array


class MemorySpace(StrEnum):
    """Host or GPU memory."""

    HOST = "host"
    DEVICE = "device"  # memory of a GPU


class MemoryCategory(StrEnum):
    """The purpose of memory."""

    PARAMETERS = "parameters"  # the rank's own parameters, or its replica
    GRADIENTS = "gradients"  # reduced gradients that wait for the update
    OPTIMIZER_STATE = "optimizer_state"
    GATHERED = "gathered"  # full parameters of the units in use
    FULL_GRADIENTS = "full_gradients"  # a unit's gradient before it is reduced
    BEST_PARAMETERS = "best_parameters"  # parameters of a training loop's best evaluation
    SCRATCH = "scratch"


class MemoryLedger:
    """An account of arrays: it counts their bytes until they are freed.

    The counts are those of memory that is really allocated. An entry leaves the ledger when Python
    frees its array, and not by a call.
    """

    def __init__(self) -> None:
        # Another thread may drop the last view of shared memory. The garbage collector may drop it
        # on this thread while it holds the lock, which must therefore be reentrant.
        self._lock = threading.RLock()
        # Bytes by category, and by category and place.
        self._held: Counter[_Key] = Counter()
        self._peak: Counter[_Key] = Counter()

    def allocate(
        self, category: MemoryCategory, length: int, dtype: DType, device: Device = HOST
    ) -> Array:
        """Allocate an uninitialised vector of ``length`` elements on ``device``, and count it."""
        array = device.namespace.empty(length, dtype)
        self.book(category, array, array.nbytes)
        return array

    def book(self, category: MemoryCategory, array: Array, nbytes: int) -> None:
        """Count ``nbytes`` under ``category`` until Python frees ``array``.

        They may be fewer than its bytes: this rank's part of an array in shared memory.
        """
        place = MemorySpace.DEVICE if is_device_array(array) else MemorySpace.HOST
        with self._lock:
            for key in (category, (category, place)):
                self._held[key] += nbytes
                self._peak[key] = max(self._peak[key], self._held[key])
        # Not at the exit of the process, when nobody reads the counts.
        weakref.finalize(array, self._free, category, place, nbytes).atexit = False

    def _free(self, category: MemoryCategory, place: MemorySpace, nbytes: int) -> None:
        with self._lock:
            self._held[category] -= nbytes
            self._held[category, place] -= nbytes

    def held(self, category: MemoryCategory, place: MemorySpace | str | None = None) -> int:
        """Return the bytes held now in ``place``, ``"host"`` or ``"device"``; in both without."""
        return self._held[_key(category, place)]

    def peak(self, category: MemoryCategory, place: MemorySpace | str | None = None) -> int:
        """Return the most bytes held at once since construction or `reset_peaks`; see `held`."""
        return self._peak[_key(category, place)]

    def reset_peaks(self) -> None:
        """Set all peaks to the bytes that are held now."""
        self._peak = Counter(self._held)

    @property
    def total(self) -> int:
        """Bytes held in all categories together."""
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, int]:
        """Return the bytes held now, by category name; categories without bytes are left out."""
        return {
            str(key): held
            # A copy, because another thread may add a category meanwhile.
            for key, held in tuple(self._held.items())
            if held and isinstance(key, MemoryCategory)
        }

    def __repr__(self) -> str:
        held = ", ".join(f"{name} {nbytes:,} B" for name, nbytes in self.as_dict().items())
        if not held:  # as after the model is gone, when the peaks are still of interest
            peaks = [
                (str(k), n) for k, n in self._peak.items() if n and isinstance(k, MemoryCategory)
            ]
            held = "nothing held now; peaks: " + ", ".join(f"{k} {n:,} B" for k, n in peaks)
            held = held if peaks else "nothing held"
        return f"{type(self).__name__}({held})"


_Key = MemoryCategory | tuple[MemoryCategory, MemorySpace]


def _key(category: MemoryCategory, place: MemorySpace | str | None) -> _Key:
    return category if place is None else (category, MemorySpace(place))
