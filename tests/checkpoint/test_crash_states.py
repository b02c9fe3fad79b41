"""Crashes of the machine during a save leave the old checkpoint or the new one, never a mixture."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from crash_states import Recording, recorded
from places import Place


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

RANKS = (1, 2, 3)
CASES = [*itertools.product((False, True), SAVES, RANKS)]


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


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize("world_size", RANKS)
def test_a_save_may_stop_after_any_of_its_operations(
    is_folder: bool, kind: str, world_size: int, tmp_path: Path, fakes: Any
) -> None:
    """A killed process has made the first operations of a save, and none of the others."""
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


@pytest.mark.timeout(120)
def test_a_crash_may_lose_any_operations_that_were_not_synced(
    tmp_path: Path, fakes: Any, torture: Any
) -> None:
    """Several crashes, each of which loses operations without a sync; then a complete save."""
    recordings: dict[Any, Recording] = {}
    count, number, crashes, kept = torture.count(100, 5000), 0, 0, 0
    while crashes < count:
        number += 1
        dice = torture.dice(number)
        case = CASES[dice.randrange(len(CASES))]
        if case not in recordings:
            recordings[case] = record(tmp_path / str(len(recordings)), fakes, *case)
        is_folder, kind, _ = case
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
            if is_folder and at == len(recording):
                assert (place.path / "latest").read_text() == f"step-{step:08d}\n", what
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
