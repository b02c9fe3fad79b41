"""What `mpishard run` and its ranks tell each other by files without content, in the job's folder.

A mark is there from the moment on that it is true, whoever looks, and whenever; what is held is
there before, and says by whom it is held that he runs. A process that no `mpishard run` of this
machine started has no such folder: it tells nobody, and is told nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from mpishard import settings

__all__ = [
    "HELD",
    "MAKE_ROOM",
    "SAVING",
    "STARTING",
    "hold",
    "is_marked",
    "mark",
    "marked",
    "unmark",
]

STARTING = "starting-"
"""With a process id: the rank is about to start MPI."""

SAVING = "saving-"
"""With a process id: the rank is where it saves, and ends, when it is told to make room."""

HELD = "held-"
"""With the launcher's number of a rank: a named pipe that the rank holds open as long as it runs.

The system closes it before it tells the rank's parent, and one rank's after the other's as they
end.
"""

MAKE_ROOM = "make-room"
"""The job has been told to make room, by SIGUSR1."""

_HIGH = 512
"""Launchers' connections have lower numbers."""

_held: list[int] = []


def _let_go() -> None:
    """Close what is held, in a process that a rank forked: it may outlive the rank."""
    while _held:
        with suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)


def mark(name: str, *, once: bool = False) -> bool:
    """Leave the mark ``name``; with ``once``, whether nobody had: true where there is no folder."""
    path = _path(name)
    if path is not None:
        try:
            path.touch(exist_ok=not once)
        except FileExistsError:
            return False
        except OSError:  # a full disk, of which the call log will tell
            pass
    return True


def hold(name: str) -> None:
    """Hold the named pipe ``name`` until this process ends, or execs, where somebody reads it."""
    path = _path(name)
    if path is None:
        return
    try:
        handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # nobody made one, or on another machine
        return
    _held.append(_closed_early(handle))


def unmark(name: str) -> None:
    """Take the mark ``name`` back, where it is."""
    path = _path(name)
    if path is not None:
        with suppress(OSError):
            path.unlink()


def is_marked(name: str) -> bool:
    """Whether the mark ``name`` has been left."""
    path = _path(name)
    return path is not None and path.exists()


def marked(folder: Path, kind: str) -> frozenset[int]:
    """Process ids of the ranks that have left a mark of ``kind``, not `HELD`, in ``folder``."""
    names = [path.name.removeprefix(kind) for path in folder.glob(f"{kind}*")]
    return frozenset(int(name) for name in names if name.isdecimal())


def _closed_early(handle: int) -> int:
    """The same file under a high number.

    Where a process ends Linux goes through its files upwards, and closes them for good in the
    other direction: nothing promises it, and tests/cli/test_rank_processes.py sees to it.
    """
    import fcntl  # not on every system that only trains in memory

    try:
        high = fcntl.fcntl(handle, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:  # more than the process may have
        return handle
    os.close(handle)
    return high


def _path(name: str) -> Path | None:
    folder = settings.job_folder()
    return None if folder is None or not folder.is_dir() else folder / name
