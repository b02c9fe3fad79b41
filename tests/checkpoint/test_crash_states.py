"""A machine that stops anywhere in a save: the old checkpoint or the new one, never a mixture."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from crash_states import Recording, recorded

from mpishard import checkpoint, run_in_threads
from mpishard.checkpoint import CheckpointFolder, newest_valid
from mpishard.checkpoint.snapshot import begin_save
from mpishard.checkpoint.target import Target


NEVER = 1000  # more saves than any of these tests makes


class Place:
    """Where a job saves: a single path, or a folder of which the two newest stay."""

    def __init__(self, root: Path, fakes: Any, *, is_folder: bool) -> None:
        self.path = root / "job" / "c"
        self.fakes = fakes
        self.is_folder = is_folder

    def save(self, step: int, seed: int, world_size: int) -> None:
        def work(backend: Any) -> None:
            model = self.fakes.Model(backend, self.fakes.values(seed))
            optimizer = self.fakes.Optimizer(backend, {"m": self.fakes.values(seed + NEVER)})
            named = {"seed": seed}
            begin_save(lambda: self._target(step), model, optimizer, metadata=named).wait()

        run_in_threads(world_size, work)

    def _target(self, step: int) -> Target:
        return CheckpointFolder(self.path).target(step) if self.is_folder else Target(self.path)

    def seed(self) -> int | None:
        """Which save is found here, with every bit of it; None for none."""
        found: Path | None = self.path
        if self.is_folder:
            found = newest_valid(self.path)
            self._check_latest()
        try:
            checkpoint.check(found or self.path)
        except FileNotFoundError:
            return None
        model = self.fakes.Model(None, np.zeros(self.fakes.LENGTH))
        optimizer = self.fakes.Optimizer(None, {"m": np.zeros(self.fakes.LENGTH)})
        seed: int = checkpoint.load(found or self.path, model, optimizer)["seed"]
        assert model.equals({"parameters": self.fakes.values(seed)})
        assert optimizer.equals({"optimizer/m": self.fakes.values(seed + NEVER)})
        return seed

    def _check_latest(self) -> None:
        """`latest` names a whole checkpoint, where there is one."""
        latest = self.path / "latest"
        if latest.exists():
            named = self.path / latest.read_text().removesuffix("\n")
            is_waiting = not named.exists()  # its successor is about to take its place
            checkpoint.check(named.with_name(f"{named.name}.previous") if is_waiting else named)

    def check_is_tidy(self) -> None:
        """Nothing is there but checkpoints."""
        entries = sorted(
            entry.name for entry in (self.path if self.is_folder else self.path.parent).iterdir()
        )
        if self.is_folder:
            assert entries.pop(0) == "latest"
            assert len(entries) <= 2
            assert all(re.fullmatch(r"step-\d{8}", name) for name in entries), entries
        else:
            assert entries == ["c"]


def put(recording: Recording, count: int, root: Path, dice: Random | None = None) -> None:
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    recording.after(count, dice).put(root)


SAVES = {
    "first": [(1, 1)],
    "second": [(1, 1), (2, 2)],
    "third": [(1, 1), (2, 2), (3, 3)],
    "again": [(1, 1), (2, 2), (2, 3)],
}
"""Step and seed of each save, the last of which does not come to its end."""

CASES = [
    (is_folder, kind, world_size)
    for is_folder in (False, True)
    for kind in SAVES
    for world_size in (1, 2, 3)
]


def record(root: Path, fakes: Any, is_folder: bool, kind: str, world_size: int) -> Recording:
    """The operations of the last save of a case."""
    place = Place(root, fakes, is_folder=is_folder)
    root.mkdir()
    *before, last = SAVES[kind]
    for step, seed in before:
        place.save(step, seed, world_size)
    with recorded(root) as recording:
        place.save(*last, world_size)
    assert place.seed() == last[1]
    return recording


@pytest.fixture(autouse=True)
def _on_paper(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """These crashes need no disk that spins."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    caplog.set_level(logging.ERROR)


@pytest.mark.parametrize(("is_folder", "kind", "world_size"), CASES)
def test_every_prefix(
    is_folder: bool, kind: str, world_size: int, tmp_path: Path, fakes: Any
) -> None:
    """Of a save's operations, as many as a killed process came to."""
    recording = record(tmp_path / "live", fakes, is_folder, kind, world_size)
    assert len(recording) > 8 + 3 * world_size, "mkdir, files, manifest, syncs, renames"
    place = Place(tmp_path / "after", fakes, is_folder=is_folder)
    old, new = ([None] + [seed for _, seed in SAVES[kind]])[-2:]
    found = []
    for count in range(len(recording) + 1):
        put(recording, count, tmp_path / "after")
        found.append(place.seed())
    changes = found.index(new)
    assert found == [old] * changes + [new] * (len(found) - changes)
    assert 0 < changes < len(recording), "it happens inside"


def test_lost_operations(tmp_path: Path, fakes: Any, torture: Any) -> None:
    """Of a save's operations, any that were not synced: crashes in a row, then a save that ends."""
    recordings: dict[Any, Recording] = {}
    count, number, crashes, kept = torture.count(200, 5000), 0, 0, 0
    while crashes < count:
        number += 1
        dice = torture.dice(number)
        case = CASES[dice.randrange(len(CASES))]
        if case not in recordings:
            recordings[case] = record(tmp_path / str(len(recordings)), fakes, *case)
        is_folder, kind, world_size = case
        place = Place(tmp_path / "after", fakes, is_folder=is_folder)
        old, new = ([None] + [seed for _, seed in SAVES[kind]])[-2:]
        step = SAVES[kind][-1][0]
        recording = recordings[case]
        while True:
            crashes += 1
            at = dice.choice([len(recording), dice.randrange(len(recording) + 1)])
            put(recording, at, tmp_path / "after", dice)
            found = place.seed()
            what = f"trial {number}: {case}, {at} of {len(recording)} operations, save {new}"
            assert found in ({new} if at == len(recording) else {old, new}), what
            kept += found == new
            if dice.random() < 0.6:
                break
            old, new, step = found, new + 1, step + dice.randrange(2)
            with recorded(tmp_path / "after") as recording:
                place.save(step, new, dice.randrange(1, 4))
        place.save(step, new + 1, 1)
        assert place.seed() == new + 1, what
        place.check_is_tidy()
    torture.saw(f"{crashes} states with lost operations: {crashes - kept} old, {kept} new")
