"""The choice, construction and set-up of the backend of this process."""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Literal, get_args

import threadpoolctl

from mpishard.base import CommunicationError, better_kernel, loaded_kernel, settings
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.failure.hooks import install_before_init, is_helper
from mpishard.communication.failure.report import OnFailure, check_on_failure
from mpishard.communication.failure.watchdog import preemption_notice
from mpishard.communication.mpi.backend import MPICommunicationBackend
from mpishard.communication.mpi.library import launcher_name, load_mpi, not_launched_error
from mpishard.communication.nccl.backend import NCCLCommunicationBackend
from mpishard.communication.threads.backend import InMemoryCommunicationBackend
from mpishard.communication.threads.run import current_backend
from mpishard.communication.tracing.recorder import record_if_asked

BackendName = Literal["auto", "mpi", "nccl", "memory"]
"""The backends of `init`."""

_logger = logging.getLogger("mpishard")

# A module-level variable, because a process, and not a thread, is one rank of one MPI world.
_process_backend: CommunicationBackend | None = None
_blas_threads: int | None = None

install_before_init()
if settings.launcher_variable() is not None and not is_helper():
    preemption_notice.listen()


def check_backend_name(backend: object) -> None:
    """Refuse a value that is not the name of a backend of `init`, with `ValueError`."""
    if not isinstance(backend, str) or backend not in get_args(BackendName):
        raise ValueError(f"backend must be 'auto', 'mpi', 'nccl' or 'memory', got {backend!r}")


def init(backend: BackendName = "auto", *, on_failure: OnFailure = "abort") -> CommunicationBackend:
    """Return the initialised backend of this process, the same one every time.

    Under MPI the call is collective and prepares the process. An uncaught exception then ends the
    job instead of hanging it. BLAS gets as many threads as this rank has cores, unless the
    environment says how many. XLA gets as many by ``NPROC``, if JAX has made no array before.

    Parameters
    ----------
    backend : {"auto", "mpi", "nccl", "memory"}
        ``auto`` is MPI if a launcher (mpiexec, mpirun, srun) started this process, and one rank
        in memory otherwise. ``nccl`` is MPI with `NCCLCommunicationBackend`, for ranks with a GPU
        each. Inside `run_in_threads`, ``auto`` and ``memory`` are the thread's own backend.
    on_failure : {"abort", "shrink"}
        The fate of the other ranks of an MPI job if one is killed or raises an exception that
        nobody catches. With "abort" the job ends. With "shrink" the others raise `PeerError`, and
        may go on with `CommunicationBackend.shrink`; this needs Open MPI, started by ``mpishard
        run --on-failure shrink`` or ``mpiexec --with-ft ulfm``. In memory ranks can always go on.

    Returns
    -------
    CommunicationBackend
        Ready for collectives.

    Raises
    ------
    MPIUnavailableError
        If MPI is asked for and there is no launcher, no mpi4py, an MPI library of another
        launcher, or a machine on which it cannot start; or if a rank, and not the launcher,
        started this process. Such a process never becomes a world of one. With "shrink", also if
        MPI was started so that no rank can outlive another.
    CollectiveMismatchError
        On every rank, with the values, if settings that must be the same differ between ranks.
    CommunicationError
        If ``memory`` is asked for under a launcher of several processes; if the process has a
        backend of the other sort; or if "shrink" is asked for, and the ranks of its backend end
        together.
    """
    global _process_backend  # noqa: PLW0603
    check_backend_name(backend)
    check_on_failure(on_failure)
    settings.check()  # before MPI starts, because the others would wait for a rank that fails later
    threads = current_backend.get()
    if threads is not None and threads._newest.is_initialized and backend not in ("mpi", "nccl"):
        return threads._newest
    # After a shrink the newest world is the one that the process has.
    present = None if _process_backend is None else _process_backend._newest
    if present is not None and present.is_initialized:
        is_mpi = isinstance(present, MPICommunicationBackend)
        is_nccl = isinstance(present, NCCLCommunicationBackend)
        if backend not in ("auto", "nccl" if is_nccl else "mpi" if is_mpi else "memory"):
            raise CommunicationError(
                f"init({backend!r}): this process has {present.describe()} already"
            )
        if on_failure == "shrink" and isinstance(present, MPICommunicationBackend):
            present._require_survival("init(on_failure='shrink')")
        return present
    made: CommunicationBackend
    if isinstance(present, MPICommunicationBackend) and present.was_interrupted:
        made = present  # entered again, because the other ranks are in this world
    elif backend in ("mpi", "nccl") or (backend == "auto" and is_launched()):
        comm = None
        if settings.launcher_variable() is None:
            # A launcher may set no variable that we know. A started MPI then knows the world size.
            if "mpi4py.MPI" not in sys.modules or load_mpi().COMM_WORLD.Get_size() == 1:
                raise not_launched_error()
            comm = load_mpi().COMM_WORLD
        kind = NCCLCommunicationBackend if backend == "nccl" else MPICommunicationBackend
        made = kind(comm, on_failure=on_failure)
    else:
        refuse_worlds_of_one()
        made = InMemoryCommunicationBackend(0, 1, "the world of one of init()")
    # Before `initialize`: an interrupted one can then be entered again by the next `init`.
    _process_backend = made
    made.initialize()
    if isinstance(made, MPICommunicationBackend):
        _limit_threads(made)
    else:
        record_if_asked(made)  # an MPI backend does this itself in `initialize`
    loaded = loaded_kernel() if made.rank == 0 else None
    if loaded is not None and (better := better_kernel(loaded)) is not None:
        _logger.debug(
            "NumPy was loaded with OpenBLAS's %s kernels, and its %s kernels are faster on this "
            "processor: export OPENBLAS_CORETYPE=%s, or start with mpishard run, which sets it",
            loaded,
            better,
            better,
        )
    return made


def blas_threads() -> int | None:
    """Return the number of BLAS threads that `init` set for this process; None if it set none."""
    return _blas_threads


def is_launched() -> bool:
    """Return whether a launcher started this process as a rank."""
    if settings.launcher_variable() is None:
        return False
    # A job step of one process (a shell on a compute node is one) needs no MPI.
    return settings.launched_world_size() != 1 or importlib.util.find_spec("mpi4py") is not None


def refuse_worlds_of_one() -> None:
    """Refuse thread-ranks if a launcher started several processes.

    Raises
    ------
    CommunicationError
        Naming the launcher and its number of processes: each would be a world of one rank.
    """
    launched = settings.launched_world_size()
    if launched is not None and launched > 1 and not is_helper():
        raise CommunicationError(
            f"init('memory') under a launcher of {launched} processes ({launcher_name()}) would "
            "be as many worlds of one rank; use init('mpi') or init('auto'), or start one process"
        )


def _limit_threads(backend: MPICommunicationBackend) -> None:
    global _blas_threads  # noqa: PLW0603
    asked = settings.cpus_per_task()
    threads = asked or max(1, int(backend.cores_per_rank))
    settings.write_default("NPROC", str(threads))  # XLA, which obeys no flag and no OMP_NUM_THREADS
    if settings.blas_threads_are_set():
        return
    _blas_threads = threads
    # BLAS takes all cores by default, and the ranks of a node would then compete for them.
    threadpoolctl.threadpool_limits(threads)
    if backend.rank == 0:
        source = "SLURM_CPUS_PER_TASK" if asked else "cores / ranks of the node"
        _logger.info("%d BLAS thread%s for each rank (%s)", threads, "s"[: threads - 1], source)
