"""Metrics: one line for each step, also after a kill and a resume."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from mpishard.checkpoint.format.disk import replace_file
from mpishard.observe import MetricsWriter, read_metrics


def write(path: Path, steps: range, resume_step: int | None = None) -> None:
    with MetricsWriter(path, resume_step=resume_step) as metrics:
        for step in steps:
            metrics.write(step, loss=1.0 / step, time=float(step))


def steps_in(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_lines_are_there_as_soon_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        metrics.write(1, loss=np.float32(0.5), tokens=np.int64(3), note=None)
        (record,) = read_metrics(path)
        time = record.pop("time")
        assert record == {"step": 1, "loss": 0.5, "tokens": 3, "note": None}
        assert 0 <= time < 10
        metrics.write(step=2, loss=float("inf"), gradient_norm=np.float64("nan"), time=1.5)
    line = path.read_text().splitlines()[1]
    assert line == '{"step": 2, "loss": null, "gradient_norm": null, "time": 1.5}'


def test_opening_again_appends(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, range(1, 3))
    write(path, range(3, 5))
    assert steps_in(path) == [1, 2, 3, 4]


@pytest.mark.parametrize("resume_step", [0, 1, 4, 6, 9])
def test_a_resumed_run_has_every_step_once(resume_step: int, tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, range(1, 7))
    before = [r for r in read_metrics(path) if r["step"] <= resume_step]
    write(path, range(resume_step + 1, 12), resume_step)
    assert read_metrics(path)[: len(before)] == before
    assert steps_in(path) == sorted(
        {*range(1, min(resume_step, 6) + 1), *range(resume_step + 1, 12)}
    )
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("resume_step", [None, 5])
@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3}', "\ufffd"])
def test_a_half_written_last_line_is_dropped(
    torn: str, resume_step: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "m"
    write(path, range(1, 3))
    with path.open("a", encoding="utf-8") as stream:
        stream.write(torn)
    assert steps_in(path) == [1, 2]
    write(path, range(3, 5), resume_step)
    assert steps_in(path) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("line", "message"),
    [("not json", "line 2 is not JSON"), ("[1]", "line 2 has no step"), ('{"a": 1}', "has no ste")],
)
def test_a_file_of_something_else_is_left_alone(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m"
    text = f"{json.dumps({'step': 1})}\n{line}\n"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_metrics(path)
    with pytest.raises(ValueError, match=message):
        MetricsWriter(path, resume_step=1)
    assert path.read_text() == text


def test_a_failed_rewrite_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m"
    write(path, range(1, 4))

    def fail(*_: object) -> None:
        raise OSError(28, "disk full")

    with monkeypatch.context() as patch:
        patch.setattr("mpishard.observe.metrics.os.fsync", fail)
        with pytest.raises(OSError, match=f"disk full: '{path}'"):
            MetricsWriter(path, resume_step=1)
    assert steps_in(path) == [1, 2, 3]
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write(path, range(1, 2), resume_step=0)
    assert os.read(reader, 100) == b'{"step": 1, "loss": 1.0, "time": 1.0}\n'
    os.close(reader)
    assert path.is_fifo()
    with pytest.raises(OSError, match="is not a regular file, and is not replaced"):
        replace_file(path, [b"x"])
    assert path.is_fifo()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full disk here")
def test_a_full_disk_is_named() -> None:
    metrics = MetricsWriter("/dev/full")
    for fail in (lambda: metrics.write(1, loss=1.0), metrics.close):
        with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
            fail()


def test_no_file_to_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "none")


def test_times_go_on_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as metrics:
        for step in range(1, 4):
            metrics.write(step, time=100.0 * step)
    with MetricsWriter(path, resume_step=2) as metrics:
        metrics.write(3)
    times = [record["time"] for record in read_metrics(path)]
    assert times[:2] == [100.0, 200.0]
    assert 200.0 <= times[2] < 260.0
