"""Findings about MPI: mpi4py, its library and launcher, SLURM's plugin; and why a job failed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpishard import settings
from mpishard.cli.doctor.finding import Finding, pip_install, shortened
from mpishard.cli.doctor.host import NEEDED_BYTES, free_bytes, larger_folder, name_host
from mpishard.cli.machine import installed_version
from mpishard.cli.probe import Answer, ask, python_command
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


class Cause(NamedTuple):
    """The reason for a failure, and the command that fixes it."""

    text: str
    fix: str


_NO_MEMORY = re.compile(r"shm_open|/dev/shm|Shared memory error|No space left on device|Bus error")
_CRASHED = re.compile(r"\(signal (7|11)\)|exited on\s+signal (7|11)\b|Segmentation fault")
_HOST = socket.gethostname()
_REINSTALL = pip_install("--force-reinstall", "mpi4py", "mpich")
_ALLOW_ROOT = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"

_KNOWN = (
    (r"attempt to run as root|--allow-run-as-root",
     Cause("Open MPI's launcher refuses to run as root", _ALLOW_ROOT)),
    (r"Invalid MPI (plugin|type)|cannot find mpi plugin",
     Cause("srun does not have the plugin that it was told to use", "unset SLURM_MPI_TYPE")),
    (r"Requested nodes are busy|step creation temporarily disabled|Unable to create step",
     Cause("SLURM has no cores left for another job step: this shell is a step that holds them",
           "export SLURM_OVERLAP=1")),
    (r"world of one[\s\S]*srun --mpi",
     Cause("each rank found itself alone: srun needs a plugin that works with this MPI library",
           "export SLURM_MPI_TYPE=pmi2  # or pmix, for Open MPI; `srun --mpi=list` names them")),
    (r"sees a world of one",
     Cause("each rank found itself alone, because the launcher does not work with this MPI library",
           _REINSTALL)),
    (r"getaddrinfo|gethostbyname|Name or service not known|[Cc]ould not resolve|name resolution",
     Cause(f"the name of this machine, {_HOST}, has no address", name_host(_HOST))),
    (r"Permission denied \(publickey|Host key verification failed|ssh: connect to host",
     Cause("the launcher cannot log in on a machine of the job", f"ssh-copy-id {_HOST}")),
)  # fmt: skip
"""What a job has printed, and what it means: the first that is found is the cause."""


def why_it_failed(answer: Answer, command: Sequence[str]) -> Cause:
    """Return the likeliest cause; if none is known, the job's own message and its command.

    Parameters
    ----------
    answer : Answer
        The end of the job, and its output.
    command : sequence of str
        The command that started it.
    """
    said = answer.out + answer.err
    free = free_bytes()
    is_small = free is not None and free < NEEDED_BYTES
    if _NO_MEMORY.search(said) or (is_small and _CRASHED.search(said)):
        return Cause(
            "the MPI library exchanges data of a machine's ranks in /dev/shm, and found no room "
            "there, or may not write",
            larger_folder(),
        )
    for pattern, cause in _KNOWN:
        if re.search(pattern, said):
            return cause
    text = answer.reason
    if answer.code is not None:
        # The line that tells most is an error, not the launcher's frame around it.
        lines = [line.strip(" =-\t") for line in (answer.err + answer.out).splitlines()]
        errors = [n for n in lines if re.search(r"\b\w*Error\b|\berror\b|ERROR|signal \d", n)]
        text = errors[-1] if errors else text
    return Cause(shortened(text), shlex.join(command))


_LIMIT_SECONDS = 20
_UNUSABLE = "mpi4py cannot be used here: "
_REBUILD = "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
_PLUGIN = re.compile(r"(?:none|pmi2|pmix(?:_v\d+)?|cray_shasta|openmpi|mpich\w*|lam)")

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
    """The library and launcher of MPI here, or the reason why there is none.

    Parameters
    ----------
    library : MPILibrary, optional
        The library that mpi4py loads.
    launcher : Launcher, optional
        The launcher that belongs to it.
    error : str
        In a line, why one of them is missing.
    """

    library: MPILibrary | None = None
    launcher: Launcher | None = None
    error: str = ""

    @classmethod
    def of_this_python(cls) -> MPIInstallation:
        """Find out, without loading the library."""
        library = None
        try:
            library = loaded_library()
            return cls(library, find_launcher(library))
        except MPIUnavailableError as error:
            return cls(library, None, str(error).partition("\n")[0])


def look_at_mpi(mpi: MPIInstallation) -> Iterator[Finding]:
    """Yield mpi4py, its library, its launcher, thread level, and whether it survives faults."""
    has_slurm = settings.is_slurm_allocation()
    bindings, started_by = installed_version("mpi4py"), settings.launcher_variable()
    fix: str | None
    if bindings is None:
        # Nothing works if ranks are to be processes; elsewhere threads do.
        is_needed = has_slurm or started_by is not None
        fix = pip_install("mpi4py", *(() if is_needed else ("mpich",)))
        text = "not installed: ranks can only be threads of one process"
        yield Finding("mpi.mpi4py", text, None, fix, is_problem=is_needed)
        return
    library, launcher = mpi.library, mpi.launcher
    if library is None:
        text = f"{bindings}, and no MPI: {mpi.error.removeprefix(_UNUSABLE)}"
        fix = _REBUILD if has_slurm else pip_install("mpich")
        yield Finding("mpi.mpi4py", text, bindings, fix, is_problem=True)
        return
    yield Finding("mpi.mpi4py", bindings, bindings)
    file = library.file and str(library.file)
    text = f"{library}, {file or 'in a file that this system does not tell'}"
    yield Finding("mpi.library", text, {"version": library.version.strip(), "file": file})
    if launcher is None:
        yield Finding("mpi.launcher", mpi.error, None, _REINSTALL, is_problem=True)
    else:
        text = f"{launcher.program} belongs to it"
        is_refused = os.geteuid() == 0 and library.family is MPIFamily.OPEN_MPI
        is_refused &= not (launcher.is_slurm or settings.open_mpi_starts_for_root())
        if is_refused:
            text += ". It refuses to run as root, as you are: mpishard run allows it"
        fix = _ALLOW_ROOT if is_refused else None
        yield Finding("mpi.launcher", text, str(launcher.program), fix)
    if launcher is None or not launcher.is_slurm:  # users type srun there
        yield from _first_on_path(library, launcher)
    if started_by is not None:
        size, fix = settings.launched_world_size(), None
        text = f"{launcher_name()} started this process"
        if size is not None and size > 1:
            text += f", one of {size}: only the first reports, and sees the cores of one rank"
            fix = "mpishard doctor  # without a launcher: it starts its own ranks"
        yield Finding("mpi.started_by", text, {"variable": started_by, "world_size": size}, fix)
    if launcher is not None:
        yield from _started(launcher)


def _first_on_path(library: MPILibrary, launcher: Launcher | None) -> Iterator[Finding]:
    """Tell whether the ``mpiexec`` and ``mpirun`` that a user types start ranks of this library."""
    fix = _REINSTALL
    if launcher is not None:
        fix = f'export PATH={shlex.quote(str(launcher.program.parent))}:"$PATH"'
    # Both, because a machine may have the two of different libraries.
    for program in ("mpiexec", "mpirun"):
        name, first = f"mpi.{program}", shutil.which(program)
        if first is not None:
            family = launcher_family(Path(first))
            if family is library.family:
                yield Finding(name, f"{first} is the first on PATH", first)
                continue
            text = f"the first on PATH, {first}, is {family or 'of an unknown MPI'}, and mpi4py "
            text += f"loads {library}: its ranks would each find themselves alone. mpishard run "
            text += "takes the right one"
            yield Finding(name, text, first, fix)
        elif launcher is not None and program == launcher.program.name:
            yield Finding(name, "not on PATH; mpishard run finds it", None, fix)


def _started(launcher: Launcher) -> Iterator[Finding]:
    """Start one rank, and yield what its library says of itself."""
    command = launcher.command(1, python_command(_LEVELS))
    is_open_mpi = launcher.library.family is MPIFamily.OPEN_MPI and not launcher.is_slurm
    tolerant = [command[0], "--with-ft", "ulfm", *command[1:]]
    answer = ask(tolerant if is_open_mpi else command, _LIMIT_SECONDS)
    survives = is_open_mpi and answer.found is not None and bool(answer.found["agrees"])
    if is_open_mpi and answer.found is None:  # an old launcher, without that option
        answer = ask(command, _LIMIT_SECONDS)
    if answer.found is None:
        cause = why_it_failed(answer, command)
        text = f"one rank alone does not start: {cause.text}"
        yield Finding("mpi.start", text, None, cause.fix, is_problem=True)
        return
    level = answer.found["level"]
    text, fix = f"MPI_THREAD_{level}", None
    if level != "MULTIPLE":
        text += " and not MULTIPLE: no thread moves data while a rank computes"
        # mpi4py asks for MULTIPLE unless one of these is set; else the library was built without.
        fix = "unset MPI4PY_RC_THREAD_LEVEL MPI4PY_RC_THREADS MPICH_MAX_THREAD_SAFETY"
    yield Finding("mpi.threads", text, level, fix)
    text = "no: a rank that dies ends the job"
    if survives:
        text = "the library has it: with mpishard run --on-failure shrink ranks outlive another"
    yield Finding("mpi.ulfm", text, survives)


# ------------------------------------------------------------------------------------------ SLURM


def look_at_slurm(mpi: MPIInstallation) -> Iterator[Finding]:
    """Yield whether this is an allocation, and whether srun has a plugin for the MPI library."""
    job, srun, fix = settings.slurm_job(), shutil.which("srun"), None
    text = f"inside job {job}" if job else "outside an allocation: mpishard run takes mpiexec"
    if srun is None and job is None:
        text = "no SLURM here"
    elif srun is None:
        text += ", and srun is not on PATH, so that mpishard run takes mpiexec"
        fix = "module load slurm  # or add the folder of srun to PATH"
    yield Finding("slurm.allocation", text, job, fix)
    if srun is not None and mpi.library is not None:
        yield _plugin(srun, mpi.library.family)


def listed_plugins(text: str) -> list[str]:
    """Return the plugins that ``srun --mpi=list`` names, in the format of old and new versions."""
    words = [word for line in text.splitlines() for word in re.split(r"[\s,:]+", line)]
    return list(dict.fromkeys(word for word in words if _PLUGIN.fullmatch(word)))


def fitting_plugins(family: MPIFamily | None, plugins: list[str]) -> list[str]:
    """Return those of ``plugins`` that an MPI library understands, the likeliest first."""
    pmix = [plugin for plugin in plugins if plugin.startswith("pmix")]
    if family is MPIFamily.OPEN_MPI:
        return pmix
    return [plugin for plugin in ("cray_shasta", "pmi2") if plugin in plugins] + pmix


def _plugin(srun: str, family: MPIFamily | None) -> Finding:
    whom = family or "this MPI library"
    answer = ask([srun, "--mpi=list"], _LIMIT_SECONDS)
    plugins = listed_plugins(answer.out + answer.err)
    fitting = fitting_plugins(family, plugins)
    taken, program = settings.slurm_plugin(), shutil.which("scontrol")
    if not taken and program:
        said = ask([program, "show", "config"], _LIMIT_SECONDS).out
        default = re.search(r"^MpiDefault\s*=\s*(\S+)", said, re.MULTILINE)
        taken = default and default[1]
    value = {"plugins": plugins, "fitting": fitting, "taken": taken}
    text, fix = f"srun has {', '.join(plugins)}", None
    if not plugins:
        text = f"srun --mpi=list names no plugin: {shortened(answer.reason)}"
        usual = "pmix" if family is MPIFamily.OPEN_MPI else "pmi2"
        fix = f"export SLURM_MPI_TYPE={usual}  # the usual one"
    elif not fitting:
        text += f", of which none works with {whom}: build mpi4py for the site's own MPI, with its "
        text, fix = f"{text}module loaded", _REBUILD
    elif taken in fitting:
        text += f", and takes {taken}"
    else:
        text += f", and takes {taken or 'none of them'}, which does not work with {whom}"
        fix = f"export SLURM_MPI_TYPE={fitting[0]}"
    return Finding("slurm.plugin", text, value, fix, is_problem=bool(plugins) and not fitting)
