"""Timelines as pictures and as lines of text."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from mpishard.observe.plots import BLUE, GREY, new_figure, plain_axes, save
from mpishard.pipeline import PipelineOperationType, TimedOperation
from mpishard.planning.timeline import Timeline

__all__ = ["plot_timelines", "text_chart"]


# Three hues that the common kinds of colour blindness tell apart, and of three lightnesses.
_FORWARD = BLUE
_INPUT = "#f0a830"
_WEIGHT = "#7fc6a4"

_WIDTH = 9.6  # inches of a figure, of which the bars have about _BARS
_BARS = 8.9
_DIGIT = 0.055  # inches of a digit of a label
_FONT = 6.5
_ROW = 0.19  # inches of a rank, where that gives a picture of
_TALLEST = 80.0  # inches at most


def plot_timelines(path: str | os.PathLike[str], timelines: Sequence[Timeline]) -> None:
    """Draw timelines below each other as a PNG, all to one scale.

    Bars carry the micro-batch's number if it fits. Later virtual stages of a rank are paler;
    a combined backward is a bar in the colours of both halves.

    Parameters
    ----------
    path : path
        The file; missing parents are made.
    timelines : sequence of Timeline
        Timelines from top to bottom.

    Raises
    ------
    ValueError
        Without timelines.
    ImportError
        If matplotlib is not installed; the message says how to get it.
    """
    if not timelines:
        raise ValueError("there is no timeline to draw")
    row = min(_ROW, _TALLEST / sum(timeline.num_stages for timeline in timelines))
    heights = [0.5 + row * timeline.num_stages for timeline in timelines]
    figure = new_figure("plot_timelines", _WIDTH, sum(heights) + 0.65)
    rows = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, height_ratios=heights)
    longest = max(timeline.makespan for timeline in timelines)
    for (axes,), timeline in zip(rows, timelines, strict=True):
        _draw(axes, timeline, _BARS / longest if longest else 0.0, row)
        axes.set_xlim(0, longest or 1)
    rows[-1][0].set_xlabel("time")
    _add_legend(figure, timelines)
    save(figure, path)


def _draw(axes: Any, timeline: Timeline, inches: float, row: float) -> None:
    """One timeline; ``inches`` are those of one unit of time, ``row`` those of a rank."""
    count = timeline.num_stages * timeline.virtual_stages_per_rank
    input_times = timeline.times.of_stages(PipelineOperationType.BACKWARD_INPUT, count)
    shortest = min(done.duration for timed in timeline.ranks for done in timed) * inches
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    virtual = timeline.virtual_stages_per_rank  # later stages of a rank are paler
    for rank, timed in enumerate(timeline.ranks):
        for done in timed:
            fade = 0.6 * done.operation.virtual_stage_index / max(virtual - 1, 1)
            for colour, start, end in _parts(done, input_times[done.global_stage]):
                bars.setdefault((rank, _paler(colour, fade)), []).append((start, end - start))
            if row == _ROW:
                _label(axes, rank, done, inches, fade)
        edges = [(o.start, o.duration) for o in timed]
        line = min(0.6, 9 * shortest)  # points: an eighth of the shortest bar at most
        axes.broken_barh(edges, (rank - 0.42, 0.84), facecolor="none", edgecolor="white", lw=line)
    for (rank, colour), spans in bars.items():
        axes.broken_barh(spans, (rank - 0.42, 0.84), facecolor=colour, lw=0, zorder=0.9)
    plain_axes(axes, "", grid="x")
    axes.set_title(_title(timeline), loc="left", fontsize=9.5, fontweight="bold", pad=3)
    axes.set_ylim(timeline.num_stages - 0.5, -0.5)
    named = range(0, timeline.num_stages, math.ceil(_ROW / row))
    axes.set_yticks(named, [f"rank {rank}" for rank in named])
    axes.tick_params(labelsize=8, length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _parts(done: TimedOperation, input_time: float) -> list[tuple[str, float, float]]:
    """Colour, start and end of what an operation is made of."""
    kind = done.operation.type
    if kind is PipelineOperationType.BACKWARD:
        middle = done.start + input_time
        return [(_INPUT, done.start, middle), (_WEIGHT, middle, done.end)]
    colours = {
        PipelineOperationType.FORWARD: _FORWARD,
        PipelineOperationType.BACKWARD_INPUT: _INPUT,
        PipelineOperationType.BACKWARD_WEIGHT: _WEIGHT,
    }
    return [(colours[kind], done.start, done.end)]


def _label(axes: Any, rank: int, done: TimedOperation, inches: float, fade: float) -> None:
    text = str(done.operation.micro_batch_index)
    if done.duration * inches < _DIGIT * (len(text) + 0.4):
        return
    is_dark = done.operation.type is PipelineOperationType.FORWARD and fade < 0.3
    axes.text(
        (done.start + done.end) / 2, rank, text, ha="center", va="center_baseline",
        fontsize=_FONT, color="white" if is_dark else "#222222",
    )  # fmt: skip


def _paler(colour: str, fade: float) -> str:
    """``colour`` mixed with that part of white."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * fade):02x}" for part in parts)


