"""Processes as ranks, over MPI: the life of a world, waiting, point to point, sub-worlds."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard import settings
from mpishard.arrays import Array, to_device
from mpishard.communication import exit_hooks
from mpishard.communication.arena import number_nodes, share_memory
from mpishard.communication.call import Call, Kind
from mpishard.communication.call_board import SharedCallLog
from mpishard.communication.group import Group
from mpishard.communication.job import IN_INIT, Job
from mpishard.communication.lanes import Condition
from mpishard.communication.launcher import check_launched_world, not_launched_error
from mpishard.communication.library import load_mpi
from mpishard.communication.mailbox import NO_RING
from mpishard.communication.messages import Messages
from mpishard.communication.patience import Patience
from mpishard.communication.recording import record_if_asked
from mpishard.communication.reduction import ReductionOperation
from mpishard.communication.small_collectives import SmallCollectives
from mpishard.communication.work import CollectiveWork, Steps, Transfer, Work, in_call
from mpishard.errors import CommunicationError, PeerError

__all__ = ["MPICommunicationBackend"]

_QUICK_POLLS = 64
"""Polls before a rank prepares for a longer wait: most short messages have come by then."""

_STIR_EVERY = 8


class MPICommunicationBackend(SmallCollectives):
    """One process as one rank of an MPI world.

    The world is a duplicate of the communicator given, so that its messages never meet the
    user's. `initialize` and `shutdown` are called by every rank. `shutdown` waits until the
    others shut down too; those that still wait for this rank raise `PeerError`. An exception that
    nobody catches ends the job, with a report that names the rank; so does a rank that waits
    longer than `settings.mpi_timeout`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Default: ``COMM_WORLD``.

    Raises
    ------
    MPIUnavailableError
        Where mpi4py is missing, or, for the default, no launcher started this process or the
        launcher belongs to another MPI library.
    """

    def __init__(self, comm: Any = None) -> None:
        super().__init__()
        if comm is None and settings.launcher_variable() is None:
            raise not_launched_error()
        self._mpi: Any = load_mpi()
        if comm is None:
            comm = self._mpi.COMM_WORLD
            check_launched_world(comm.Get_size(), self._mpi.Get_library_version())
        self._comm = comm
        self._rank: int = comm.Get_rank()
        self._world_size: int = comm.Get_size()
        self._job: Job | None = None
        self._group: Group | None = None
        self._nodes: tuple[int, ...] = ()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def nodes(self) -> tuple[int, ...]:
        self._ready()
        return self._nodes

    @property
    def cores_per_rank(self) -> float:
        """The share of the cores that this rank has; below 1 where ranks share them."""
        return self._joined()[0].cores_per_rank

    # ------------------------------------------------------------------------------- life cycle

    def initialize(self) -> None:
        begins = not self._initialized and self._is_root
        super().initialize()
        if begins:
            record_if_asked(self)

    def _on_initialize(self) -> None:
        if self._job is None:
            self._job = Job(self._mpi, self._comm)
            self._nodes = self._job.nodes
        if self._group is None or self._group.is_leaving:
            if not self._is_root:
                raise CommunicationError("a world that was split off cannot be entered again")
            self._job.enter()
            with self._job.wait(lambda: IN_INIT):
                self._group = self._enter(self._job)
            self._sequence = 0
            self._pending.clear()
        self._messages = Messages(self._group)
        self._forget_plans()
        self._job.join(self._group, self)
        if self._job.board is not None:
            self.call_log = SharedCallLog(self._job.board, self._group.name)
        if self._is_root:
            exit_hooks.install(self)

    def _enter(self, job: Job) -> Group:
        rings = self._comm.allgather(job.take_ring())
        mailbox = job.make_mailbox(rings, self._nodes, self._rank)
        group = Group(self._mpi, self._comm.Dup(), "", mailbox)
        job.start_progress(self._comm)
        return group

    def _on_shutdown(self) -> None:
        job, group = self._joined()
        if self._is_root:
            job.leave()
            exit_hooks.remove(self)
        else:
            group.leave()

    def abort(self, error: BaseException) -> None:
        """End the job, with a report of ``error`` that names this rank, and exit code 1.

        Ctrl-C ends it with 130. Does not return, except in a world of one: there nobody waits,
        and the exception can go its way.
        """
        job, _ = self._joined()
        if job.world_size > 1:
            last = next(reversed(list(self.call_log)), None)
            job.fail(
                error,
                "before any collective"
                if last is None
                else f"in or after collective {last.sequence}, {last}, called at {last.site}",
            )

    @property
    def _talk(self) -> Group:
        assert self._group is not None
        return self._group

    @property
    def _is_crowded(self) -> bool:
        return self._job is not None and self._job.crowded

    def _begun(self) -> None:
        thread = self._joined()[0].progress_thread
        if thread is not None:
            thread.wake()

    def _joined(self) -> tuple[Job, Group]:
        self._ready()
        assert self._job is not None
        return self._job, self._talk

    def _call(
        self,
        kind: Kind,
        array: Array | None,
        *,
        operation: ReductionOperation | None = None,
        root: int = -1,
        counts: tuple[int, ...] | None = None,
        out_rows: int = -1,
    ) -> Call:
        _, group = self._joined()
        if group.broken is not None:
            raise group.broken
        call = super()._call(
            kind, array, operation=operation, root=root, counts=counts, out_rows=out_rows
        )
        group.sequence = call.sequence
        return call

    # ---------------------------------------------------------------------------------- waiting

    def _drive(self, work: Work) -> None:
        job, _ = self._joined()
        job.is_waiting = True
        try:
            self._poll(work, job)
        finally:
            job.is_waiting = False
            if job.progress_thread is not None:
                job.progress_thread.wake()

    def _poll(self, work: Work, job: Job) -> None:
        # Nothing is issued while this rank waits: what is alone now stays so.
        advance = work.advance if job.count_pending() == 1 else job.progress
        for _ in range(1 if job.crowded else _QUICK_POLLS):
            advance()
            if work.done:
                self._forget_done()
                return
        patience = Patience(job.crowded, lambda: self._look_round(work))
        polls = 0
        with job.wait(lambda: work.where):
            while not work.done:
                patience.pause()
                advance()
                # A mailbox is read without MPI, which is asked here to go on with what it began.
                polls += 1
                if polls % _STIR_EVERY == 0:
                    job.stir()
        self._forget_done()

    def _look_round(self, work: Work) -> None:
        """Raise where a rank that ``work`` needs has left."""
        group = self._talk
        self._messages.reap()
        sequence = work.call.sequence if isinstance(work, CollectiveWork) else None
        peer = work.peer if isinstance(work, Transfer) else None
        for rank, last in group.departures().items():
            if rank == peer or (sequence is not None and last < sequence):
                group.broken = PeerError(
                    f"rank {rank} left after collective {last}, while rank {self._rank} "
                    f"waits {work.where}. Look for a loop or a branch that ends earlier on "
                    f"rank {rank}",
                    rank,
                )
                raise group.broken

    # -------------------------------------------------------------------------------- sub-worlds

    def _steps_split(self, call: Call, color: int | None, key: int) -> Steps:
        job, group = self._joined()
        with self._turn(0) as turn:
            ring = NO_RING if color is None else job.take_ring()
            wish = np.array([-1 if color is None else color, key, *ring], np.int64)
            try:
                headers = yield from self._open(call, turn, wish)
            except BaseException:
                job.put_back_ring(ring)
                raise
            # MPI_Comm_split blocks: what was issued before must not need this rank any more.
            yield Condition(lambda: self._pending[0].call is call)
            wishes = headers.integers(4)
            colors = sorted({c for c, *_ in wishes if c >= 0})
            members = sorted((k, r) for r, (c, k, *_) in enumerate(wishes) if c == color)
            with job.wait(lambda: in_call(call)):
                job.tidy()
                comm = group.comm.Split(
                    self._mpi.UNDEFINED if color is None else colors.index(color),
                    0 if color is None else members.index((key, self._rank)),
                )
        if color is None:
            return None
        child = MPICommunicationBackend(comm)
        child._job = job
        child._nodes = number_nodes([self._nodes[rank] for _, rank in members])
        ranks = ", ".join(str(rank) for _, rank in members[:8])
        more = ", .." if len(members) > 8 else ""
        inside = f" of {group.name}" if group.name else ""
        rings = [(wishes[rank][2], wishes[rank][3]) for _, rank in members]
        mailbox = job.make_mailbox(rings, child._nodes, child._rank)
        with job.wait(lambda: in_call(call)):
            child._group = Group(self._mpi, comm, f"ranks {ranks}{more}{inside}", mailbox)
        return child

    # ------------------------------------------------------------------------------------- memory

    def _steps_allocate_shared(self, call: Call, nbytes: int) -> Steps:
        with self._turn(0) as turn:
            yield from self._open(call, turn)
            # What follows blocks: what was issued before must not need this rank any more.
            yield Condition(lambda: self._pending[0].call is call)
            group = self._talk
            if group.node is None:
                with self._joined()[0].wait(lambda: in_call(call)):
                    group.node = group.comm.Split(self._nodes[self._rank], self._rank)
            steps = share_memory(
                self._mpi, group.node, group.comm, nbytes, settings.arena_sources()
            )
            while True:
                try:
                    request = next(steps)
                except StopIteration as stop:
                    return stop.value
                yield self._keep(request)

    # ---------------------------------------------------------------------------- point to point

    def _begin(self, transfer: Transfer) -> Transfer:
        super()._begin(transfer)
        if not transfer.done:
            self._begun()
        return transfer

    def _send(self, array: Array, destination: int, tag: int) -> None:
        self._messages.send(array, destination, tag)

    def _steps_send(self, array: Array, destination: int, tag: int) -> Steps:
        yield from self._messages.post(array, destination, tag)

    def _steps_receive(
        self, source: int, count: int, tag: int, dtype: np.dtype[Any] | None
    ) -> Steps:
        array, on_device = yield from self._messages.receive(source, count, tag, dtype)
        return to_device(array) if on_device else array
