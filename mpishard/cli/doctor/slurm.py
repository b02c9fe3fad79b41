"""What ``mpishard doctor`` finds of SLURM: the allocation, and the plugin that fits the MPI."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

from mpishard import settings
from mpishard.cli.doctor.finding import Finding, Verdict, some
from mpishard.cli.doctor.mpi import MPIInstallation
from mpishard.cli.doctor.probe import ask
from mpishard.cli.run.launcher import MPIFamily

__all__ = ["fitting_plugins", "listed_plugins", "look_at_slurm"]

_LIMIT_SECONDS = 15
_PLUGIN = re.compile(r"(?:none|pmi2|pmix(?:_v\d+)?|cray_shasta|openmpi|mpich\w*|lam)")


def look_at_slurm(mpi: MPIInstallation) -> Iterator[Finding]:
    """Whether this is an allocation, and whether srun speaks to the MPI library."""
    job, srun = settings.slurm_job(), shutil.which("srun")
    if srun is None:
        if job is None:
            yield Finding("slurm.allocation", Verdict.OK, "no SLURM here", None)
            return
        yield Finding(
            "slurm.allocation",
            Verdict.NOTE,
            f"inside job {job}, and srun is not on PATH, so that mpishard run takes mpiexec",
            job,
            'export PATH="<folder of srun>:$PATH"',
        )
        return
    where = (
        f"inside job {job}" if job else "outside an allocation, where mpishard run takes mpiexec"
    )
    yield Finding("slurm.allocation", Verdict.OK, where, job)
    if mpi.library is not None:
        yield _plugin(srun, mpi.library.family)


def listed_plugins(text: str) -> list[str]:
    """The plugins that ``srun --mpi=list`` names, in the words of old versions and new ones."""
    words = [word for line in text.splitlines() for word in re.split(r"[\s,:]+", line)]
    return list(dict.fromkeys(word for word in words if _PLUGIN.fullmatch(word)))


def fitting_plugins(family: MPIFamily | None, plugins: list[str]) -> list[str]:
    """Those of ``plugins`` that ranks of an MPI library understand, the likeliest first."""
    pmix = [plugin for plugin in plugins if plugin.startswith("pmix")]
    if family is MPIFamily.OPEN_MPI:
        return pmix
    known = [plugin for plugin in ("cray_shasta", "pmi2") if plugin in plugins]
    return known + pmix


def _plugin(srun: str, family: MPIFamily | None) -> Finding:
    answer = ask([srun, "--mpi=list"], _LIMIT_SECONDS)
    plugins = listed_plugins(answer.out + answer.err)
    fitting = fitting_plugins(family, plugins)
    taken = settings.slurm_plugin() or _default_plugin()
    value = {"plugins": plugins, "fitting": fitting, "taken": taken}
    if not plugins:
        text = f"srun --mpi=list names no plugin: {some(answer.reason)}"
        return Finding("slurm.plugin", Verdict.NOTE, text, value, "srun --mpi=list")
    listed = f"srun has {', '.join(plugins)}"
    if not fitting:
        return Finding(
            "slurm.plugin",
            Verdict.PROBLEM,
            f"{listed}, of which none speaks to {family or 'this MPI library'}: build mpi4py for "
            "the site's own MPI, with its module loaded",
            value,
            "pip install --force-reinstall --no-cache-dir --no-binary mpi4py mpi4py",
        )
    if taken in fitting:
        return Finding("slurm.plugin", Verdict.OK, f"{listed}, and takes {taken}", value)
    return Finding(
        "slurm.plugin",
        Verdict.NOTE,
        f"{listed}, and takes {taken or 'none of them'}, which does not speak to "
        f"{family or 'this MPI library'}",
        value,
        f"export SLURM_MPI_TYPE={fitting[0]}",
    )


def _default_plugin() -> str | None:
    """MpiDefault of the cluster; None where nobody tells."""
    program = shutil.which("scontrol")
    if program is None:
        return None
    said = ask([program, "show", "config"], _LIMIT_SECONDS).out
    found = re.search(r"^MpiDefault\s*=\s*(\S+)", said, re.MULTILINE)
    return found[1] if found else None
