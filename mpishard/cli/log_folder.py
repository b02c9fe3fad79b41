"""The folder of ``--log-dir``: what each rank prints, and its call log."""

from __future__ import annotations

import socket
from pathlib import Path

from mpishard.communication.call_file import call_files

__all__ = ["CALLS", "check_log_folder", "prepare_log_folder"]

CALLS = "calls"
"""The folder in it that is the job's own: call logs as the ranks write them."""


def check_log_folder(folder: Path) -> None:
    """Refuse what cannot be a folder for logs, or is that of a job that still runs.

    Raises
    ------
    ValueError
        Saying which of the two.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--log-dir must be a folder, and {folder} is a file")
    for file in call_files(folder / CALLS):
        # Of another machine's process nothing is known.
        if file.host == socket.gethostname() and file.is_alive():
            raise ValueError(
                f"--log-dir {folder} belongs to a job that still runs: its rank "
                f"{file.launched_rank} is process {file.pid} on {file.host}. Give each job a "
                "folder of its own"
            )


def prepare_log_folder(folder: Path) -> Path | None:
    """Make ``folder``; move the logs of an earlier job in it aside, and say where.

    Raises
    ------
    OSError
        Where it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    old = [*folder.glob("rank-*.log"), *folder.glob("rank-*.calls.txt"), *folder.glob(CALLS)]
    if not old:
        return None
    number = 1
    while (aside := folder / f"earlier-{number}").exists():
        number += 1
    aside.mkdir()
    for path in old:
        path.rename(aside / path.name)
    return aside
