"""What ``mpishard doctor`` finds of the memory that ranks of a machine share."""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mpishard.cli.doctor.finding import Finding, Verdict
from mpishard.cli.doctor.probe import ask, python_command
from mpishard.cli.run.leftovers import mapped_files
from mpishard.cli.wording import bytes_text, counted

__all__ = ["NEEDED_BYTES", "free_bytes", "larger_folder", "leftovers", "look_at_shared_memory"]

FOLDER = Path("/dev/shm")  # noqa: S108 - memory, and not a place for temporary files

NEEDED_BYTES = 64 * 2**20
"""Open MPI takes 16 MiB for each rank, MPICH some 3 MiB for each job; below 20 it may crash."""

_OF_JOBS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "mpishard-*")
_STARTING_SECONDS = 60
_MOST_NAMED = 20
_LIMIT_SECONDS = 10

# Opens, as a rank does, what another process holds.
_OPEN = """
import os, sys
handle = os.open(sys.argv[1], os.O_RDWR)
answer(os.pread(handle, 8, 0).decode())
"""


def look_at_shared_memory() -> Iterator[Finding]:
    """The folder /dev/shm, anonymous memory, and what dead jobs left."""
    if FOLDER.is_dir():
        yield _folder()
    else:
        yield Finding("memory.folder", Verdict.OK, f"this system has no {FOLDER}", None)
    yield _memfd()
    if FOLDER.is_dir():
        yield _leftovers()


def free_bytes() -> int | None:
    """Bytes free in /dev/shm; None where there is no such folder."""
    try:
        status = os.statvfs(FOLDER)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def larger_folder() -> str:
    """The line that makes /dev/shm larger, and writable."""
    if Path("/.dockerenv").exists():
        return "docker run --shm-size=2g ...  # start the container so"
    if Path("/run/.containerenv").exists():
        return "podman run --shm-size=2g ...  # start the container so"
    return f"sudo mount -o remount,rw,size=2g,mode=1777 {FOLDER}"


def _folder() -> Finding:
    free = free_bytes()
    if free is None:
        return Finding(
            "memory.folder", Verdict.PROBLEM, f"{FOLDER} cannot be read", None, larger_folder()
        )
    status = os.statvfs(FOLDER)
    total = status.f_blocks * status.f_frsize
    value = {"free": free, "total": total}
    text = f"{FOLDER} has {bytes_text(free)} free of {bytes_text(total)}"
    try:
        with tempfile.TemporaryFile(dir=FOLDER) as file:
            file.write(b"mpishard")
    except OSError as error:
        return Finding(
            "memory.folder",
            Verdict.PROBLEM,
            f"{FOLDER} cannot be written to ({error.strerror}): MPICH does not start so",
            value,
            larger_folder(),
        )
    if free < NEEDED_BYTES:
        return Finding(
            "memory.folder",
            Verdict.NOTE,
            f"{text}: Open MPI takes 16 MiB for each rank, and MPICH crashes where it is small",
            value,
            larger_folder(),
        )
    return Finding("memory.folder", Verdict.OK, text, value)


def _memfd() -> Finding:
    if not hasattr(os, "memfd_create"):
        return Finding("memory.memfd", Verdict.OK, "this system has no memfd", False)
    try:
        handle = os.memfd_create("mpishard-doctor")
    except OSError as error:
        return _no_memfd(f"cannot be made ({error.strerror})")
    try:
        os.pwrite(handle, b"mpishard", 0)
        path = f"/proc/{os.getpid()}/fd/{handle}"
        answer = ask(python_command(_OPEN, path), _LIMIT_SECONDS)
    finally:
        os.close(handle)
    if answer.found != "mpishard":
        return _no_memfd(f"cannot be opened by another process ({answer.reason})")
    return Finding("memory.memfd", Verdict.OK, "can be made, and opened by other processes", True)


def _no_memfd(why: str) -> Finding:
    return Finding(
        "memory.memfd",
        Verdict.NOTE,
        f"{why}: models take their shared memory from {FOLDER} instead, which is limited",
        False,
        "docker run --cap-add=SYS_PTRACE ...  # start the container so"
        if Path("/.dockerenv").exists()
        else "sudo mount -o remount,rw,hidepid=0 /proc",
    )


def _leftovers() -> Finding:
    dead = leftovers()
    nbytes = sum(path.stat().st_size for path in dead if path.exists())
    value = {"files": [str(path) for path in dead], "bytes": nbytes}
    if not dead:
        return Finding(
            "memory.leftovers", Verdict.OK, f"no dead job left anything in {FOLDER}", value
        )
    first = dead[:_MOST_NAMED]
    more = (
        f"; the line is for the first {len(first)}, then ask again"
        if len(first) < len(dead)
        else ""
    )
    return Finding(
        "memory.leftovers",
        Verdict.NOTE,
        f"{counted(len(dead), 'file')} of killed jobs in {FOLDER}, {bytes_text(nbytes)}, that no "
        f"process here has mapped{more}",
        value,
        f"cd {FOLDER} && rm {shlex.join(path.name for path in first)}",
    )


def leftovers(folder: Path = FOLDER, processes: Path = Path("/proc")) -> list[Path]:
    """Files of MPI jobs in ``folder`` that are this user's, and that no process has mapped.

    Files of the last minute are left out: a job may be about to map them.
    """
    found = []
    now, user = time.time(), os.geteuid()
    for path in sorted({path for pattern in _OF_JOBS for path in folder.glob(pattern)}):
        try:
            status = path.lstat()
        except FileNotFoundError:  # its job has just ended
            continue
        is_own = user in (0, status.st_uid) and stat.S_ISREG(status.st_mode)
        if is_own and now - max(status.st_mtime, status.st_ctime) > _STARTING_SECONDS:
            found.append((path, status.st_ino))
    # Read after the files were listed: what is mapped now may have been mapped meanwhile.
    mapped = mapped_files(processes) if found else ()
    # By name: in another container the folder may be another.
    names = {(path.name, inode) for path, inode in mapped}
    return [path for path, inode in found if (path.name, inode) not in names]
