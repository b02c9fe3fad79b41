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
import os
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from mpishard import settings
from mpishard.communication.failure.abort import launched_ending
from mpishard.communication.failure.rank_process import claim_rank, is_helper

if TYPE_CHECKING:
    from mpishard.communication.contract.backend import CommunicationBackend

__all__ = ["install", "install_before_init", "remove"]

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
    for backend in tuple(_live):
        try:
            backend.shutdown()
        except KeyboardInterrupt as error:
            backend.abort(error)
