"""States of a disk after a crash: a save's operations, recorded and played back in part.

The model is that of a file system which promises no more than POSIX does. What was written to a
file may be lost, in any part, before that file is synced; so may a name that was made, moved or
removed, before its directory is. A name is moved all at once or not at all.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

__all__ = ["Operation", "Recording", "recorded"]

ROOT = 0  # the number of the directory that is recorded


@dataclass(frozen=True)
class Operation:
    """One change. Files and directories have numbers, which names point to."""

    kind: str  # "make", "move", "remove", "write", "sync"
    number: int  # of what is written, synced, or named
    directory: int = -1
    name: str = ""
    target: int = -1  # directory that it is moved to
    target_name: str = ""
    offset: int = 0
    content: bytes = b""

    def syncs(self) -> tuple[int, ...]:
        """The numbers that must all be synced before this is sure to last."""
        if self.kind == "write":
            return (self.number,)
        return (self.directory, self.target) if self.kind == "move" else (self.directory,)


@dataclass
class Tree:
    """Directories and files by number."""

    directories: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytearray] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path) -> Tree:
        """Content of a disk."""
        tree = cls()
        tree._take(root, ROOT)
        return tree

    def _take(self, directory: Path, number: int) -> None:
        for entry in sorted(directory.iterdir()):
            new = self.new(is_directory=entry.is_dir())
            self.directories[number][entry.name] = new
            if entry.is_dir():
                self._take(entry, new)
            else:
                self.files[new][:] = entry.read_bytes()

    def new(self, *, is_directory: bool) -> int:
        number = len(self.directories) + len(self.files)
        if is_directory:
            self.directories[number] = {}
        else:
            self.files[number] = bytearray()
        return number

    def copy(self) -> Tree:
        return Tree(
            {number: dict(names) for number, names in self.directories.items()},
            {number: bytearray(content) for number, content in self.files.items()},
        )

    def find(self, parts: tuple[str, ...]) -> int:
        number = ROOT
        for part in parts:
            number = self.directories[number][part]
        return number

    def apply(self, operation: Operation) -> None:
        op = operation
        if op.kind == "make":
            self.directories[op.directory][op.name] = op.number
        elif op.kind == "remove":
            self.directories[op.directory].pop(op.name, None)
        elif op.kind == "move":
            self.directories[op.directory].pop(op.name, None)
            self.directories[op.target][op.target_name] = op.number
        elif op.kind == "write":
            content = self.files[op.number]
            content.extend(bytes(max(0, op.offset + len(op.content) - len(content))))
            content[op.offset : op.offset + len(op.content)] = op.content

    def put(self, directory: Path, number: int = ROOT) -> None:
        """Write it to a disk."""
        for name, child in self.directories[number].items():
            if child in self.directories:
                (directory / name).mkdir()
                self.put(directory / name, child)
            else:
                (directory / name).write_bytes(self.files[child])

    def content(self, number: int = ROOT) -> dict[str, Any]:
        """Names and what they stand for."""
        return {
            name: self.content(child) if child in self.directories else bytes(self.files[child])
            for name, child in self.directories[number].items()
        }


@dataclass
class Recording:
    """The operations of a save, from a disk of which all is synced."""

    before: Tree
    operations: list[Operation] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.operations)

    def after(self, count: int, dice: Random | None = None) -> Tree:
        """The disk after a crash behind ``count`` operations.

        Without ``dice`` all of them lasted; else a subset of what was not synced did.
        """
        tree = self.before.copy()
        # What was made later must be there to be pointed to.
        for op in self.operations[:count]:
            if op.kind == "make" and op.number not in tree.directories:
                if op.content:
                    tree.directories[op.number] = {}
                else:
                    tree.files[op.number] = bytearray()
        share = 0.0 if dice is None else dice.choice([0.1, 0.5, 0.9, 1.0])
        for index, op in enumerate(self.operations[:count]):
            if dice is None or op.kind == "sync" or self._lasts(index, count):
                tree.apply(op)
            elif dice.random() >= share:
                part = op.content
                if op.kind == "write" and dice.random() < 0.3:
                    part = part[: dice.randrange(len(part) + 1)]
                tree.apply(replace(op, content=part))
        return tree

    def _lasts(self, index: int, count: int) -> bool:
        synced = {op.number for op in self.operations[index + 1 : count] if op.kind == "sync"}
        return synced.issuperset(self.operations[index].syncs())


class _Recorder:
    """Stands in for the functions of `os` that change a disk, and notes what they do."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.live = Tree.of(root)
        self.recording = Recording(self.live.copy())
        self.open: dict[int, tuple[int, int]] = {}  # descriptor -> number, position
        self.lock = threading.RLock()
        self.real = {
            name: getattr(os, name)
            for name in ("open", "write", "fsync", "close", "mkdir", "rename", "unlink", "rmdir")
        }

    def _parts(self, path: Any) -> tuple[str, ...] | None:
        path = Path(os.fsdecode(path)) if not isinstance(path, int) else None
        if path is None or not path.is_relative_to(self.root):
            return None
        return path.relative_to(self.root).parts

    def _note(self, operation: Operation) -> None:
        self.live.apply(operation)
        self.recording.operations.append(operation)

    def _make(self, parts: tuple[str, ...], *, is_directory: bool) -> int:
        number = self.live.new(is_directory=is_directory)
        mark = b"directory" if is_directory else b""
        directory = self.live.find(parts[:-1])
        self._note(Operation("make", number, directory, parts[-1], content=mark))
        return number

    def os_open(self, path: Any, flags: int, mode: int = 0o777, **options: Any) -> int:
        parts = self._parts(path)
        with self.lock:
            descriptor: int = self.real["open"](path, flags, mode, **options)
            if parts is not None:
                if (
                    flags & os.O_CREAT
                    and parts[-1] not in self.live.directories[self.live.find(parts[:-1])]
                ):
                    self._make(parts, is_directory=False)
                self.open[descriptor] = self.live.find(parts), 0
            return descriptor

    def os_close(self, descriptor: int) -> None:
        with self.lock:
            self.open.pop(descriptor, None)
            self.real["close"](descriptor)

    def os_write(self, descriptor: int, content: Any) -> int:
        with self.lock:
            written: int = self.real["write"](descriptor, content)
            if descriptor in self.open:
                number, position = self.open[descriptor]
                part = bytes(content)[:written]
                self._note(Operation("write", number, offset=position, content=part))
                self.open[descriptor] = number, position + written
            return written

    def os_fsync(self, descriptor: int) -> None:
        with self.lock:
            if descriptor in self.open:  # a machine that crashes on paper needs no real one
                self._note(Operation("sync", self.open[descriptor][0]))

    def os_mkdir(self, path: Any, mode: int = 0o777, **options: Any) -> None:
        parts = self._parts(path)
        with self.lock:
            self.real["mkdir"](path, mode, **options)
            if parts is not None:
                self._make(parts, is_directory=True)

    def os_rename(self, source: Any, target: Any) -> None:
        one, other = self._parts(source), self._parts(target)
        with self.lock:
            self.real["rename"](source, target)
            if one is not None and other is not None:
                self._note(
                    Operation(
                        "move",
                        self.live.find(one),
                        self.live.find(one[:-1]),
                        one[-1],
                        self.live.find(other[:-1]),
                        other[-1],
                    )
                )

    def _remove(self, how: str, path: Any) -> None:
        parts = self._parts(path)
        with self.lock:
            self.real[how](path)
            if parts is not None:
                self._note(
                    Operation(
                        "remove", self.live.find(parts), self.live.find(parts[:-1]), parts[-1]
                    )
                )

    def os_unlink(self, path: Any) -> None:
        self._remove("unlink", path)

    def os_rmdir(self, path: Any) -> None:
        self._remove("rmdir", path)

    def rmtree(self, path: Any, ignore_errors: bool = False) -> None:
        try:
            for entry in sorted(Path(path).iterdir()):
                if entry.is_dir() and not entry.is_symlink():
                    self.rmtree(entry)
                else:
                    self.os_unlink(entry)
            self.os_rmdir(path)
        except OSError:
            if not ignore_errors:
                raise


@contextmanager
def recorded(root: Path) -> Iterator[Recording]:
    """Record what is done to ``root`` and all below it, by any thread."""
    recorder = _Recorder(root)
    patches = [mock.patch.object(shutil, "rmtree", recorder.rmtree)]
    patches += [
        mock.patch.object(os, name, getattr(recorder, f"os_{name}")) for name in recorder.real
    ]
    for patch in patches:
        patch.start()
    try:
        yield recorder.recording
    finally:
        for patch in patches:
            patch.stop()
    # Nothing was done behind the recorder's back.
    assert recorder.live.content() == Tree.of(root).content()
