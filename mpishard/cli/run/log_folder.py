"""The folder of ``--log-dir``: what each rank prints, and its call log, at each start."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from mpishard.communication.contract.status import records_in

__all__ = [
    "CALLS",
    "check_log_folder",
    "folder_of_start",
    "held_log_folder",
    "prepare_log_folder",
]

CALLS = "calls"
"""The folder in it that is the job's own: call logs as the ranks write them."""

_RESTARTS = "restart-[0-9]*"

_LOCK = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""What a file system says that has no locks, as some parallel ones are mounted."""


def folder_of_start(folder: Path, restart_count: int) -> Path:
    """Where the ranks' logs are, in ``folder``, once the job has been restarted so many times."""
    return folder / f"restart-{restart_count}" if restart_count else folder


def check_log_folder(folder: Path) -> None:
    """Refuse what cannot be a folder for logs, or is that of a job that still runs.

    Raises
    ------
    ValueError
        Saying which of the two.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--log-dir must be a folder, and {folder} is a file")
    starts = (folder, *folder.glob(_RESTARTS))
    for record in chain.from_iterable(
        records_in(start / CALLS, with_calls=False) for start in starts
    ):
        # Of another machine's process nothing is known.
        if record.host == socket.gethostname() and record.is_alive:
            raise ValueError(
                f"--log-dir {folder} belongs to a job that still runs: its rank "
                f"{record.launched_rank} is process {record.pid} on {record.host}. Give each job a "
                "folder of its own"
            )


@contextmanager
def held_log_folder(folder: Path) -> Iterator[None]:
    """Make ``folder``, and keep other jobs out of it meanwhile: those of scripts of any kind.

    The file of the lock stays: one that is removed could be locked by two, each its own.

    Raises
    ------
    OSError
        Where it cannot be written.
    ValueError
        Where another job holds it.
    """
    import fcntl  # not on every system that only trains in memory

    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"--log-dir {folder} belongs to a job that still runs. Give each job a folder of "
                "its own"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(handle)


def prepare_log_folder(folder: Path) -> Path | None:
    """Move the logs of an earlier job in ``folder`` aside, and say where.

    Raises
    ------
    OSError
        Where it cannot be written.
    """
    names = ("rank-*.log", "rank-*.calls.txt", CALLS, _RESTARTS)
    old = [path for name in names for path in folder.glob(name)]
    if not old:
        return None
    number = 1
    while (aside := folder / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for path in old:
        path.rename(aside / path.name)
    return aside
