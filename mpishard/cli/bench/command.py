"""The command ``mpishard bench``: its subcommands, the ranks that measure, and what is shown."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from mpishard import settings
from mpishard.cli.bench.checkpoint import CheckpointBenchmark, checkpoint_table
from mpishard.cli.bench.collectives import (
    KINDS,
    CollectiveBenchmark,
    CollectiveResult,
    collective_panels,
    collective_table,
)
from mpishard.cli.bench.speedup import TENSOR, SpeedupBenchmark, speedup_table
from mpishard.cli.bench.step import (
    ALONE,
    ChecksBenchmark,
    StepBenchmark,
    checks_table,
    step_panel,
    step_table,
)
from mpishard.cli.bench.workload import CONTEXT, write_json
from mpishard.cli.tables import show
from mpishard.cli.wording import check_choice, parse_bytes, refuse, refusing
from mpishard.communication import CommunicationBackend
from mpishard.distributed import launch
from mpishard.errors import MPIUnavailableError
from mpishard.observe import Panel, plot_panels
from mpishard.pipeline import SCHEDULE_NAMES

__all__ = ["bench"]

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure collectives, training steps and checkpoints on this machine.",
)


def _count(help_text: str, minimum: int = 1) -> Any:
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
PlotOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the times as a PNG.")]

_SIZES = {"mlp": (1024, 8, 64), "gpt": (256, 4, 8)}
"""Width, layers and batch per rank of the published figures."""

# Strategies whose ranks compute samples of their own; `speedup` is for those that share them.
_STRATEGIES = (ALONE, "ddp", "zero1", "zero2", "zero3", "fsdp")


@bench.command()
def collectives(
    context: typer.Context,
    collective: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(KINDS)}; may be repeated. Default: all."),
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Bytes of the whole array.")
    ] = "8B,1KiB,64KiB,1MiB,16MiB,64MiB",
    dtype: Annotated[
        Literal["float32", "float64", "int32", "int64"], typer.Option(help="Dtype of the array.")
    ] = "float32",
    repeats: Annotated[int, _count("Number of times of each.")] = 15,
    busy: Annotated[int, _count("Busy processes that share the node's cores meanwhile.", 0)] = 0,
    json: JSONOption = None,
    plot: PlotOption = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Time collectives, beside those of the MPI library and of gloo, and a copy.

    gloo is measured if PyTorch is installed.
    """
    chosen = collective or list(KINDS)
    for name in chosen:
        check_choice("bench", "--collective", name, KINDS)
    with refusing("bench", "--sizes: "):
        lengths = [parse_bytes(text) for text in sizes.split(",")]
    benchmark = CollectiveBenchmark(chosen, lengths, dtype, repeats, busy)

    def table(results: Sequence[CollectiveResult], size: int) -> Table:
        made = collective_table(results, size)
        if size == 1:
            made.caption = "One rank has no other to communicate with: -n 2 starts two."
        elif not any("shared" in result.way for result in results):
            made.caption = "No rows of shared memory: there is none, or MPISHARD_ARENA is off."
        return made

    _Job(context, ranks, world_size, json, plot).measure(
        "collectives",
        lambda backend: [result for rows in benchmark.run(backend) for result in rows],
        table,
        lambda results, _: collective_panels(results),
    )


@bench.command()
def checks(
    context: typer.Context,
    strategy: Annotated[
        Literal["ddp", "zero1", "zero2", "fsdp"], typer.Option(help="Strategy of the training.")
    ] = "fsdp",
    steps: Annotated[int, _count("Steps of each way that count.")] = 30,
    json: JSONOption = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Measure the cost of checked and logged calls in a step of examples/train_gpt.py."""
    benchmark = ChecksBenchmark(strategy, steps=steps)
    _Job(context, ranks, world_size, json).measure(
        "checks", benchmark.run, lambda result, size: checks_table(benchmark, result, size)
    )


@bench.command()
def step(
    context: typer.Context,
    model: Annotated[Literal["mlp", "gpt"], typer.Option(help="Model that is trained.")] = "mlp",
    strategy: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(_STRATEGIES)}; may be repeated. Default: all."),
    ] = None,
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
    memory: Annotated[bool, typer.Option(help="Measure resident memory too.")] = False,
    precision: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="bfloat16: mixed precision."),
    ] = "float32",
    json: JSONOption = None,
    plot: PlotOption = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Time training steps; the strategy alone is the same step without communication."""
    chosen = strategy or [s for s in _STRATEGIES if s != "zero3"]  # which is fsdp
    for name in chosen:
        check_choice("bench", "--strategy", name, _STRATEGIES)
    usual = _SIZES[model]
    sizes = (width or usual[0], layers or usual[1], batch or usual[2])
    mixed = None if precision == "float32" else precision
    benchmark = StepBenchmark(
        model, *sizes, steps, warmup, unit_size, checks, memory, mixed, tokens
    )
    with refusing("bench"):  # sizes that do not fit each other
        benchmark.build_model()
    _Job(context, ranks, world_size, json, plot).measure(
        "steps",
        lambda backend: [result for name in chosen for result in benchmark.run(backend, name)],
        lambda results, size: step_table(benchmark, results, size),
        lambda results, size: [step_panel(benchmark, results, size)],
    )


@bench.command()
def speedup(
    context: typer.Context,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help=f"tensor, or a pipeline's schedule: {', '.join(SCHEDULE_NAMES)}; or all. May be "
            "repeated. Default: tensor, 1f1b, zb-h1."
        ),
    ] = None,
    width: Annotated[int, _count("Width of the GPT.")] = 512,
    layers: Annotated[int, _count("Number of its blocks.")] = 4,
    batch: Annotated[int, _count("Sequences of a step, of all ranks together.")] = 32,
    micro_batches: Annotated[int, _count("Micro-batches of pipelines.")] = 8,
    steps: Annotated[int, _count("Steps that count.")] = 7,
    warmup: Annotated[int, _count("Steps before them.")] = 1,
    json: JSONOption = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Time a step that all ranks share, by tensor or pipeline parallelism, against one rank's."""
    every = [TENSOR, *SCHEDULE_NAMES]
    chosen = way or [TENSOR, "1f1b", "zb-h1"]
    for name in chosen:
        check_choice("bench", "--way", name, [*every, "all"])
    if "all" in chosen:
        chosen = every
    size = ranks or world_size or settings.launched_world_size()
    if size == 1 or (not size and settings.launcher_variable() is None):
        refuse("bench", "speedup compares ranks that share a step with one alone: -n 2 starts two")
    benchmark = SpeedupBenchmark(width, layers, batch, micro_batches, steps, warmup)
    with refusing("bench"):  # sizes that do not fit each other
        benchmark.build_model()
    _Job(context, ranks, world_size, json).measure(
        "speedup",
        lambda backend: benchmark.run(backend, chosen),
        lambda results, size: speedup_table(benchmark, results, size),
    )


