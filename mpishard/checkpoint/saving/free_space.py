"""Free space on the disk: a save that does not fit is refused before anything is written.

Rank 0 makes the directory of a save and measures the free space. `FoundSpace` is its finding, which
all ranks get in one exchange with the bytes that each rank needs.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TypedDict

from mpishard.base import CheckpointError
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.folder import Target
from mpishard.communication import path_from, path_text

_TOO_SMALL = "there is not enough room"
_IS_FULL = (errno.ENOSPC, errno.EDQUOT)


class FoundSpace(TypedDict):
    """The temporary directory of a save, and the space beside it, as JSON."""

    directory: str
    """The directory, as `path_text`; empty if the disk had no space for it."""
    parent: str
    """The directory in which the checkpoint will be, as `path_text`."""
    free: int
    """Number of bytes that are free there."""
    refusal: str
    """The error of a disk without space for a directory; empty if there was none."""


def make_temporary(target: Target) -> FoundSpace:
    """Make the temporary directory of ``target``, and measure the free space. Only on rank 0."""
    parent, refusal, directory = target.path.parent, "", None
    try:
        directory = target.make_temporary()
        free = disk.free_bytes(parent)
    except OSError as error:
        if directory is not None:
            disk.remove_tree(directory)
        if not is_full(error):
            raise
        # The error is raised later, when the ranks have exchanged how many bytes they need.
        refusal, directory, free = f"rank 0: {error}", None, disk.free_bytes(parent)
    return {
        "directory": path_text(directory),
        "parent": path_text(parent),
        "free": free,
        "refusal": refusal,
    }


def directory_of(found: FoundSpace | None) -> Path | None:
    """Return the temporary directory; None if there is none."""
    return None if found is None else path_from(found["directory"])


def require_found(found: FoundSpace, needed: int) -> Path:
    """Return the temporary directory, or refuse if fewer than ``needed`` bytes are free."""
    directory, parent = directory_of(found), path_from(found["parent"])
    assert parent is not None
    # No space is reserved: if others fill the disk later, `full_disk_error` explains that.
    if directory is None or needed > found["free"]:
        raise _no_space(found["refusal"] or _TOO_SMALL, needed, found["free"], parent)
    return directory


def require_space(directory: Path, needed: int) -> None:
    """Refuse to write ``needed`` bytes to ``directory`` if fewer are free."""
    free = disk.free_bytes(directory)
    if needed > free:
        raise _no_space(_TOO_SMALL, needed, free, directory.parent)


def is_full(error: OSError) -> bool:
    """Return True if the disk, or the user's quota, has no space left."""
    return error.errno in _IS_FULL


def full_disk_error(error: OSError, directory: Path, needed: int) -> CheckpointError:
    """Return the error of a disk that became full while ``needed`` bytes were written."""
    return _no_space(str(error), needed, disk.free_bytes(directory), directory.parent)


def _no_space(reason: str, needed: int, free: int, parent: Path) -> CheckpointError:
    return CheckpointError(
        f"{reason}: {needed:,} bytes are needed and {free:,} are free in {parent}; free some, or "
        "save elsewhere"
    )
