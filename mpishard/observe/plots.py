"""Pictures of runs and of measurements, in one style, drawn by matplotlib."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mpishard.base import Array
from mpishard.observe.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#3b6fb6"
RED = "#d1495b"
GREY = "#5f6b73"
PALETTE = (BLUE, RED, "#4f9d69", "#e09f3e", "#7d5ba6", GREY)
"""Colours of curves, in order."""

_GRID = "#e3e6e8"


def new_figure(what: str, width: float = 7.2, height: float = 4.2) -> Figure:
    """Return an empty figure with a canvas of its own: no window, no state shared by threads.

    Raises
    ------
    ImportError
        If matplotlib is not installed; the message says that ``what`` needs it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{what} needs matplotlib: pip install 'mpishard[plot]'") from error
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    # Notebooks call this method to show an object. pyplot would register one, but is not loaded.
    vars(figure)["_repr_png_"] = lambda: _png(figure)
    return figure


def _png(figure: Any) -> bytes:
    from PIL import Image  # installed with matplotlib, which needs it

    stream = io.BytesIO()
    figure.canvas.draw()
    picture = Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB")
    # A chart has few colours, so a palette of 256 is enough, and takes a third of the bytes.
    picture.quantize(256, dither=Image.Dither.NONE).save(stream, "png", optimize=True)
    return stream.getvalue()


def plain_axes(axes: Axes, title: str, grid: Literal["x", "y", "both"]) -> None:
    """Set a title on the left and a pale grid along ``grid``; hide the top and right frame."""
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
    axes.grid(axis=grid, color=_GRID)
    # The grid would otherwise cross the curves.
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write the figure as a PNG; missing parents are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Drawn before the file is opened, so that an error leaves an older picture whole.
    target.write_bytes(_png(figure))


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a panel.

    Parameters
    ----------
    label : str
        Text in the legend.
    x, y : sequence of float
        Values of one length.
    spread : sequence of (float, float), optional
        Lowest and highest y of each point.
    modelled : bool
        Whether it is a model's line: dashed and without points, in the colour of the curve before.
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
        Title and labels.
    curves : sequence of Curve
        In the order of the legend.
    logarithmic : {"xy", "x", ""}
        The logarithmic axes. A linear y axis begins at 0 unless ``close``.
    boundary : (float, str), optional
        The x from which on the panel is shaded, and the text beside it.
    close : bool
        Whether the y axis is limited to the values, as for losses. The first fiftieth of each
        curve, which may fall steeply, is not considered.
    """

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    logarithmic: Literal["xy", "x", ""] = "xy"
    boundary: tuple[float, str] | None = None
    close: bool = False


def plot_panels(path: str | os.PathLike[str], panels: Sequence[Panel]) -> Figure:
    """Draw panels side by side as a PNG.

    Parameters
    ----------
    path : path
        The file; missing parents are made.
    panels : sequence of Panel
        Panels from left to right. Curves of one label have one colour in all of them, and one
        line in the legend.

    Returns
    -------
    matplotlib.figure.Figure
        The picture. A notebook shows it if it is the last value of a cell.

    Raises
    ------
    ImportError
        If matplotlib is not installed; the message says how to get it.
    """
    # Three panels or more must still fit the width of a page.
    width = 4.8 if len(panels) < 3 else 3.7
    figure = new_figure("plot_panels", width=width * len(panels), height=4.0)
    labels = dict.fromkeys(c.label for panel in panels for c in panel.curves if not c.modelled)
    colours = dict(zip(labels, itertools.cycle(PALETTE), strict=False))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, panel, colours)
    save(figure, path)
    return figure


def _draw_panel(axes: Axes, panel: Panel, colours: Mapping[str, str]) -> None:
    paint = PALETTE[0]
    style: dict[str, Any]
    for curve in panel.curves:
        # Without a colour of its own: it belongs to the measurement before it.
        if curve.modelled:
            style = {"linestyle": (0, (4, 3)), "linewidth": 1.2, "alpha": 0.8}
        else:
            paint = colours[curve.label]
            # Points of a measurement have markers; those of a long run would hide its line.
            style = {"marker": "o" if len(curve.x) <= 50 else "", "markersize": 4, "linewidth": 1.6}
        axes.plot(curve.x, curve.y, label=curve.label, color=paint, **style)
        if curve.spread:
            low, high = zip(*curve.spread, strict=True)
            axes.fill_between(curve.x, low, high, color=paint, alpha=0.15, linewidth=0)
    if panel.boundary is not None:
        begin, text = panel.boundary
        left, right = axes.get_xlim()
        axes.axvspan(begin, right, color=GREY, alpha=0.08, linewidth=0)
        # axvspan has widened the limits.
        axes.set_xlim(left, right)
        axes.text(
            begin, 0.02, f" {text}", transform=axes.get_xaxis_transform(), color=GREY, fontsize=8
        )
    for axis in ("x", "y"):
        if axis in panel.logarithmic:
            axes.set(**{f"{axis}scale": "log"})
    if "y" in panel.logarithmic:
        from matplotlib.ticker import LogFormatter, StrMethodFormatter

        # Plain numbers instead of powers of ten, and some between these if the axis has few.
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    elif panel.close:
        _fit_y(axes, [y for curve in panel.curves for y in curve.y[len(curve.y) // 50 :]])
    else:
        axes.set_ylim(bottom=0)
    plain_axes(axes, panel.title, grid="both")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    lines, labels = axes.get_legend_handles_labels()
    # Lines of one label, such as a measurement and its model, have one entry.
    each = dict(zip(labels, lines, strict=True))
    axes.legend(each.values(), each.keys(), frameon=False, fontsize=8)


def _fit_y(axes: Axes, values: Sequence[float]) -> None:
    """Limit the y axis to the finite values, with a margin."""
    finite = np.array(values, np.float64)
    finite = finite[np.isfinite(finite)]
    if finite.size:
        low, high = float(finite.min()), float(finite.max())
        # Equal values have no range: then a tenth of their size, or 1 around 0.
        margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
        axes.set_ylim(low - margin, high + margin)


Points = Sequence[tuple[int, float]]


def plot_loss_curve(
    path: str | os.PathLike[str] | None = None,
    training: Points | Sequence[float] | str | os.PathLike[str] = (),
    validation: Points = (),
    *,
    baseline: tuple[str, float] | None = None,
    title: str = "",
    unit: str = "",
) -> Figure:
    """Draw losses against steps.

    Parameters
    ----------
    path : path, optional
        The PNG to write; missing parents are made. None writes no file.
    training : sequence of (int, float), sequence of float, or path
        Step and loss of each step, drawn pale, with their moving average on top; losses alone, such
        as a result's ``loss_history``, are those of steps 1, 2, ... Or the metrics file of a run
        (`MetricsWriter`, ``metrics=`` of a run), or its folder; the validation losses of the file
        are then drawn too.
    validation : sequence of (int, float)
        Step and loss of each validation.
    baseline : (str, float), optional
        Label and loss of something to compare with: a horizontal line.
    title : str
        Text above the picture.
    unit : str
        Unit of the losses, such as ``"nats per byte"``.

    Returns
    -------
    matplotlib.figure.Figure
        The picture. A notebook shows it if it is the last value of a cell.

    Raises
    ------
    ImportError
        If matplotlib is not installed; the message says how to get it.
    TypeError
        If ``training`` is none of these.
    FileNotFoundError, ValueError
        If ``training`` names no metrics file, or a damaged one; if ``path`` has the name of a
        metrics file, which the picture would overwrite.
    """
    if path is not None and Path(path).suffix in (".jsonl", ".json"):
        raise ValueError(
            f"{path} is the PNG to write, and named like a metrics file: pass that as training"
        )
    if isinstance(training, str | os.PathLike):
        training, in_file = losses_of(training)
        validation = validation or in_file
    training = _numbered(training)
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
    """Return the steps and losses in a run's metrics: those of training, those of validation.

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
        # A loss that was not finite is null in the file.
        [(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)]
        for name in ("loss", "validation_loss")
    )
    if not training and not validation:
        raise ValueError(f"{path} has no losses in its {len(rows)} lines")
    return training, validation


