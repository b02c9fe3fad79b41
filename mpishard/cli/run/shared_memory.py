"""Files that jobs leave in ``/dev/shm``: which of them no process maps, and their removal.

MPI libraries remove their files if ranks end in good order, and a killed rank does not.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from mpishard.communication import RankRecord

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory, and not a place for temporary files

_OF_JOBS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "mpishard-*")
_STARTING_SECONDS = 60

_logger = logging.getLogger("mpishard")


def remove_shared_memory(records: Iterable[RankRecord]) -> list[Path]:
    """Remove the files in shared memory that the ranks had mapped and that no process maps now.

    Files of other users stay.

    Parameters
    ----------
    records : iterable of RankRecord
        Status pages of the job's ranks, which name the files that they had mapped.

    Returns
    -------
    list of Path
        The files that were removed.
    """
    paths = {Path(name) for record in records for name in record.shared_memory}
    unmapped = _unmapped(path for path in sorted(paths) if path.parent == SHARED_MEMORY)
    found = [path for path, status in unmapped.items() if status.st_uid == os.geteuid()]
    for path in found:
        path.unlink(missing_ok=True)
        _logger.debug("removed %s, which the job left behind", path)
    return found


def leftovers(folder: Path = SHARED_MEMORY, processes: Path = Path("/proc")) -> list[Path]:
    """Return files of MPI jobs in ``folder`` that no process maps, and that this user may remove.

    Files of the last minute are left out, because a job may be about to map them.
    """
    now, user = time.time(), os.geteuid()
    paths = {path for pattern in _OF_JOBS for path in folder.glob(pattern)}
    return [
        path
        for path, status in _unmapped(sorted(paths), processes).items()
        if user in (0, status.st_uid)
        and now - max(status.st_mtime, status.st_ctime) > _STARTING_SECONDS
    ]


def _unmapped(paths: Iterable[Path], processes: Path = Path("/proc")) -> dict[Path, os.stat_result]:
    """Return the regular files among ``paths`` that no living process maps.

    The system hides the processes of other users, unless this is root.
    """
    found = {}
    for path in paths:
        with suppress(FileNotFoundError):  # its job has just ended
            status = path.lstat()
            # No links, through which another file could be meant.
            if stat.S_ISREG(status.st_mode):
                found[path] = status
    # Read after the files were listed, because a job may have mapped one meanwhile. Compared by
    # name, because in another container the folder may have another path.
    mapped = set()
    for maps in processes.glob("[0-9]*/maps") if found else ():
        with suppress(OSError):  # the process has ended, or is another user's
            for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6:
                    mapped.add((Path(fields[5]).name, int(fields[4])))
    return {
        path: status for path, status in found.items() if (path.name, status.st_ino) not in mapped
    }
