"""The picture of a training run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.observe.drawing import BLUE, GREY, RED, new_figure, plain_axes, save

__all__ = ["plot_loss_curve"]

Points = Sequence[tuple[int, float]]

_TRAINING = BLUE
_VALIDATION = RED
_BASELINE = GREY


def plot_loss_curve(
    path: str | os.PathLike[str],
    training: Points,
    validation: Points = (),
    *,
    baseline: tuple[str, float] | None = None,
    title: str = "",
    unit: str = "",
) -> None:
    """Draw losses against steps as a PNG.

    Parameters
    ----------
    path : path
        The file; missing parents are made.
    training : sequence of (int, float)
        Step and loss of each step; drawn pale, with their moving average on top.
    validation : sequence of (int, float)
        Step and loss of each validation.
    baseline : (str, float), optional
        Label and loss of something to compare with: a horizontal line.
    title : str
        Above the picture.
    unit : str
        Of the losses, as ``"nats per byte"``.

    Raises
    ------
    ImportError
        Where matplotlib is not installed; the message says how to get it.
    """
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
    save(figure, path)


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
        axes.plot(steps, _moving_mean(losses, width), color=_TRAINING, linewidth=1.8, label=label)
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


def _moving_mean(values: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Mean over a centred window of ``width`` values, shorter at both ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(values.size)
    low = np.maximum(places - width // 2, 0)
    high = np.minimum(places + (width + 1) // 2, values.size)
    means: np.ndarray[Any, Any] = (sums[high] - sums[low]) / (high - low)
    return means
