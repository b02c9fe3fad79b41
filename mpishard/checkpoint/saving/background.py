"""A function that runs in a thread, and its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from enum import IntEnum

_YIELD_SECONDS = 0.001


# The states are integers, because the ranks exchange them as an array.
class TaskState(IntEnum):
    """State of a `BackgroundTask`."""

    WORKING = 0
    DONE = 1
    FAILED = 2


class BackgroundTask:
    """A thread that calls ``body()`` once. Its errors are kept, not raised.

    Parameters
    ----------
    body : callable
        The function. It must not communicate, because only one thread of a rank may.
    """

    def __init__(self, body: Callable[[], None]) -> None:
        self._body = body
        self.state = TaskState.WORKING
        self.error: BaseException | None = None
        """The error that ``body()`` raised, if the state is ``FAILED``."""
        # A process that ends by an error does not wait for a daemon thread, nor for the disk.
        self._thread = threading.Thread(target=self._run, name="mpishard-checkpoint", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait until the function has ended, for at most ``seconds``."""
        self._thread.join(seconds)

    def _run(self) -> None:
        # The starting thread waits until this thread runs, and then for Python's lock. Without
        # this sleep training would lose milliseconds.
        time.sleep(_YIELD_SECONDS)
        try:
            self._body()
        except BaseException as error:  # noqa: BLE001 - `PendingSave` raises it, on all ranks
            self.error = error
            self.state = TaskState.FAILED
        else:
            self.state = TaskState.DONE
