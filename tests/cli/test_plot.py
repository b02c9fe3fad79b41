"""``mpishard plot``: pictures of runs from their metrics."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mpishard.cli import app
from mpishard.observe import MetricsWriter

if importlib.util.find_spec("matplotlib") is None:
    pytest.skip("matplotlib is not installed here", allow_module_level=True)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / "small", tmp_path / "large"]
    for folder in folders:
        with MetricsWriter(folder / "metrics.jsonl") as metrics:
            for step in range(1, 101):
                metrics.write(step, loss=3 / step)
            if folder.name == "large":
                metrics.write(100, validation_loss=0.5)
    return folders


def plot(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plot", *map(str, arguments)])
    return result.exit_code, result.output


def test_one_run_and_several(runs: list[Path], tmp_path: Path) -> None:
    assert plot(runs[0]) == (0, f"{runs[0] / 'loss.png'}\n")
    assert plot(runs[1] / "metrics.jsonl", "--unit", "nats")[0] == 0
    assert plot(*runs, "-o", tmp_path / "both.png") == (0, f"{tmp_path / 'both.png'}\n")
    for path in (runs[0] / "loss.png", runs[1] / "loss.png", tmp_path / "both.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_runs_that_cannot_be_drawn_are_refused_by_name(runs: list[Path], tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    assert plot(nothing) == (2, f"mpishard plot: there is no file or folder {nothing}\n")
    (tmp_path / "empty").mkdir()
    file = tmp_path / "empty" / "metrics.jsonl"
    why = f"there is no {file}; a run writes its losses there with metrics={file}"
    assert plot(runs[0], file.parent) == (2, f"mpishard plot: {why}\n")
    code, said = plot(runs[0], "-o", "loss.pdf")
    why = "a PNG is drawn: give a name that ends with .png, got loss.pdf"
    assert (code, said) == (2, f"mpishard plot: --output: {why}\n")
    (tmp_path / "bad.jsonl").write_text("no JSON\n")
    code, said = plot(runs[0], tmp_path / "bad.jsonl")
    assert (code, "line 1 is not JSON" in said) == (2, True)


def test_runs_of_one_name_have_one_colour_and_one_line_in_the_legend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr("mpishard.observe.plots.save", lambda figure, _: drawn.append(figure))
    runs = [tmp_path / seed / precision for seed in "01" for precision in ("f4", "bf16")]
    for number, run in enumerate(runs):
        with MetricsWriter(run / "metrics.jsonl") as metrics:
            for step in range(1, 101):
                metrics.write(step, loss=50.0 if step < 2 else 2 + 0.1 * number)
    assert plot(*runs, "-o", tmp_path / "all.png")[0] == 0
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["f4", "bf16"]
    colours = [line.get_color() for line in axes.lines]
    assert colours[:2] == colours[2:]
    assert colours[0] != colours[1]
    low, high = axes.get_ylim()  # all of the losses but the first steps
    assert 1.5 < low < 2
    assert 2.3 < high < 50
