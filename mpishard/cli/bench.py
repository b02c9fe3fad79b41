"""``mpishard bench``: measure collectives and training steps on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from mpishard import settings
from mpishard.cli.bench_report import show, write_json
from mpishard.cli.bench_step import ALONE, StepBenchmark, step_table
from mpishard.communication import CommunicationBackend
from mpishard.distributed import DistributedStrategy, launch
from mpishard.errors import MPIUnavailableError

__all__ = ["bench"]

bench = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Measure collectives and training steps on this machine.",
)

RanksOption = Annotated[
    int, typer.Option("-n", min=0, metavar="N", help="Start N MPI ranks and measure on them.")
]
ThreadsOption = Annotated[
    int, typer.Option("--world-size", min=0, metavar="N", help="Measure on N threads as ranks.")
]
JSONOption = Annotated[Path | None, typer.Option("--json", help="Write every time to this file.")]


class _Model(StrEnum):
    MLP = "mlp"
    GPT = "gpt"


class _Checks(StrEnum):
    ON = "on"
    OFF = "off"
    BOTH = "both"


_SIZES = {_Model.MLP: (1024, 8, 64), _Model.GPT: (256, 4, 8)}
"""Width, layers and batch per rank of the published figures."""

_STRATEGIES = (ALONE, *(str(strategy) for strategy in DistributedStrategy))


@bench.command()
def step(
    context: typer.Context,
    model: Annotated[_Model, typer.Option(help="What is trained.")] = _Model.MLP,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(_STRATEGIES)}; may be repeated. Default: all."),
    ] = None,
    width: Annotated[int, typer.Option(min=0, help="Default 1024 for mlp, 256 for gpt.")] = 0,
    layers: Annotated[int, typer.Option(min=0, help="Default 8 for mlp, 4 for gpt.")] = 0,
    batch: Annotated[
        int, typer.Option(min=0, help="Samples of each rank; default 64 for mlp, 8 for gpt.")
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
    ranks: RanksOption = 0,
    world_size: ThreadsOption = 0,
) -> None:
    """Time training steps; ``alone`` is the same step without communication."""
    chosen = strategy or list(_STRATEGIES)
    for name in chosen:
        if name not in _STRATEGIES:
            _refuse(f"--strategy must be one of {', '.join(_STRATEGIES)}; got {name!r}")
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

    def measure(backend: CommunicationBackend) -> None:
        results = [result for name in chosen for result in benchmark.run(backend, name)]
        if backend.rank == 0:
            show(step_table(benchmark, results, backend.world_size))
            if json is not None:
                rows = [result.as_dict() for result in results]
                write_json(json, {"world_size": backend.world_size, "steps": rows})

    _on_ranks(context, measure, ranks, world_size)


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
        worker = Path(__file__).with_name("bench_rank.py")
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


def _refuse(message: str) -> None:
    typer.echo(f"mpishard bench: {message}", err=True)
    raise typer.Exit(2)
