"""``mpishard bench``: measure collectives, training steps and checkpoints on this machine."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mpishard import settings
from mpishard.cli.bench.checkpoint import CheckpointBenchmark, checkpoint_table
from mpishard.cli.bench.checks import ChecksBenchmark, checks_table
from mpishard.cli.bench.collectives import (
    KINDS,
    CollectiveBenchmark,
    collective_panels,
    collective_table,
)
from mpishard.cli.bench.report import write_json
from mpishard.cli.bench.speedup import TENSOR, SpeedupBenchmark, speedup_table
from mpishard.cli.bench.step import ALONE, StepBenchmark, step_panel, step_table
from mpishard.cli.tables import show
from mpishard.cli.wording import parse_bytes
from mpishard.communication import CommunicationBackend
from mpishard.distributed import DistributedStrategy, launch
from mpishard.errors import MPIUnavailableError
from mpishard.observe import plot_panels
from mpishard.pipeline import SCHEDULE_NAMES

__all__ = ["bench"]

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure collectives, training steps and checkpoints on this machine.",
)

RanksOption = Annotated[
    int,
    typer.Option(
        "-n", min=0, metavar="N", show_default=False, help="Start N MPI ranks and measure on them."
    ),
]
ThreadsOption = Annotated[
    int,
    typer.Option(
        "--world-size", min=0, metavar="N", show_default=False, help="Measure on N thread-ranks."
    ),
]
JSONOption = Annotated[Path | None, typer.Option("--json", help="Write every time to this file.")]


class _Model(StrEnum):
    MLP = "mlp"
    GPT = "gpt"


class _Sharded(StrEnum):
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"


class _Checks(StrEnum):
    ON = "on"
    OFF = "off"
    BOTH = "both"


_SIZES = {_Model.MLP: (1024, 8, 64), _Model.GPT: (256, 4, 8)}
"""Width, layers and batch per rank of the published figures."""

_ALL = "all"
_BYTES = "8B,1KiB,64KiB,1MiB,16MiB,64MiB"

# Where ranks compute samples of their own; `speedup` is for those that share them.
_STRATEGIES = (ALONE, "ddp", "zero1", "zero2", "zero3", "fsdp")


class _Type(StrEnum):
    FLOAT32 = "float32"
    FLOAT64 = "float64"
    INT32 = "int32"
    INT64 = "int64"


@bench.command()
def collectives(
    context: typer.Context,
    collective: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(KINDS)}; may be repeated. Default: all."),
    ] = None,
    sizes: Annotated[str, typer.Option(help="Bytes of the whole array.")] = _BYTES,
    dtype: Annotated[_Type, typer.Option(help="Of its elements.")] = _Type.FLOAT32,
    repeats: Annotated[int, typer.Option(min=1, help="How often each is timed.")] = 15,
    json: JSONOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time against size as a PNG.")] = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Time collectives beside the MPI library's own, gloo's where PyTorch is, and a copy."""
    chosen = collective or list(KINDS)
    for name in chosen:
        if name not in KINDS:
            _refuse(f"--collective must be one of {', '.join(KINDS)}; got {name!r}")
    try:
        lengths = [parse_bytes(text) for text in sizes.split(",")]
    except ValueError as error:
        _refuse(f"--sizes: {error}")
    _check_plot(plot)
    benchmark = CollectiveBenchmark(chosen, lengths, str(dtype), repeats)

    def measure(backend: CommunicationBackend) -> None:
        results = [result for rows in benchmark.run(backend) for result in rows]
        if backend.rank > 0:
            return
        show(collective_table(results, backend.world_size))
        if backend.world_size == 1:
            typer.echo("One rank has nobody to talk to: -n 2 starts two.")
        elif not any("shared" in result.way for result in results):
            typer.echo("No rows of shared memory: these ranks have none, or MPISHARD_ARENA is off.")
        if json is not None:
            rows = [result.as_dict() for result in results]
            write_json(json, {"world_size": backend.world_size, "collectives": rows})
        if plot is not None:
            plot_panels(plot, collective_panels(results))

    _on_ranks(context, measure, ranks, world_size)