def _draw(
    axes: Axes,
    training: Array,
    validation: Array,
    baseline: tuple[str, float] | None,
) -> None:
    steps, losses = training
    if steps.size:
        # A fiftieth of the run, however long: enough to remove the noise of batches.
        width = max(1, steps.size // 50)
        axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
        label = f"training (mean of {width} steps)" if width > 1 else "training"
        axes.plot(steps, moving_mean(losses, width), color=BLUE, linewidth=1.8, label=label)
    if validation.size:
        axes.plot(
            *validation,
            color=RED,
            linewidth=1.0,
            marker="o",
            markersize=5,
            markeredgecolor="white",
            label=f"validation (last {validation[1, -1]:.3f})",
            zorder=3,
        )
    if baseline is not None:
        name, loss = baseline
        axes.axhline(
            loss,
            color=GREY,
            linestyle=(0, (5, 3)),
            linewidth=1.4,
            label=f"{name} ({loss:.3f})",
        )
    # Without the first steep fall, which would flatten the rest.
    others = [] if baseline is None else [baseline[1]]
    _fit_y(axes, [*losses[losses.size // 50 :], *validation[1], *others])


def _numbered(training: Points | Sequence[float]) -> Points:
    """Return steps and losses; losses alone are numbered from 1."""
    if not isinstance(training, Iterable):
        raise TypeError(
            "training must be losses, such as result.loss_history, pairs of step and loss, or the "
            f"path of a run, got {type(training).__name__}"
        )
    pairs: list[Any] = list(training)
    is_alone = all(np.ndim(each) == 0 for each in pairs)
    return list(enumerate(pairs, start=1)) if is_alone else pairs


def _finite(points: Points) -> Array:
    """Return steps and losses as rows, shape (2, n), without those that are not finite."""
    table = np.array([(step, loss) for step, loss in points], np.float64).reshape(-1, 2)
    kept: Array = table[np.isfinite(table).all(axis=1)].T
    return kept


def moving_mean(values: Array, width: int) -> Array:
    """Return the mean over a centred window of ``width`` values, shorter at both ends."""
    # Computed from running sums, so that a wide window takes no longer than a narrow one.
    sums = np.concatenate([[0.0], np.cumsum(values)])
    places = np.arange(values.size)
    low = np.maximum(places - width // 2, 0)
    high = np.minimum(places + (width + 1) // 2, values.size)
    means: Array = (sums[high] - sums[low]) / (high - low)
    return means
