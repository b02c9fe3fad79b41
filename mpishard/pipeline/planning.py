"""Estimates of a run before it starts: the time line of a pipeline schedule, and its picture."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mpishard.observe import BLUE, GREY, new_figure, plain_axes, save
from mpishard.pipeline import (
    IPipelineSchedule,
    PipelineOperationType,
    StageTimes,
    TimedOperation,
    bubble_fraction,
    run_clock,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Timeline", "plot_timelines", "simulate", "text_chart"]


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """The result of `simulate`.

    Parameters
    ----------
    schedule_name : str
        Name of the schedule.
    num_stages, num_micro_batches, virtual_stages_per_rank : int
        Number of ranks P, of micro-batches M, and of stages per rank V.
    times : StageTimes
        Times of the stages' operations.
    ranks : tuple of tuple of TimedOperation
        The operations of each rank, in order.
    peak_live : tuple of float
        Largest number of live micro-batches on each rank. A micro-batch is live from the beginning
        of its forward to the end of its backward, or of the input's half if the halves are apart.
        In each of a rank's V stages it counts 1/V.
    peak_held : tuple of float
        As `peak_live`, but counted to the end of the parameters' half, which frees the memory.
    """

    schedule_name: str
    num_stages: int
    num_micro_batches: int
    virtual_stages_per_rank: int
    times: StageTimes
    ranks: tuple[tuple[TimedOperation, ...], ...]
    peak_live: tuple[float, ...]
    peak_held: tuple[float, ...]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.schedule_name}, {self.num_stages} ranks, "
            f"{self.num_micro_batches} micro-batches, makespan {self.makespan:g}, "
            f"bubble {100 * self.bubble_fraction:.1f} %)"
        )

    @property
    def makespan(self) -> float:
        """Time from the start to the end of the last operation of all ranks."""
        return max(timed[-1].end for timed in self.ranks)

    @property
    def spans(self) -> list[tuple[float, float]]:
        """First start and last end of each rank."""
        return [(timed[0].start, timed[-1].end) for timed in self.ranks]

    @property
    def work(self) -> list[float]:
        """Computing time of each rank."""
        return [sum(operation.duration for operation in timed) for timed in self.ranks]

    @property
    def bubble_fraction(self) -> float:
        """The fraction 1 - work / (the longest span of a rank from first start to last end).

        This is the bubble fraction of the literature. The work is the mean over the ranks.
        """
        return bubble_fraction(self.ranks)

    @property
    def idle_fraction(self) -> float:
        """The fraction 1 - work / makespan: the loss in a step that all ranks begin together.

        It includes the wait of a rank for its first micro-batch, unlike the bubble fraction.
        """
        # Rounding may make it a last bit larger than the makespan, and the fraction negative.
        work = sum(self.work) / self.num_stages
        return max(0.0, 1 - work / self.makespan) if self.makespan else 0.0


def simulate(
    schedule: IPipelineSchedule,
    num_stages: int,
    num_micro_batches: int,
    times: StageTimes | None = None,
) -> Timeline:
    """Run a schedule on a virtual clock.

    Parameters
    ----------
    schedule : IPipelineSchedule
        The schedule.
    num_stages, num_micro_batches : int
        Number of ranks P and of micro-batches M.
    times : StageTimes, optional
        Times of each global stage; a rank with V stages takes V of them for a micro-batch. Default:
        1 for forward and for each half of backward, and 0 for communication.

    Returns
    -------
    Timeline
        Times of all operations, and the figures that follow from them.

    Raises
    ------
    ValueError
        If `check_schedule` refuses the schedule; for times of another number of stages.

    Examples
    --------
    >>> from mpishard.pipeline import OneForwardOneBackwardSchedule
    >>> from mpishard.pipeline import simulate
    >>> timeline = simulate(OneForwardOneBackwardSchedule(), num_stages=4, num_micro_batches=8)
    >>> timeline.makespan, round(timeline.bubble_fraction, 4), timeline.peak_live
    (33.0, 0.2727, (4.0, 3.0, 2.0, 1.0))
    """
    times = times or StageTimes()
    virtual = schedule.virtual_stages_per_rank
    ranks = run_clock(schedule, num_stages, num_micro_batches, times)
    peaks = [_peaks(timed) for timed in ranks]
    return Timeline(
        schedule.name,
        num_stages,
        num_micro_batches,
        virtual,
        times,
        ranks,
        # A micro-batch is counted once in each virtual stage of a rank.
        peak_live=tuple(live / virtual for live, _ in peaks),
        peak_held=tuple(held / virtual for _, held in peaks),
    )


def _peaks(timed: Sequence[TimedOperation]) -> tuple[int, int]:
    """Return one rank's `peak_live` and `peak_held`, not divided by V."""
    live = held = peak_live = peak_held = 0
    for operation, _, _, _ in timed:
        kind = operation.type
        if kind is PipelineOperationType.FORWARD:
            live, held = live + 1, held + 1
            peak_live, peak_held = max(peak_live, live), max(peak_held, held)
        if kind in (PipelineOperationType.BACKWARD, PipelineOperationType.BACKWARD_INPUT):
            live -= 1
        if kind in (PipelineOperationType.BACKWARD, PipelineOperationType.BACKWARD_WEIGHT):
            held -= 1
    return peak_live, peak_held


