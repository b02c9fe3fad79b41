"""A folder of the checkpoints of one run: the newest, some before it, and which is the newest."""

from __future__ import annotations

import logging
import os
import re
import secrets
from dataclasses import dataclass, replace
from pathlib import Path

from mpishard.arguments import as_integer, check_path
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.manifest import MANIFEST, Manifest
from mpishard.errors import CheckpointError

__all__ = ["LATEST", "CheckpointFolder", "Entry", "Target", "newest_of", "previous_of"]

LATEST = "latest"
"""Name of the text file that names the newest checkpoint of a folder."""

_log = logging.getLogger("mpishard")

_NAME = re.compile(r"step-(\d{8,})(\.previous)?")


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
        Which save it was: the newest has the highest, also where a run went back and on again.
    problem : str
        Why it cannot be read, as far as its manifest and its files' lengths tell; empty where
        it can.
    """

    path: Path
    step: int
    sequence: int
    problem: str = ""


class CheckpointFolder:
    """Where a run saves again and again: ``<path>/step-00000010`` and so on.

    Beside them ``latest`` is a text file with the name of the newest. It moves when that is whole
    and on the disk, and only then older ones are removed.

    Parameters
    ----------
    path : path
        The folder, on a file system that all ranks see; made by the first save.
    keep_last : int
        How many of the newest stay. One that cannot be read is not counted.
    keep_every : int, optional
        Those of steps that it divides stay for ever.

    Raises
    ------
    TypeError, ValueError
        For what is no path, a blank one, or numbers below 1.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, keep_last: int = 2, keep_every: int | None = None
    ) -> None:
        check_path("the path of a folder of checkpoints", path)
        self.path = Path(path).resolve()
        self.keep_last = _at_least_one("keep_last", keep_last)
        self.keep_every = None if keep_every is None else _at_least_one("keep_every", keep_every)
        # By identity of the file: a manifest is read once, however many a run keeps.
        self._manifests: Manifests = {}
        self._refused: dict[int, str] = {}

    def path_of(self, step: int) -> Path:
        """Where the checkpoint after ``step`` steps is, or would be."""
        return _path_of(self.path, step)

    def target(self, step: int) -> Target:
        """Where the checkpoint after ``step`` steps goes.

        Raises
        ------
        ValueError
            For a negative step.
        CheckpointError
            Where the folder is something else.
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

    def entries(self) -> list[Entry]:
        """The checkpoints of the folder, the newest first; those that cannot be read last."""
        known, self._manifests = self._manifests, {}
        found = _entries(self.path, known, self._manifests)
        return [
            replace(entry, problem=entry.problem or self._refused.get(entry.sequence, ""))
            for entry in found
        ]

    def refuse(self, sequence: int, problem: str) -> None:
        """Count the save ``sequence`` no more: somebody has read all of it and found a fault."""
        self._refused[sequence] = problem

    def prune(self) -> None:
        """Remove what nobody keeps. The newest that can be read always stays.

        So does a directory in which there are files of somebody else; a warning names them.
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


def _path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def newest_of(path: Path) -> Path | None:
    """The newest checkpoint of a folder, None where there are none."""
    entries = _entries(path, {}, {})
    if not entries:
        return None
    newest = entries[0].path
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
        self._sequence = 1 + max((entry.sequence for entry in folder.entries()), default=0)

    @property
    def sequence(self) -> int:
        return self._sequence

    def make_temporary(self) -> Path:
        # What a killed save was about to replace takes its name again.
        for entry in self._folder.entries():
            place = _path_of(self._folder.path, entry.step)
            if not place.exists():
                disk.rename(entry.path, place)
        return super().make_temporary()

    def _is_left_over(self, entry: Path) -> bool:
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            return match[2] is not None and _path_of(entry.parent, int(match[1])).exists()
        return re.fullmatch(r"\.step-\d{8,}\.[0-9a-f]{16}\.tmp", entry.name) is not None

    def put(self, directory: Path) -> None:
        super().put(directory)
        disk.replace_file(self._folder.path / LATEST, f"{self.path.name}\n".encode())
        self._folder.prune()


Manifests = dict[tuple[int, int, int], Manifest]


def _entries(folder: Path, known: Manifests, found_now: Manifests) -> list[Entry]:
    """The checkpoints of a folder; those of ``known`` manifests that are there go on."""
    found = []
    if folder.is_dir():
        for directory in folder.iterdir():
            match = _NAME.fullmatch(directory.name)
            # What a save was replacing counts where that save was killed between its renames.
            if match is None or (match[2] and _path_of(folder, int(match[1])).exists()):
                continue
            found.append(_entry(directory, int(match[1]), known, found_now))
    return sorted(found, key=lambda e: (not e.problem, e.sequence, e.step), reverse=True)


def _entry(directory: Path, step: int, known: Manifests, found_now: Manifests) -> Entry:
    file = directory / MANIFEST
    try:
        status = file.stat()
        mark = status.st_ino, status.st_mtime_ns, status.st_size
        manifest = known.get(mark) or Manifest.read(directory)
        found_now[mark] = manifest
        torn = manifest.torn_files(directory)
    except (OSError, ValueError) as error:
        return Entry(directory, step, 0, f"{MANIFEST}: {error}")
    return Entry(directory, step, manifest.sequence, "; ".join(torn))


def _at_least_one(name: str, value: int) -> int:
    if as_integer(name, value) < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return int(value)


def _listed(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
