"""Backend whose rank raises, sleeps or ends at the n-th collective of a save or a load."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from places import Place

from mpishard.checkpoint import StagingBuffer

__all__ = ["ACTIONS", "OPERATIONS", "Interruption", "operate"]

ACTIONS = ("raise", "sleep", "kill")
OPERATIONS = ("save", "save_async", "load")


class Interruption:
    """Counts the collectives of a rank, and interrupts it at one of them.

    Parameters
    ----------
    backend : CommunicationBackend
        The rank's.
    at : int
        The collective, from 1; 0 for none.
    action : str
        "raise", "sleep" for the given seconds, or "kill".
    """

    def __init__(self, backend: Any, at: int = 0, action: str = "", seconds: float = 0.0) -> None:
        self.count = 0
        self._at, self._action, self._seconds = at, action, seconds
        self._admit = backend._admit
        backend._admit = self._call

    def _call(self, *arguments: Any, **options: Any) -> Any:
        self.count += 1
        if self.count == self._at:
            if self._action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._action == "raise":
                raise ValueError("boom")
            time.sleep(self._seconds)
        return self._admit(*arguments, **options)


def operate(backend: Any, place: Place, operation: str, number: int) -> None:
    """One rank of a save, which has the number as step and seed, or of a load."""
    if operation == "load":
        place.load_on(backend)
        return
    staging = StagingBuffer() if operation == "save_async" else None
    pending = place.begin(backend, number, number, staging)
    while staging is not None and not pending.poll():
        time.sleep(0.001)
    pending.wait()
