"""Which launcher started this process, and whether the MPI library belongs to it."""

from __future__ import annotations

from mpishard import settings
from mpishard.errors import MPIUnavailableError

__all__ = ["check_launched_world", "launcher_name", "not_launched_error"]

HOW_TO_LAUNCH = "mpishard run -n 4 script.py (or: mpiexec -n 4 python script.py)"


def launcher_name() -> str:
    """The family of the launcher, guessed from the variable that it set."""
    variable = settings.launcher_variable()
    if variable is None:
        return "no launcher"
    if settings.is_slurm_step():
        return "Slurm (srun)"
    if variable.startswith("OMPI_") or variable == "PMIX_RANK":
        return "Open MPI (mpirun, prterun) or another PMIx launcher"
    return "the MPICH family (hydra's mpiexec; MPICH, Intel MPI, MVAPICH, Cray)"


def not_launched_error() -> MPIUnavailableError:
    """The error for MPI asked for in a process that no launcher started."""
    return MPIUnavailableError(
        "MPI was asked for, and no MPI launcher started this process, so that its world would "
        f"be one rank. Start it with: {HOW_TO_LAUNCH}. For threads as ranks use "
        'mpishard.run_in_threads, for one rank init("memory")'
    )


def check_launched_world(world_size: int, library: str) -> None:
    """Refuse a world of one where the launcher started several processes.

    Parameters
    ----------
    world_size : int
        What the MPI library says.
    library : str
        The library's version string.

    Raises
    ------
    MPIUnavailableError
        Naming the library, the launcher and the mend.
    """
    if world_size > 1:
        return
    launched = settings.launched_world_size()
    if launched is None and settings.pmix_rank() > 0:
        launched = settings.pmix_rank() + 1
    if launched is None or launched <= 1:
        return
    variable = settings.launcher_variable()
    # srun speaks to an MPI library through a plugin, and by default often through none.
    slurm = "`srun --mpi=pmi2` (`srun --mpi=list` names others), or " * settings.is_slurm_step()
    family = " ".join(library.partition("\n")[0].split())
    raise MPIUnavailableError(
        f"the launcher started {launched} processes ({variable} is set: {launcher_name()}), but "
        f"the MPI library that mpi4py loads is another one ({family}) and sees a world of one. "
        f"Each process would train alone. Mend: start with {slurm}`mpishard run`, which takes the "
        "mpiexec that belongs to the library, or with that mpiexec by its full path (it lies "
        "beside python where MPI was installed as a wheel); or install an mpi4py that is built "
        "for the launcher's MPI"
    )
