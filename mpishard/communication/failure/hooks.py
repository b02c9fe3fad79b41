"""The end of each process of an MPI job, so that no rank waits for it for ever.

An uncaught exception, on the main thread or another, ends the job. If a launcher started several
processes this holds from ``import mpishard`` on, because the others may wait inside ``init`` for
one that never comes. Every other end (the last line, ``sys.exit``) leaves the worlds in good order,
and the process keeps its own exit code. The end itself has a time limit, ``MPISHARD_EXIT_TIMEOUT``.
mpishard does not report a process that ends so before it called ``init``, because the script may
not mean to call it. Ranks that did call it give up after ``MPISHARD_TIMEOUT``.

Nothing is installed in a world of one. Hooks that others installed before (pytest, IPython) stay.

A rank's children (a worker of multiprocessing, a script that plots) inherit the launcher's
variables. They could be taken for the rank, and their exception would end the job. So the first
process that imports mpishard writes its process id to the environment.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from traceback import walk_stack
from types import TracebackType

from mpishard.base import MPIUnavailableError, settings
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.call import MessageWait
from mpishard.communication.contract.matching import who
from mpishard.communication.failure.abort import (
    EXIT_LIMIT,
    STDERR,
    Termination,
    launched_ending,
    launcher_socket,
)
from mpishard.communication.failure.report import user_place
from mpishard.communication.failure.watchdog import watchdog

_LATER_SECONDS = 2.0  # between the limits of the watchdog, of faulthandler and of SIGALRM

_live: list[CommunicationBackend] = []
_hooked: set[str] = set()
# A process that a rank forked is no rank, so it leaves no world when it ends.
os.register_at_fork(after_in_child=_live.clear)


def install_before_init() -> None:
    """Let an uncaught exception end the job if a launcher started several processes."""
    claim_rank()
    if (settings.launched_world_size() or 1) > 1 and not is_helper():
        _hook_exceptions()


def install(backend: CommunicationBackend) -> None:
    """Watch over ``backend``, a root world, until `remove`."""
    _live.append(backend)
    _hooked.add("a world")
    if backend.world_size > 1:
        _hook_exceptions()
        if "exit" not in _hooked:
            _hooked.add("exit")
            atexit.register(_leave_all)


def remove(backend: CommunicationBackend) -> None:
    """Stop watching over ``backend``."""
    if backend in _live:
        _live.remove(backend)


def _hook_exceptions() -> None:
    if "exceptions" in _hooked:
        return
    _hooked.add("exceptions")
    process = os.getpid()
    previous = sys.excepthook

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # An exception at an interactive prompt does not end the process.
        if not hasattr(sys, "ps1"):
            _end(error, process)
        # Reached in a world of one, at a prompt, and in a process that is no rank: elsewhere `_end`
        # ends the process.
        previous(kind, error, trace)

    def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            _end(args.exc_value, process)
        threading.__excepthook__(args)

    sys.excepthook = uncaught
    # Replaced only if it is Python's own hook, and not that of pytest or of the user.
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = uncaught_in_thread


def _end(error: BaseException, process: int) -> None:
    """End the job if others may wait for this process: in a world, or in the first ``init``."""
    if os.getpid() != process:
        return  # a rank forked this process, which is no rank itself
    if _live:
        _live[0].abort(error)
    elif "a world" not in _hooked:
        launched_ending().fail(error, "before init() had returned")


def _leave_all() -> None:
    """Leave every world, and limit the time that the process then takes to end."""
    ending = launched_ending()
    with suppress(RuntimeError):  # Python starts no thread while it ends
        watchdog.guard(ending)  # keeps the watchdog running when the worlds have been left
    for backend in tuple(_live):
        try:
            backend.shutdown()
        except KeyboardInterrupt as error:
            backend.abort(error)
    last = watchdog.last or ending
    if last.statuses is not None:
        # Marks on the page that this rank has come here, for `_where_it_ends` of other ranks.
        # Every other reader ignores the wait of a rank that has left.
        last.statuses.page.wait(MessageWait(last.rank or 0, 0, is_send=False, group=""))
    # This wait has no end: it lasts as long as the process.
    watchdog.wait(lambda: _where_it_ends(last), ending, limit=EXIT_LIMIT).__enter__()
    limit = EXIT_LIMIT.seconds()
    if limit:
        # The watchdog ends with Python's threads. After that faulthandler's C thread prints where
        # Python is stuck. If mpi4py was imported first, MPI_Finalize comes even later, after
        # Python's own end, and only a timer of the system can end the process.
        faulthandler.dump_traceback_later(limit + _LATER_SECONDS, exit=True, file=STDERR)
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            signal.setitimer(signal.ITIMER_REAL, limit + 2 * _LATER_SECONDS)


def _where_it_ends(job: Termination) -> str:
    """Return the place at which this process is stuck at its end, to stand after "waited .. s"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if any(caller.f_code.co_name == "finalize_mpi" for caller, _ in walk_stack(frame)):
        records = [r for r in job.records() if r.is_known and r.is_alive and not r.waited]
        running = [record.rank for record in records if record.rank != job.rank]
        late = f" ({who(running)} {'do' if len(running) > 1 else 'does'} not)" * bool(running)
        return f"in MPI_Finalize, which every rank of the job must call{late}"
    place = user_place(frame)
    return f"for its process to end{place and ', at '}{place}"


# ------------------------------------------------------------------- which process is the rank


def claim_rank() -> None:
    """Make this process the rank, if a launcher started several and no rank started this one."""
    if (settings.launched_world_size() or 1) > 1 and not is_helper():
        # With the launcher's identity and connection: processes of a job that this rank starts have
        # others, and are no helpers.
        words = (os.getpid(), launcher_socket(), *settings.launch_identity())
        settings.write("MPISHARD_RANK_PROCESS", " ".join(map(str, words)))


def is_helper() -> bool:
    """Return whether a rank started this process, or forked it.

    A rank may start a job of its own. The processes of that job are ranks: their launcher gives
    them another identity or another connection.
    """
    words = settings.rank_process().split(" ")
    if len(words) < 2 or words[0] == str(os.getpid()):
        return False
    connection = str(launcher_socket())
    return words[2:] == list(settings.launch_identity()) and connection in ("0", words[1])


def helper_error() -> MPIUnavailableError:
    """Return the error for a process that asks for MPI though a rank started it."""
    return MPIUnavailableError(
        f"this is a helper process of rank {settings.launched_rank()}: that rank's process "
        f"({settings.rank_process().partition(' ')[0]}) started it, and no launcher did, so that "
        "it is no rank and has no place in the world. Let the rank call the collectives; for one "
        'rank of its own use init("memory"), for ranks of its own mpishard.run_in_threads or '
        "mpishard run. If this process is to be the rank, and the other is not, import mpishard "
        "only in this one"
    )
