"""Every change of the file system that a save makes, in one place.

A save that is cut short anywhere must leave a whole checkpoint, so what it does to the disk, and
in which order, is here and nowhere else: tests record these calls, break them one by one, and
look at the disk as it is after each.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

__all__ = [
    "free_bytes",
    "make_directories",
    "make_directory",
    "remove_aside",
    "remove_tree",
    "rename",
    "replace_file",
    "sync_directory",
    "write_file",
]


def free_bytes(directory: Path) -> int:
    """Bytes that this user may still write on the file system of ``directory``, there or not."""
    while not directory.exists():
        directory = directory.parent
    system = os.statvfs(directory)
    return system.f_bavail * system.f_frsize


def make_directory(directory: Path) -> None:
    """Make a directory, whose parent is there."""
    os.mkdir(directory)  # noqa: PTH102


def make_directories(directory: Path) -> None:
    """Make a directory and those above it, where they are not there, and have them last."""
    if not directory.is_dir():
        make_directories(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def write_file(file: Path, parts: Iterable[memoryview | bytes]) -> None:
    """Make ``file``, of ``parts`` one after the other, and have its content reach the disk."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(file: Path, content: bytes) -> None:
    """Make ``file`` hold ``content``: at every moment it holds that or what it held before."""
    beside = file.with_name(f".{file.name}.tmp")
    beside.unlink(missing_ok=True)
    write_file(beside, [content])
    rename(beside, file)
    sync_directory(file.parent)


def rename(source: Path, target: Path) -> None:
    """Rename a file, over another one, or a directory."""
    os.rename(source, target)  # noqa: PTH104


def sync_directory(directory: Path) -> None:
    """Have the names in ``directory`` reach the disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync a directory, and say so; a disk that fails says EIO.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES):
            raise
    finally:
        os.close(descriptor)


def remove_tree(directory: Path) -> None:
    """Remove what nobody needs any more. What cannot be removed stays, for the next save."""
    shutil.rmtree(directory, ignore_errors=True)


def remove_aside(directories: Mapping[Path, Path]) -> None:
    """Remove directories, none of which is ever there in part.

    Parameters
    ----------
    directories : mapping of Path to Path
        To the name, in the same directory, that each has while it is removed. One that cannot be
        renamed stays, for the next save.

    Raises
    ------
    OSError
        Where the disk fails.
    """
    aside = []
    for directory, name in directories.items():
        with suppress(PermissionError, FileNotFoundError):
            rename(directory, name)
            aside.append(name)
    # What is removed first may also be lost first: not before the names are.
    for parent in {name.parent for name in aside}:
        sync_directory(parent)
    for name in aside:
        remove_tree(name)
