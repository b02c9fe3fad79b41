"""A folder of the checkpoints of one run: the newest, some before it, and which is the newest."""

from __future__ import annotations

import logging
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from mpishard.arguments import as_count, as_integer, check_path
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.manifest import MANIFEST, Manifest
from mpishard.errors import CheckpointError

LATEST = "latest"
"""Name of the text file that names the newest checkpoint of a folder."""

_log = logging.getLogger("mpishard")

# Inode, time of the last change in ns, and bytes: of a manifest that was not replaced.
_FileMark = tuple[int, int, int]
_NAME = re.compile(r"step-(\d{8,})(\.previous)?")


_OURS = re.compile(r"manifest\.json|rank\d{5,}\.safetensors|\.nfs.*")
_TOKEN_BYTES = 8
_LISTED = 5


def previous_of(path: Path) -> Path:
    """Return the place of the checkpoint that ``path`` replaces, until it is replaced."""
    return path.parent / f"{path.name}.previous"  # with_name() raises for the root


def temporary_of(path: Path) -> Path:
    """Return a new name for a directory that becomes, or was, the checkpoint ``path``."""
    return path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.tmp")


def foreign_in(directory: Path) -> str:
    """Return, in words, the first few names in a directory that are no part of a checkpoint."""
    names = sorted(e.name for e in directory.iterdir() if not _OURS.fullmatch(e.name))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


class Target:
    """The directory of one checkpoint, on rank 0. Communicates nothing.

    Parameters
    ----------
    path : path
        The directory to make or replace.

    Raises
    ------
    TypeError, ValueError
        For a path that is none, or blank.
    CheckpointError
        If other files are there, which would be lost.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_path("the path of a checkpoint", path)
        self.path = Path(path).resolve()
        self.is_put = False
        """Whether the new checkpoint is in its place, durably."""
        self.sequence = 1
        """Number of the save, among those in the same folder."""
        # The nearest one that exists: those below it will be made.
        for parent in self.path.parents:
            if parent.exists():
                if not parent.is_dir():
                    raise CheckpointError(f"{parent} is a file, and {self.path} cannot be in it")
                break
        for directory in (self.path, previous_of(self.path)):
            if directory.is_dir():
                foreign = foreign_in(directory)
                if foreign:
                    is_checkpoint = (directory / MANIFEST).exists()
                    place = "" if is_checkpoint else f", such as {directory / 'checkpoint'}"
                    raise CheckpointError(
                        f"{directory} holds {foreign}, which would be lost: saving replaces the "
                        f"whole directory. Save to a path of its own{place}"
                    )
            elif directory.exists():
                raise CheckpointError(f"{directory} is a file; a checkpoint is a directory")

    def make_temporary(self) -> Path:
        """Make a new directory beside it; remove those of saves that were killed."""
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
        """Move ``directory``, whose content is on the disk, to the checkpoint's place.

        Raises
        ------
        OSError
            If that is impossible. Unless `is_put`, the earlier checkpoint is unchanged.
        """
        previous = previous_of(self.path)
        disk.sync_directory(directory)
        # No system call swaps two directories everywhere, so there are two renames, and between
        # them the earlier checkpoint is found under its other name.
        replaces = self.path.exists()
        if replaces:
            if previous.exists():
                # The directory that a killed save moved here may not be on the disk yet.
                disk.sync_directory(self.path.parent)
                disk.remove_tree(previous)
            disk.rename(self.path, previous)
        try:
            disk.rename(directory, self.path)
            try:
                disk.sync_directory(self.path.parent)
            except BaseException:
                # A new checkpoint that a power failure may take back is none: restore the old one.
                disk.rename(self.path, directory)
                raise
        except BaseException:
            if replaces:
                disk.rename(previous, self.path)
            raise
        self.is_put = True
        if previous.exists():
            disk.remove_tree(previous)


@dataclass(frozen=True, slots=True)
class Entry:
    """One checkpoint of a folder.

    Parameters
    ----------
    path : Path
        Its directory.
    step : int
        The step after which it was saved.
    sequence : int
        Number of the save; the newest has the highest, even if the run went back in steps.
    problem : str
        Why it cannot be read, as far as its manifest and its files' lengths tell; empty if it can.
    """

    path: Path
    step: int
    sequence: int
    problem: str = ""


class CheckpointFolder:
    """The folder of the checkpoints of one run: ``<path>/step-00000010`` and so on.

    The text file ``latest`` in it has the name of the newest. It is changed when that checkpoint
    is complete and on the disk, and only then are older ones removed.

    Parameters
    ----------
    path : path
        The folder, on a file system that all ranks see; made by the first save.
    keep_last : int
        Number of the newest to keep. One that cannot be read is not counted.
    keep_every : int, optional
        Checkpoints of steps that it divides are kept for ever.

    Raises
    ------
    TypeError, ValueError
        For a path that is none, or blank, or numbers below 1.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep_last: int = 2, keep_every: int | None = None
    ) -> None:
        check_path("the path of a folder of checkpoints", path)
        self.path = Path(path).resolve()
        self.keep_last = as_count("keep_last", keep_last)
        self.keep_every = None if keep_every is None else as_count("keep_every", keep_every)
        # A manifest is read once, however many checkpoints a run keeps.
        self._manifests: dict[_FileMark, Manifest] = {}
        self._refused: dict[int, str] = {}

    def path_of(self, step: int) -> Path:
        """Return the directory of the checkpoint after ``step`` steps, existing or not."""
        return self.path / f"step-{step:08d}"

    def target(self, step: int) -> Target:
        """Return the target of the checkpoint after ``step`` steps.

        Raises
        ------
        ValueError
            For a negative step.
        CheckpointError
            If the folder is a file, or a single checkpoint.
        """
        if as_integer("step", step) < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        if self.path.is_file() or (self.path / MANIFEST).exists():
            what = "a file" if self.path.is_file() else "a single checkpoint"
            raise CheckpointError(
                f"{self.path} is {what}; a run saves to a folder of checkpoints. Choose another "
                "path"
            )
        return _StepTarget(self, int(step))

    def require_access(self) -> None:
        """Refuse a folder, existing or not, in which this user may not make files.

        Raises
        ------
        CheckpointError
            If nobody may, as on a read-only file system, or only others.
        """
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not disk.may_write(existing):
            raise CheckpointError(
                f"checkpoints cannot be saved in {self.path}: this user may not make files in "
                f"{existing}. Change its permissions, or choose another path"
            )

    def entries(self) -> list[Entry]:
        """Return the checkpoints of the folder, the newest first, the unreadable ones last."""
        known, self._manifests = self._manifests, {}
        found = []
        for directory in self.path.iterdir() if self.path.is_dir() else ():
            match = _NAME.fullmatch(directory.name)
            # What a save was replacing counts if that save was killed between its renames.
            if match is None or (match[2] and self.path_of(int(match[1])).exists()):
                continue
            sequence = 0
            try:
                status = (directory / MANIFEST).stat()
                mark = status.st_ino, status.st_mtime_ns, status.st_size
                # A manifest that has not changed since the last look is not read again.
                manifest = self._manifests[mark] = known.get(mark) or Manifest.read(directory)
                problem = "; ".join(manifest.torn_files(directory))
                sequence = manifest.sequence
                problem = problem or self._refused.get(sequence, "")
            except (OSError, ValueError) as error:
                problem = f"{MANIFEST}: {error}"
            found.append(Entry(directory, int(match[1]), sequence, problem))
        return sorted(found, key=lambda e: (not e.problem, e.sequence, e.step), reverse=True)

    def refuse(self, sequence: int, problem: str) -> None:
        """Stop counting the save ``sequence``: somebody has read all of it and found a problem."""
        self._refused[sequence] = problem

    def prune(self) -> None:
        """Remove checkpoints that need not be kept. The newest that can be read always stays.

        So does a directory with files of other programs; a warning names them.
        """
        whole = [entry for entry in self.entries() if not entry.problem]
        unwanted = {}
        for entry in whole[self.keep_last :]:
            if self.keep_every is not None and entry.step % self.keep_every == 0:
                continue
            foreign = foreign_in(entry.path)
            if foreign:
                _log.warning("%s is not removed, because it holds %s", entry.path, foreign)
            else:
                unwanted[entry.path] = temporary_of(self.path_of(entry.step))
        disk.remove_aside(unwanted)


