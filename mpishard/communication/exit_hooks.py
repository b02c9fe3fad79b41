"""What happens when an MPI process ends: nobody is left waiting for it.

An exception that nobody catches, on the main thread or another, ends the job. Every other end
(the last line, ``sys.exit``) leaves the worlds in good order, and the process keeps its own exit
code. Nothing is installed in a world of one. A hook that somebody else installed before (pytest,
IPython) is theirs: the exception is shown by them or handled as they like.
"""

from __future__ import annotations

import atexit
import sys
import threading
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpishard.communication.mpi import MPICommunicationBackend

__all__ = ["install", "remove"]

_live: list[MPICommunicationBackend] = []
_hooked: set[str] = set()


def install(backend: MPICommunicationBackend) -> None:
    """Watch over ``backend``, a root world, until `remove`."""
    _live.append(backend)
    if backend.world_size == 1 or _hooked:
        return
    _hooked.add("this process")
    atexit.register(_leave_all)
    previous = sys.excepthook

    def uncaught(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if _live and not _is_interactive():
            _live[0].abort(error)
        previous(kind, error, trace)

    sys.excepthook = uncaught
    # Python keeps its own hook under this name; another one is pytest's, or the user's choice.
    if threading.excepthook is threading.__excepthook__:

        def uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
            if _live and args.exc_value is not None and args.exc_type is not SystemExit:
                _live[0].abort(args.exc_value)
            threading.__excepthook__(args)

        threading.excepthook = uncaught_in_thread


def remove(backend: MPICommunicationBackend) -> None:
    """Stop watching over ``backend``."""
    if backend in _live:
        _live.remove(backend)


def _is_interactive() -> bool:
    """At a prompt an exception ends nothing."""
    return hasattr(sys, "ps1")


def _leave_all() -> None:
    for backend in tuple(_live):
        try:
            backend.shutdown()
        except KeyboardInterrupt as error:
            backend.abort(error)
