"""Folder with the checkpoints of one run, and the place of a single checkpoint."""

from __future__ import annotations

import logging
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from mpishard.base import CheckpointError, as_count, as_integer, check_path
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.manifest import MANIFEST, Manifest

LATEST = "latest"
"""Name of the text file that names the newest checkpoint of a folder."""

_log = logging.getLogger("mpishard")

# Inode, time of the last change in ns, and bytes, which differ if a manifest was replaced.
_FileMark = tuple[int, int, int]
_NAME = re.compile(r"step-(\d{8,})(\.previous)?")
# NFS makes files .nfs* of removed files that are still open.
_OURS = re.compile(r"manifest\.json|rank\d{5,}\.safetensors|\.nfs.*")
_TOKEN_BYTES = 8
_LISTED = 5


def previous_of(path: Path) -> Path:
    """Return the place of the old checkpoint while a new one is moved to ``path``."""
    return path.parent / f"{path.name}.previous"  # with_name() would raise for the root.


def temporary_of(path: Path) -> Path:
    """Return a new name for a directory that will become, or was, the checkpoint ``path``."""
    return path.with_name(f".{path.name}.{secrets.token_hex(_TOKEN_BYTES)}.tmp")


def foreign_in(directory: Path) -> str:
    """Return the first few names in a directory that are not part of a checkpoint, as text."""
    names = sorted(e.name for e in directory.iterdir() if not _OURS.fullmatch(e.name))
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


class Target:
    """Directory of one checkpoint, on rank 0. It communicates nothing.

    Parameters
    ----------
    path : path
        Directory to make or replace.

    Raises
    ------
    TypeError, ValueError
        If the path is not a path or is blank.
    CheckpointError
        If there is a file, or a directory with other files, which would be lost.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        check_path("the path of a checkpoint", path)
        self.path = Path(path).resolve()
        self.is_put = False
        """True if the new checkpoint is in its place, and on the disk."""
        self.sequence = 1
        """Number of the save, among those in the same folder."""
        # The nearest existing parent must be a directory. Missing ones are made below it.
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
        """Make a new directory beside the target, and remove those of saves that were killed."""
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
        """Move ``directory``, whose files are on the disk, to the checkpoint's place.

        Raises
        ------
        OSError
            If a step fails. Unless `is_put`, the earlier checkpoint is unchanged.
        """
        previous = previous_of(self.path)
        disk.sync_directory(directory)
        # No portable system call swaps two directories. This takes two renames, between which
        # readers find the earlier checkpoint under its other name.
        replaces = self.path.exists()
        if replaces:
            if previous.exists():
                # After a killed save `previous` may be the only complete checkpoint on the disk. It
                # is removed only after the one at `path` is certainly there.
                disk.sync_directory(self.path.parent)
                disk.remove_tree(previous)
            disk.rename(self.path, previous)
        try:
            disk.rename(directory, self.path)
            try:
                disk.sync_directory(self.path.parent)
            except BaseException:
                # A power failure could undo the rename, so that the old checkpoint is restored.
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
        Directory of the checkpoint.
    step : int
        Step after which the checkpoint was saved.
    sequence : int
        Number of the save. The newest has the highest number, even if the run went back in steps.
        It is 0 if the manifest cannot be read.
    problem : str
        Reason why the checkpoint cannot be read, according to its manifest and the lengths of its
        files; empty if there is none.
    """

    path: Path
    step: int
    sequence: int
    problem: str = ""


class CheckpointFolder:
    """Folder of the checkpoints of one run: ``<path>/step-00000010`` and so on.

    The text file ``latest`` in the folder has the name of the newest checkpoint. It is changed when
    that checkpoint is complete and on the disk. Older checkpoints are removed afterwards.

    Parameters
    ----------
    path : path
        The folder, on a file system that all ranks see. The first save makes it.
    keep_last : int
        Number of newest checkpoints to keep. Checkpoints that cannot be read are not counted.
    keep_every : int, optional
        Checkpoints whose step is a multiple of this number are never removed.

    Raises
    ------
    TypeError, ValueError
        If the path is not a path or is blank, or a number is not an integer >= 1.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep_last: int = 2, keep_every: int | None = None
    ) -> None:
        check_path("the path of a folder of checkpoints", path)
        self.path = Path(path).resolve()
        self.keep_last = as_count("keep_last", keep_last)
        self.keep_every = None if keep_every is None else as_count("keep_every", keep_every)
        # Manifests are kept, so that each is read only once.
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
            If the step is negative.
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
            If the user has no permission, or the file system is read-only.
        """
        existing = next(path for path in (self.path, *self.path.parents) if path.exists())
        if not disk.may_write(existing):
            reason = (
                f"{existing} is on a read-only file system. Choose another path"
                if disk.is_read_only(existing)
                else f"this user may not make files in {existing}. Change its permissions, or "
                "choose another path"
            )
            raise CheckpointError(f"checkpoints cannot be saved in {self.path}: {reason}")

    def entries(self) -> list[Entry]:
        """Return the checkpoints of the folder, newest first, and unreadable ones last."""
        # The new dict has only manifests that are still there, so that those of removed ones are
        # freed.
        known, self._manifests = self._manifests, {}
        found = []
        for directory in self.path.iterdir() if self.path.is_dir() else ():
            match = _NAME.fullmatch(directory.name)
            # A directory *.previous counts only if its save was killed between the two renames.
            if match is None or (match[2] and self.path_of(int(match[1])).exists()):
                continue
            sequence = 0
            try:
                status = (directory / MANIFEST).stat()
                mark = status.st_ino, status.st_mtime_ns, status.st_size
                manifest = self._manifests[mark] = known.get(mark) or Manifest.read(directory)
                problem = "; ".join(manifest.torn_files(directory))
                sequence = manifest.sequence
                problem = problem or self._refused.get(sequence, "")
            except (OSError, ValueError) as error:
                problem = f"{MANIFEST}: {error}"
            found.append(Entry(directory, int(match[1]), sequence, problem))
        return sorted(found, key=lambda e: (not e.problem, e.sequence, e.step), reverse=True)

    def refuse(self, sequence: int, problem: str) -> None:
        """Treat the save ``sequence`` as unreadable from now on; ``problem`` is the reason."""
        self._refused[sequence] = problem

    def prune(self) -> None:
        """Remove checkpoints that need not be kept, but never the newest that can be read.

        A directory with files of other programs is not removed, and a warning names them.
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
    """Return the newest checkpoint of a folder that can be read, or None if there is none.

    If no checkpoint can be read, it is one of the others.
    """
    entries = CheckpointFolder(path).entries()
    if not entries:
        return None
    newest = entries[0].path
    # The checkpoint that `latest` names may be damaged since. A warning then gives the reason.
    latest = path / LATEST
    named = latest.read_text(errors="replace").strip() if latest.is_file() else newest.name
    broken = [entry for entry in entries if entry.problem and entry.path.name == named]
    if broken and not entries[0].problem:
        _log.warning("using %s: %s cannot be used: %s", newest, named, broken[0].problem)
    return newest


class _StepTarget(Target):
    """Place of a step's checkpoint in a folder."""

    def __init__(self, folder: CheckpointFolder, step: int) -> None:
        super().__init__(folder.path_of(step))
        self._folder = folder
        self.sequence = 1 + max((entry.sequence for entry in folder.entries()), default=0)

    def make_temporary(self) -> Path:
        # A checkpoint that a killed save has renamed to *.previous gets its name back.
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
        # `latest` is changed last, so that it never names an incomplete directory.
        disk.replace_file(self._folder.path / LATEST, [f"{self.path.name}\n".encode()])
        self._folder.prune()
