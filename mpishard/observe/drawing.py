"""The one look of the package's pictures; matplotlib is imported here."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

__all__ = ["BLUE", "GREY", "PALETTE", "RED", "new_figure", "plain_axes", "save"]

BLUE = "#3b6fb6"
RED = "#d1495b"
GREY = "#5f6b73"
PALETTE = (BLUE, RED, "#4f9d69", "#e09f3e", "#7d5ba6", GREY)
"""Colours of curves, in order."""

_GRID = "#e3e6e8"


def new_figure(what: str, width: float = 7.2, height: float = 4.2) -> Any:
    """An empty figure with a canvas of its own: no window, no state shared between threads.

    Raises
    ------
    ImportError
        Where matplotlib is not installed; the message names ``what`` needs it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib: pip install 'mpishard[plot]'") from error
    figure: Any = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    # Notebooks ask an object for its picture; pyplot, which would tell them how, is not loaded.
    figure._repr_png_ = lambda: _png(figure)
    return figure


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png")
    return stream.getvalue()


def plain_axes(axes: Any, title: str, grid: str) -> None:
    """Title on the left, a pale grid along ``grid``, no frame at the top and right."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
    axes.grid(axis=grid, color=_GRID)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write the figure as a PNG; missing parents are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(_png(figure))
