"""What happens when a process of an MPI job ends: nobody is left waiting for it.

An exception that nobody catches, on the main thread or another, ends the job: from ``import
mpishard`` on, where a launcher started several processes, because the others may wait inside
``init`` for one that never comes. Every other end (the last line, ``sys.exit``) leaves the worlds
in good order, and the process keeps its own exit code. One that ends so before it called ``init``
is not missed by mpishard: the script may never have meant to call it. Ranks that did call it give
up after ``MPISHARD_TIMEOUT``.

Nothing is installed in a world of one. A hook that somebody else installed before (pytest,
IPython) is theirs: the exception is shown by them or handled as they like.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from mpishard import settings
from mpishard.communication.failure.abort import EXIT_LIMIT, launched_ending
from mpishard.communication.failure.rank_process import claim_rank, is_helper
from mpishard.communication.failure.tracebacks import is_internal
from mpishard.communication.failure.watchdog import watchdog

if TYPE_CHECKING:
    from mpishard.communication.contract.backend import CommunicationBackend

__all__ = ["install", "install_before_init", "remove"]

_STDERR = 2
_LATER_SECONDS = 2.0

_live: list[CommunicationBackend] = []
_hooked: set[str] = set()
# A process that a rank forked is no rank: where it ends, no world is left.
os.register_at_fork(after_in_child=_live.clear)


def install_before_init() -> None:
    """Let an exception end the job, where a launcher started several processes, this among them."""
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
        # A process that a rank forked is no rank. At a prompt an exception ends nothing.
        if os.getpid() == process and not hasattr(sys, "ps1"):
            _end(error)
        previous(kind, error, trace)

    sys.excepthook = uncaught
    # Python keeps its own hook under this name; another one is pytest's, or the user's choice.
    if threading.excepthook is threading.__excepthook__:

        def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
            error = args.exc_value
            if os.getpid() == process and error is not None and args.exc_type is not SystemExit:
                _end(error)
            threading.__excepthook__(args)

        threading.excepthook = uncaught_in_thread


def _end(error: BaseException) -> None:
    """End the job where others may wait for this process: in a world, or for the first of all."""
    if _live:
        _live[0].abort(error)
    elif "a world" not in _hooked:
        launched_ending().fail(error, "before init() had returned")


def _leave_all() -> None:
    ending = launched_ending()
    with suppress(RuntimeError):  # Python starts no thread any more
        watchdog.guard(ending)  # which outlives the worlds
    for backend in tuple(_live):
        try:
            backend.shutdown()
        except KeyboardInterrupt as error:
            backend.abort(error)
    watchdog.wait(_where_it_ends, ending, limit=EXIT_LIMIT).__enter__()  # as long as it runs
    limit = EXIT_LIMIT.seconds()
    if limit:
        # The watchdog ends with Python's threads. A thread of C then says where Python is stuck;
        # and where mpi4py was imported first, MPI_Finalize comes after Python's own end.
        faulthandler.dump_traceback_later(limit + _LATER_SECONDS, exit=True, file=_STDERR)
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            signal.setitimer(signal.ITIMER_REAL, limit + 2 * _LATER_SECONDS)


def _where_it_ends() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and is_internal(frame.f_code.co_filename):
        if frame.f_code.co_name == "finalize_mpi":
            return "in MPI_Finalize, which every rank of the job must call"
        frame = frame.f_back
    if frame is None:
        return "for its process to end"
    code = frame.f_code
    return f"for its process to end, at {code.co_filename}:{frame.f_lineno}, in {code.co_qualname}"
