"""``mpishard plan schedule``: pipeline schedules on a virtual clock."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mpishard.cli.outputs import check_png
from mpishard.cli.tables import figures_table, screen_width, show
from mpishard.cli.wording import choice, counted, echo, refusing, say
from mpishard.pipeline import (
    SCHEDULE_NAMES,
    RuleSchedule,
    StageTimes,
    Timeline,
    plot_timelines,
    schedule_by_name,
    simulate,
    text_chart,
)

_ALL = "all"
_LOOPED = ("interleaved", "looped-bfs")
_MOST_OPERATIONS = 2_000_000  # they take seconds, and less than a gigabyte
_MANY_RANKS = 8  # with more, a table has the largest peak alone


def schedule(
    stages: Annotated[
        int, typer.Option("-p", "--stages", min=1, help="Number of ranks of the pipeline, P.")
    ],
    micro_batches: Annotated[
        int,
        typer.Option("-m", "--micro-batches", min=1, help="Number of micro-batches of a step, M."),
    ],
    schedule: Annotated[str, choice("plan", (*SCHEDULE_NAMES, _ALL))] = _ALL,
    virtual_stages: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help=f"Stages of a rank, V, for {' and '.join(_LOOPED)}; default 2.",
        ),
    ] = None,
    forward: Annotated[
        float, typer.Option(help="Time of the forward of a micro-batch, in all layers of a rank.")
    ] = 1.0,
    backward_input: Annotated[
        float, typer.Option(help="The same for the backward of the input.")
    ] = 1.0,
    backward_weight: Annotated[
        float, typer.Option(help="The same for the backward of the parameters.")
    ] = 1.0,
    communication: Annotated[
        float, typer.Option(help="Time of a message between two ranks.")
    ] = 0.0,
    output: Annotated[
        Path | None, typer.Option(help="Draw the chart to this file, a .png.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of table and chart.")
    ] = False,
) -> None:
    """Run pipeline schedules on a virtual clock: bubble, time and memory.

    Each of the V stages of a rank takes 1/V of its times. All times have the same unit.
    """
    with refusing("plan"):
        # Before the simulations, whose result could not be drawn.
        _check(output, forward, backward_input, backward_weight, communication)
        schedules = _schedules(schedule, virtual_stages, stages, micro_batches)
        timelines = []
        for each in schedules:
            # The options are times of a rank, which its virtual stages divide.
            scale = each.virtual_stages_per_rank
            of_stage = StageTimes(
                forward / scale, backward_input / scale, backward_weight / scale, communication
            )
            timelines.append(simulate(each, stages, micro_batches, of_stage))
    if output is not None:
        with refusing("plan", "--output: ", errors=(OSError,)):
            plot_timelines(output, timelines)
        say("plan", f"wrote {output}")
    if as_json:
        # Also the spans of each rank, so that other programs can draw them.
        rows = [
            {
                "schedule": timeline.schedule_name,
                "stages": stages,
                "micro_batches": micro_batches,
                "virtual_stages_per_rank": timeline.virtual_stages_per_rank,
                "bubble_fraction": timeline.bubble_fraction,
                "published_bubble_fraction": each.published_bubble_fraction(stages, micro_batches),
                "idle_fraction": timeline.idle_fraction,
                "makespan": timeline.makespan,
                "spans": timeline.spans,
                "peak_live": timeline.peak_live,
                "peak_held": timeline.peak_held,
            }
            for each, timeline in zip(schedules, timelines, strict=True)
        ]
        typer.echo(json.dumps(rows, indent=1))
    else:
        show(_table(schedules, timelines))
        _show_charts(timelines, is_drawn=output is not None)


def _check(output: Path | None, *times: float) -> None:
    """Refuse impossible times, and files that cannot be drawn."""
    flags = ("--forward", "--backward-input", "--backward-weight", "--communication")
    for flag, value in zip(flags, times, strict=True):
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{flag} must be 0 or more and finite, got {value:g}")
    # Fractions of the makespan are not defined if it is 0.
    if not any(times):
        raise ValueError(f"{', '.join(flags[:-1])} and {flags[-1]} are all 0: one must take time")
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"--output: there is no folder {output.parent}: make it first")
    check_png("plan", "--output", output)


def _schedules(
    name: str, virtual_stages: int | None, stages: int, micro_batches: int
) -> list[RuleSchedule]:
    """Return the schedule of that name, or all. Refuse too many operations."""
    schedules = [
        # Among all schedules V is for the looped ones. One that was named alone refuses it.
        schedule_by_name(each, virtual_stages if each in _LOOPED or name != _ALL else None)
        for each in (SCHEDULE_NAMES if name == _ALL else (name,))
    ]
    for each in schedules:
        # Forward and both halves of backward, for each micro-batch in each stage.
        count = 3 * stages * micro_batches * each.virtual_stages_per_rank
        if count > _MOST_OPERATIONS:
            raise ValueError(
                f"{each.name} with {stages} ranks and {micro_batches} micro-batches has up to "
                f"{count} operations, and at most {_MOST_OPERATIONS} are simulated; the bubble "
                "hardly changes beyond about ten micro-batches per rank"
            )
    return schedules


def _table(schedules: Sequence[RuleSchedule], timelines: Sequence[Timeline]) -> Table:
    first = timelines[0]
    table = figures_table(
        f"{counted(first.num_stages, 'rank')}, {counted(first.num_micro_batches, 'micro-batch')}",
        ("schedule", "V", "bubble", "published", "makespan", "idle", "peak live", "peak held"),
        ("schedule",),
    )
    for schedule, timeline in zip(schedules, timelines, strict=True):
        published = schedule.published_bubble_fraction(first.num_stages, first.num_micro_batches)
        table.add_row(
            timeline.schedule_name,
            str(timeline.virtual_stages_per_rank),
            f"{timeline.bubble_fraction:.1%}",
            "-" if published is None else f"{published:.1%}",
            f"{timeline.makespan:g}",
            f"{timeline.idle_fraction:.1%}",
            _peak(timeline.peak_live),
            _peak(timeline.peak_held),
        )
    table.caption = (
        "bubble: waiting from a rank's first operation to its last; published: its formula for "
        "equal F, B and W, if there is one; idle: from the step's first operation to its last. "
        "Peaks in micro-batches, rank by rank: live from forward to the input's backward, held "
        "until the parameters' is done."
    )
    return table


def _show_charts(timelines: Sequence[Timeline], *, is_drawn: bool) -> None:
    """Print charts of the schedules that fit the screen; ``is_drawn``: a file has all of them."""
    width = screen_width()
    charts = {timeline.schedule_name: text_chart(timeline, width) for timeline in timelines}
    for name, chart in charts.items():
        if chart is not None:
            typer.echo(f"\n{name}\n{chart}")
    # A chart that is folded could not be read, so it is left out and named.
    wider = [name for name, chart in charts.items() if chart is None]
    if wider and not is_drawn:
        echo(f"\nCharts wider than {width} columns are not shown: {', '.join(wider)}.")
        typer.echo("--output FILE.png draws all.")
    # The letters need an explanation only if a chart was printed.
    if len(wider) < len(charts):
        typer.echo(
            "\nF forward, B backward or its input's half, W the parameters' half;\n"
            "small letters: a rank's second stage, and every other"
        )


def _peak(peaks: Sequence[float]) -> str:
    if len(set(peaks)) == 1:
        return f"{peaks[0]:.4g}"
    if len(peaks) > _MANY_RANKS:
        # The largest peak decides whether the run fits into the memory of a rank.
        return f"<= {max(peaks):.4g}"
    return " ".join(f"{peak:.4g}" for peak in peaks)
