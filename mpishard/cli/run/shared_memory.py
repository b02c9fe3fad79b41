"""Files that jobs leave in ``/dev/shm`` and ``/tmp``: those of dead jobs, and their removal.

MPI libraries and launchers remove their files if they end in good order, and killed ones do not.
The agents of other hosts run this file as a script, so it imports only the standard library.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from mpishard.communication import RankRecord

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - memory, and not a place for temporary files

_OF_JOBS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "mpishard-*")
_STARTING_SECONDS = 60
_MAPPING_SECONDS = 0.1
"""Time in which a process maps the file that it has just created."""

_PROXY_SECONDS = 10.0
"""Time in which Hydra's proxy writes its file after its start."""

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


def remove_files_of_dead_jobs(since: float | None = None) -> None:
    """Remove the files of this user that jobs have left behind on this host, also in ``/tmp``.

    Parameters
    ----------
    since : float, optional
        Time, of `time.time`, of the start of a job that has ended now. Its files may be younger
        than those that `leftovers` returns.
    """
    dead = leftovers()
    if since is not None:
        paths = sorted(path for pattern in _OF_JOBS for path in SHARED_MEMORY.glob(pattern))
        if young := [path for path, s in _unmapped(paths).items() if s.st_ctime >= since]:
            time.sleep(_MAPPING_SECONDS)
            dead += [path for path, s in _unmapped(young).items() if s.st_uid == os.geteuid()]
    for path in dead:
        with suppress(OSError):  # another user's, if this is not root
            path.unlink()
    folder = Path(tempfile.gettempdir())
    topologies = _own(folder.glob("hydra_hwloc_xmlfile_*"))
    of_daemons = _own(folder.glob("prted.*"))
    launchers = _launchers() if topologies or of_daemons else {}
    starts = [start for name, start in launchers.values() if name.startswith("hydra_pmi")]
    for path in topologies:
        with suppress(OSError):  # removed meanwhile
            written = path.stat().st_mtime
            if not any(-1 < written - start < _PROXY_SECONDS for start in starts):
                path.unlink()
    for path in of_daemons:
        process = path.name.rpartition(".")[2]
        if process.isdecimal() and int(process) not in launchers:
            shutil.rmtree(path, ignore_errors=True)
    for path in _own(folder.glob("mpishard-job-*")):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STARTING_SECONDS:
                remove_folder(path, only_of_dead=True)


def hold_folder(folder: Path) -> int | None:
    """Mark the folder of a job as used until this process ends; return None if another one has."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
        else:
            return handle
    return None


def remove_folder(folder: Path, *, only_of_dead: bool = False) -> None:
    """Remove the folder of a job, unless its process runs and it must be ``only_of_dead``."""
    handle = hold_folder(folder) if only_of_dead else -1
    if handle is not None:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            os.close(handle)


def _own(paths: Iterable[Path]) -> list[Path]:
    """Return those of ``paths`` that belong to this user, and are no links."""
    found = []
    for path in paths:
        with suppress(FileNotFoundError):
            status = path.lstat()
            if status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode):
                found.append(path)
    return found


def _launchers() -> dict[int, tuple[str, float]]:
    """Return name and start time of the processes of MPI launchers on this host, by process id."""
    found = {}
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            text = (path / "stat").read_text()
            name, fields = (
                text.partition("(")[2].rpartition(")")[0],
                text.rpartition(")")[2].split(),
            )
            if (
                name.startswith(("hydra_pmi", "prte", "mpiexec", "mpirun"))
                and fields[0] not in "ZX"
            ):
                found[int(path.name)] = name, boot + int(fields[19]) / os.sysconf("SC_CLK_TCK")
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
    inodes = {str(status.st_ino) for status in found.values()}  # few lines are of these
    for maps in processes.glob("[0-9]*/maps") if found else ():
        with suppress(OSError):  # the process has ended, or is another user's
            for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[4] in inodes:
                    mapped.add((Path(fields[5]).name, int(fields[4])))
    return {
        path: status for path, status in found.items() if (path.name, status.st_ino) not in mapped
    }


if __name__ == "__main__":
    remove_files_of_dead_jobs(*map(float, sys.argv[1:]))