@bench.command()
def checks(
    context: typer.Context,
    strategy: Annotated[_Sharded, typer.Option(help="How it is trained.")] = _Sharded.FSDP,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each way that count.")] = 30,
    json: JSONOption = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """What comparing and logging calls costs of a step of examples/train_gpt.py's model."""
    benchmark = ChecksBenchmark(str(strategy), steps=steps)

    def measure(backend: CommunicationBackend) -> None:
        result = benchmark.run(backend)
        if backend.rank == 0:
            show(checks_table(benchmark, result, backend.world_size))
            if json is not None:
                write_json(json, {"world_size": backend.world_size, "checks": result.as_dict()})

    _on_ranks(context, measure, ranks, world_size)


@bench.command()
def step(
    context: typer.Context,
    model: Annotated[_Model, typer.Option(help="What is trained.")] = _Model.MLP,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(_STRATEGIES)}; may be repeated. Default: all."),
    ] = None,
    width: Annotated[
        int, typer.Option(min=0, show_default=False, help="Default 1024 for mlp, 256 for gpt.")
    ] = 0,
    layers: Annotated[
        int, typer.Option(min=0, show_default=False, help="Default 8 for mlp, 4 for gpt.")
    ] = 0,
    batch: Annotated[
        int,
        typer.Option(
            min=0, show_default=False, help="Samples of each rank; default 64 for mlp, 8 for gpt."
        ),
    ] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 5,
    unit_size: Annotated[
        int, typer.Option(min=1, help="Least elements of a unit of the sharded model.")
    ] = 1024,
    checks: Annotated[
        _Checks, typer.Option(help="Compare the ranks' calls; both: in every other step.")
    ] = _Checks.ON,
    memory: Annotated[bool, typer.Option(help="Take resident memory too.")] = False,
    json: JSONOption = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the time of each step as a PNG.")] = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Time training steps; ``alone`` is the same step without communication."""
    # zero3 is fsdp by another name.
    chosen = strategy or [s for s in _STRATEGIES if s != DistributedStrategy.ZERO3]
    for name in chosen:
        if name not in _STRATEGIES:
            _refuse(f"--strategy must be one of {', '.join(_STRATEGIES)}; got {name!r}")
    _check_plot(plot)
    usual = _SIZES[model]
    benchmark = StepBenchmark(
        str(model),
        width or usual[0],
        layers or usual[1],
        batch or usual[2],
        steps=steps,
        warmup=warmup,
        unit_size=unit_size,
        checks=str(checks),
        memory=memory,
    )
    try:
        benchmark.build_model()
    except ValueError as error:
        _refuse(str(error))

    def measure(backend: CommunicationBackend) -> None:
        results = [result for name in chosen for result in benchmark.run(backend, name)]
        if backend.rank == 0:
            show(step_table(benchmark, results, backend.world_size))
            if json is not None:
                rows = [result.as_dict() for result in results]
                write_json(json, {"world_size": backend.world_size, "steps": rows})
            if plot is not None:
                plot_panels(plot, [step_panel(benchmark, results, backend.world_size)])

    _on_ranks(context, measure, ranks, world_size)


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
    width: Annotated[int, typer.Option(min=1, help="Of the GPT.")] = 512,
    layers: Annotated[int, typer.Option(min=1, help="Its blocks.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step, of all ranks.")] = 32,
    micro_batches: Annotated[int, typer.Option(min=1, help="Of pipelines.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count.")] = 7,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 1,
    json: JSONOption = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Time a step that all ranks share, tensor-parallel and as a pipeline, against one rank's."""
    chosen = way or [TENSOR, "1f1b", "zb-h1"]
    every = [TENSOR, *SCHEDULE_NAMES]
    for name in chosen:
        if name not in (*every, _ALL):
            _refuse(f"--way must be one of {', '.join(every)}, or {_ALL}; got {name!r}")
    if _ALL in chosen:
        chosen = every
    size = ranks or world_size or settings.launched_world_size()
    if size == 1 or (not size and settings.launcher_variable() is None):
        _refuse("speedup compares ranks that share a step with one alone: -n 2 starts two")
    benchmark = SpeedupBenchmark(width, layers, batch, micro_batches, steps, warmup)
    try:
        benchmark.build_model()
    except ValueError as error:
        _refuse(str(error))

    def measure(backend: CommunicationBackend) -> None:
        results = benchmark.run(backend, chosen)
        if backend.rank == 0:
            show(speedup_table(benchmark, results, backend.world_size))
            if json is not None:
                rows = [result.as_dict() for result in results]
                write_json(json, {"world_size": backend.world_size, "speedup": rows})

    _on_ranks(context, measure, ranks, world_size)