def _title(timeline: Timeline) -> str:
    held = max(timeline.peak_held)
    stages = timeline.virtual_stages_per_rank
    return (
        f"{timeline.schedule_name}"
        + (f", {stages} stages per rank" if stages > 1 else "")
        + f":  bubble {timeline.bubble_fraction:.1%},  makespan {timeline.makespan:g},  "
        f"peak {held:.3g} micro-batch{'es' * (held != 1)}"
    )


def _add_legend(figure: Any, timelines: Sequence[Timeline]) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=_FORWARD, label="forward"),
        Patch(facecolor=_INPUT, label="backward: input (B)"),
        Patch(facecolor=_WEIGHT, label="backward: parameters (W)"),
    ]
    if any(timeline.virtual_stages_per_rank > 1 for timeline in timelines):
        patches.append(Patch(facecolor=_paler(GREY, 0.6), label="paler: a rank's later stages"))
    figure.legend(handles=patches, loc="outside upper left", ncols=4, frameon=False, fontsize=8)


_LETTERS = {
    PipelineOperationType.FORWARD: "F",
    PipelineOperationType.BACKWARD: "B",
    PipelineOperationType.BACKWARD_INPUT: "B",
    PipelineOperationType.BACKWARD_WEIGHT: "W",
}


def text_chart(timeline: Timeline, width: int = 100) -> str | None:
    """One line for each rank, and time to the right.

    F is a forward, B a backward, or its input's half, W the parameters' half, with the
    micro-batch's number; what follows until the operation ends is filled with ``=``, and a dot is
    time in which the rank waits. In every other virtual stage the letters are small ones.

    Parameters
    ----------
    timeline : Timeline
        Timeline that is drawn.
    width : int
        Columns that there are.

    Returns
    -------
    str or None
        The lines; None if an operation would be too narrow for its label.

    Examples
    --------
    >>> from mpishard.pipeline import ZeroBubbleH1Schedule
    >>> from mpishard.planning import simulate, text_chart
    >>> print(text_chart(simulate(ZeroBubbleH1Schedule(), 2, 2), width=40))
    rank 0  F0F1..B0W0B1W1
    rank 1  ..F0B0F1B1W0W1
    """
    names = [f"rank {rank}" for rank in range(timeline.num_stages)]
    indent = max(map(len, names)) + 2
    shortest = min(o.duration for timed in timeline.ranks for o in timed)
    label = 1 + len(str(timeline.num_micro_batches - 1))
    if not shortest or indent + timeline.makespan / shortest * label > width + 1e-9:
        return None
    columns = label / shortest
    lines = []
    for name, timed in zip(names, timeline.ranks, strict=True):
        line = ""
        for operation, _, start, end in timed:
            letter = _LETTERS[operation.type]
            if operation.virtual_stage_index % 2:
                letter = letter.lower()
            first, behind = (math.floor(time * columns + 0.5 + 1e-9) for time in (start, end))
            line = line.ljust(first, ".")
            line += f"{letter}{operation.micro_batch_index}".ljust(behind - first, "=")
        lines.append(f"{name.ljust(indent)}{line}")
    return "\n".join(lines)
