"""The MPI library of this process, loaded and started for the first backend, and its launcher.

Only this module imports mpi4py; others import its types for the type checker alone.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import os
import resource
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from mpishard.base import MPIUnavailableError, settings
from mpishard.communication.contract.status import RankState, own_page
from mpishard.communication.failure.abort import finalizing, flush_output
from mpishard.communication.failure.watchdog import watchdog
from mpishard.communication.mpi.slurm_pmi import limit_values

if TYPE_CHECKING:
    from mpi4py import Rc

# UCX, which MPICH uses between hosts, moves one segment of TCP in each call. With its default of
# 8 KiB a link of 10 Gbit/s would need 150,000 calls a second.
_TCP_SEGMENTS = {"UCX_TCP_TX_SEG_SIZE": "64k", "UCX_TCP_RX_SEG_SIZE": "256k"}
_POLL_SECONDS = 0.1  # between two looks of the main thread at a call of another thread
START_SECONDS = 10.0
"""Seconds that MPI may take to start on a busy machine before the wait for other ranks counts."""

# Needs of MPICH 5.0.2 (UCX), measured with 1 to 16 ranks, which die in MPI_Init with less.
_SHARED = "/dev/shm"  # noqa: S108 - memory, and not a place for temporary files
_SHARED_BY_RANK = 8 * 2**20
_LEAST_SHARED = 20 * 2**20
_DESCRIPTORS = 13

Result = TypeVar("Result")

_finalizes: list[bool] = []
"""Whether MPI is to end with this process; empty if this module did not start it."""


def leave_mpi_running() -> None:
    """Do not finalize MPI at the end of this process: it would wait for ranks that are gone.

    Raises
    ------
    MPIUnavailableError
        If mpi4py itself will finalize it.
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
    """Return ``mpi4py.MPI``, with MPI started.

    Raises
    ------
    MPIUnavailableError
        If mpi4py or the MPI library that it needs is not installed.
    """
    for name, size in _TCP_SEGMENTS.items():
        settings.write_default(name, size)
    try:
        # Alone a process waits for no other, so mpi4py may start MPI as it always does.
        launched = settings.pmix_launcher() or (settings.launched_world_size() or 1) > 1
        if launched and "mpi4py.MPI" not in sys.modules:
            return _start_under_watch()
        from mpi4py import MPI
    except MPIUnavailableError:
        raise
    except (ImportError, RuntimeError) as error:
        raise MPIUnavailableError(
            f"MPI was asked for, and mpi4py cannot be loaded ({error}). Fix: "
            "pip install 'mpishard[mpi]' brings mpi4py and an MPICH of its own; on a cluster, "
            "pip install 'mpishard[mpi4py]' with the site's MPI module loaded"
        ) from error
    return MPI


def _start_under_watch() -> ModuleType:
    """Start MPI, which waits for all processes of the job, while the watchdog checks the time.

    mpi4py starts MPI on import and holds Python's lock meanwhile. No other thread could run, no
    signal could be received, and a process whose peer died before it started MPI would be stuck for
    ever. A call through ctypes releases the lock.
    """
    import mpi4py

    rc: Rc = mpi4py.rc
    wanted, ends = rc.initialize, rc.finalize
    # mpi4py does not finalize MPI either: it would do so in a process that a rank forked, too,
    # which would be stuck for ever.
    rc.initialize, rc.finalize = False, bool(ends) and not wanted
    try:
        from mpi4py import MPI
    finally:
        rc.initialize, rc.finalize = wanted, ends
    if wanted and ends is not False:
        _finalizes[:] = [True]
        atexit.register(finalize_mpi, MPI, os.getpid())
    if not wanted or MPI.Is_initialized():  # the user starts it, or MPI4PY_RC_INITIALIZE did
        return MPI
    check_machine(MPI.Get_library_version())
    # The page of this process before it has a world: `mpishard run` and other ranks see the wait.
    page = own_page()
    if page is not None:
        page.end(RankState.STARTED)
    watchdog.start()
    where = "in init() for MPI to start, which needs all processes of the job"
    with watchdog.wait(lambda: where, slack=START_SECONDS):
        _initialize(MPI, rc)
    if page is not None:
        page.end(RankState.LEFT)
    return MPI


