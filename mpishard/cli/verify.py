"""``mpishard verify``: whether a model's sharded training is its training in one process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mpishard import settings
from mpishard.cli import verify_rank, verify_reference
from mpishard.cli.bench_report import counted, show
from mpishard.cli.launcher import find_launcher, loaded_library
from mpishard.cli.verify_job import VerifyJob
from mpishard.cli.verify_mesh import DATA_STRATEGIES, MESH_FLAGS, MeshChoice, UsageError
from mpishard.cli.verify_report import Verdict, default_tolerance
from mpishard.cli.verify_rules import RULES
from mpishard.distributed import DistributedStrategy
from mpishard.errors import MPIUnavailableError
from mpishard.pipeline import SCHEDULE_NAMES

__all__ = ["verify"]

_STRATEGIES = [strategy.value for strategy in DistributedStrategy]


_Size = Annotated[int | None, typer.Option(min=1, show_default=False, help="Of hybrid; default 1.")]


class _Backend(StrEnum):
    AUTO = "auto"
    MPI = "mpi"
    MEMORY = "memory"


class _Recompute(StrEnum):
    FULL = "full"
    SELECTIVE = "selective"


class _Type(StrEnum):
    FLOAT32 = "float32"
    FLOAT64 = "float64"


def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="package.module:factory or file.py:factory. factory(seed) returns (model, x, y) "
            "or (model, x, y, loss); it may take dtype too.",
        ),
    ],
    strategy: Annotated[
        str, typer.Option(help=f"One of {', '.join(_STRATEGIES)}.")
    ] = DistributedStrategy.FSDP.value,
    ranks: Annotated[int, typer.Option("-n", min=1, metavar="N", help="Number of ranks.")] = 2,
    backend: Annotated[
        _Backend,
        typer.Option(help="mpi: processes; memory: threads; auto: mpi where it can be started."),
    ] = _Backend.AUTO,
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(RULES)}.")] = "sgd",
    learning_rate: Annotated[float, typer.Option(help="Of the optimizer.")] = 1e-3,
    steps: Annotated[int, typer.Option(min=1, help="Updates.")] = 5,
    batch_size: Annotated[
        int,
        typer.Option(min=0, show_default=False, help="Samples of the global batch; default 8 N."),
    ] = 0,
    tolerance: Annotated[
        float | None,
        typer.Option(show_default=False, help="Relative error; default 1e-10, float32: 1e-4."),
    ] = None,
    dtype: Annotated[
        _Type | None, typer.Option(show_default=False, help="Of the model; default its own.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Given to the factory.")] = 0,
    pipeline_parallel_size: _Size = None,
    tensor_parallel_size: _Size = None,
    data_parallel_size: Annotated[
        int | None, typer.Option(show_default=False, help="Of hybrid; default what is left of N.")
    ] = None,
    micro_batches: Annotated[
        int | None,
        typer.Option(min=1, show_default=False, help="Of pipeline and hybrid; default 4."),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            show_default=False,
            help=f"Of pipeline and hybrid: {', '.join(SCHEDULE_NAMES)}, or all of them one after "
            "the other; default gpipe.",
        ),
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Of tensor and hybrid.")
    ] = False,
    recompute: Annotated[
        _Recompute | None,
        typer.Option(
            show_default=False, help="Activations that are computed again; of mesh strategies."
        ),
    ] = None,
    data_parallel_strategy: Annotated[
        str | None,
        typer.Option(
            show_default=False, help=f"Of hybrid: {', '.join(DATA_STRATEGIES)}; default zero1."
        ),
    ] = None,
) -> None:
    """Train TARGET's model on N ranks and alone, and compare every rank's parameters.

    Exit code 0 where all agree, 1 where they do not, 2 where nothing can be compared.
    """
    _check(strategy, optimizer, learning_rate, tolerance)
    given = (
        pipeline_parallel_size, tensor_parallel_size, data_parallel_size, micro_batches, schedule,
        sequence_parallel or None, recompute and recompute.value, data_parallel_strategy,
    )  # fmt: skip
    try:
        mesh = MeshChoice.of(strategy.lower(), ranks, dict(zip(MESH_FLAGS, given, strict=True)))
    except UsageError as error:
        _refuse(str(error))
    way = _way(backend)
    with tempfile.TemporaryDirectory(prefix="mpishard-verify-") as folder:
        job = VerifyJob(
            Path(folder), target, strategy.lower(), optimizer, ranks, steps,
            batch_size or 8 * ranks, seed, learning_rate, dtype and dtype.value, mesh,
        )  # fmt: skip
        job.write()
        alone = f"from {verify_reference.__name__} import main; main()"
        if _run([sys.executable, "-c", alone, folder]) != 0:
            raise typer.Exit(2)
        mesh = VerifyJob.read(job.folder).mesh  # a black box has no schedules
        worker = [verify_rank.__file__, folder, way]
        launcher = ["-m", "mpishard", "run", "-n", str(ranks)] if way == "mpi" else []
        code = _run([sys.executable, *launcher, *worker])
        found = {name: verify_rank.Comparison.read(job.folder, name) for name in mesh.schedules}
    whom = counted(ranks, "MPI rank" if way == "mpi" else "thread-rank")
    are_equal = True
    for name, comparison in found.items():
        where = f"{strategy}{mesh.describe(name)} on {whom}"
        if comparison is None:
            break
        verdict = Verdict(comparison, tolerance or default_tolerance(str(comparison.dtype)))
        typer.echo(f"{target}: {where} against training alone, {counted(steps, 'step')} of "
                   f"{optimizer}, {comparison.dtype}")  # fmt: skip
        show(verdict.table())
        for line in verdict.lines():
            typer.echo(line)
        are_equal &= verdict.is_equal
    if code != 0 or None in found.values():
        typer.echo(
            f"mpishard verify: alone the model trains, and {where} ended with exit code "
            f"{code}: see above", err=True,
        )  # fmt: skip
        raise typer.Exit(1)
    raise typer.Exit(0 if are_equal else 1)


def _check(strategy: str, optimizer: str, learning_rate: float, tolerance: float | None) -> None:
    if strategy.lower() not in _STRATEGIES:
        _refuse(f"--strategy must be one of {', '.join(_STRATEGIES)}; got {strategy!r}")
    if optimizer not in RULES:
        _refuse(f"--optimizer must be one of {', '.join(RULES)}; got {optimizer!r}")
    if not 0 < learning_rate < float("inf"):
        _refuse(f"--learning-rate must be above 0, got {learning_rate}")
    if tolerance is not None and not 0 < tolerance < float("inf"):
        _refuse(f"--tolerance must be above 0, got {tolerance}")
    launcher = settings.launcher_variable()
    if launcher is not None:
        _refuse(f"this process is a rank already ({launcher} is set): start verify without mpirun")


def _way(backend: _Backend) -> str:
    if backend is _Backend.MEMORY:
        return "memory"
    try:
        find_launcher(loaded_library())
    except MPIUnavailableError as error:
        if backend is _Backend.MPI:
            _refuse(f"--backend mpi: {error}")
        typer.echo(f"mpishard verify: threads, for MPI cannot be started here: {error}", err=True)
        return "memory"
    return "mpi"


def _run(command: list[str]) -> int:
    """The exit code of a command that has this process's output. Ctrl-C reaches it too."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.wait()  # it ends its own ranks first
            raise typer.Exit(settings.EXIT_INTERRUPT) from None


def _refuse(message: str) -> NoReturn:
    typer.echo(f"mpishard verify: {message}", err=True)
    raise typer.Exit(2)