@bench.command()
def checkpoint(
    context: typer.Context,
    size: Annotated[str, typer.Option(help="Bytes of each rank's file, about.")] = "256MiB",
    repeats: Annotated[int, typer.Option(min=2, help="How often each is timed.")] = 7,
    folder: Annotated[
        Path, typer.Option(help="Where files are written, and removed; all ranks see it.")
    ] = Path(),
    json: JSONOption = None,
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Time saving, saving while training goes on, and loading, beside plain writing and reading."""
    try:
        benchmark = CheckpointBenchmark(parse_bytes(size), repeats, folder)
    except ValueError as error:
        _refuse(f"--size: {error}")

    def measure(backend: CommunicationBackend) -> None:
        results = benchmark.run(backend)
        if backend.rank == 0:
            show(checkpoint_table(benchmark, results, backend.world_size))
            if json is not None:
                rows = [result.as_dict() for result in results]
                write_json(json, {"world_size": backend.world_size, "checkpoint": rows})

    try:
        _on_ranks(context, measure, ranks, world_size)
    except OSError as error:
        _refuse(str(error))


def _check_plot(plot: Path | None) -> None:
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        _refuse("--plot needs matplotlib: pip install 'mpishard[plot]'")


def _on_ranks(
    context: typer.Context,
    measure: Callable[[CommunicationBackend], None],
    ranks: int,
    world_size: int,
) -> None:
    """Run ``measure`` on this process's ranks, or start MPI ranks that do."""
    if ranks and world_size:
        _refuse("-n starts MPI ranks and --world-size threads: give one of them")
    launcher = settings.launcher_variable()
    if launcher is not None and (ranks or world_size):
        _refuse(
            f"this process is a rank already ({launcher} is set): leave out -n and --world-size"
        )
    if ranks:
        worker = Path(__file__).with_name("rank.py")
        command = [sys.executable, "-m", "mpishard", "run", "-n", str(ranks), str(worker)]
        # In place of this process, so that signals and the exit code are those of the job.
        os.execv(sys.executable, [*command, "bench", context.command.name or "", *_given(context)])  # noqa: S606
    try:
        launch(measure, world_size=world_size or None)
    except MPIUnavailableError as error:
        _refuse(str(error))


def _given(context: typer.Context) -> list[str]:
    """The options that the user gave, but for -n, as they can be given again."""
    words = []
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name == "ranks" or source is None or source.name != "COMMANDLINE":
            continue
        value: Any = context.params[option.name or ""]
        if isinstance(value, bool):
            words.append((option.opts if value else option.secondary_opts)[0])
        else:
            for each in value if isinstance(value, list) else [value]:
                words += [option.opts[0], str(each)]
    return words


def _refuse(message: str) -> NoReturn:
    typer.echo(f"mpishard bench: {message}", err=True)
    raise typer.Exit(2)
