"""A thread that lets MPI move data while this rank computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from mpishard.communication.mpi.ulfm import is_loss

__all__ = ["ProgressThread"]

_PAUSE_SECONDS = 5e-5


class ProgressThread:
    """Pokes MPI while something is under way, so that it goes on without the rank's own calls.

    MPI libraries move a large message in parts, and mostly while they are called. A rank that
    multiplies matrices does not call them: what it has begun would stand still until it waits.
    The thread looks for messages on a communicator of its own, where there are none (a duplicate of
    the world: to look among one's own does not move what goes to others, in MPICH). It touches
    no collective and no array; which data are sent, and in which order, is the rank's business.

    It needs ``MPI_THREAD_MULTIPLE`` and pays where a rank has a core to spare.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : mpi4py.MPI.Intracomm
        A duplicate of the world, which is the thread's alone.
    is_busy : callable
        Whether any request is under way; called by the thread.
    """

    def __init__(self, mpi: Any, comm: Any, is_busy: Callable[[], bool]) -> None:
        self._mpi = mpi
        self._any = mpi.ANY_SOURCE, mpi.ANY_TAG
        self._comm = comm
        self._is_busy = is_busy
        self._begun = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="mpishard-progress", daemon=True)
        self._thread.start()

    @staticmethod
    def is_possible(mpi: Any) -> bool:
        """Whether MPI may be called by several threads at a time."""
        return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)

    def wake(self) -> None:
        """Say that a request was begun."""
        self._begun.set()

    def stop(self) -> None:
        """End the thread, which must not be in MPI when MPI ends. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._begun.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            self._begun.wait()
            self._begun.clear()
            while self._is_busy() and not self._stopped:
                try:
                    self._comm.Iprobe(*self._any)
                except self._mpi.Exception as error:
                    if not is_loss(self._mpi, error):
                        raise
                    return  # the rank hears of it where it waits
                time.sleep(_PAUSE_SECONDS)
