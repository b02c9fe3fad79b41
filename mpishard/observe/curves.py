"""Pictures of measurements: points and a model's line, side by side in panels."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mpishard.observe.drawing import GREY, PALETTE, new_figure, plain_axes, save

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
        In the order of the legend.
    logarithmic : {"xy", "x", ""}
        Which axes are; others begin at 0.
    boundary : (float, str), optional
        An x from which on something holds, and what: shaded.
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    logarithmic: Literal["xy", "x", ""] = "xy"
    boundary: tuple[float, str] | None = None


def plot_panels(path: str | os.PathLike[str], panels: Sequence[Panel]) -> Any:
    """Draw panels side by side as a PNG.

    Parameters
    ----------
    path : path
        The file; missing parents are made.
    panels : sequence of Panel
        From left to right. Curves of one label have one colour in all of them.

    Returns
    -------
    matplotlib.figure.Figure
        The picture; as the last value of a notebook cell it shows itself.

    Raises
    ------
    ImportError
        Where matplotlib is not installed; the message says how to get it.
    """
    width = 4.8 if len(panels) < 3 else 3.7
    figure = new_figure("plot_panels", width=width * len(panels), height=4.0)
    labels = dict.fromkeys(c.label for panel in panels for c in panel.curves if not c.modelled)
    colours = dict(zip(labels, itertools.cycle(PALETTE), strict=False))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel, colours)
    save(figure, path)
    return figure


def _draw(axes: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    paint = PALETTE[0]
    for curve in panel.curves:
        if curve.modelled:
            style = {"linestyle": (0, (4, 3)), "linewidth": 1.2, "alpha": 0.8}
        else:
            paint = colours[curve.label]
            # Points of a measurement are marked; those of a long run would hide its line.
            style = {"marker": "o" if len(curve.x) <= 50 else "", "markersize": 4, "linewidth": 1.6}
        axes.plot(curve.x, curve.y, label=curve.label, color=paint, **style)
        if curve.spread:
            low, high = zip(*curve.spread, strict=True)
            axes.fill_between(curve.x, low, high, color=paint, alpha=0.15, linewidth=0)
    if panel.boundary is not None:
        begin, text = panel.boundary
        left, right = axes.get_xlim()
        axes.axvspan(begin, right, color=GREY, alpha=0.08, linewidth=0)
        axes.set_xlim(left, right)
        axes.text(
            begin, 0.02, f" {text}", transform=axes.get_xaxis_transform(), color=GREY, fontsize=8
        )
    for axis in ("x", "y"):
        if axis in panel.logarithmic:
            axes.set(**{f"{axis}scale": "log"})
    if "y" in panel.logarithmic:
        _plain_ticks(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    plain_axes(axes, panel.title, grid="both")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.legend(frameon=False, fontsize=8)


def _plain_ticks(axis: Any) -> None:
    """Numbers as people write them, and some between the powers of ten where there are few."""
    from matplotlib.ticker import LogFormatter, StrMethodFormatter

    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
