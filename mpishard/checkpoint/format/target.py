"""Where a checkpoint goes: one that takes the place of another, or of nothing."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from mpishard.arguments import check_path
from mpishard.checkpoint.format import disk
from mpishard.errors import CheckpointError

__all__ = ["Target", "foreign_in", "previous_of", "temporary_of"]

_OURS = re.compile(r"manifest\.json|rank\d{5,}\.safetensors|\.nfs.*")
_TOKEN_BYTES = 8
_LISTED = 5


def previous_of(path: Path) -> Path:
    """Where the checkpoint that ``path`` replaces waits until it is replaced."""
    return path.with_name(f"{path.name}.previous")


def temporary_of(path: Path) -> Path:
    """A new name for what becomes, or was, the checkpoint ``path``."""
    return path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.tmp")


def foreign_in(directory: Path) -> str:
    """The names in a checkpoint's directory that are none of a checkpoint, the first few."""
    return _listed(sorted(e.name for e in directory.iterdir() if not _OURS.fullmatch(e.name)))


class Target:
    """The directory of one checkpoint. Rank 0 has it; nothing of it communicates.

    Parameters
    ----------
    path : path
        To make or replace.

    Raises
    ------
    TypeError, ValueError
        For what is no path, or a blank one.
    CheckpointError
        Where something else is there, and would be lost.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_path("the path of a checkpoint", path)
        self.path = Path(path).resolve()
        self.is_put = False
        """Whether the new checkpoint is in its place, and stays there."""
        for parent in self.path.parents:
            if parent.exists():
                if not parent.is_dir():
                    raise CheckpointError(f"{parent} is a file, and {self.path} cannot be in it")
                break
        for directory in (self.path, previous_of(self.path)):
            if directory.is_dir():
                foreign = foreign_in(directory)
                if foreign:
                    raise CheckpointError(
                        f"{directory} holds {foreign}, which are no part of a checkpoint "
                        "and would be lost: saving replaces the directory. Save to a path of its "
                        "own"
                    )
            elif directory.exists():
                raise CheckpointError(f"{directory} is a file; a checkpoint is a directory")

    @property
    def sequence(self) -> int:
        """Which save it is, of those in the same folder."""
        return 1

    def make_temporary(self) -> Path:
        """A new directory beside it; those of saves that were killed are removed."""
        parent = self.path.parent
        disk.make_directories(parent)
        for entry in parent.iterdir():
            if self._is_left_over(entry):
                disk.remove_tree(entry)
        directory = temporary_of(self.path)
        disk.make_directory(directory)
        return directory

    def _is_left_over(self, entry: Path) -> bool:
        ours = rf"\.{re.escape(self.path.name)}\.[0-9a-f]{{16}}\.tmp"
        return re.fullmatch(ours, entry.name) is not None

    def put(self, directory: Path) -> None:
        """Put ``directory``, whose content is on the disk, in the checkpoint's place.

        Raises
        ------
        OSError
            Where that cannot be done. Unless `is_put`, what was there is as it was.
        """
        previous = previous_of(self.path)
        disk.sync_directory(directory)
        replaces = self.path.exists()
        if replaces:
            if previous.exists():
                # What a killed save put here may not be on the disk yet.
                disk.sync_directory(self.path.parent)
                disk.remove_tree(previous)
            disk.rename(self.path, previous)
        try:
            disk.rename(directory, self.path)
            try:
                disk.sync_directory(self.path.parent)
            except BaseException:
                disk.rename(self.path, directory)
                raise
        except BaseException:
            if replaces:
                disk.rename(previous, self.path)
            raise
        self.is_put = True
        if previous.exists():
            disk.remove_tree(previous)


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
