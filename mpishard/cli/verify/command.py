"""The command ``mpishard verify``: train alone, train on ranks, and compare."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from mpishard.base import as_positive, settings
from mpishard.cli.run.job import RunJob
from mpishard.cli.run.launcher import MPIInstallation
from mpishard.cli.tables import show
from mpishard.cli.verify.comparison import Comparison, Recording, compare_steps
from mpishard.cli.verify.job import VerifyJob
from mpishard.cli.verify.problem import SIZES
from mpishard.cli.wording import check_start, choice, counted, echo, refuse, refusing, say
from mpishard.communication import mesh_sizes
from mpishard.distributed import STRATEGY_OPTIONS, DistributedStrategy

_STRATEGIES = [s.value for s in DistributedStrategy if s is not DistributedStrategy.NONE]
_TARGET = (
    "package.module:factory or file.py:factory, a model with data; or script.py, a loop with "
    "mpishard.torch."
)
_ARGUMENTS = (
    "Arguments of script.py, after --. With a script only -n, --steps and --tolerance apply."
)


def _flag(help_text: str, minimum: int | None = None) -> object:
    """Return an option whose help text has its default."""
    return typer.Option(help=help_text, min=minimum, show_default=False)


def verify(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="FACTORY", help=_TARGET)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]", help=_ARGUMENTS)
    ] = None,
    strategy: Annotated[str, choice("verify", _STRATEGIES)] = "fsdp",
    ranks: Annotated[
        int, typer.Option("-n", "-np", min=1, metavar="N", help="Number of ranks.")
    ] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Number of updates.")] = 5,
    tolerance: Annotated[
        float | None,
        _flag("Largest relative error; default 1e-10, for float32 1e-4, for bfloat16 by depth."),
    ] = None,
    precision: Annotated[
        Literal["bfloat16"] | None,
        _flag("Mixed precision of the ranks, against float64 alone; factory(seed, dtype) is used."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Argument of the factory.")] = 0,
    pipeline_parallel_size: Annotated[int, _flag("For hybrid; default 1.", 1)] = 1,
    tensor_parallel_size: Annotated[int, _flag("For hybrid; default 1.", 1)] = 1,
    data_parallel_size: Annotated[int, _flag("For hybrid; default N over the other two.")] = -1,
) -> None:
    """Compare sharded training of FACTORY's model with training it in one process.

    Trains on N ranks and alone, and compares every rank's parameters after each step. A script with
    a loop of its own is run on N ranks and on one, up to the last of the steps.

    factory(seed) returns (model, x, y) or (model, x, y, loss), and then a dict if needed, with
    optimizer: a rule of mpishard.optimizers, by default SGD(1e-3, momentum=0.9); batch_size: of all
    ranks, by default 8 N; and options of as_distributed, such as schedule.

    Exit codes: 0, all agree; 1, they differ; 2, nothing can be compared.
    """
    check_start("verify", "start verify without mpirun")
    if tolerance is not None:
        with refusing("verify"):
            # NaN would make everything different, and infinity everything equal.
            as_positive("--tolerance", tolerance)
    if target.endswith(".py"):
        names = {"strategy", "precision", "seed", *SIZES}
        fix = "is for a factory; a script makes its own model and optimizer"
        _refuse_given(context, names, fix)
        is_equal = _verify_script([target, *(arguments or ())], ranks, steps, tolerance)
        raise typer.Exit(0 if is_equal else 1)
    if arguments:
        refuse("verify", f"{arguments[0]}: a factory takes no arguments; a script does")
    taken = STRATEGY_OPTIONS.get(strategy, ())
    _refuse_given(context, {*SIZES} - {*taken}, f"is for --strategy hybrid; got {strategy}")
    sizes = {
        "pipeline": (ranks, 1, 1),
        "tensor": (1, ranks, 1),
    }.get(strategy, (pipeline_parallel_size, tensor_parallel_size, data_parallel_size))
    with refusing("verify", f"-n {ranks}: "):
        mesh = mesh_sizes(ranks, *sizes)
    kind = _kind_of_ranks()
    # The reference and the ranks are processes of their own: settings and results are files.
    with tempfile.TemporaryDirectory(prefix="mpishard-verify-") as folder:
        job = VerifyJob(
            Path(folder), target, strategy, mesh, ranks, steps, seed, precision, kind, tolerance
        )
        is_equal = _verify_factory(job)
    raise typer.Exit(0 if is_equal else 1)


def _refuse_given(context: typer.Context, names: Collection[str], why: str) -> None:
    """Refuse flags among ``names`` that the user has given."""
    for name in context.params:
        source = context.get_parameter_source(name)
        # By its source, because the user may give a flag the value of its default.
        if name in names and source is not None and source.name == "COMMANDLINE":
            refuse("verify", f"--{name.replace('_', '-')} {why}")


def _verify_factory(job: VerifyJob) -> bool:
    """Train alone and on the ranks, print the comparison, and return True if they agree."""
    job.write(job)
    reference, program = (f"{__package__}.{name}" for name in ("reference", "ranks"))
    folder, ranks, is_mpi = str(job.folder), job.world_size, job.backend == "mpi"
    # Made before training alone, because it refuses more ranks than can be started.
    started = RunJob("verify", [program, folder], ranks, is_module=True) if is_mpi else None
    # The reference has printed the reason, and without it nothing can be compared.
    if _run(reference, folder):
        raise typer.Exit(2)
    job = VerifyJob.read(job.folder)  # the reference has completed it
    code = _run(program, folder) if started is None else started.run()
    whom = counted(ranks, "MPI rank" if is_mpi else "thread-rank")
    where = f"{job.strategy}{job.mesh} on {whom}"
    found: Comparison | None = VerifyJob.read(job.folder, "comparison")
    if found is None:  # ranks without a result have failed, even if the job ended with code 0
        _fail(where, code or 1)
    how = f"{counted(job.steps, 'step')} of {job.rule}"
    echo(f"{job.target}: {where} against training alone, {how}, {found.dtype}")
    # All steps may agree, and the job fail after them, as in shutdown.
    is_equal = _show(found)
    if code:
        _fail(where, code)
    return is_equal


def _verify_script(words: Sequence[str], ranks: int, steps: int, tolerance: float | None) -> bool:
    """Run a script on one rank and on ``ranks``; print a comparison, return True if they agree."""
    with tempfile.TemporaryDirectory(prefix="mpishard-verify-") as folder:
        alone, on_ranks = (Recording(Path(folder, f"{i}"), n) for i, n in enumerate((1, ranks)))
        for recording in (alone, on_ranks):
            recording.folder.mkdir()
            variables = {"MPISHARD_VERIFY": f"{steps}:{recording.folder}"}
            code = RunJob("verify", words, recording.ranks, variables=variables).run()
            where = f"{words[0]} on {counted(recording.ranks, 'rank')}"
            # The script has run on one rank: that it fails on several is a difference, exit code 1.
            if code and recording is on_ranks:
                _fail(where, code)
            if code:
                refuse("verify", f"{where} ended with exit code {code}: see above")
            if not recording.steps:
                refuse(
                    "verify",
                    f"{where} made no step of an optimizer of mpishard.torch; a model "
                    "of mpishard is verified by a factory, as file.py:factory",
                )
        try:
            found = compare_steps(alone, on_ranks, tolerance)
        except ValueError as error:
            echo(f"DIFFERENT: {error}")
            return False
    return _show(found)


def _fail(where: str, code: int) -> NoReturn:
    """End with exit code 1, because the ranks failed, or with that of Ctrl-C."""
    text = f"the model trains alone, and {where} ended with exit code {code}: see above"
    refuse("verify", text, code if code == settings.EXIT_INTERRUPT else 1)


def _show(found: Comparison) -> bool:
    """Print a comparison, and return True if all agree."""
    show(found.table())
    echo("\n".join(found.lines()))
    return found.is_equal


def _kind_of_ranks() -> Literal["mpi", "memory"]:
    """Return ``"mpi"`` if MPI can be started, else ``"memory"``, for threads."""
    mpi = MPIInstallation.of_this_python()
    if mpi.launcher is not None:
        return "mpi"
    # Threads run the same engine and stores, so that a comparison is still worth its time.
    say("verify", f"uses threads, because MPI cannot be started here: {mpi.error}")
    return "memory"


def _run(module: str, folder: str) -> int:
    """Run a module in a process with this one's output, and return its exit code."""
    # No shared state: a model may keep caches, and a factory may change its modules.
    return subprocess.run([sys.executable, "-m", module, folder], check=False).returncode
