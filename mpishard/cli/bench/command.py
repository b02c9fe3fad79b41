"""The command ``mpishard bench``: its subcommands, the ranks that measure, and the results."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.main import get_command

from mpishard.base import MPIUnavailableError
from mpishard.cli.bench.collectives import KINDS, CollectiveBenchmark
from mpishard.cli.bench.machine import MachineBenchmark
from mpishard.cli.bench.step import CONTEXT, STRATEGIES, StepBenchmark
from mpishard.cli.machine import describe_machine
from mpishard.cli.outputs import check_output, write_json
from mpishard.cli.tables import show
from mpishard.cli.wording import check_start, choice, parse_bytes, refuse, refusing, say
from mpishard.communication import CommunicationBackend
from mpishard.distributed import launch
from mpishard.planning import Machine, MachineError

bench = typer.Typer(rich_markup_mode=None)

_RANK = "rank"
"""Context of a rank that ``mpishard bench -n`` has started with its own words."""

_REPEATED = "One of {}; may be repeated. Default: all."


def _count(help_text: str, minimum: int = 1) -> object:
    """Return an option that takes a number; its default is shown unless the minimum is 0."""
    return typer.Option(min=minimum, show_default=minimum > 0, help=help_text)


RanksOption = Annotated[
    int,
    typer.Option("-n", "-np", min=0, metavar="N", show_default=False, help="Start N MPI ranks."),
]
ThreadsOption = Annotated[
    int,
    typer.Option(
        "--world-size", min=0, metavar="N", show_default=False, help="Measure on N thread-ranks."
    ),
]
JSONOption = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write every time to this file.")
]

_SIZES = {"mlp": (1024, 8, 64), "gpt": (256, 4, 8)}
"""Width, layers and batch per rank of the published figures."""


@bench.command()
def collectives(
    context: typer.Context,
    collective: Annotated[list[str] | None, choice("bench", KINDS, _REPEATED)] = None,
    sizes: Annotated[
        str, typer.Option(metavar="SIZE,...", help="Bytes of the whole array.")
    ] = "8B,1KiB,64KiB,1MiB,16MiB,64MiB",
    dtype: Annotated[
        Literal["float32", "float64", "int32", "int64"], typer.Option(help="Dtype of the array.")
    ] = "float32",
    repeats: Annotated[int, _count("Number of times of each.")] = 15,
    json: JSONOption = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Time collectives, those of the MPI library, and a copy in memory."""
    with refusing("bench", "--sizes: "):
        lengths = [parse_bytes(text) for text in sizes.split(",")]
    benchmark = CollectiveBenchmark(collective or KINDS, lengths, dtype, repeats)
    _measure(context, benchmark, ranks, world_size, json)