# Three hues that differ for people with the common kinds of colour blindness, and in lightness.
_FORWARD = BLUE
_INPUT = "#f0a830"
_WEIGHT = "#7fc6a4"

_LETTERS = {
    PipelineOperationType.FORWARD: "F",
    PipelineOperationType.BACKWARD: "B",
    PipelineOperationType.BACKWARD_INPUT: "B",
    PipelineOperationType.BACKWARD_WEIGHT: "W",
}

_WIDTH = 9.6  # width of a figure in inches
_BARS = 8.9  # approximate width of the bars in it
_DIGIT = 0.055  # width in inches of a digit of a label
_FONT = 6.5
_ROW = 0.19  # height of a rank in inches, unless the figure would be higher than _TALLEST
_TALLEST = 80.0


def plot_timelines(path: str | os.PathLike[str] | None, timelines: Sequence[Timeline]) -> Figure:
    """Draw timelines below each other as a PNG, all to one scale.

    Bars have the micro-batch's number if it fits. Later virtual stages of a rank are paler. A
    combined backward is a bar in the colours of both halves.

    Parameters
    ----------
    path : path, optional
        The file; missing parents are made. None writes no file.
    timelines : sequence of Timeline
        Timelines from top to bottom.

    Returns
    -------
    matplotlib.figure.Figure
        The picture. A notebook shows it if it is the last value of a cell.

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
    from matplotlib.patches import Patch  # after new_figure, whose error says how to install it

    rows = figure.subplots(len(timelines), 1, squeeze=False, sharex=True, height_ratios=heights)
    longest = max(timeline.makespan for timeline in timelines)
    for (axes,), timeline in zip(rows, timelines, strict=True):
        _draw(axes, timeline, _BARS / longest if longest else 0.0, row)
        axes.set_xlim(0, longest or 1)
    rows[-1][0].set_xlabel("time")
    patches = [
        Patch(facecolor=_FORWARD, label="forward"),
        Patch(facecolor=_INPUT, label="backward: input (B)"),
        Patch(facecolor=_WEIGHT, label="backward: parameters (W)"),
    ]
    if any(timeline.virtual_stages_per_rank > 1 for timeline in timelines):
        patches.append(Patch(facecolor=_paler(GREY, 0.6), label="paler: a rank's later stages"))
    figure.legend(handles=patches, loc="outside upper left", ncols=4, frameon=False, fontsize=8)
    if path is not None:
        save(figure, path)
    return figure


def _draw(axes: Any, timeline: Timeline, inches: float, row: float) -> None:
    """Draw a timeline; ``inches`` is the width of a unit of time, ``row`` the height of a rank."""
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
            text, middle = str(done.operation.micro_batch_index), (done.start + done.end) / 2
            # Numbers only in bars that are wide and high enough for them.
            if row == _ROW and done.duration * inches >= _DIGIT * (len(text) + 0.4):
                is_dark = done.operation.type is PipelineOperationType.FORWARD and fade < 0.3
                axes.text(
                    middle,
                    rank,
                    text,
                    ha="center",
                    va="center_baseline",
                    fontsize=_FONT,
                    color="white" if is_dark else "#222222",
                )
        edges = [(o.start, o.duration) for o in timed]
        line = min(0.6, 9 * shortest)  # in points, at most an eighth of the shortest bar
        axes.broken_barh(edges, (rank - 0.42, 0.84), facecolor="none", edgecolor="white", lw=line)
    # One collection for each rank and colour: single bars would take minutes for large schedules.
    for (rank, colour), spans in bars.items():
        axes.broken_barh(spans, (rank - 0.42, 0.84), facecolor=colour, lw=0, zorder=0.9)
    plain_axes(axes, "", grid="x")
    held = max(timeline.peak_held)
    title = (
        f"{timeline.schedule_name}"
        + (f", {virtual} stages per rank" if virtual > 1 else "")
        + f":  bubble {timeline.bubble_fraction:.1%},  makespan {timeline.makespan:g},  "
        f"peak {held:.3g} micro-batch{'es' * (held != 1)}"
    )
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", pad=3)
    axes.set_ylim(timeline.num_stages - 0.5, -0.5)
    # In a figure of many ranks only some are named, so that names do not overlap.
    named = range(0, timeline.num_stages, math.ceil(_ROW / row))
    axes.set_yticks(named, [f"rank {rank}" for rank in named])
    axes.tick_params(labelsize=8, length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _parts(done: TimedOperation, input_time: float) -> list[tuple[str, float, float]]:
    """Return colour, start and end of an operation, or of both halves of a backward."""
    if done.operation.type is PipelineOperationType.BACKWARD:
        middle = done.start + input_time
        return [(_INPUT, done.start, middle), (_WEIGHT, middle, done.end)]
    colours = {"F": _FORWARD, "B": _INPUT, "W": _WEIGHT}
    return [(colours[_LETTERS[done.operation.type]], done.start, done.end)]


def _paler(colour: str, fade: float) -> str:
    """Return ``colour`` mixed with white, which has the fraction ``fade``."""
    parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * fade):02x}" for part in parts)


def text_chart(timeline: Timeline, width: int = 100) -> str | None:
    """Draw a timeline as text: a line for each rank, with time to the right.

    F is a forward, B a backward or its input's half, and W the parameters' half. The number of the
    micro-batch follows, and ``=`` until the operation ends. A dot is time in which the rank waits.
    Every second virtual stage of a rank has lower-case letters.

    Parameters
    ----------
    timeline : Timeline
        The timeline.
    width : int
        Number of columns.

    Returns
    -------
    str or None
        The lines; None if an operation would be too narrow for its label.

    Examples
    --------
    >>> from mpishard.pipeline import ZeroBubbleH1Schedule
    >>> from mpishard.pipeline import simulate, text_chart
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
    # The shortest operation is just wide enough for its label.
    columns = label / shortest
    lines = []
    for name, timed in zip(names, timeline.ranks, strict=True):
        line = ""
        for operation, _, start, end in timed:
            letter = _LETTERS[operation.type]
            # The case of one letter distinguishes neighbouring stages of a rank.
            if operation.virtual_stage_index % 2:
                letter = letter.lower()
            # Rounded to the nearest column. A sum of times may miss the middle between two columns
            # by a rounding error, and 1e-9 makes all of these fall to the same side.
            first, behind = (math.floor(time * columns + 0.5 + 1e-9) for time in (start, end))
            line = line.ljust(first, ".")
            line += f"{letter}{operation.micro_batch_index}".ljust(behind - first, "=")
        lines.append(f"{name.ljust(indent)}{line}")
    return "\n".join(lines)
