"""The MPI library of this process, loaded and started when the first backend is made.

mpi4py is imported here and nowhere else.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from types import ModuleType
from typing import Any

from mpishard import settings
from mpishard.communication.contract.status import RankState, own_page
from mpishard.communication.failure.abort import flush_output
from mpishard.communication.failure.watchdog import watchdog
from mpishard.errors import MPIUnavailableError

__all__ = ["START_SECONDS", "leave_mpi_running", "load_mpi"]

_STARTS = "in init() for MPI to start, which needs all processes of the job"
START_SECONDS = 10.0
"""What MPI may take to start, on a busy machine, before the wait for other ranks counts."""


_finalizes: list[bool] = []
"""Whether MPI is to end with this process; empty where that is not this module's business."""


def leave_mpi_running() -> None:
    """Do not end MPI with this process: it would wait for ranks that are gone.

    Raises
    ------
    MPIUnavailableError
        Where mpi4py itself will end it.
    """
    import mpi4py

    if not _finalizes and mpi4py.rc.finalize is not False:
        raise MPIUnavailableError(
            "on_failure='shrink': this script imported mpi4py.MPI before mpishard started it, so "
            "that mpi4py will end MPI with the process, which may wait for ever for ranks that are "
            "gone. Call mpishard.init() before that import, or set mpi4py.rc.finalize = False "
            "before it"
        )
    _finalizes[:] = [False]


def load_mpi() -> ModuleType:
    """``mpi4py.MPI``, with MPI started.

    Raises
    ------
    MPIUnavailableError
        Where mpi4py or the MPI library that it needs is not installed.
    """
    several = (settings.launched_world_size() or 1) > 1
    try:
        if several and "mpi4py.MPI" not in sys.modules:
            return _start_under_watch()
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MPIUnavailableError(
            f"MPI was asked for, and mpi4py cannot be loaded ({error}). Mend: "
            "pip install 'mpishard[mpi]' brings mpi4py and an MPICH of its own; on a cluster, "
            "pip install 'mpishard[mpi4py]' with the site's MPI module loaded"
        ) from error
    return MPI


def _start_under_watch() -> ModuleType:
    """Start MPI, which waits for all processes of the job, so that the watchdog sees it wait.

    mpi4py would do it on import, and would hold Python's lock for as long: no other thread could
    run, no signal be heard, and a process whose fellow died before it came would be stuck for
    ever. Called through ctypes the library leaves the lock alone.
    """
    import mpi4py

    rc = mpi4py.rc
    wanted, ends = rc.initialize, rc.finalize
    # Nor does mpi4py end it: it would in a process that a rank forked, too, for ever.
    rc.initialize, rc.finalize = False, bool(ends) and not wanted
    try:
        from mpi4py import MPI
    finally:
        rc.initialize, rc.finalize = wanted, ends
    if wanted and ends is not False:
        _finalizes[:] = [True]
        atexit.register(_finalize, MPI, os.getpid())
    if not wanted or MPI.Is_initialized():  # the user starts it, or MPI4PY_RC_INITIALIZE did
        return MPI
    page = own_page()  # that of the world takes its place
    if page is not None:
        page.end(RankState.STARTED)
    watchdog.start()
    with watchdog.wait(lambda: _STARTS, slack=START_SECONDS):
        _initialize(MPI, rc)
    if page is not None:
        page.end(RankState.LEFT)
    return MPI


def _finalize(mpi: Any, process: int) -> None:
    """End MPI with the process that started it, and not with one that this forked."""
    if os.getpid() == process and _finalizes[0] and mpi.Is_initialized() and not mpi.Is_finalized():
        flush_output()  # MPI may wait for other ranks
        mpi.Finalize()


def _initialize(mpi: Any, rc: Any) -> None:
    """MPI_Init_thread, as mpi4py does it, without Python's lock."""
    level = getattr(mpi, f"THREAD_{rc.thread_level.upper()}") if rc.threads else mpi.THREAD_SINGLE
    try:
        start = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError):  # not a library that can be asked by name
        mpi.Init_thread(level)
        return
    code = start(None, None, ctypes.c_int(level), ctypes.byref(ctypes.c_int()))
    if code:
        raise RuntimeError(f"MPI_Init_thread() failed [error code: {code}]")
    handlers = {
        "exception": mpi.ERRORS_RETURN, "abort": mpi.ERRORS_ABORT, "fatal": mpi.ERRORS_ARE_FATAL
    }  # fmt: skip
    if rc.errors in handlers:
        for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
            comm.Set_errhandler(handlers[rc.errors])
