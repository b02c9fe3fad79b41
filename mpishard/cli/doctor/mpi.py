"""Findings about MPI: mpi4py, its library and launcher, the plugin of SLURM; causes of failures."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mpishard.base import settings
from mpishard.cli.doctor.finding import Finding, pip_install, shortened
from mpishard.cli.doctor.host import NEEDED_BYTES, free_bytes, larger_folder
from mpishard.cli.machine import installed_version
from mpishard.cli.probe import Answer, ask
from mpishard.cli.run.launcher import MPIFamily, MPIInstallation, MPILibrary, launcher_family
from mpishard.cli.wording import counted
from mpishard.communication import launcher_name


class Cause(NamedTuple):
    """The cause of a failure, and the command that fixes it."""

    text: str
    fix: str


_NO_MEMORY = re.compile(r"shm_open|/dev/shm|Shared memory error|No space left on device|Bus error")
_CRASHED = re.compile(r"\(signal (7|11)\)|exited on\s+signal (7|11)\b|Segmentation fault")
_HOST = socket.gethostname()
_REINSTALL = pip_install("--force-reinstall", "mpi4py", "mpich")
_ALLOW_ROOT = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"

_ALONE = "each rank found itself alone: srun needs a plugin that works with this MPI library"

_KNOWN = (
    (r"attempt to run as root|--allow-run-as-root",
     Cause("Open MPI's launcher refuses to run as root", _ALLOW_ROOT)),
    (r"Invalid MPI (plugin|type)|cannot find mpi plugin",
     Cause("srun does not have the plugin that its settings name", "unset SLURM_MPI_TYPE")),
    (r"Requested nodes are busy|step creation temporarily disabled|Unable to create step",
     Cause("SLURM has no cores left for another job step: this shell is a step that holds them",
           "export SLURM_OVERLAP=1")),
    (r"world of one[\s\S]*srun --mpi=pmix", Cause(_ALONE, "export SLURM_MPI_TYPE=pmix")),
    (r"world of one[\s\S]*srun --mpi=pmi2",
     Cause(_ALONE, "export SLURM_MPI_TYPE=pmi2  # `srun --mpi=list` names others")),
    (r"Task launch for \S+ failed on node",
     Cause("the nodes start no ranks with this plugin: pmix opens libpmix.so there, which Debian "
           "has in a package of its own",
           "sudo apt-get install libpmix-dev  # on every node; `journalctl -u slurmd` has more")),
    (r"sees a world of one",
     Cause("each rank found itself alone, because the launcher does not work with this MPI library",
           _REINSTALL)),
    (r"getaddrinfo|gethostbyname|Name or service not known|[Cc]ould not resolve|name resolution",
     Cause(f"the name of this machine, {_HOST}, has no address",
           f"echo '127.0.0.1 {_HOST}' | sudo tee -a /etc/hosts")),
    (r"Permission denied \(publickey|Host key verification failed|ssh: connect to host",
     Cause("the launcher cannot log in to a machine of the job", f"ssh-copy-id {_HOST}")),
)  # fmt: skip
"""Patterns of the output of a job, and their causes. The first pattern that is found counts."""


def why_it_failed(answer: Answer, command: Sequence[str]) -> Cause:
    """Return the likeliest cause; if none is known, the message of the job and its ``command``."""
    output = answer.out + answer.err
    free = free_bytes()
    # A crash has many causes. With too little shared memory this one is likely.
    is_small = free is not None and free < NEEDED_BYTES
    if _NO_MEMORY.search(output) or (is_small and _CRASHED.search(output)):
        text = "the MPI library exchanges data of a machine's ranks in /dev/shm, which is full, or "
        return Cause(f"{text}where it may not write", larger_folder())
    for pattern, cause in _KNOWN:
        if re.search(pattern, output):
            return cause
    text = answer.reason
    if answer.code is not None:
        # The last error and not the last line, which is the launcher's frame around it.
        lines = [line.strip(" =-\t") for line in (answer.err + answer.out).splitlines()]
        errors = [n for n in lines if re.search(r"\b\w*Error\b|\berror\b|ERROR|signal \d", n)]
        text = errors[-1] if errors else text
    return Cause(shortened(text), shlex.join(command))


_LIMIT_SECONDS = 20
_IMMEDIATE_SECONDS, _TRIAL_SECONDS = 10, 60
_BUSY = r"Immediate execution impossible|Requested nodes are busy|Unable to allocate resources"
RANK_VARIABLES = {"MPISHARD_TIMEOUT": "20", "MPISHARD_WARN_AFTER": "0", "MPISHARD_TRACE": ""}
"""Settings of two ranks: one that waits for its peer in vain gives up before the doctor does."""
_UNUSABLE = "mpi4py cannot be used here: "
_REBUILD = "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py"
_PLUGIN = re.compile(r"(?:none|pmi2|pmix(?:_v\d+)?|cray_shasta|openmpi|mpich\w*|lam)")


def examine_mpi(mpi: MPIInstallation) -> Iterator[Finding]:
    """Yield mpi4py with its library, and the launcher, if one is wrong."""
    has_slurm = settings.is_slurm_allocation()
    bindings, started_by = installed_version("mpi4py"), settings.launcher_variable()
    if bindings is None:
        # Threads need no MPI. A launcher, or SLURM, starts processes, which need one.
        is_needed = has_slurm or started_by is not None
        install = pip_install("mpi4py") if is_needed else pip_install("mpi4py", "mpich")
        text = "not installed: ranks can only be threads of one process"
        yield Finding("mpi.mpi4py", text, None, install, is_problem=is_needed)
        return
    library, launcher = mpi.library, mpi.launcher
    reason = mpi.error.removeprefix(_UNUSABLE).partition("\n")[0]
    if library is None:
        text = f"{bindings}, and no MPI: {reason}"
        # On a cluster mpi4py needs the site's MPI: that of a wheel does not know its network.
        install = _REBUILD if has_slurm else pip_install("mpich")
        yield Finding("mpi.mpi4py", text, bindings, install, is_problem=True)
        return
    file = library.file and str(library.file)
    text = f"{bindings} loads {library}, {file or 'in a file that this system does not name'}"
    value = {"bindings": bindings, "version": library.version.strip(), "file": file}
    yield Finding("mpi.mpi4py", text, value)
    if launcher is None:
        yield Finding("mpi.launcher", reason, None, _REINSTALL, is_problem=True)
    else:
        text = f"{launcher.program} belongs to it"
        is_root = os.geteuid() == 0 and not settings.open_mpi_starts_for_root()
        fix = None
        if is_root and library.family is MPIFamily.OPEN_MPI and not launcher.is_slurm:
            text += ". It refuses to start for root; mpishard run gives it permission"
            fix = _ALLOW_ROOT
        yield Finding("mpi.launcher", text, str(launcher.program), fix)
    if launcher is None or not launcher.is_slurm:  # users type srun there
        yield from _first_on_path(mpi, library.family)
    # mpiexec -n 4 mpishard doctor: four processes examine, and each has a part of the cores.
    size = settings.launched_world_size()
    if started_by is not None and size is not None and size > 1:
        text = f"{launcher_name()} started this process, one of {size}: only the first reports"
        text += ", and it sees the cores of one rank"
        fix = "mpishard doctor  # without a launcher: it starts its own ranks"
        yield Finding("mpi.started_by", text, {"variable": started_by, "world_size": size}, fix)


def _first_on_path(mpi: MPIInstallation, wanted: MPIFamily | None) -> Iterator[Finding]:
    """Yield an ``mpiexec`` or ``mpirun`` on PATH that starts no ranks of the MPI library."""
    fix, launcher = _REINSTALL, mpi.launcher
    if launcher is not None:
        fix = f'export PATH={shlex.quote(str(launcher.program.parent))}:"$PATH"'
    # Both, because those of a machine may belong to two libraries.
    for program in ("mpiexec", "mpirun"):
        name, first = f"mpi.{program}", shutil.which(program)
        family = first and launcher_family(Path(first))
        if first is None or family is wanted:
            continue
        text = f"the first on PATH, {first}, is {family or 'of an unknown MPI'}, and mpi4py loads "
        text += f"{mpi.library}: each rank would be in a world of one. mpishard run takes the right"
        yield Finding(name, f"{text} one", first, fix)


# ------------------------------------------------------------------------------------------ SLURM


def examine_slurm(mpi: MPIInstallation, quick: bool) -> Iterator[Finding]:
    """Yield whether srun is there inside an allocation, and has a plugin for the MPI library.

    Unless ``quick``, the plugin is tried on two nodes.
    """
    job, srun = settings.slurm_job(), shutil.which("srun")
    if srun is None and job is not None:
        text = f"inside job {job}, and srun is not on PATH: mpishard run takes mpiexec"
        fix = "module load slurm  # or add the folder of srun to PATH"
        yield Finding("slurm.allocation", text, job, fix)
    if srun is not None and mpi.library is not None:
        answer = ask([srun, "--mpi=list"], _LIMIT_SECONDS)
        plugins = listed_plugins(answer.out + answer.err)
        fitting = fitting_plugins(mpi.library, plugins)
        taken = _taken_plugin()
        yield _plugin(mpi.library, plugins, fitting, taken, answer)
        if fitting and not quick:
            yield _two_nodes(srun, taken if taken in fitting else fitting[0], mpi.library)


def listed_plugins(text: str) -> list[str]:
    """Return the plugins in the output of ``srun --mpi=list``, of old and new versions."""
    # Names stand one in a line, or in a sentence with commas, beside other words.
    words = [word for line in text.splitlines() for word in re.split(r"[\s,:]+", line)]
    return list(dict.fromkeys(word for word in words if _PLUGIN.fullmatch(word)))


def fitting_plugins(library: MPILibrary, plugins: list[str]) -> list[str]:
    """Return the ``plugins`` that work with an MPI library, the likeliest first."""
    pmix = [plugin for plugin in plugins if plugin.startswith("pmix")]
    version = library.version.lower()
    if library.family is MPIFamily.OPEN_MPI:  # version 5 has PMIx alone
        return pmix
    # SLURM lists cray_shasta on any machine. MPICH has PMIx only if it was built with it, which
    # its version says.
    usual = ["cray_shasta", "pmi2"] if "cray" in version else ["pmi2"]
    has_pmix = library.family is not MPIFamily.MPICH or "pmix" in version
    return [plugin for plugin in usual if plugin in plugins] + pmix * has_pmix


def _taken_plugin() -> str | None:
    """Return the plugin that srun takes: that of SLURM_MPI_TYPE, or the default of the site."""
    taken, program = settings.slurm_plugin(), shutil.which("scontrol")
    if not taken and program:
        config = ask([program, "show", "config"], _LIMIT_SECONDS).out
        default = re.search(r"^MpiDefault\s*=\s*(\S+)", config, re.MULTILINE)
        taken = default[1] if default else None
    return taken


def _plugin(
    library: MPILibrary, plugins: list[str], fitting: list[str], taken: str | None, answer: Answer
) -> Finding:
    whom = library.family or "this MPI library"
    value = {"plugins": plugins, "fitting": fitting, "taken": taken}
    text, fix = f"srun has {', '.join(plugins)}", None
    if not plugins:
        text = f"srun --mpi=list names no plugin: {shortened(answer.reason)}"
        usual = "pmix" if library.family is MPIFamily.OPEN_MPI else "pmi2"
        fix = f"export SLURM_MPI_TYPE={usual}  # the usual one"
    elif not fitting:
        text += (
            f", and none works with {whom}: load the module of the site's MPI, build mpi4py anew"
        )
        fix = _REBUILD
    elif taken in fitting:
        text += f", and takes {taken}"
    else:
        text += f", and takes {taken or 'none of them'}, which does not work with {whom}"
        fix = f"export SLURM_MPI_TYPE={fitting[0]}"
    return Finding("slurm.plugin", text, value, fix, is_problem=bool(plugins) and not fitting)


def _two_nodes(srun: str, plugin: str, library: MPILibrary) -> Finding:
    """Start two ranks with ``plugin``, on two nodes unless the allocation has only one."""
    nodes = min(2, settings.slurm_node_count() or 2)
    where = counted(nodes, "node")
    command = [srun, f"--mpi={plugin}", f"--nodes={nodes}", "--ntasks=2", "--time=1"]
    # A rank that fails ends the other one. The step needs cores that this shell may hold.
    command += ["--kill-on-bad-exit=1", "--overlap", f"--immediate={_IMMEDIATE_SECONDS}"]
    command += [sys.executable, "-m", "mpishard.cli.doctor.job"]
    answer = ask(command, _TRIAL_SECONDS, RANK_VARIABLES)
    found = answer.found
    if answer.code == 0 and found is not None:
        text = f"two ranks of {library} on {found['hosts']} start with --mpi={plugin}, compute "
        return Finding("slurm.two_nodes", f"{text}right sums and end", found["hosts"])
    if re.search(_BUSY, answer.err):
        text = f"--mpi={plugin} was not tried: {where} could not be had within "
        fix = f"salloc --nodes={nodes} --ntasks=2 mpishard doctor  # waits until they are free"
        return Finding("slurm.two_nodes", f"{text}{_IMMEDIATE_SECONDS} s", None, fix)
    cause = why_it_failed(answer, command)
    failed = re.search(r"on node (\S+?):", answer.err)
    where += f" ({failed[1]} among them)" if failed else ""
    text = f"two ranks on {where} do not communicate with --mpi={plugin}: {cause.text}"
    return Finding("slurm.two_nodes", text, answer.code, cause.fix, is_problem=True)
