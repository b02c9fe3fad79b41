"""The loss curve: a small PNG of any data."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpishard.observe import MetricsWriter, plot_loss_curve
from mpishard.observe.plots import moving_mean


def curve(length: int, noise: float = 0.1) -> list[tuple[int, float]]:
    random = np.random.default_rng(0)
    return [
        (step, 1.3 + 4 * math.exp(-step / 50) + noise * random.standard_normal())
        for step in range(1, length + 1)
    ]


@pytest.fixture(autouse=True)
def _needs_matplotlib(request: pytest.FixtureRequest) -> None:
    if "without" not in request.node.name:
        pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("training", "validation", "baseline"),
    [
        (curve(5000, 0.3), curve(5000)[::250], ("bigram", 2.346)),
        (curve(3), (), None),
        ((), curve(1), None),
        ((), (), ("bigram", 2.3)),
        ((), (), None),
        ([(1, 2.0)] * 3, (), None),
        ([(1, math.nan), (2, math.inf), (3, 1.0)], [(3, math.nan)], None),
    ],
)
def test_any_data_gives_a_small_png(
    training: Any, validation: Any, baseline: Any, tmp_path: Path
) -> None:
    path = tmp_path / "plots" / "loss.png"
    plot_loss_curve(path, training, validation, baseline=baseline, title="A run", unit="nats")
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert 1_000 < len(content) < 100_000


def test_no_global_state_of_matplotlib_is_touched(tmp_path: Path) -> None:
    was_imported = "matplotlib.pyplot" in sys.modules
    plot_loss_curve(tmp_path / "loss.png", curve(10))
    assert ("matplotlib.pyplot" in sys.modules) == was_imported


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'mpishard\[plot\]'"):
        plot_loss_curve(tmp_path / "loss.png", curve(3))
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.parametrize("width", [1, 2, 3, 7, 50])
def test_the_moving_mean_is_a_mean_of_neighbours(width: int) -> None:
    values = np.random.default_rng(1).standard_normal(20)
    expected = [
        values[max(0, i - width // 2) : i + (width + 1) // 2].mean() for i in range(len(values))
    ]
    np.testing.assert_allclose(moving_mean(values, width), expected, rtol=1e-12, atol=1e-12)


def test_a_metrics_file_is_drawn_and_the_figure_shows_itself(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as metrics:
        for step, loss in curve(20):
            metrics.write(step, loss=loss)
        metrics.write(20, validation_loss=1.5)
    figure = plot_loss_curve(None, tmp_path, title="A run")
    assert figure._repr_png_().startswith(b"\x89PNG")
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.lines}
    assert lines["training"].get_xdata().tolist() == list(range(1, 21))
    assert lines["validation (last 1.500)"].get_ydata().tolist() == [1.5]
    same = plot_loss_curve(tmp_path / "loss.png", tmp_path / "metrics.jsonl", title="A run")
    assert (tmp_path / "loss.png").read_bytes() == same._repr_png_()


def test_a_metrics_file_without_losses_is_refused(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "m.jsonl") as metrics:
        metrics.write(1, gradient_norm=2.0)
    with pytest.raises(ValueError, match=r"m\.jsonl has no losses in its 1 lines"):
        plot_loss_curve(None, tmp_path / "m.jsonl")
    with pytest.raises(FileNotFoundError):
        plot_loss_curve(None, tmp_path)


def test_losses_alone_are_numbered_and_other_values_refused() -> None:
    (axes,) = plot_loss_curve(None, [3.0, 2.0, 1.0]).axes
    assert axes.lines[0].get_xdata().tolist() == [1, 2, 3]
    with pytest.raises(TypeError, match=r"training must be losses, such as .*, got object"):
        plot_loss_curve(None, object())  # type: ignore[arg-type]