@bench.command()
def step(
    context: typer.Context,
    model: Annotated[Literal["mlp", "gpt"], typer.Option(help="Model that is trained.")] = "mlp",
    strategy: Annotated[list[str] | None, choice("bench", STRATEGIES, _REPEATED)] = None,
    width: Annotated[int, _count("Default 1024 for mlp, 256 for gpt.", 0)] = 0,
    layers: Annotated[int, _count("Default 8 for mlp, 4 for gpt.", 0)] = 0,
    batch: Annotated[int, _count("Samples of each rank; default 64 for mlp, 8 for gpt.", 0)] = 0,
    tokens: Annotated[int, _count("Tokens of a sequence of gpt.")] = CONTEXT,
    steps: Annotated[int, _count("Steps that count.")] = 20,
    warmup: Annotated[int, _count("Steps before them.")] = 5,
    unit_size: Annotated[int, _count("Least elements of a unit of the sharded model.")] = 1024,
    checks: Annotated[
        Literal["on", "off", "both"],
        typer.Option(help="Compare the ranks' calls; both: in every other step."),
    ] = "on",
    memory: Annotated[bool, typer.Option("--memory", help="Measure resident memory too.")] = False,
    precision: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="bfloat16: mixed precision.")
    ] = "float32",
    json: JSONOption = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Time training steps. The strategy "alone" is the same step without communication."""
    chosen = strategy or [s for s in STRATEGIES if s != "zero3"]  # which is fsdp
    # 0 stands for the usual size, because an option cannot know which model is chosen.
    usual = _SIZES[model]
    sizes = (width or usual[0], layers or usual[1], batch or usual[2])
    mixed = None if precision == "float32" else precision
    benchmark = StepBenchmark(
        model, *sizes, steps, warmup, unit_size, checks, memory, mixed, tokens, chosen
    )
    with refusing("bench"):  # sizes that do not fit each other
        # A model without arrays yet: wrong sizes are refused before ranks start.
        benchmark.build_model()
    _measure(context, benchmark, ranks, world_size, json)


@bench.command()
def machine(
    context: typer.Context,
    output: Annotated[
        Path, typer.Option("--json", metavar="FILE", help="Machine file to write.")
    ] = Path("machine.json"),
    repeats: Annotated[int, _count("Number of times of each call.")] = 15,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Measure this machine for `mpishard plan step`, with all ranks of a node at work."""
    check_output("bench", "--json", output)
    benchmark = MachineBenchmark(repeats)

    def body(backend: CommunicationBackend) -> None:
        found = benchmark.run(backend)
        if backend.rank > 0:
            return
        kept: list[str] = []
        # Without a file there is nothing to keep, and one of another version cannot be read.
        with suppress(MachineError, OSError):
            found, kept = found.keeping(Machine.load(output))
        show(benchmark.table(found))
        found.write(output, measured_on=describe_machine())
        say("bench", f"wrote {output}")
        if kept:
            say("bench", f"kept what was not measured now: {', '.join(kept)}")

    _on_ranks(context, body, ranks, world_size)


def _measure(
    context: typer.Context,
    benchmark: Any,
    ranks: int,
    threads: int,
    json: Path | None,
) -> None:
    """Run a benchmark on new MPI ranks, on threads, or on the ranks of the running job.

    Rank 0 shows the table and writes the file. A benchmark has a ``key`` in JSON,
    ``run(backend)`` and ``table(results, world_size)``.
    """
    # Before minutes of measurements, whose result could not be written.
    check_output("bench", "--json", json)

    def body(backend: CommunicationBackend) -> None:
        results = benchmark.run(backend)
        if backend.rank > 0:
            return
        show(benchmark.table(results, backend.world_size))
        if json is not None:
            rows = [asdict(result) for result in results]
            write_json(json, {"world_size": backend.world_size, benchmark.key: rows})

    _on_ranks(context, body, ranks, threads)


def _on_ranks(
    context: typer.Context,
    body: Callable[[CommunicationBackend], None],
    ranks: int,
    threads: int,
) -> None:
    """Run ``body`` on new MPI ranks, on threads, or on the ranks of the running job."""
    if ranks and threads:
        refuse("bench", "-n starts MPI ranks and --world-size threads: give one of them")
    # A rank has the words of the user, -n among them, and must not start ranks again.
    starts_ranks = bool(ranks or threads) and context.obj is not _RANK
    check_start("bench", "leave out -n and --world-size", starts_ranks=starts_ranks)
    if ranks and starts_ranks:
        words = ["run", "-n", str(ranks), "-m", __name__, *sys.argv[2:]]  # after `mpishard bench`
        # Replaces this process, so that signals reach the job and its exit code is returned.
        os.execv(sys.executable, [sys.executable, "-m", "mpishard", *words])  # noqa: S606

    with refusing("bench", errors=(MPIUnavailableError,)):
        # Without -n and --world-size these are the ranks of the user's own launcher.
        launch(body, world_size=threads or None)


# `mpishard bench -n` runs this module on each rank.
if __name__ == "__main__":
    get_command(bench)(prog_name="mpishard bench", obj=_RANK)
