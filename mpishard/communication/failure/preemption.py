"""The order to make room, SIGUSR1: kept from the moment it comes until a training loop heeds it.

A rank hears it from ``import mpishard`` on: between there and the first step it builds a model,
reads data and loads a checkpoint, and the order is not repeated. Before that it has no handler, and
the signal would end it; `mpishard run` sends none then, and leaves `marks.MAKE_ROOM`.

MPICH has a handler of its own from MPI_Init on, which calls the one that it finds.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from types import FrameType

from mpishard.communication.failure import marks
from mpishard.communication.failure.abort import launched_ending, say

__all__ = ["PreemptionNotice", "preemption_notice"]

_IGNORED = "unheeded"


class PreemptionNotice:
    """Whether this process has been told to make room, and nobody has heeded it yet."""

    def __init__(self) -> None:
        self.is_given = False
        self._was_obeyed = False
        self._process = 0

    def listen(self) -> None:
        """Hear it from now on, unless somebody else does. On the main thread alone. Idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
            return
        self._process = os.getpid()
        signal.signal(signal.SIGUSR1, self._handle)
        atexit.register(self.report_if_ignored)
        # In this order: whoever leaves the mark sends the signal then, to those who listen.
        self.is_given = marks.is_marked(marks.MAKE_ROOM)

    def obey(self) -> None:
        """The ranks save, and end: the order is obeyed."""
        self.is_given = False
        self._was_obeyed = True

    def report_if_ignored(self) -> None:
        """Tell the user, at the end, of an order that came to nothing."""
        if not self.is_given or self._was_obeyed or os.getpid() != self._process:
            return
        if marks.mark(_IGNORED, once=True):  # one rank of the job speaks
            say(
                f"mpishard: {launched_ending().name} was told to make room by SIGUSR1, and nobody "
                "heeded it: no step of an optimize(checkpoint=FOLDER) came after it"
            )

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked by the rank, and no rank: a loader of data
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.is_given = True


preemption_notice = PreemptionNotice()
"""That of this process, which hears it where a launcher started it as a rank."""
