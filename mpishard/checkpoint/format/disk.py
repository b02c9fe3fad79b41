"""All changes of the file system that a save makes.

A save that is interrupted anywhere must leave a complete checkpoint. Therefore all operations on
the disk are here. Tests record these calls, make each of them fail, and examine the disk after
each.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path


def free_bytes(directory: Path) -> int:
    """Return the bytes free for this user on the file system of ``directory``, existing or not."""
    # A directory that does not exist will be on the file system of its nearest existing parent.
    while not directory.exists():
        directory = directory.parent
    system = os.statvfs(directory)
    return system.f_bavail * system.f_frsize


def may_write(directory: Path) -> bool:
    """Return True if this user may make files in an existing directory."""
    is_effective = os.access in os.supports_effective_ids
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=is_effective)


def is_read_only(directory: Path) -> bool:
    """Return True if the file system of an existing directory is mounted read-only."""
    return bool(os.statvfs(directory).f_flag & os.ST_RDONLY)


def make_directory(directory: Path) -> None:
    """Make a directory in an existing one."""
    os.mkdir(directory)  # noqa: PTH102


def make_directories(directory: Path) -> None:
    """Make a directory and its parents durably, if they are missing."""
    if not directory.is_dir():
        make_directories(directory.parent)
        directory.mkdir(exist_ok=True)
        # A new directory's name is on the disk only after a sync of its parent.
        sync_directory(directory.parent)


def write_file(file: Path, parts: Iterable[memoryview | bytes]) -> None:
    """Make ``file``, which must not exist, from ``parts``, and sync it to the disk."""
    # O_EXCL refuses an existing file, so that two saves cannot write to the same one.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            rest = memoryview(part)
            # A call may write less than it is given, and writes at most 2 GiB.
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(file: Path, parts: Iterable[memoryview | bytes]) -> None:
    """Replace the content of ``file``, which is the old one or the new one at every moment.

    Raises
    ------
    OSError
        If ``file`` is not a regular file, such as ``/dev/null``, or the disk fails.
    """
    if file.exists() and not file.is_file():  # A rename would replace a device, too.
        raise OSError(f"{file} is not a regular file, and is not replaced")
    beside = file.with_name(f".{file.name}.tmp")
    # A killed process may have left this file, and `write_file` refuses one that exists.
    beside.unlink(missing_ok=True)
    try:
        write_file(beside, parts)
        rename(beside, file)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and not error.filename:
            error.filename = str(file)  # The error of a full disk has no file name.
        raise
    sync_directory(file.parent)


def rename(source: Path, target: Path) -> None:
    """Rename a directory, or a file, which replaces another one."""
    os.rename(source, target)  # noqa: PTH104


def sync_directory(directory: Path) -> None:
    """Sync the names in ``directory`` to the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync a directory, and return these. A failing disk returns EIO.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise
    finally:
        os.close(descriptor)


def remove_tree(directory: Path) -> None:
    """Remove a directory. Files that cannot be removed are left for the next save."""
    shutil.rmtree(directory, ignore_errors=True)


def remove_aside(directories: Mapping[Path, Path]) -> None:
    """Remove directories, so that none ever has a part of its content under its name.

    Parameters
    ----------
    directories : mapping of Path to Path
        Directory -> its name, in the same parent, while it is removed. A directory that cannot be
        renamed is left for the next save.

    Raises
    ------
    OSError
        If the disk fails.
    """
    aside = []
    for directory, name in directories.items():
        with suppress(PermissionError, FileNotFoundError):
            rename(directory, name)
            aside.append(name)
    # After a crash any of the removals may be on the disk. The new names must be there before.
    for parent in {name.parent for name in aside}:
        sync_directory(parent)
    for name in aside:
        remove_tree(name)