def call_uninterrupted(mpi: ModuleType, call: Callable[[], Result]) -> Result:
    """Return ``call()``, which no exception of a signal handler interrupts.

    Python runs signal handlers only on the main thread, so another thread makes the call. An
    exception that strikes the main thread meanwhile is raised when the call is over.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        return call()
    # Locks and no Event or Thread: those run Python code in which a signal's exception may strike.
    begun, over = threading.Lock(), threading.Lock()
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        if begun.acquire(blocking=False):
            try:
                results.append(call())
            except BaseException as error:  # noqa: BLE001 - the main thread raises it
                errors.append(error)
            over.release()

    over.acquire()
    interruption: BaseException | None = None
    try:
        _thread.start_new_thread(run, ())
    except BaseException as error:
        if begun.acquire(blocking=False):
            raise  # the thread, if it was started, now makes no call
        interruption = error
    while not results and not errors:
        try:  # has a loop of its own, because handlers also run when a loop begins again
            while not results and not errors:
                over.acquire(timeout=_POLL_SECONDS)
        except BaseException as error:  # noqa: BLE001 - raised below
            interruption = error
    if interruption is not None or errors:
        raise interruption or errors[0]
    return results[0]


def finalize_mpi(mpi: ModuleType, process: int) -> None:
    """Finalize MPI at the end of the process that started it, but not of a process it forked."""
    if os.getpid() == process and _finalizes[0] and mpi.Is_initialized() and not mpi.Is_finalized():
        flush_output()  # before MPI waits for other ranks, and this one may be killed
        finalizing.set()
        try:
            # Through ctypes, which releases Python's lock, so that the watchdog can run.
            ctypes.CDLL(mpi.__file__).MPI_Finalize()
        except (OSError, AttributeError):
            mpi.Finalize()


def delay_aborts() -> None:
    """Give the watchdog a second to report a killed rank, if srun has started this process.

    Open MPI ends the ranks that are connected to a killed one, with code 14, at once. An abort of
    mpishard takes as much longer. Under `mpishard run` the agents report.
    """
    if settings.is_slurm_step() and settings.job_folder() is None:
        settings.write_default("OMPI_MCA_mpi_abort_delay", "1")


def _initialize(mpi: ModuleType, rc: Rc) -> None:
    """Call MPI_Init_thread as mpi4py does, but without Python's lock."""
    level = getattr(mpi, f"THREAD_{rc.thread_level.upper()}") if rc.threads else mpi.THREAD_SINGLE
    try:
        start = ctypes.CDLL(mpi.__file__).MPI_Init_thread
    except (OSError, AttributeError):  # the library cannot be opened, or hides the function
        mpi.Init_thread(level)
        return
    limit_values(mpi.Get_library_version())
    delay_aborts()
    code = start(None, None, ctypes.c_int(level), ctypes.byref(ctypes.c_int()))
    if code:
        raise RuntimeError(f"MPI_Init_thread() failed [error code: {code}]")
    handlers = {
        "exception": mpi.ERRORS_RETURN, "abort": mpi.ERRORS_ABORT, "fatal": mpi.ERRORS_ARE_FATAL
    }  # fmt: skip
    if rc.errors in handlers:
        for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
            comm.Set_errhandler(handlers[rc.errors])


# ------------------------------------------------------------------------------ before MPI starts


def check_machine(library: str) -> None:
    """Refuse a launcher or machine on which this MPI library would die in MPI_Init.

    MPICH ends with SIGSEGV, SIGBUS or an error of its own if /dev/shm is absent, small, full or
    read-only. It also ends if the launcher uses PMIx, as Open MPI's does, and the library was not
    built for it, as MPICH's wheel. Open MPI 5 goes on without /dev/shm: it prints a warning and
    uses other transports. Every library ends if it runs out of file descriptors.

    Parameters
    ----------
    library : str
        The library's version string.

    Raises
    ------
    MPIUnavailableError
        Naming the missing resource, or the launcher and library that do not fit; and the fix.
    """
    ranks = settings.launched_local_size() or 1
    is_mpich = library.startswith("MPICH Version")
    launcher = settings.pmix_launcher()
    # The version string has the options of the build, with "pmix" among them if it was built in.
    if is_mpich and launcher is not None and "pmix" not in library.lower():
        raise MPIUnavailableError(
            f"{launcher} started this process, and mpi4py loads {_family(library)}, which cannot "
            f"join a job of it. Fix: start with {_fitting_launcher(library)}"
        )
    if short := _short_descriptors(ranks) or (_short_memory(ranks) if is_mpich else ""):
        raise MPIUnavailableError(f"MPI cannot start on this machine: {short}")


