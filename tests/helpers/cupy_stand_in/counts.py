"""What the stand-in is asked to do, counted: launches, copies, reads and waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Counts", "count", "counting"]


@dataclass
class Counts:
    """How often all threads of the process asked for something since the counting began.

    Attributes
    ----------
    launches : int
        Kernels: CuPy's own, and those of the package.
    copies : int
        Copies from the host to a device, or between devices.
    reads : int
        Copies from a device to the host. The host waits for each.
    waits : int
        Calls of ``synchronize``.
    """

    launches: int = 0
    copies: int = 0
    reads: int = 0
    waits: int = 0

    @property
    def operations(self) -> int:
        """All that keeps a device's queue busy: launches and copies, either way."""
        return self.launches + self.copies + self.reads


_counters: list[Counts] = []
_lock = threading.Lock()


def count(kind: str) -> None:
    """Count one of a kind, the name of an attribute of `Counts`."""
    if _counters:
        with _lock:
            for counter in _counters:
                setattr(counter, kind, getattr(counter, kind) + 1)


@contextmanager
def counting() -> Iterator[Counts]:
    """Count inside of the block."""
    counter = Counts()
    with _lock:
        _counters.append(counter)
    try:
        yield counter
    finally:
        with _lock:
            _counters[:] = [other for other in _counters if other is not counter]
