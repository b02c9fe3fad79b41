"""``mpishard bench checkpoint``: each way is timed, nothing is left; no test looks at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from mpishard.checkpoint.format import disk
from mpishard.cli import app
from mpishard.cli.bench import checkpoint as bench_checkpoint
from mpishard.cli.bench.checkpoint import CheckpointBenchmark, CheckpointResult


def bench(*arguments: Any) -> Result:
    return CliRunner().invoke(app, ["bench", "checkpoint", *map(str, arguments)])


def test_each_way_is_timed_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_checkpoint, "_STEP_WIDTH", 64)
    folder, path = tmp_path / "new", tmp_path / "c.json"
    options = ["--size", "1MiB", "--repeats", 2, "--world-size", 2]
    ended = bench(*options, "--folder", folder, "--json", path)
    assert ended.exit_code == 0, ended.output
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
    title = " ".join(ended.stdout.split("──")[0].split())
    assert title.startswith("MLP of 1 layer of width 1024, AdamW, FSDP, 2 ranks: 12.01 MiB in ")


def test_its_size() -> None:
    benchmark = CheckpointBenchmark(256 << 20, 7, Path())
    for world_size in (1, 2, 8):
        nbytes = 12 * benchmark.layers(world_size) * 1024 * 1025 / world_size
        assert abs(nbytes / (256 << 20) - 1) < 0.03


def test_ratios_are_those_of_one_repeat() -> None:
    times = {"save": (8.0, 2.0, 4.0), "memory for copies": (4.0,),
             "save_async, call": (4.0, 1.0, 1.0)}  # fmt: skip
    others = {"save": "", "memory for copies": "", "save_async, call": "save"}
    rows = [CheckpointResult(way, t, 2**20, others[way]) for way, t in times.items()]
    table = CheckpointBenchmark(2**20, 3, Path()).table(rows, 2)
    assert list(table.columns[3].cells) == ["256 KiB/s", "256 KiB/s", "1 MiB/s"]  # of medians
    assert list(table.columns[4].cells) == ["", "", "0.50"]


def test_what_is_asked_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = bench("--size", "5 parsecs", "--world-size", 1)
    assert ended.exit_code == 2
    assert "--size: a size is a number with B, KiB, MiB or GiB" in ended.stderr
    (tmp_path / "file").write_text("")
    ended = bench("--size", "1MiB", "--world-size", 1, "--folder", tmp_path / "file")
    assert ended.exit_code == 2
    assert "Invalid value for '--folder': Directory" in ended.stderr
    ended = bench("--size", "1MiB", "--world-size", 1, "--folder", tmp_path / "file" / "new")
    assert ended.exit_code == 2
    assert ended.stderr.startswith("mpishard bench: --folder: ")
    (tmp_path / "file").unlink()
    monkeypatch.setattr(disk, "free_bytes", lambda _: 100)
    ended = bench("--size", "1MiB", "--world-size", 1, "--folder", tmp_path)
    assert ended.exit_code == 2
    assert "bytes are needed and 100 are free" in ended.stderr
    assert list(tmp_path.iterdir()) == []