def _short_descriptors(ranks: int) -> str:
    try:
        used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names alone
    except OSError:  # not Linux
        return ""
    # The soft limit: it counts unless the process itself raises it.
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = used + _DESCRIPTORS + ranks
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return ""
    return (
        f"a process may open {limit} files, {used} are open and MPI needs about "
        f"{needed - used} more for {ranks} ranks. Allow more before the launcher starts: "
        "ulimit -n 1024"
    )


def _short_memory(ranks: int) -> str:
    options = "docker run --shm-size=2g, or the same option of your container or batch system"
    mend = f"mount -o remount,rw,size=2g {_SHARED} (as root), {options}"
    try:
        status = os.statvfs(_SHARED)
    except OSError:
        return (
            f"MPICH needs {_SHARED}, memory that processes share, and there is none: mkdir -p "
            f"{_SHARED} && mount -t tmpfs -o size=2g tmpfs {_SHARED} (as root), {options}"
        )
    if not os.access(_SHARED, os.W_OK | os.X_OK):
        return f"MPICH writes to {_SHARED}, which is read-only for this process: {mend}"
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    needed = max(_LEAST_SHARED, ranks * _SHARED_BY_RANK)
    # Other ranks may have taken their parts already, so only this rank's part must be free.
    if total >= needed and free >= _SHARED_BY_RANK:
        return ""
    return (
        f"{_SHARED} has {total / 2**20:.1f} MiB, of which {free / 2**20:.1f} are free, and MPICH "
        f"needs about {needed / 2**20:.0f} MiB for {ranks} ranks: {mend}, or remove files that "
        "ended jobs have left there (mpishard doctor lists them)"
    )


# ----------------------------------------------------------------------------------- the launcher


def launcher_name() -> str:
    """Return the family of the launcher, guessed from the variable that it set."""
    variable = settings.launcher_variable()
    if variable is None:
        return "no launcher"
    if settings.is_slurm_step():
        return "Slurm (srun)"
    if variable.startswith("OMPI_") or variable == "PMIX_RANK":
        return "Open MPI (mpirun, prterun) or another PMIx launcher"
    return "the MPICH family (hydra's mpiexec; MPICH, Intel MPI, MVAPICH, Cray)"


def not_launched_error() -> MPIUnavailableError:
    """Return the error for a process that asks for MPI though no launcher started it."""
    return MPIUnavailableError(
        "MPI was asked for, and no MPI launcher started this process, so that its world would "
        "be one rank. Start it with: mpishard run -n 4 script.py (or: mpiexec -n 4 python "
        "script.py). For threads as ranks use mpishard.run_in_threads, for one rank "
        'init("memory")'
    )


def check_launched_world(world_size: int, library: str) -> None:
    """Refuse a world of one rank if the launcher started several processes.

    Parameters
    ----------
    world_size : int
        The world size that the MPI library reports.
    library : str
        The library's version string.

    Raises
    ------
    MPIUnavailableError
        Naming the library, the launcher and the fix.
    """
    # PMIx sets no size; a rank above 0 shows that there are several processes.
    launched = settings.launched_world_size() or settings.pmix_rank() + 1
    if world_size > 1 or launched <= 1:
        return
    variable = settings.launcher_variable()
    raise MPIUnavailableError(
        f"the launcher started {launched} processes ({variable} is set: {launcher_name()}), but "
        f"the MPI library that mpi4py loads is another one ({_family(library)}) and sees a world "
        f"of one. Each process would train alone. Fix: start with {_fitting_launcher(library)}"
    )


def _family(library: str) -> str:
    """Return the first line of a library's version, which has its name."""
    return " ".join(library.partition("\n")[0].split())


def _fitting_launcher(library: str) -> str:
    """Return the launchers that start ranks of ``library``, for an error message."""
    ours = "`mpishard run`, which takes the mpiexec that belongs to the library, or with "
    if settings.is_slurm_step():  # mpishard run takes srun as well
        fitting = "pmix" if library.startswith("Open MPI") else "pmi2"
        taken = settings.slurm_plugin() or "none"
        ours = f"`srun --mpi={fitting}` (it took {taken}; `srun --mpi=list` names others), or with "
        ours *= taken != fitting
    return (
        f"{ours}that library's mpiexec by its full path (it lies beside python if MPI was "
        "installed as a wheel); or install an mpi4py that is built for the launcher's MPI"
    )
