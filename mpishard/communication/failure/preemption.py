"""The order to save and end, SIGUSR1: kept from the moment it comes until a training loop obeys it.

A rank receives it from ``import mpishard`` on: between there and the first step it builds a model,
reads data and loads a checkpoint, and the order is not repeated. Before that it has no handler:
`mpishard run` starts ranks with the signal blocked, so that an order which comes early waits until
the import. Started otherwise, the process would end by it.

MPICH has a handler of its own from MPI_Init on, which calls the one that it finds.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from types import FrameType

from mpishard import settings
from mpishard.communication.failure.abort import launched_ending, say

__all__ = ["OrderToMakeRoom", "order_to_make_room"]


class OrderToMakeRoom:
    """Whether this process has been told to make room, and nobody has heeded it yet."""

    def __init__(self) -> None:
        self.is_given = False
        self._was_heeded = False
        self._process = 0

    def listen(self) -> None:
        """Receive it from now on, unless a handler of the user's does. Idempotent.

        On the main thread alone.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            self._process = os.getpid()
            signal.signal(signal.SIGUSR1, self._hear)
            atexit.register(self.say_if_unheeded)
        if settings.job_folder() is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))

    def heed(self) -> None:
        """The ranks save, and end: the order is obeyed."""
        self.is_given = False
        self._was_heeded = True

    def say_if_unheeded(self) -> None:
        """Tell the user, at the end, of an order that came to nothing."""
        if not self.is_given or self._was_heeded or os.getpid() != self._process:
            return
        if _is_first_to_say_so():
            say(
                f"mpishard: {launched_ending().name} was told to make room by SIGUSR1, and nobody "
                "heeded it: no step of an optimize(checkpoint=FOLDER) came after it"
            )

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked by the rank, and no rank: a loader of data
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.is_given = True


def _is_first_to_say_so() -> bool:
    """Whether no other rank of the job has told the user; True if there is no job's folder."""
    folder = settings.job_folder()
    try:
        if folder is not None and folder.is_dir():
            (folder / "unheeded").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:  # a full disk
        pass
    return True


order_to_make_room = OrderToMakeRoom()
"""That of this process, which hears it where a launcher started it as a rank."""
