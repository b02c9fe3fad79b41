"""Shared memory that a killed job leaves behind, and that nobody else will remove."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mpishard.communication.contract.status import RankRecord

__all__ = ["mapped_files", "remove_shared_memory"]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where the system keeps it

_logger = logging.getLogger("mpishard")


def remove_shared_memory(records: Iterable[RankRecord]) -> list[Path]:
    """Remove the files in shared memory that the ranks had mapped and that no process maps now.

    MPI libraries name their files for the job, and remove them when ranks end in good order.
    Files of other users, and those that a process still uses, stay.

    Parameters
    ----------
    records : iterable of RankRecord
        What the ranks of the job say that they had mapped.

    Returns
    -------
    list of Path
        What was removed.
    """
    paths = {Path(name) for record in records for name in record.shared_memory}
    found = {path for path in paths if path.parent == _SHARED_MEMORY and _is_ours(path)}
    if found:
        found -= {path for path, _ in mapped_files()}
    for path in found:
        path.unlink(missing_ok=True)
        _logger.debug("removed %s, which the job left behind", path)
    return sorted(found)


def _is_ours(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)


def mapped_files(processes: Path = Path("/proc")) -> set[tuple[Path, int]]:
    """The files that are part of living processes, as these call them, with their inodes.

    Of what other users run, only what the system tells: nothing, unless this is root.
    """
    found = set()
    for maps in processes.glob("[0-9]*/maps"):
        with suppress(OSError):  # it ends meanwhile, or is another user's
            for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/"):
                    found.add((Path(fields[5]), int(fields[4])))
    return found
