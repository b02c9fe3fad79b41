"""``mpishard trace``: record the ranks of a script, merge their traces, and print a summary."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from mpishard.cli.run.command import (
    HostsOption,
    ModuleOption,
    OversubscribeOption,
    RanksOption,
    ScriptArgument,
)
from mpishard.cli.run.job import RunJob
from mpishard.cli.tables import figures_table, show
from mpishard.cli.wording import bytes_text, counted, echo, given_path, milliseconds, refusing
from mpishard.observe import JobTrace, TraceSummary, merge_traces, open_trace, summarize_trace

_MERGED = "trace.json"
_OF_RANKS = (
    "rank",
    "node",
    "steps",
    "in steps",
    "computing",
    "waiting",
    "idle",
    "in flight",
    "hidden",
    "last",
)
_OF_CALLS = ("call", "of", "calls", "bytes", "in flight", "waited", "median wait")

trace = typer.Typer(rich_markup_mode=None)


@trace.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def run(
    context: typer.Context,
    script: ScriptArgument,
    ranks: RanksOption = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Folder for the traces.", metavar="FOLDER")
    ] = "trace",
    module: ModuleOption = False,
    hosts: HostsOption = "",
    oversubscribe: OversubscribeOption = False,
) -> None:
    """Run SCRIPT on N MPI ranks as `mpishard run` does; record it, merge and summarize.

    The exit code is that of the script. The traces of a failed job are merged, too.
    """
    # Ranks get the absolute path, because a script may change its working directory. Messages
    # show the user's own.
    made = given_path("trace run", "--output", output)
    folder = made.absolute()
    # Before the folder is emptied: a job that is refused must keep the older trace.
    job = RunJob(
        "trace run",
        [script, *context.args],
        ranks,
        hosts,
        {"MPISHARD_TRACE": str(folder)},
        is_module=module,
        may_oversubscribe=oversubscribe,
    )
    with refusing("trace run", "--output: "):
        folder.mkdir(parents=True, exist_ok=True)
        # Traces of an earlier job with more ranks would be merged with these.
        for old in (*folder.glob("rank_*.json"), folder / _MERGED):
            old.unlink(missing_ok=True)
    code = job.run()
    # Ranks that failed may have left traces, too, which are merged.
    with refusing("trace", code=code or 2):
        recorded = open_trace(folder)
        merge_traces(recorded, made / _MERGED)
        _print_summary(summarize_trace(recorded), recorded)
        echo(f"{made / _MERGED}: open it in https://ui.perfetto.dev")
    raise typer.Exit(code)


@trace.command()
def merge(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Where the ranks have left rank_<r>.json.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Default: trace.json in FOLDER.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make one file of all ranks' traces, for https://ui.perfetto.dev or chrome://tracing."""
    path = folder / _MERGED if output is None else output
    with refusing("trace"):
        if not folder.is_dir():
            raise FileNotFoundError(f"there is no folder {folder}")
        # The next merge would read it as the trace of a rank.
        if path.name.startswith("rank_"):
            raise ValueError(f"--output {path} would look like the trace of a rank")
        recorded = open_trace(folder)
        merge_traces(recorded, path)
    _print_notes(recorded)
    echo(f"{path}: {recorded.world_size} ranks; open it in https://ui.perfetto.dev")


@trace.command()
def summary(
    recorded: Annotated[
        Path, typer.Argument(metavar="FOLDER|FILE", help="Folder of traces, or a merged one.")
    ],
) -> None:
    """Print the parts of each rank's steps, and the time of collectives."""
    with refusing("trace"):
        job = open_trace(recorded)
        _print_summary(summarize_trace(job), job)


def _print_notes(recorded: JobTrace) -> None:
    for rank, ending in sorted(recorded.endings.items()):
        if ending.is_early:
            echo(
                f"rank {rank}'s trace ends early, at {ending.until / 1e6:.3f} s: {ending.reason}",
                err=True,
            )
        if ending.dropped:
            echo(
                f"rank {rank} dropped {ending.dropped} events, all that came after "
                f"{ending.until / 1e6:.3f} s: its trace was full",
                err=True,
            )


def _print_summary(found: TraceSummary, recorded: JobTrace) -> None:
    nodes = len({about["node"] for about in recorded.ranks})
    until = max(ending.until for ending in recorded.endings.values())
    who = counted(recorded.world_size, "rank")
    words = [f"{who} on {counted(nodes, 'node')}, {until / 1e6:.3f} s"]
    if not math.isnan(found.step_seconds):
        words.append(f"a step takes {milliseconds(found.step_seconds)} (median)")
    # Only pipelines have passes; without any the bubble is NaN.
    if not math.isnan(found.bubble):
        words.append(f"bubble of its passes {found.bubble:.1%} (median)")
    if found.uncertainty:
        words.append(f"clocks of nodes agree to {found.uncertainty * 1e6:.0f} us")
    echo("; ".join(words))
    table = figures_table("What the ranks' steps are made of", _OF_RANKS)
    for rank in found.ranks:
        # A rank without events has 0 seconds, and shares of 0 %.
        whole = rank.seconds or 1.0
        shares = (rank.computing, rank.waiting, rank.idle, rank.in_flight)
        table.add_row(
            str(rank.rank),
            str(rank.node),
            str(rank.steps),
            f"{rank.seconds:.3f} s",
            *(f"{share / whole:.1%}" for share in shares),
            f"{rank.hidden / rank.in_flight if rank.in_flight else 0.0:.1%}",
            f"{rank.last:.0%}",
        )
    show(table)
    table = figures_table("What was called, all ranks together", _OF_CALLS, ("call", "of"))
    for call in found.calls:
        table.add_row(
            call.kind,
            call.group,
            str(call.calls),
            bytes_text(call.nbytes),
            f"{call.in_flight:.3f} s",
            f"{call.waiting:.3f} s",
            milliseconds(call.median_wait),
        )
    show(table)
    # Below the tables, because a trace that ends early explains odd figures in them.
    _print_notes(recorded)
