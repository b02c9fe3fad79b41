"""Pictures of measurements: points and a model's line, side by side in panels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpishard.observe.drawing import PALETTE, new_figure, plain_axes, save

__all__ = ["Curve", "Panel", "plot_panels"]


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a panel.

    Parameters
    ----------
    label : str
        In the legend.
    x, y : sequence of float
        Of one length.
    spread : sequence of (float, float), optional
        Lowest and highest y of each point.
    modelled : bool
        A model's line, dashed and without points, in the colour of the curve before it.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    spread: Sequence[tuple[float, float]] = ()
    modelled: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One of the pictures in a figure.

    Parameters
    ----------
    title, x_label, y_label : str
        What it shows.
    curves : sequence of Curve
        In the order of their colours.
    logarithmic : bool
        Whether both axes are.
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    logarithmic: bool = True


def plot_panels(path: str | os.PathLike[str], panels: Sequence[Panel]) -> None:
    """Draw panels side by side as a PNG.

    Parameters
    ----------
    path : path
        The file; missing parents are made.
    panels : sequence of Panel
        From left to right.

    Raises
    ------
    ImportError
        Where matplotlib is not installed; the message says how to get it.
    """
    figure = new_figure("plot_panels", width=1.0 + 4.4 * len(panels), height=4.0)
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel)
    save(figure, path)


def _draw(axes: Any, panel: Panel) -> None:
    colour = -1
    for curve in panel.curves:
        if curve.modelled:
            style = {"linestyle": (0, (4, 3)), "linewidth": 1.2, "alpha": 0.8}
        else:
            colour += 1
            style = {"marker": "o", "markersize": 4, "linewidth": 1.6}
        paint = PALETTE[max(colour, 0) % len(PALETTE)]
        axes.plot(curve.x, curve.y, label=curve.label, color=paint, **style)
        if curve.spread:
            low, high = zip(*curve.spread, strict=True)
            axes.fill_between(curve.x, low, high, color=paint, alpha=0.15, linewidth=0)
    if panel.logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    plain_axes(axes, panel.title, grid="both")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.legend(frameon=False, fontsize=8)