@bench.command()
def checkpoint(
    context: typer.Context,
    size: Annotated[str, typer.Option(help="Bytes of each rank's file, about.")] = "256MiB",
    repeats: Annotated[int, _count("Number of times of each.", 2)] = 7,
    folder: Annotated[
        Path, typer.Option(help="Where files are written, and removed; all ranks see it.")
    ] = Path(),
    json: JSONOption = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Time saving, saving beside training, and loading, against plain writing and reading."""
    with refusing("bench", "--size: "):
        benchmark = CheckpointBenchmark(parse_bytes(size), repeats, folder)
    with refusing("bench", errors=(OSError,)):
        _Job(context, ranks, world_size, json).measure(
            "checkpoint",
            benchmark.run,
            lambda results, count: checkpoint_table(benchmark, results, count),
        )


@dataclass(frozen=True, slots=True)
class _Job:
    """Ranks that measure, and files for what they find.

    ``ranks`` are MPI ranks that are started for it, ``world_size`` is a number of threads; if
    both are 0 the ranks are those of this process.
    """

    context: typer.Context
    ranks: int
    world_size: int
    json: Path | None
    plot: Path | None = None

    def measure(
        self,
        key: str,
        run: Callable[[CommunicationBackend], Any],
        table: Callable[[Any, int], Table],
        panels: Callable[[Any, int], list[Panel]] = lambda *_: [],
    ) -> None:
        """Run a benchmark; rank 0 shows its table and writes the files."""
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            refuse("bench", "--plot needs matplotlib: pip install 'mpishard[plot]'")
        if self.ranks and self.world_size:
            refuse("bench", "-n starts MPI ranks and --world-size threads: give one of them")
        launcher = settings.launcher_variable()
        if launcher is not None and (self.ranks or self.world_size):
            text = f"this process is a rank already ({launcher} is set): leave out -n and "
            refuse("bench", f"{text}--world-size")
        if self.ranks:
            words = ["run", "-n", str(self.ranks), "-m", "mpishard", "bench"]
            words += [self.context.command.name or "", *_given(self.context)]
            # In place of this process, so that signals and the exit code are those of the job.
            os.execv(sys.executable, [sys.executable, "-m", "mpishard", *words])  # noqa: S606

        def body(backend: CommunicationBackend) -> None:
            results = run(backend)
            if backend.rank > 0:
                return
            show(table(results, backend.world_size))
            if self.json is not None:
                is_one = not isinstance(results, list)
                rows = results.as_dict() if is_one else [asdict(result) for result in results]
                write_json(self.json, {"world_size": backend.world_size, key: rows})
            if self.plot is not None:
                plot_panels(self.plot, panels(results, backend.world_size))

        with refusing("bench", errors=(MPIUnavailableError,)):
            launch(body, world_size=self.world_size or None)


def _given(context: typer.Context) -> list[str]:
    """Return the options that the user gave, except -n, as they can be given again."""
    words = []
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name == "ranks" or source is None or source.name != "COMMANDLINE":
            continue
        value: Any = context.params[option.name or ""]
        if isinstance(value, bool):
            words.append((option.opts if value else option.secondary_opts)[0])
        else:
            # Versions of Typer differ: an option that is repeated is a list or a tuple.
            for each in value if isinstance(value, list | tuple) else [value]:
                words += [option.opts[0], str(each)]
    return words
