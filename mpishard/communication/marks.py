"""What `mpishard run` and its ranks tell each other by empty files in the job's folder.

Each is there from the moment on that it is true, whoever looks, and whenever. A process that no
`mpishard run` of this machine started has no such folder: it tells nobody, and is told nothing.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from mpishard import settings

__all__ = ["MAKE_ROOM", "SAVING", "STARTING", "is_marked", "mark", "marked", "unmark"]

STARTING = "starting-"
"""With a process id: the rank is about to start MPI."""

SAVING = "saving-"
"""With a process id: the rank is where it saves, and ends, when it is told to make room."""

MAKE_ROOM = "make-room"
"""The job has been told to make room, by SIGUSR1."""


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
    """Process ids of the ranks that have left a mark of ``kind`` in ``folder``."""
    names = [path.name.removeprefix(kind) for path in folder.glob(f"{kind}*")]
    return frozenset(int(name) for name in names if name.isdecimal())


def _path(name: str) -> Path | None:
    folder = settings.job_folder()
    return None if folder is None or not folder.is_dir() else folder / name
