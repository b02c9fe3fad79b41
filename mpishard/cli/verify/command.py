"""``mpishard verify``: whether a model's sharded training is its training in one process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer

from mpishard import settings
from mpishard.cli.run.launcher import find_launcher, loaded_library
from mpishard.cli.tables import show
from mpishard.cli.verify import flags
from mpishard.cli.verify import rank as verify_rank
from mpishard.cli.verify import reference as verify_reference
from mpishard.cli.verify.job import VerifyJob
from mpishard.cli.verify.mesh import MESH_FLAGS, MeshChoice, UsageError
from mpishard.cli.verify.rank import Comparison
from mpishard.cli.verify.report import Verdict, default_tolerance
from mpishard.cli.verify.rules import RULES
from mpishard.cli.wording import counted
from mpishard.distributed import DistributedStrategy
from mpishard.errors import MPIUnavailableError

__all__ = ["verify"]


def verify(
    target: flags.TargetArgument,
    strategy: flags.StrategyOption = DistributedStrategy.FSDP.value,
    ranks: flags.RanksOption = 2,
    backend: flags.BackendOption = flags.BackendChoice.AUTO,
    optimizer: flags.OptimizerOption = "sgd",
    learning_rate: flags.LearningRateOption = 1e-3,
    steps: flags.StepsOption = 5,
    batch_size: flags.BatchSizeOption = 0,
    tolerance: flags.ToleranceOption = None,
    dtype: flags.TypeOption = None,
    seed: flags.SeedOption = 0,
    pipeline_parallel_size: flags.MeshSizeOption = None,
    tensor_parallel_size: flags.MeshSizeOption = None,
    data_parallel_size: flags.DataSizeOption = None,
    micro_batches: flags.MicroBatchesOption = None,
    schedule: flags.ScheduleOption = None,
    sequence_parallel: flags.SequenceParallelOption = False,
    recompute: flags.RecomputeOption = None,
    data_parallel_strategy: flags.DataStrategyOption = None,
) -> None:
    """Train TARGET's model on N ranks and alone, and compare every rank's parameters.

    Exit code 0 where all agree, 1 where they do not, 2 where nothing can be compared.
    """
    _check(strategy, optimizer, learning_rate, tolerance)
    given = (
        pipeline_parallel_size, tensor_parallel_size, data_parallel_size, micro_batches, schedule,
        sequence_parallel or None, recompute and recompute.value, data_parallel_strategy,
    )  # fmt: skip
    mesh = _mesh(strategy, ranks, dict(zip(MESH_FLAGS, given, strict=True)))
    way = _way(backend)
    with tempfile.TemporaryDirectory(prefix="mpishard-verify-") as folder:
        job = _train_alone(VerifyJob(
            Path(folder), target, strategy.lower(), optimizer, ranks, steps,
            batch_size or 8 * ranks, seed, learning_rate, dtype and dtype.value, mesh,
        ))  # fmt: skip
        code = _train_on_ranks(job, way)
        found = {name: Comparison.read(job.folder, name) for name in job.mesh.schedules}
    raise typer.Exit(0 if _are_equal(job, way, code, found, tolerance) else 1)


def _check(strategy: str, optimizer: str, learning_rate: float, tolerance: float | None) -> None:
    if strategy.lower() not in flags.STRATEGIES:
        _refuse(f"--strategy must be one of {', '.join(flags.STRATEGIES)}; got {strategy!r}")
    if optimizer not in RULES:
        _refuse(f"--optimizer must be one of {', '.join(RULES)}; got {optimizer!r}")
    if not 0 < learning_rate < float("inf"):
        _refuse(f"--learning-rate must be above 0, got {learning_rate}")
    if tolerance is not None and not 0 < tolerance < float("inf"):
        _refuse(f"--tolerance must be above 0, got {tolerance}")
    launcher = settings.launcher_variable()
    if launcher is not None:
        _refuse(f"this process is a rank already ({launcher} is set): start verify without mpirun")


def _mesh(strategy: str, ranks: int, given: Mapping[str, Any]) -> MeshChoice:
    try:
        return MeshChoice.of(strategy.lower(), ranks, given)
    except UsageError as error:
        _refuse(str(error))


def _way(backend: flags.BackendChoice) -> str:
    """Where ranks are: ``mpi`` or ``memory``."""
    if backend is flags.BackendChoice.MEMORY:
        return "memory"
    try:
        find_launcher(loaded_library())
    except MPIUnavailableError as error:
        if backend is flags.BackendChoice.MPI:
            _refuse(f"--backend mpi: {error}")
        typer.echo(f"mpishard verify: threads, for MPI cannot be started here: {error}", err=True)
        return "memory"
    return "mpi"


def _train_alone(job: VerifyJob) -> VerifyJob:
    """Train in a process of its own, which settles what the job compares."""
    job.write()
    program = f"from {verify_reference.__name__} import main; main()"
    if _run([sys.executable, "-c", program, str(job.folder)]) != 0:
        raise typer.Exit(2)
    return VerifyJob.read(job.folder)


def _train_on_ranks(job: VerifyJob, way: str) -> int:
    """Train on the job's ranks, which leave a `Comparison` for each schedule; the exit code."""
    launcher = ["-m", "mpishard", "run", "-n", str(job.world_size)] if way == "mpi" else []
    return _run([sys.executable, *launcher, verify_rank.__file__, str(job.folder), way])


def _are_equal(
    job: VerifyJob,
    way: str,
    code: int,
    found: Mapping[str, Comparison | None],
    tolerance: float | None,
) -> bool:
    """Whether each schedule's comparison was made, and found no difference; shown as it is."""
    whom = counted(job.world_size, "MPI rank" if way == "mpi" else "thread-rank")
    are_equal = True
    for schedule, comparison in found.items():
        where = f"{job.strategy}{job.mesh.describe(schedule)} on {whom}"
        if comparison is None:
            break
        verdict = Verdict(comparison, tolerance or default_tolerance(str(comparison.dtype)))
        typer.echo(
            f"{job.target}: {where} against training alone, {counted(job.steps, 'step')} of "
            f"{job.optimizer}, {comparison.dtype}"
        )
        show(verdict.table())
        for line in verdict.lines():
            typer.echo(line)
        are_equal &= verdict.is_equal
    if code == 0 and None not in found.values():
        return are_equal
    typer.echo(
        f"mpishard verify: alone the model trains, and {where} ended with exit code {code}: see "
        "above",
        err=True,
    )
    return False


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
