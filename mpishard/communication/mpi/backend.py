"""Processes as ranks, over MPI: the life of a world, waiting, point to point, sub-worlds."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np

from mpishard import settings
from mpishard.arrays import Array, to_device
from mpishard.communication.contract.backoff import Patience
from mpishard.communication.contract.call import Call, Kind
from mpishard.communication.contract.status import MessageWait
from mpishard.communication.contract.work import CollectiveWork, Steps, Transfer, Work, in_call
from mpishard.communication.diagnostics.stall import describe_departure, parting
from mpishard.communication.failure import hooks as exit_hooks
from mpishard.communication.failure.rank_process import helper_error, is_helper
from mpishard.communication.mpi.group import Group
from mpishard.communication.mpi.job import IN_INIT, Job
from mpishard.communication.mpi.lanes import Condition, Turn
from mpishard.communication.mpi.library import check_launched_world, load_mpi, not_launched_error
from mpishard.communication.mpi.mapped_files import library_files
from mpishard.communication.mpi.messages import Messages
from mpishard.communication.mpi.node_memory import number_nodes, share_memory
from mpishard.communication.mpi.rings import NO_RING
from mpishard.communication.mpi.shrinking import ShrinkingWorld
from mpishard.communication.mpi.ulfm import OnFailure
from mpishard.communication.tracing.session import record_if_asked
from mpishard.errors import CommunicationError, PeerError

__all__ = ["MPICommunicationBackend"]

_QUICK_POLLS = 64
"""Polls before a rank prepares for a longer wait: most short messages have come by then."""

_STIR_EVERY = 8

_worlds: weakref.WeakSet[MPICommunicationBackend] = weakref.WeakSet()
"""The worlds of this process, and those split from them."""


class MPICommunicationBackend(ShrinkingWorld):
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
    on_failure : {"abort", "shrink"}
        What becomes of the other ranks where one is gone: they end with it, or raise `PeerError`
        and may go on, with `shrink`. That needs Open MPI with its fault tolerance, as ``mpishard
        run --on-failure shrink`` starts it, and takes MPI's error handlers: what MPI raises is
        returned on ``comm`` and those made of it, and MPI is not finalized.

    Raises
    ------
    MPIUnavailableError
        Where mpi4py is missing, a rank started this process, or, for the default, no launcher
        did or the launcher belongs to another MPI library; for "shrink" where ranks cannot
        outlive each other.
    """

    def __init__(self, comm: Any = None, *, on_failure: OnFailure = "abort") -> None:
        super().__init__(on_failure)
        if is_helper():
            raise helper_error()
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
        self._is_forked = False
        self._prepare_to_survive()

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
        if begins and self._may_record:
            record_if_asked(self)

    def _on_initialize(self) -> None:
        if self._is_forked:
            raise self._not_ready_error()
        if self._job is None:
            self._job = Job(self._mpi, self._comm, survives=self._on_failure == "shrink")
            self._nodes = self._job.nodes
        if self._group is None or self._group.is_leaving:
            if not self._is_root:
                raise CommunicationError("a world that was split off cannot be entered again")
            self._job.guard()
            with self._job.wait(lambda: IN_INIT):
                self._group = self._enter(self._job)
            self._sequence = 0
            self._pending.clear()
        self._messages = Messages(self._group, self.world_ranks)
        self._forget_plans()
        self._job.join(self._group, self)
        _worlds.add(self)
        if self._is_root:
            if self._job.statuses is not None:
                self.status = self._job.statuses.page
                self.status.note_shared_memory(library_files())
            exit_hooks.install(self)

    def _world_of(self, comm: Any) -> Self:
        return type(self)(comm, on_failure="shrink")

    def _enter(self, job: Job) -> Group:
        rings = self._comm.allgather(job.take_ring())
        mailbox = job.make_mailbox(rings, self._nodes, self._rank)
        with job.making_group():
            group = Group(self._mpi, self._comm.Dup(), mailbox)
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
        and the exception can go its way. So it can in a process that a rank forked, which is none.
        """
        if self._is_forked:
            return
        job, _ = self._joined()
        if job.world_size > 1:
            last = self.status.last
            job.fail(
                error,
                "before any collective"
                if last is None
                else f"in or after {in_call(last.call, last.group).removeprefix('in ')}",
            )

    def _disown(self) -> None:
        """Stop being this process's: it was forked by the rank."""
        self._initialized, self._is_forked = False, True
        if self.recorder is not None:
            self.recorder.disown()
        for work in (*self._pending, *self._transfers):
            work.fail(self._not_ready_error())
        self._pending.clear()
        self._transfers.clear()

    def _not_ready_error(self) -> CommunicationError:
        if not self._is_forked:
            return super()._not_ready_error()
        return CommunicationError(
            f"a forked process is no rank: this one was forked by rank {self._rank} of "
            f"{self._world_size}, which alone may use the world and MPI; let it send what this "
            "process finds, or compute here with arrays alone"
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

    def _admit(self, kind: Kind, sequence: int) -> None:
        group = self._talk
        if group.broken is not None:
            raise group.broken
        group.sequence = sequence

    # ---------------------------------------------------------------------------------- waiting

    def _drive(self, work: Work) -> None:
        job, _ = self._joined()
        job.is_waiting = True
        try:
            self._poll(work, job)
        except self._mpi.Exception as error:
            raise self._explain(error, work.where) from error
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
        self.status.wait(work.awaited)
        try:
            with job.wait(lambda: work.where):
                while not work.done:
                    patience.pause()
                    advance()
                    # A mailbox is read without MPI, which is asked to go on with what it began.
                    polls += 1
                    if polls % _STIR_EVERY == 0:
                        job.stir()
        finally:
            self.status.go_on()
        self._forget_done()

    def _look_round(self, work: Work) -> None:
        """Raise where a rank that ``work`` needs has left."""
        self._joined()[0].look(work.where)
        group = self._talk
        self._messages.reap()
        for rank, last in group.departures().items():
            if _needs(work, rank, last):
                group.broken = self._left_error(rank, last, work.awaited)
                raise group.broken

    def _left_error(self, local: int, last: int, awaited: Call | MessageWait) -> PeerError:
        """The error of a rank that waits for one that left after its collective ``last``."""
        rank, me = self.world_ranks[local], self.world_ranks[self._rank]
        statuses = self._joined()[0].statuses
        records = [] if statuses is None else statuses.records()
        text = describe_departure(rank, last, self.label, me, awaited, records)
        return PeerError(text, rank)

    @contextmanager
    def _blocked_in(self, call: Call) -> Iterator[None]:
        """Say, while MPI holds this rank up, that it waits in ``call``."""
        before = self.status.awaited
        self.status.wait(call)
        try:
            with self._joined()[0].wait(lambda: in_call(call, self.label)):
                yield
        finally:
            if before is None:
                self.status.go_on()
            else:
                self.status.wait(before)

    def _parting(self, sequence: int) -> str:
        statuses = self._joined()[0].statuses
        if statuses is None:
            return ""
        return parting(statuses.records(), self.label, upto=sequence)

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
            with self._blocked_in(call), job.making_group():
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
        child._world_ranks = tuple(self.world_ranks[rank] for _, rank in members)
        rings = [(wishes[rank][2], wishes[rank][3]) for _, rank in members]
        mailbox = job.make_mailbox(rings, child._nodes, child._rank)
        with self._blocked_in(call), job.making_group():
            child._group = Group(self._mpi, comm, mailbox)
        return child

    # ------------------------------------------------------------------------------------- memory

    def _steps_allocate_shared(self, call: Call, nbytes: int) -> Steps:
        with self._turn(0) as turn:
            yield from self._open(call, turn)
            return (yield from self._steps_share(call, turn, nbytes))

    def _steps_share(self, call: Call, turn: Turn, nbytes: int) -> Steps:
        # What follows may block: what was issued before must not need this rank any more.
        yield Condition(lambda: self._pending[0].call is call)
        node = turn.comm if self.node_count == 1 else self._node_of_several(call)
        steps = share_memory(self._mpi, node, turn.comm, nbytes, settings.arena_sources())
        while True:
            try:
                request = next(steps)
            except StopIteration as stop:
                self.status.note_shared_memory(library_files())  # a window is the library's
                return stop.value
            yield self._keep(request)

    def _node_of_several(self, call: Call) -> Any:
        group = self._talk
        if group.node is None:
            with self._blocked_in(call), self._joined()[0].making_group():
                group.node = group.comm.Split(self._nodes[self._rank], self._rank)
        return group.node

    # ---------------------------------------------------------------------------- point to point

    def _begin(self, transfer: Transfer) -> Transfer:
        super()._begin(transfer)
        if not transfer.done:
            self._begun()
        return transfer

    def _send(self, array: Array, destination: int, tag: int) -> None:
        try:
            self._messages.send(array, destination, tag)
        except self._mpi.Exception as error:
            where = f"to send a message to rank {self.world_ranks[destination]}"
            raise self._explain(error, where) from error

    def _steps_send(self, array: Array, destination: int, tag: int) -> Steps:
        yield from self._messages.post(array, destination, tag)

    def _steps_receive(
        self, source: int, count: int, tag: int, dtype: np.dtype[Any] | None
    ) -> Steps:
        array, on_device = yield from self._messages.receive(source, count, tag, dtype)
        return to_device(array) if on_device else array


def _leave_to_the_rank() -> None:
    """Let a process that a rank has just forked touch nothing of the rank's."""
    for backend in tuple(_worlds):
        backend._disown()
    _worlds.clear()


os.register_at_fork(after_in_child=_leave_to_the_rank)


def _needs(work: Work, rank: int, last: int) -> bool:
    """Whether ``work`` waits for ``rank``, which left after its collective ``last``."""
    if isinstance(work, Transfer):
        return work.peer == rank
    return isinstance(work, CollectiveWork) and last < work.call.sequence
