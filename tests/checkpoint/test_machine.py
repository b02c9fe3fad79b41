"""Saves, crashes, damage and pruning in random order, compared with a model of the disk."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vectors import LENGTH, Model, values

from mpishard import checkpoint, run_in_threads
from mpishard.checkpoint import CheckpointFolder, PendingSave, StagingBuffer, newest_valid
from mpishard.checkpoint.saving.save import begin_save
from mpishard.errors import CheckpointError

CALLS = ("open", "write", "fsync", "mkdir", "rename")


HARM = [
    ("rank00000.safetensors", "bits"), ("rank00000.safetensors", "shape"),
    ("manifest.json", "shape"),
]  # fmt: skip
"""Kinds of damage: bits, which only a checksum shows, or damage that the manifest shows."""


class Killed(BaseException):
    """The process ends here."""


class Killer:
    """Ends the process, as far as the disk can tell, at the n-th system call that changes it."""

    def __init__(self, root: Path, at: int) -> None:
        self.root, self.at, self.count = root, at, 0

    def _wrap(self, name: str) -> Any:
        real = getattr(os, name)

        def call(first: Any, *rest: Any, **options: Any) -> Any:
            if isinstance(first, int) or Path(first).is_relative_to(self.root):
                self.count += 1
                if self.count > self.at:
                    raise Killed
            return real(first, *rest, **options)

        return mock.patch.object(os, name, call)

    def __enter__(self) -> None:
        self.patches = [self._wrap(name) for name in CALLS]
        # A killed process tidies nothing up either.
        real = shutil.rmtree

        def rmtree(path: Any, **options: Any) -> None:
            self.count += 1
            if self.count <= self.at:
                real(path, **options)

        self.patches.append(mock.patch.object(shutil, "rmtree", rmtree))
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_: object) -> None:
        for patch in self.patches:
            patch.stop()


class Entry:
    """State of one checkpoint in the model of the disk."""

    def __init__(self, step: int, seed: int) -> None:
        self.step, self.seed = step, seed
        self.harm = ""


class Checkpoints(RuleBasedStateMachine):
    """A folder, and a list of what should be in it, the newest last."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="machine-"))
        self.path = self.root / "run"
        self.entries: list[Entry] = []
        self.seed = 0
        self.step = 0
        self.pending: PendingSave | None = None
        self.started: Entry | None = None
        self.staging = StagingBuffer()
        self.vector = values(0)

    @initialize(keep_last=st.integers(1, 3), keep_every=st.sampled_from([None, 2, 3]))
    def begin(self, keep_last: int, keep_every: int | None) -> None:
        self.keep_last, self.keep_every = keep_last, keep_every
        self.folder = CheckpointFolder(self.path, keep_last=keep_last, keep_every=keep_every)

    def teardown(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        shutil.rmtree(self.root)

    # ----------------------------------------------------------------------------- the model

    def saved(self, entry: Entry) -> None:
        """A save came to its end: its step is replaced, and what nobody keeps is gone."""
        self.entries = [e for e in self.entries if e.step != entry.step] + [entry]
        self.prune_model(self.keep_last, self.keep_every)

    def prune_model(self, keep_last: int, keep_every: int | None) -> None:
        whole = [e for e in self.entries if e.harm != "shape"]
        for old in whole[:-keep_last]:
            if keep_every is None or old.step % keep_every:
                self.entries.remove(old)

    def newest(self) -> Entry | None:
        return next((e for e in reversed(self.entries) if not e.harm), None)

    # ----------------------------------------------------------------------------- what is done

    def next_entry(self, back: int) -> Entry:
        self.seed += 1
        self.step = max(0, self.step + 1 - back)
        return Entry(self.step, self.seed)

    def begin_save(
        self, entry: Entry, model: Model, staging: StagingBuffer | None = None
    ) -> PendingSave:
        return begin_save(
            lambda: self.folder.target(entry.step),
            model,
            metadata={"seed": entry.seed},
            staging=staging,
        )

    @precondition(lambda self: self.pending is None)
    @rule(back=st.sampled_from([0, 0, 0, 1, 3]), world_size=st.integers(1, 3))
    def save(self, back: int, world_size: int) -> None:
        entry = self.next_entry(back)

        def work(backend: Any) -> None:
            model = Model(backend, values(entry.seed))
            self.begin_save(entry, model).wait()

        run_in_threads(world_size, work)
        self.saved(entry)

    @precondition(lambda self: self.pending is None)
    @rule(back=st.sampled_from([0, 0, 1]))
    def save_in_the_background(self, back: int) -> None:
        entry = self.next_entry(back)
        model = Model(None, values(entry.seed))
        self.pending = self.begin_save(entry, model, self.staging)
        self.started = entry
        for _, piece in model.pieces["parameters"]:
            piece.fill(-1)  # training goes on

    @precondition(lambda self: self.pending is not None)
    @rule(times=st.integers(1, 3))
    def poll(self, times: int) -> None:
        assert self.pending is not None
        assert self.started is not None
        if any(self.pending.poll() for _ in range(times)):
            self.finish()

    @precondition(lambda self: self.pending is not None)
    @rule()
    def finish(self) -> None:
        assert self.pending is not None
        assert self.started is not None
        self.pending.wait()
        assert self.pending.done
        self.saved(self.started)
        self.pending = self.started = None

    @precondition(lambda self: self.pending is None)
    @rule(at=st.integers(0, 40), back=st.sampled_from([0, 0, 1]), is_async=st.booleans())
    def crash_in_a_save(self, at: int, back: int, is_async: bool) -> None:
        """The disk stays as it is behind ``at`` calls; then it holds the old or the new."""
        entry = self.next_entry(back)
        model = Model(None, values(entry.seed))
        staging = self.staging if is_async else None
        killer = Killer(self.root, at)
        try:
            with killer:
                self.begin_save(entry, model, staging).wait()
        except (Killed, CheckpointError):
            assert killer.count > at
            place = self.path / f"step-{entry.step:08d}"
            if not place.exists() or self.saved_seed(place) != entry.seed:
                return  # it was not put in its place
            before = [e for e in self.entries if e.step != entry.step] + [entry]
            self.saved(entry)
            # What is pruned next may be there still.
            there = {e.step for e in self.folder.entries()}
            assert there >= {e.step for e in self.entries}, "it was to be kept"
            self.entries = [e for e in before if e.step in there]
        else:
            self.saved(entry)

    @precondition(lambda self: self.pending is None)
    @rule(keep_last=st.integers(1, 3), keep_every=st.sampled_from([None, 2]))
    def prune(self, keep_last: int, keep_every: int | None) -> None:
        CheckpointFolder(self.path, keep_last=keep_last, keep_every=keep_every).prune()
        self.prune_model(keep_last, keep_every)

    @precondition(lambda self: self.pending is None and self.newest() is not None)
    @rule(which=st.integers(0, 9), how=st.sampled_from(HARM), where=st.integers(0, 10_000))
    def corrupt(self, which: int, how: tuple[str, str], where: int) -> None:
        whole = [entry for entry in self.entries if not entry.harm]
        entry, (name, entry_harm) = whole[-1 - which % len(whole)], how
        file = self.directory(entry) / name
        content = bytearray(file.read_bytes())
        content[where % len(content)] ^= 1 << where % 8
        if entry_harm == "shape" and name.startswith("rank"):
            content = content[: where % len(content)]
        file.write_bytes(content)
        entry.harm = entry_harm

    def directory(self, entry: Entry) -> Path:
        path = self.path / f"step-{entry.step:08d}"
        return path if path.exists() else path.with_name(f"{path.name}.previous")

    def saved_seed(self, path: Path) -> int:
        """The seed of a save, if its manifest can be read."""
        try:
            with checkpoint.CheckpointReader(path) as reader:
                return int(reader.metadata["user"]["seed"])
        except CheckpointError:
            return -1

    def seed_at(self, path: Path) -> int:
        arrays = checkpoint.load_arrays(path)
        flat = np.concatenate([array.ravel() for array in arrays.values()])
        return next(s for s in range(self.seed + 1) if flat.tobytes() == values(s).tobytes())

    @rule(world_size=st.integers(1, 3))
    def load(self, world_size: int) -> None:
        if self.pending is not None or self.newest() is None:
            return

        def work(backend: Any) -> None:
            found = newest_valid(self.path, backend)
            assert found is not None
            model = Model(backend, np.zeros(LENGTH))
            checkpoint.load(found, model)
            newest = self.newest()
            assert newest is not None
            assert model.equals({"parameters": values(newest.seed)})

        run_in_threads(world_size, work)

    @invariant()
    def model_and_disk_agree(self) -> None:
        if self.pending is not None or not hasattr(self, "folder"):
            return
        newest = self.newest()
        if newest is not None:
            assert newest_valid(self.path) == self.directory(newest)
            assert self.seed_at(self.directory(newest)) == newest.seed
        elif self.entries:
            with pytest.raises(CheckpointError, match="none of the checkpoints"):
                newest_valid(self.path)
        else:
            assert newest_valid(self.path) is None
        found = sorted(e.step for e in self.folder.entries())
        assert found == sorted(e.step for e in self.entries)


def test_random_sequences_of_saves_crashes_and_damage(
    torture: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    steps, length = torture.count(150, 5000), 25
    run_state_machine_as_test(
        Checkpoints,
        settings=settings(
            max_examples=max(4, steps // length),
            stateful_step_count=length,
            deadline=None,
            phases=[Phase.generate],  # shrinking takes minutes, and the steps are few
            suppress_health_check=list(HealthCheck),
            derandomize=not torture.is_nightly,
        ),
    )
    torture.saw(f"{steps} steps: save, crash, corrupt, load, prune; model and disk agree")
