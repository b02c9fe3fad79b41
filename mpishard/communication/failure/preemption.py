"""A preemption notice, SIGUSR1: kept from the moment it arrives until a training loop obeys it.

A rank receives it from ``import mpishard`` on: before the first step it builds a model, reads data
and loads a checkpoint, and the notice is not repeated. Before that the rank has no handler:
`mpishard run` starts ranks with the signal blocked, so that a notice which comes early waits until
the import. Started otherwise, the process ends by it.

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

__all__ = ["PreemptionNotice", "preemption_notice"]


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
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            self._process = os.getpid()
            signal.signal(signal.SIGUSR1, self._handle)
            atexit.register(self.report_if_ignored)
        if settings.job_folder() is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))

    def obey(self) -> None:
        """Note that the ranks save and end."""
        self.is_given = False
        self._was_obeyed = True

    def report_if_ignored(self) -> None:
        """Tell the user, at the end of the process, of a notice that no training loop obeyed."""
        if not self.is_given or self._was_obeyed or os.getpid() != self._process:
            return
        folder = settings.job_folder()
        try:
            if folder is not None and folder.is_dir():
                (folder / "unheeded").touch(exist_ok=False)
        except FileExistsError:
            return  # another rank of the job has told the user
        except OSError:  # a full disk
            pass
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
