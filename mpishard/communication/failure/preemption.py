"""A preemption notice, SIGUSR1: kept from the moment it arrives until a training loop obeys it.

A rank receives it from ``import mpishard`` on: before the first step it builds a model, reads data
and loads a checkpoint, and the notice is not repeated. Before that the rank has no handler, and
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
    """Whether this process has been given notice, and no training loop has obeyed it yet."""

    def __init__(self) -> None:
        self.is_given = False
        self._was_obeyed = False
        self._process = 0

    def listen(self) -> None:
        """Receive it from now on, unless the user has a handler. Main thread only. Idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
            return
        self._process = os.getpid()
        signal.signal(signal.SIGUSR1, self._handle)
        atexit.register(self.report_if_ignored)
        # In this order: the launcher leaves the mark first, and then signals those that listen.
        self.is_given = marks.is_marked(marks.MAKE_ROOM)

    def obey(self) -> None:
        """Note that the ranks save and end."""
        self.is_given = False
        self._was_obeyed = True

    def report_if_ignored(self) -> None:
        """Tell the user, at the end of the process, of a notice that no training loop obeyed."""
        if not self.is_given or self._was_obeyed or os.getpid() != self._process:
            return
        if marks.mark(_IGNORED, once=True):  # one rank of the job reports
            say(
                f"mpishard: {launched_ending().name} was preempted by SIGUSR1, and nothing obeyed "
                "it: no step of an optimize(checkpoint=FOLDER) came after it"
            )

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a fork of the rank, such as a data loader, is no rank
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.is_given = True


preemption_notice = PreemptionNotice()
"""The notice of this process, which receives it if a launcher started it as a rank."""
