"""Findings about the memory that ranks of a machine share."""

from __future__ import annotations

import os
import shlex
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mpishard.cli.doctor.finding import Finding, note, ok, problem
from mpishard.cli.probe import ask, python_command
from mpishard.cli.run.rank_processes import mapped_files
from mpishard.cli.wording import bytes_text, counted

__all__ = [
    "NEEDED_BYTES", "free_bytes", "larger_folder", "leftovers", "look_at_shared_memory",
    "open_processes",
]  # fmt: skip

FOLDER = Path("/dev/shm")  # noqa: S108 - memory, and not a place for temporary files

NEEDED_BYTES = 64 * 2**20
"""Open MPI takes 16 MiB for each rank, MPICH some 3 MiB for each job; below 20 it may crash."""

_OF_JOBS = ("mpich_shm_*", "sm_segment.*", "vader_segment.*", "mpishard-*")
_STARTING_SECONDS = 60
_MOST_NAMED = 20
_LIMIT_SECONDS = 10

# Opens memory of another process in the way that a rank does.
_OPEN = """
import os, sys
handle = os.open(sys.argv[1], os.O_RDWR)
answer(os.pread(handle, 8, 0).decode())
"""


def look_at_shared_memory() -> Iterator[Finding]:
    """Yield findings about the folder /dev/shm, anonymous memory, and files of dead jobs."""
    if FOLDER.is_dir():
        yield _folder()
    else:
        yield ok("memory.folder", f"this system has no {FOLDER}", None)
    yield _memfd()
    if FOLDER.is_dir():
        yield _leftovers()


def free_bytes() -> int | None:
    """Return the bytes free in /dev/shm; None if there is no such folder."""
    try:
        status = os.statvfs(FOLDER)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def larger_folder() -> str:
    """Return the command that makes /dev/shm larger, and writable."""
    for engine, file in (("docker", "/.dockerenv"), ("podman", "/run/.containerenv")):
        if Path(file).exists():
            return f"{engine} run --shm-size=2g ...  # start the container like this"
    return f"sudo mount -o remount,rw,size=2g,mode=1777 {FOLDER}"


def _folder() -> Finding:
    name, mend, free = "memory.folder", larger_folder(), free_bytes()
    if free is None:
        return problem(name, f"{FOLDER} cannot be read", None, mend)
    status = os.statvfs(FOLDER)
    total = status.f_blocks * status.f_frsize
    value = {"free": free, "total": total}
    try:
        with tempfile.TemporaryFile(dir=FOLDER) as file:
            file.write(b"mpishard")
    except OSError as error:
        text = f"{FOLDER} cannot be written to ({error.strerror}): MPICH cannot start then"
        return problem(name, text, value, mend)
    text = f"{FOLDER} has {bytes_text(free)} free of {bytes_text(total)}"
    if free >= NEEDED_BYTES:
        return ok(name, text, value)
    text += ": Open MPI takes 16 MiB for each rank, and MPICH crashes if it is small"
    return note(name, text, value, mend)


def _memfd() -> Finding:
    """Tell whether a process can open anonymous memory of another one, as ranks do."""
    name = "memory.memfd"
    if not hasattr(os, "memfd_create"):
        return ok(name, "this system has no memfd", False)
    try:
        handle = os.memfd_create("mpishard-doctor")
        try:
            os.pwrite(handle, b"mpishard", 0)
            path = f"/proc/{os.getpid()}/fd/{handle}"
            answer = ask(python_command(_OPEN, path), _LIMIT_SECONDS)
        finally:
            os.close(handle)
        if answer.found == "mpishard":
            return ok(name, "can be made, and opened by other processes", True)
        text = f"cannot be opened by another process ({answer.reason})"
    except OSError as error:
        text = f"cannot be made ({error.strerror})"
    text += ": ranks send messages instead, which is several times slower"
    return note(name, text, False, open_processes())


def open_processes() -> str:
    """Return the command that lets a rank open the memory of another one, through /proc."""
    if Path("/.dockerenv").exists():
        return "docker run --cap-add=SYS_PTRACE ...  # start the container like this"
    return "sudo mount -o remount,rw,hidepid=0 /proc"


def _leftovers() -> Finding:
    name, dead = "memory.leftovers", leftovers()
    nbytes = sum(path.stat().st_size for path in dead if path.exists())
    value = {"files": [str(path) for path in dead], "bytes": nbytes}
    if not dead:
        return ok(name, f"no dead job left anything in {FOLDER}", value)
    text = f"{counted(len(dead), 'file')} of killed jobs in {FOLDER}, {bytes_text(nbytes)}, that "
    text += "no process here has mapped"
    first = shlex.join(path.name for path in dead[:_MOST_NAMED])
    if len(dead) > _MOST_NAMED:
        text += f"; the command removes the first {_MOST_NAMED}: repeat doctor and command"
    return note(name, text, value, f"cd {FOLDER} && rm {first}")


def leftovers(folder: Path = FOLDER, processes: Path = Path("/proc")) -> list[Path]:
    """Return files of MPI jobs in ``folder`` that are this user's and that no process has mapped.

    Files of the last minute are left out, because a job may be about to map them.
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
    # Read after the files were listed, because a job may have mapped one meanwhile.
    mapped = mapped_files(processes) if found else ()
    # Compared by name, because in another container the folder may have another path.
    names = {(path.name, inode) for path, inode in mapped}
    return [path for path, inode in found if (path.name, inode) not in names]