def newest_of(path: Path) -> Path | None:
    """Return the newest checkpoint of a folder, None if there are none."""
    entries = CheckpointFolder(path).entries()
    if not entries:
        return None
    newest = entries[0].path
    # `latest` may name a checkpoint that was damaged since: the newest that can be read counts.
    latest = path / LATEST
    named = latest.read_text(errors="replace").strip() if latest.is_file() else newest.name
    broken = [entry for entry in entries if entry.problem and entry.path.name == named]
    if broken and not entries[0].problem:
        _log.warning("using %s: %s cannot be used: %s", newest, named, broken[0].problem)
    return newest


class _StepTarget(Target):
    """A step's place in a folder."""

    def __init__(self, folder: CheckpointFolder, step: int) -> None:
        super().__init__(folder.path_of(step))
        self._folder = folder
        self.sequence = 1 + max((entry.sequence for entry in folder.entries()), default=0)

    def make_temporary(self) -> Path:
        # The checkpoint that a killed save was about to replace gets its name back.
        for entry in self._folder.entries():
            place = self._folder.path_of(entry.step)
            if not place.exists():
                disk.rename(entry.path, place)
        return super().make_temporary()

    def _is_left_over(self, entry: Path) -> bool:
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            return match[2] is not None and self._folder.path_of(int(match[1])).exists()
        return re.fullmatch(r"\.step-\d{8,}\.[0-9a-f]{16}\.tmp", entry.name) is not None

    def put(self, directory: Path) -> None:
        super().put(directory)
        # Only now, so that `latest` never names a directory that is not complete.
        disk.replace_file(self._folder.path / LATEST, [f"{self.path.name}\n".encode()])
        self._folder.prune()
