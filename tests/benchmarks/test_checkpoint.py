"""Measurements of checkpoints: each way is timed and no files stay; no test depends on a time."""

from __future__ import annotations

import importlib
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from mpishard.checkpoint.format import disk
from mpishard.errors import CheckpointError


@pytest.fixture
def checkpoint() -> Any:
    """The script, as a module."""
    return importlib.import_module("checkpoint")


def measure(checkpoint: Any, folder: Path, path: Path | None = None) -> None:
    arguments = Namespace(size=1 << 20, tiny=0, repeats=2, folder=folder, json=path)
    importlib.import_module("harness").measure(checkpoint.main, arguments)


def test_each_way_is_timed_and_nothing_is_left(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(checkpoint, "_STEP_WIDTH", 64)
    folder, path = tmp_path / "new", tmp_path / "c.json"
    measure(checkpoint, folder, path)
    found = json.loads(path.read_text())
    assert found["world_size"] == 2
    rows = {row["way"]: row for row in found["checkpoint"]}
    assert len(rows) == 11
    for way, row in rows.items():
        assert len(row["seconds"]) == (1 if way == "memory for copies" else 2)
        assert min(row["seconds"]) > 0
    stall = rows["save_async, stall"]["seconds"][0]
    assert stall >= rows["save_async, call"]["seconds"][0]
    # Parameters and two moments of one layer of 1024 x 1024, in float32, and headers.
    nbytes = 3 * 4 * 1024 * 1025
    assert nbytes < rows["save"]["nbytes"] < nbytes + 4096
    assert list(folder.iterdir()) == []
    title = " ".join(capsys.readouterr().out.split("──")[0].split())
    assert title.startswith("MLP of 1 layer of width 1024, AdamW, FSDP, 2 ranks: 12.01 MiB in ")


def test_its_size(checkpoint: Any) -> None:
    benchmark = checkpoint.CheckpointBenchmark(256 << 20, 7, Path())
    for world_size in (1, 2, 8):
        nbytes = 12 * benchmark.layers(world_size) * 1024 * 1025 / world_size
        assert abs(nbytes / (256 << 20) - 1) < 0.03
    tiny = checkpoint.CheckpointBenchmark(1, 7, Path(), tiny=19)
    assert [entry.shape for entry in tiny.model(2).checkpoint_parameters()] == [(10,)] * 20
    assert tiny.description(2) == "10 layer norms of 10 features"


def test_ratios_are_those_of_one_repeat(checkpoint: Any) -> None:
    times = {
        "save": (8.0, 2.0, 4.0),
        "memory for copies": (4.0,),
        "save_async, call": (4.0, 1.0, 1.0),
    }
    others = {"save": "", "memory for copies": "", "save_async, call": "save"}
    rows = [checkpoint.CheckpointResult(way, t, 2**20, others[way]) for way, t in times.items()]
    table = checkpoint.CheckpointBenchmark(2**20, 3, Path()).table(rows, 2)
    assert list(table.columns[3].cells) == ["256 KiB/s", "256 KiB/s", "1 MiB/s"]  # of medians
    assert list(table.columns[4].cells) == ["", "", "0.50"]


def test_a_folder_without_room_is_refused_and_left_as_it_was(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        measure(checkpoint, tmp_path / "file" / "new")
    (tmp_path / "file").unlink()
    monkeypatch.setattr(disk, "free_bytes", lambda _: 100)
    with pytest.raises(CheckpointError, match="bytes are needed and 100 are free"):
        measure(checkpoint, tmp_path)
    assert list(tmp_path.iterdir()) == []
