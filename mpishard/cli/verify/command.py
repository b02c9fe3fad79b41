"""The command ``mpishard verify``: train alone, train on ranks, and compare."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from mpishard import settings
from mpishard.arguments import as_positive
from mpishard.cli.run.job import Job
from mpishard.cli.run.launcher import MPIInstallation
from mpishard.cli.tables import show
from mpishard.cli.verify.comparison import Comparison, Recording, compare_steps
from mpishard.cli.verify.job import (
    DATA_STRATEGIES,
    MESH_FLAGS,
    STRATEGIES,
    WRAPPERS,
    MeshChoice,
    VerifyJob,
)
from mpishard.cli.verify.reference import RULES
from mpishard.cli.wording import check_start, choice, counted, refuse, refusing, say
from mpishard.pipeline import SCHEDULE_NAMES

Backend = Literal["auto", "mpi", "memory"]


def _flag(help_text: str, minimum: int | None = None) -> Any:
    """Return an option whose help text has its default."""
    return typer.Option(help=help_text, min=minimum, show_default=False)


_SIZE = _flag("For hybrid; default 1.", 1)
_TARGET = (
    "package.module:factory or file.py:factory. factory(seed) returns (model, x, y) or "
    "(model, x, y, loss); it may take dtype too. Or script.py, a loop with mpishard.torch."
)
_ARGUMENTS = "Of a script, after --; it takes -n, --steps and --tolerance only."
_SCHEDULES = "For pipeline and hybrid: {}; default gpipe."
_DATA = "For hybrid: {}; default zero1."
_WRAPPERS = (
    "Optimizer in the strategy's place, one of {}: with a period of one step for descent, without "
    "staleness, with any number of ranks, with all elements of a gradient."
)


def verify(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help=_TARGET)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]", help=_ARGUMENTS)
    ] = None,
    strategy: Annotated[str, choice("verify", STRATEGIES)] = "fsdp",
    ranks: Annotated[
        int, typer.Option("-n", "-np", min=1, metavar="N", help="Number of ranks.")
    ] = 2,
    backend: Annotated[
        Backend, typer.Option(help="mpi: processes; memory: threads; auto: mpi if it can start.")
    ] = "auto",
    optimizer: Annotated[str, choice("verify", RULES)] = "sgd",
    learning_rate: Annotated[
        float | None, _flag("Learning rate of the optimizer; default 1e-3, for lbfgs 1.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of updates.")] = 5,
    batch_size: Annotated[int, _flag("Samples of the global batch; default 8 N.", 0)] = 0,
    tolerance: Annotated[
        float | None,
        _flag("Largest relative error; default 1e-10, for float32 1e-4, for bfloat16 by depth."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "float64"] | None, _flag("Dtype of the model; default its own.")
    ] = None,
    precision: Annotated[
        Literal["bfloat16"] | None,
        _flag("Mixed precision of the ranks, against float64 alone; the factory must take dtype."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Argument of the factory.")] = 0,
    pipeline_parallel_size: Annotated[int | None, _SIZE] = None,
    tensor_parallel_size: Annotated[int | None, _SIZE] = None,
    data_parallel_size: Annotated[
        int | None, _flag("For hybrid; default N over the other two.")
    ] = None,
    micro_batches: Annotated[int | None, _flag("For pipeline and hybrid; default 4.", 1)] = None,
    schedule: Annotated[str | None, choice("verify", ("all", *SCHEDULE_NAMES), _SCHEDULES)] = None,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="For tensor and hybrid.")
    ] = False,
    recompute: Annotated[
        Literal["full", "selective"] | None,
        _flag("For tensor, pipeline and hybrid: compute activations again in backward."),
    ] = None,
    data_parallel_strategy: Annotated[str | None, choice("verify", DATA_STRATEGIES, _DATA)] = None,
    delay: Annotated[
        int, _flag("AsyncSGDOptimizer, whose gradients come so many steps later.", 0)
    ] = 0,
    wrapper: Annotated[str | None, choice("verify", WRAPPERS, _WRAPPERS)] = None,
) -> None:
    """Compare sharded training of TARGET's model with training it in one process.

    Trains on N ranks and alone, and compares every rank's parameters after each step. A script with
    a loop of its own is run on N ranks and on one, up to the last of the steps.

    Exit codes: 0, all agree; 1, they differ; 2, nothing can be compared.
    """
    check_start("verify", "start verify without mpirun")
    with refusing("verify"):
        for flag, number in (("--learning-rate", learning_rate), ("--tolerance", tolerance)):
            as_positive(flag, 1 if number is None else number)
    if data_parallel_size == 0:
        refuse("verify", "--data-parallel-size must be 1 or more, or -1 for what is left, got 0")
    if target.endswith(".py"):
        _check_script(context)
        is_equal = _verify_script([target, *(arguments or ())], ranks, steps, tolerance)
        raise typer.Exit(0 if is_equal else 1)
    if arguments:
        refuse("verify", f"{arguments[0]}: a factory takes no arguments; a script does")
    wrapper = _chosen_wrapper(strategy, optimizer, steps, delay, wrapper, precision)
    given = (
        pipeline_parallel_size, tensor_parallel_size, data_parallel_size, micro_batches, schedule,
        sequence_parallel, recompute, data_parallel_strategy,
    )  # fmt: skip
    with refusing("verify"):
        mesh = MeshChoice.of(strategy, ranks, dict(zip(MESH_FLAGS, given, strict=True)))
    kind = _kind_of_ranks(backend)
    learning_rate = learning_rate or (1.0 if optimizer == "lbfgs" else 1e-3)
    # The reference and the ranks are processes of their own: settings and results are files.
    with tempfile.TemporaryDirectory(prefix="mpishard-verify-") as folder:
        job = VerifyJob(
            Path(folder), target, strategy, mesh, optimizer, ranks, steps, batch_size or 8 * ranks,
            seed, learning_rate, dtype, precision, delay, wrapper, kind, tolerance,
        )  # fmt: skip
        is_equal = _verify_factory(job)
    raise typer.Exit(0 if is_equal else 1)


def _check_script(context: typer.Context) -> None:
    """Refuse flags of models that verify trains itself."""
    for name in context.params.keys() - {"target", "arguments", "ranks", "steps", "tolerance"}:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            refuse("verify", f"{flag} is for a factory; a script makes its own model and optimizer")


def _chosen_wrapper(
    strategy: str, optimizer: str, steps: int, delay: int, wrapper: str | None,
    precision: str | None,
) -> str | None:  # fmt: skip
    """Return the name of the optimizer around the rule; ``"async"`` if there is a delay.

    Refuses a wrapper, or a delay, that does not fit the other flags.
    """
    if delay and wrapper not in (None, "async"):
        refuse("verify", f"--delay {delay} is for --wrapper async; got {wrapper}")
    chosen = "async" if delay else wrapper
    takers = STRATEGIES if chosen is None else WRAPPERS[chosen][1]
    if strategy not in takers:
        flag = f"--wrapper {wrapper}" if wrapper else "--delay"
        refuse("verify", f"{flag} is for --strategy {', '.join(takers)}; got {strategy}")
    if delay >= steps:
        refuse("verify", f"--delay {delay} leaves no update of --steps {steps}")
    if chosen == "local-sgd" and optimizer != "descent":
        text = f"got {optimizer}, whose state would differ between replicas"
        refuse("verify", f"--wrapper local-sgd is for --optimizer descent; {text}")
    if optimizer == "lbfgs" and (precision or chosen not in (None, "elastic")):
        text = "leave out --delay, --precision and --wrapper, except --wrapper elastic"
        refuse("verify", f"--optimizer lbfgs compares losses of one function: {text}")
    return chosen


def _verify_factory(job: VerifyJob) -> bool:
    """Train alone and on the ranks, print each comparison, and tell whether all agree."""
    job.write(job)
    reference, program = (f"{__package__}.{name}" for name in ("reference", "ranks"))
    folder, ranks, is_mpi = str(job.folder), job.world_size, job.backend == "mpi"
    # Made before training alone, because it refuses more ranks than can be started.
    started = Job("verify", [program, folder], ranks, is_module=True) if is_mpi else None
    if _run(reference, folder):
        raise typer.Exit(2)
    job = VerifyJob.read(job.folder)  # which the reference has settled
    code = _run(program, folder) if started is None else started.run()
    whom = counted(ranks, "MPI rank" if is_mpi else "thread-rank")
    how = f"{counted(job.steps, 'step')} of {job.optimizer}"
    if job.wrapper:
        how += f" with {job.wrapper}"
    if job.replica_count:
        whom += f", {counted(job.replica_count, 'replica')},"
    are_equal = True
    for schedule in job.mesh.schedules:
        where = f"{job.strategy}{job.mesh.describe(schedule)} on {whom}"
        found: Comparison | None = VerifyJob.read(job.folder, f"comparison-{schedule}")
        if found is None:
            # Ranks without a result have failed, even if the job ended with code 0.
            _fail(where, code or 1)
        typer.echo(f"{job.target}: {where} against training alone, {how}, {found.dtype}")
        are_equal &= _show(found)
    if code:
        _fail(where, code)
    return are_equal


def _verify_script(words: Sequence[str], ranks: int, steps: int, tolerance: float | None) -> bool:
    """Run a script on one rank and on ``ranks``, print a comparison, and tell if they agree."""
    with tempfile.TemporaryDirectory(prefix="mpishard-verify-") as folder:
        alone, together = (Recording(Path(folder, f"{i}"), n) for i, n in enumerate((1, ranks)))
        for recording in (alone, together):
            recording.folder.mkdir()
            variables = {"MPISHARD_VERIFY": f"{steps}:{recording.folder}"}
            code = Job("verify", words, recording.ranks, variables=variables).run()
            where = f"{words[0]} on {counted(recording.ranks, 'rank')}"
            if code and recording is together:
                _fail(where, code)
            if code:
                refuse("verify", f"{where} ended with exit code {code}: see above")
            if not recording.steps:
                refuse("verify", f"{where} made no step of an optimizer of mpishard.torch; a model "
                       "of mpishard is verified by a factory, as file.py:factory")  # fmt: skip
        try:
            found = compare_steps(alone, together, tolerance)
        except ValueError as error:
            typer.echo(f"DIFFERENT: {error}")
            return False
    return _show(found)


def _fail(where: str, code: int) -> NoReturn:
    """End with exit code 1, because the ranks failed, or with that of Ctrl-C."""
    text = f"the model trains alone, and {where} ended with exit code {code}: see above"
    refuse("verify", text, code if code == settings.EXIT_INTERRUPT else 1)


def _show(found: Comparison) -> bool:
    """Print a comparison, and tell whether all agree."""
    show(found.table())
    typer.echo("\n".join(found.lines()))
    return found.is_equal


def _kind_of_ranks(backend: Backend) -> Literal["mpi", "memory"]:
    """Return the kind of ranks that ``auto`` selects; refuse ``mpi`` if it cannot be started."""
    if backend == "memory":
        return backend
    mpi = MPIInstallation.of_this_python()
    if mpi.launcher is not None:
        return "mpi"
    if backend == "mpi":
        refuse("verify", f"--backend mpi: {mpi.error}")
    say("verify", f"uses threads, because MPI cannot be started here: {mpi.error}")
    return "memory"


def _run(module: str, folder: str) -> int:
    """Run a module in a process with this one's output, and return its exit code."""
    return subprocess.run([sys.executable, "-m", module, folder], check=False).returncode
