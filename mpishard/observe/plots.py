"""The picture of a training run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.observe.drawing import BLUE, GREY, RED, new_figure, plain_axes, save
from mpishard.observe.metrics import read_metrics

__all__ = ["losses_of", "moving_mean", "plot_loss_curve"]

Points = Sequence[tuple[int, float]]

_TRAINING = BLUE
_VALIDATION = RED
_BASELINE = GREY


def plot_loss_curve(
    path: str | os.PathLike[str] | None = None,
    training: Points | str | os.PathLike[str] = (),
    validation: Points = (),
    *,
    baseline: tuple[str, float] | None = None,
    title: str = "",
    unit: str = "",
) -> Any:
    """Draw losses against steps.

    Parameters
    ----------
    path : path, optional
        The PNG to write; missing parents are made. None writes no file.
    training : sequence of (int, float), or path
        Step and loss of each step; drawn pale, with their moving average on top. Or the metrics
        file of a run (`MetricsWriter`, ``metrics=`` of a run), or the folder that it is in: then
        its validation losses are drawn too.
    validation : sequence of (int, float)
        Step and loss of each validation.
    baseline : (str, float), optional
        Label and loss of something to compare with: a horizontal line.
    title : str
        Text above the picture.
    unit : str
        Unit of the losses, as ``"nats per byte"``.

    Returns
    -------
    matplotlib.figure.Figure
        The picture; as the last value of a notebook cell it shows itself.

    Raises
    ------
    ImportError
        If matplotlib is not installed; the message says how to get it.
    FileNotFoundError, ValueError
        If `training` names no metrics file, or one that is damaged.
    """
    if isinstance(training, str | os.PathLike):
        training, in_file = losses_of(training)
        validation = validation or in_file
    figure = new_figure("plot_loss_curve")
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot()
    _draw(axes, _finite(training), _finite(validation), baseline)
    plain_axes(axes, title, grid="y")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss [{unit}]" if unit else "loss")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="upper right")
    if path is not None:
        save(figure, path)
    return figure


def losses_of(run: str | os.PathLike[str]) -> tuple[Points, Points]:
    """Return steps and losses of a run's metrics: of its training, and of its validations.

    Parameters
    ----------
    run : path
        A metrics file, or a folder with a ``metrics.jsonl``.

    Returns
    -------
    (sequence of (int, float), sequence of (int, float))
        Step and loss of each step, and of each validation. Losses that were not finite are left
        out.

    Raises
    ------
    FileNotFoundError
        If there is no such file.
    ValueError
        If a line is damaged, or no line holds a loss.
    """
    path = Path(run)
    if path.is_dir():
        path /= "metrics.jsonl"
    rows = read_metrics(path)
    training, validation = (
        [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
        for name in ("loss", "validation_loss")
    )
    if not training and not validation:
        raise ValueError(f"{path} has no losses in its {len(rows)} lines")
    return training, validation


def _draw(
    axes: Any,
    training: np.ndarray[Any, Any],
    validation: np.ndarray[Any, Any],
    baseline: tuple[str, float] | None,
) -> None:
    steps, losses = training
    if steps.size:
        width = max(1, steps.size // 50)
        axes.plot(steps, losses, color=_TRAINING, alpha=0.25, linewidth=0.8)
        label = f"training (mean of {width} steps)" if width > 1 else "training"
        axes.plot(steps, moving_mean(losses, width), color=_TRAINING, linewidth=1.8, label=label)
    if validation.size:
        axes.plot(
            *validation, color=_VALIDATION, linewidth=1.0, marker="o", markersize=5,
            markeredgecolor="white", label=f"validation (last {validation[1, -1]:.3f})", zorder=3,
        )  # fmt: skip
    if baseline is not None:
        name, loss = baseline
        axes.axhline(
            loss,
            color=_BASELINE,
            linestyle=(0, (5, 3)),
            linewidth=1.4,
            label=f"{name} ({loss:.3f})",
        )
    _set_limits(axes, losses, [*validation[1], *([] if baseline is None else [baseline[1]])])


def _set_limits(axes: Any, losses: np.ndarray[Any, Any], others: list[float]) -> None:
    """Show all but the first steep fall, which would press the rest flat."""
    values = np.array([*losses[losses.size // 50 :], *others])
    if values.size:
        low, high = float(values.min()), float(values.max())
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)


def _finite(points: Points) -> np.ndarray[Any, Any]:
    """Steps and losses as rows, shape (2, n), without those that cannot be drawn."""
    table = np.array([(step, loss) for step, loss in points], np.float64).reshape(-1, 2)
    kept: np.ndarray[Any, Any] = table[np.isfinite(table).all(axis=1)].T
    return kept


def moving_mean(values: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Mean over a centred window of ``width`` values, shorter at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(values.size)
    low = np.maximum(places - width // 2, 0)
    high = np.minimum(places + (width + 1) // 2, values.size)
    means: np.ndarray[Any, Any] = (sums[high] - sums[low]) / (high - low)
    return means
