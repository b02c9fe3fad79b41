"""What ``mpishard doctor`` finds of MPI: mpi4py, the library, the launcher that belongs to it."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mpishard import settings
from mpishard.cli.doctor.causes import why_it_failed
from mpishard.cli.doctor.finding import Finding, Verdict, pip_install
from mpishard.cli.doctor.probe import ask, python_command
from mpishard.cli.run.launcher import (
    Launcher,
    MPIFamily,
    MPILibrary,
    find_launcher,
    launcher_family,
    loaded_library,
)
from mpishard.communication.mpi.library import launcher_name
from mpishard.errors import MPIUnavailableError

__all__ = ["MPIInstallation", "look_at_mpi"]

_LIMIT_SECONDS = 20

_LEVELS = """
from mpi4py import MPI
names = "SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"
levels = {getattr(MPI, "THREAD_" + name): name for name in names}
try:
    agrees = MPI.COMM_WORLD.Agree(1) == 1
except (AttributeError, NotImplementedError, MPI.Exception):
    agrees = False
answer({"level": levels[MPI.Query_thread()], "agrees": agrees})
"""


@dataclass(frozen=True, slots=True)
class MPIInstallation:
    """What starts ranks here, or why nothing does.

    Parameters
    ----------
    library : MPILibrary, optional
        What mpi4py loads.
    launcher : Launcher, optional
        What belongs to it.
    error : str
        In a line, why one of them is missing.
    """

    library: MPILibrary | None = None
    launcher: Launcher | None = None
    error: str = ""

    @classmethod
    def of_this_python(cls) -> MPIInstallation:
        """What this Python finds, without loading it."""
        library = None
        try:
            library = loaded_library()
            return cls(library, find_launcher(library))
        except MPIUnavailableError as error:
            return cls(library, None, str(error).partition("\n")[0])


def look_at_mpi(mpi: MPIInstallation) -> Iterator[Finding]:
    """mpi4py, its library, the launcher that belongs to it, thread level, faults survived."""
    try:
        bindings = version("mpi4py")
    except PackageNotFoundError:
        yield _no_bindings()
        return
    if mpi.library is None:
        yield Finding(
            "mpi.mpi4py",
            Verdict.PROBLEM,
            f"{bindings}, and no MPI: {mpi.error.removeprefix(_UNUSABLE)}",
            bindings,
            pip_install("mpich") if not settings.is_slurm_allocation() else _REBUILD,
        )
        return
    yield Finding("mpi.mpi4py", Verdict.OK, bindings, bindings)
    yield _library(mpi.library)
    if mpi.launcher is None:
        yield Finding(
            "mpi.launcher",
            Verdict.PROBLEM,
            mpi.error,
            None,
            _onto_path(None),
        )
    else:
        yield from _launcher(mpi.launcher)
    yield from _strangers(mpi.library, mpi.launcher)
    yield from _started_by_a_launcher()
    if mpi.launcher is not None:
        yield from _levels(mpi.launcher)


_UNUSABLE = "mpi4py cannot be used here: "
_REBUILD = "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"


def _no_bindings() -> Finding:
    # Where ranks were to be processes, nothing works; elsewhere threads do.
    wanted = settings.is_slurm_allocation() or settings.launcher_variable() is not None
    return Finding(
        "mpi.mpi4py",
        Verdict.PROBLEM if wanted else Verdict.NOTE,
        "not installed: ranks can be threads of one process, and no more",
        None,
        pip_install("mpi4py") if wanted else pip_install("mpi4py", "mpich"),
    )


def _library(library: MPILibrary) -> Finding:
    value = {"version": library.version.strip(), "file": library.file and str(library.file)}
    text = f"{library}, {library.file or 'in a file that this system does not tell'}"
    return Finding("mpi.library", Verdict.OK, text, value)


def _launcher(launcher: Launcher) -> Iterator[Finding]:
    program = str(launcher.program)
    root = os.geteuid() == 0 and launcher.library.family is MPIFamily.OPEN_MPI
    if not root or launcher.is_slurm or settings.open_mpi_starts_for_root():
        yield Finding("mpi.launcher", Verdict.OK, f"{program} belongs to it", program)
        return
    yield Finding(
        "mpi.launcher",
        Verdict.NOTE,
        f"{program} belongs to it. It refuses to run as root, as you are: mpishard run tells it to",
        program,
        "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    )


def _strangers(library: MPILibrary, launcher: Launcher | None) -> Iterator[Finding]:
    """Whether ``mpiexec`` and ``mpirun``, as they are typed, start ranks of this library."""
    if launcher is not None and launcher.is_slurm:
        return  # there srun is typed
    for name in ("mpiexec", "mpirun"):
        first = shutil.which(name)
        family = None if first is None else launcher_family(Path(first))
        if first is not None and family is library.family:
            yield Finding(f"mpi.{name}", Verdict.OK, f"{first} is the first on PATH", first)
        elif first is not None:
            yield Finding(
                f"mpi.{name}",
                Verdict.NOTE,
                f"the first on PATH, {first}, is {family or 'of an unknown MPI'}, and mpi4py loads "
                f"{library}: its ranks would each find themselves alone. mpishard run takes the "
                "right one",
                first,
                _onto_path(launcher),
            )
        elif launcher is not None and name == launcher.program.name:
            text = "not on PATH; mpishard run finds it"
            yield Finding(f"mpi.{name}", Verdict.NOTE, text, None, _onto_path(launcher))


def _onto_path(launcher: Launcher | None) -> str:
    folder = "<bin folder of that MPI>"
    if launcher is not None:
        folder = str(launcher.program.parent)
    return f'export PATH={shlex.quote(folder)}:"$PATH"'


def _started_by_a_launcher() -> Iterator[Finding]:
    if settings.launcher_variable() is None:
        return
    size = settings.launched_world_size()
    text = f"{launcher_name()} started this process"
    value = {"variable": settings.launcher_variable(), "world_size": size}
    if size is None or size <= 1:
        yield Finding("mpi.started_by", Verdict.OK, text, value)
        return
    yield Finding(
        "mpi.started_by",
        Verdict.NOTE,
        f"{text}, one of {size}: only the first reports, and what it says of cores is true of a "
        "rank",
        value,
        "mpishard doctor  # without a launcher: it starts the ranks that it needs",
    )


def _levels(launcher: Launcher) -> Iterator[Finding]:
    """What MPI says of itself once it has started: asked of one rank."""
    command = launcher.command(1, python_command(_LEVELS))
    open_mpi = launcher.library.family is MPIFamily.OPEN_MPI and not launcher.is_slurm
    tolerant = [command[0], "--with-ft", "ulfm", *command[1:]]
    answer = ask(tolerant if open_mpi else command, _LIMIT_SECONDS)
    survives = open_mpi and answer.found is not None and bool(answer.found["agrees"])
    if open_mpi and answer.found is None:  # a launcher that knows no such option
        answer = ask(command, _LIMIT_SECONDS)
    found: dict[str, Any] | None = answer.found
    if found is None:
        cause = why_it_failed(answer, command)
        text = f"one rank alone does not start: {cause.text}"
        yield Finding("mpi.start", Verdict.PROBLEM, text, None, cause.mend)
        return
    yield _thread_level(found["level"])
    text = "no: a rank that dies ends the job"
    if survives:
        text = "the library has it: mpishard run --on-failure shrink lets ranks outlive another"
    yield Finding("mpi.ulfm", Verdict.OK, text, survives)


def _thread_level(level: str) -> Finding:
    if level == "MULTIPLE":
        return Finding("mpi.threads", Verdict.OK, "MPI_THREAD_MULTIPLE", level)
    return Finding(
        "mpi.threads",
        Verdict.NOTE,
        f"MPI_THREAD_{level} and not MULTIPLE: no thread moves data while a rank computes",
        level,
        # mpi4py asks for MULTIPLE unless it is told otherwise; then it is the library's build.
        "unset MPI4PY_RC_THREAD_LEVEL MPI4PY_RC_THREADS MPICH_MAX_THREAD_SAFETY",
    )
