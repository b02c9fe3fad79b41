"""The backend of processes, over MPI: the life of a world, waiting, messages, groups.

The backend is made of parts: an `MPIJob` (this process and its end), a `Group` (communicators,
headers, channels, and the user's messages), its `Collectives`, and a `Staging` for GPU arrays.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mpishard.base import (
    Array,
    CommunicationError,
    DType,
    MPIUnavailableError,
    PeerError,
    is_device_array,
    require_type,
    settings,
    to_device,
)
from mpishard.communication.contract.arena import number_nodes
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.backoff import Backoff
from mpishard.communication.contract.call import Call, place_after
from mpishard.communication.contract.status import RankRecord
from mpishard.communication.contract.work import Condition, Steps, Transfer, Work
from mpishard.communication.failure import hooks
from mpishard.communication.failure.hooks import helper_error, is_helper
from mpishard.communication.failure.report import OnFailure, check_on_failure
from mpishard.communication.failure.stall import describe_departure
from mpishard.communication.mpi.arena import ArenaCollectives
from mpishard.communication.mpi.collectives import Collectives
from mpishard.communication.mpi.gpu import Staging, needs_staging
from mpishard.communication.mpi.group import CUT_OFF, Group, share_group_memory
from mpishard.communication.mpi.job import IN_INIT, MPIJob, library_files, unlink_mpich_files
from mpishard.communication.mpi.library import (
    call_uninterrupted,
    check_launched_world,
    leave_mpi_running,
    load_mpi,
    not_launched_error,
)
from mpishard.communication.mpi.messages import MessageRequest
from mpishard.communication.mpi.node_memory import at_once, share_memory
from mpishard.communication.mpi.ulfm import check_survivable
from mpishard.communication.tracing.recorder import record_if_asked, stop_recording

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

_QUICK_POLLS = 64
"""Polls of memory before a wait is recorded: most peers that run now come by then."""

_PROGRESS_EVERY = 8  # polls of a wait between two calls that let MPI progress its requests
_IN_SHRINK = "in shrink() for the other ranks that are left"

_worlds: weakref.WeakSet[MPICommunicationBackend] = weakref.WeakSet()
"""The worlds of this process, and those split from them."""

_cut_off: list[object] = []
"""Tracebacks of exceptions that cut off a collective, kept for the arrays that MPI may use."""


def _through(name: str) -> Callable[..., Steps]:
    """Return the ``_steps_`` method of the collective, which takes arrays on the host or a GPU."""

    def steps(self: MPICommunicationBackend, call: Call, given: Any, *arguments: object) -> Steps:
        collective: Callable[..., Steps] = getattr(self._collectives, name)
        if type(given) is np.ndarray or given is None:
            return collective(call, given, *arguments)
        array = given[0] if isinstance(given, list | tuple) else given
        self._sees_gpu |= is_device_array(array)
        if not (is_device_array(array) and self._needs_staging(call, array)):
            return collective(call, given, *arguments)
        # Made at the first use: pinned memory needs a GPU, which most runs do not have.
        if self._gpu is None:
            self._gpu = Staging(logs=self._rank == 0 and self._is_root)
        return self._gpu.run(collective, call, given, *arguments)

    return steps


class MPICommunicationBackend(CommunicationBackend):
    """One process as one rank of an MPI world.

    The world is a duplicate of the communicator given, so that its messages are never mixed with
    the user's. Every rank calls `initialize` and `shutdown`. `shutdown` waits until the others shut
    down too; those that still wait for this rank raise `PeerError`. An uncaught exception ends the
    job, with a report that names the rank, and so does a wait longer than
    `settings.collective_timeout`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Default: ``COMM_WORLD``.
    on_failure : {"abort", "shrink"}
        The fate of the other ranks if one is gone. With "abort" they end with it. With "shrink"
        they raise `PeerError`, and may go on with `shrink`. This needs Open MPI with its fault
        tolerance, as ``mpishard run --on-failure shrink`` starts it. It also sets MPI's error
        handlers to return errors, on ``comm`` and communicators made of it, and does not finalize
        MPI.

    Raises
    ------
    MPIUnavailableError
        If mpi4py is missing or a rank started this process; for the default ``comm`` also if no
        launcher started it, or the launcher of another MPI library; for "shrink" if ranks cannot
        outlive each other.
    """

    def __init__(self, comm: Comm | None = None, *, on_failure: OnFailure = "abort") -> None:
        check_on_failure(on_failure)
        if is_helper():
            raise helper_error()
        if comm is None and settings.launcher_variable() is None:
            raise not_launched_error()
        mpi: ModuleType = load_mpi()
        if comm is None:
            comm = mpi.COMM_WORLD
            # Only for the default: a user's own communicator may well have one rank.
            try:
                check_launched_world(comm.Get_size(), mpi.Get_library_version())
            except MPIUnavailableError:
                unlink_mpich_files()  # the process ends without MPI_Finalize
                raise
        super().__init__(comm.Get_rank(), comm.Get_size())
        self._comm = comm
        self._on_failure: OnFailure = on_failure
        self._mpi = mpi
        self._may_record = True
        self._job: MPIJob | None = None
        self._group: Group | None = None
        self._nodes: tuple[int, ...] = ()
        self._is_forked = False
        self._gpu: Staging | None = None
        self._sees_gpu = False  # whether an array of a collective was on a GPU
        if on_failure == "shrink" and self._world_size > 1:
            check_survivable(mpi.Get_library_version())
            leave_mpi_running()

    @property
    def nodes(self) -> tuple[int, ...]:
        if not self._nodes:
            raise self._not_ready_error()
        return self._nodes

    @property
    def _kind(self) -> str:
        """The backend and its settings, which must be the same on every rank, for errors."""
        return "mpi"

    @property
    def cores_per_rank(self) -> float:
        """Number of cores for this rank; below 1 if ranks share cores."""
        return self._joined()[0].cores_per_rank

    @property
    def scratch_bytes(self) -> int:
        group = 0 if self._group is None else self._group.scratch_bytes
        return super().scratch_bytes + group + (self._gpu.scratch_bytes if self._gpu else 0)

    # ------------------------------------------------------------------------------- life cycle

    def initialize(self) -> None:
        begins = not self._initialized and self._is_root
        super().initialize()
        if begins and self._may_record:
            record_if_asked(self)

    def _on_initialize(self) -> None:
        if self._is_forked:
            raise self._not_ready_error()
        is_new = self._job is None
        if self._job is None:
            survives = self._on_failure == "shrink"
            self._job = MPIJob(self._mpi, self._comm, self._kind, survives=survives)
        job = self._job
        if self._group is None or self._group.is_leaving:
            if not self._is_root:
                raise CommunicationError("a world that was split off cannot be entered again")
            try:
                job.guard()
                # A rank may be missing, so the wait has a time limit and is named in reports.
                with job.wait(lambda: IN_INIT):
                    call_uninterrupted(self._mpi, lambda: self._enter(is_new=is_new))
            finally:
                if is_new and self._group is None:
                    job.retire()
                    self._job = None
        group = self._group
        assert group is not None
        self._collectives = collectives = self._make_collectives(group)
        self._in_arenas = ArenaCollectives(
            collectives, group, self.topology, self._reducer, self.traffic
        )
        job.session = self._session
        job.join(group, self)
        _worlds.add(self)
        if self._is_root:
            self._session.status = job.statuses.page
            self.status.note_shared_memory(library_files())
            hooks.install(self)

    def _make_collectives(self, group: Group) -> Collectives:
        return Collectives(self, group)

    def _needs_staging(self, call: Call, array: Array) -> bool:
        """Return whether the GPU array ``array`` travels through host memory for ``call``."""
        return needs_staging(call, array)

    def _alike(self, comm: Comm, on_failure: OnFailure = "abort") -> Self:
        """Return a backend of this kind for the ranks of ``comm``."""
        return type(self)(comm, on_failure=on_failure)

    def _enter(self, *, is_new: bool) -> None:
        """The collective part of `initialize`."""
        job = self._job
        assert job is not None
        if is_new:
            job.meet()
            self._nodes = job.nodes
        with job.making_group():
            # Two of our own: messages of the user cannot match ours, nor messages our data.
            comm, data = self._comm.Dup(), self._comm.Dup()
        memory = at_once(share_group_memory(self._mpi, data, set(), self._nodes))
        self._group = Group(self._mpi, comm, data, self._reducer, memory)

    @property
    def was_interrupted(self) -> bool:
        """Whether an exception interrupted `initialize` after this rank had entered the world."""
        return not (self._initialized or self._group is None or self._group.is_leaving)

    def _on_shutdown(self) -> None:
        job, group = self._joined()
        if self._is_root:
            if self._session.broken is not None:
                self._notify_of_break()
            job.leave()
            hooks.remove(self)
        else:
            group.leave()

    def abort(self, error: BaseException) -> None:
        """End the job, with a report of ``error`` that names this rank, and exit code 1.

        Ctrl-C ends it with 130. It returns only in a world of one, where nobody waits, and in a
        process that a rank forked, which is no rank. The exception then ends the process alone.
        """
        require_type("error", error, BaseException)
        if self._is_forked:
            return
        job, _ = self._joined()
        if job.world_size > 1:
            job.ending.fail(error, place_after(self.status.read().last, "in or after"))

    def _disown(self) -> None:
        """Refuse every use in this process, which was forked by the rank."""
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
            f"{self._world_size}, which alone may use the world and MPI; let it send its findings "
            "to the rank, or compute here with arrays alone"
        )

    def _joined(self) -> tuple[MPIJob, Group]:
        if self._job is None or self._group is None or not self._initialized:
            raise self._not_ready_error()
        return self._job, self._group

    # ---------------------------------------------------------------------- exceptions in between

    def _break(self, where: str, error: BaseException) -> None:
        super()._break(where, error)
        # The exception may strike between the post of a request and the assignment of its result.
        # Then only the frames of the traceback hold the arrays that MPI uses.
        _cut_off.append(error.__traceback__)

    def _notify_of_break(self) -> None:
        # Sent only at the next call, which shows that the script caught the exception: an uncaught
        # one ends the job with its own report and exit code.
        if self._job is not None and not isinstance(self._session.broken, PeerError):
            self._job.send_notices()

    # ---------------------------------------------------------------------------------- waiting

    def _drive(self, work: Work) -> None:
        job, group = self._joined()
        try:
            # Nothing is issued while this rank waits, so a single operation stays the only one.
            session = self._session
            is_alone = len(session.under_way()) == 1
            advance = work.advance if is_alone else session.progress
            # Polls of messages call MPI, which may take long or yield.
            in_memory = is_alone and group.channel is not group.messages
            yields = job.crowded or not in_memory or isinstance(work, Transfer)
            for _ in range(1 if yields else _QUICK_POLLS):
                advance()
                if work.done:
                    self._forget_done()
                    return
            backoff = Backoff(yields, lambda: self._check_peers(work))
            polls = 0
            self.status.wait(work.awaited)
            wait = job.wait(lambda: work.where)
            try:
                with wait:
                    while not work.done:
                        backoff.pause()
                        advance()
                        # A wait at a ring makes no call of MPI, whose requests must progress too.
                        polls += 1
                        if polls % _PROGRESS_EVERY == 0:
                            job.progress_mpi()
            finally:
                # Ended again, because an exception of a signal handler may have struck as it began
                # or ended. The watchdog would end the job at the time limit.
                wait.end()
                self.status.go_on()
            self._forget_done()
        except self._mpi.Exception as error:
            raise self._explain(error, work.where) from error

    def _explain(self, error: Exception, where: str) -> Exception:
        return error if self._job is None else self._job.explain(error, where)

    def _check_peers(self, work: Work) -> None:
        """Raise if a rank that ``work`` needs has left or failed."""
        self._require_whole()  # the progress thread may have ended it
        self._joined()[0].check_losses(work.where)
        group = self._joined()[1]
        group.mail.reap()
        departures = group.departures()
        if departures and isinstance(work, Transfer):
            # A message that a rank sent before it left has arrived before its notice.
            self.progress()
        for rank, last in departures.items():
            if last == CUT_OFF:
                self._session.broken = PeerError(
                    f"rank {self.world_ranks[rank]} was cut off in a collective by an exception "
                    f"that its script caught, while rank {self.world_ranks[self._rank]} waits "
                    f"{work.where}: this world has ended, and nothing more can be called on it. "
                    "Let such an exception end the job",
                    self.world_ranks[rank],
                )
                raise self._session.broken
            if not work.done and self._needs(work, rank, last):
                gone, me = self.world_ranks[rank], self.world_ranks[self._rank]
                text = describe_departure(gone, last, me, work.awaited, self._records())
                self._ended = PeerError(text, gone)
                raise self._ended

    def _needs(self, work: Work, rank: int, last: int) -> bool:
        """Return whether ``work`` needs ``rank``, which left after its collective ``last``."""
        awaited = work.awaited
        if isinstance(awaited, Call):
            return last < awaited.sequence
        # If the head of a message has come, its data are under way, and the rank is not needed.
        is_coming = not awaited.is_send and any(
            isinstance(other.waitable, MessageRequest)
            for other in self._transfers
            if other.awaited.peer == awaited.peer and not other.awaited.is_send
        )
        return awaited.peer == self.world_ranks[rank] and not is_coming

    @contextmanager
    def _blocked_in(self, call: Call) -> Iterator[None]:
        """Record that this rank waits in ``call`` while MPI blocks it."""
        before = self.status.awaited
        self.status.wait(call)
        try:
            with self._joined()[0].wait(lambda: call.where):
                yield
        finally:
            if before is None:
                self.status.go_on()
            else:
                self.status.wait(before)

    def _records(self) -> list[RankRecord]:
        return self._joined()[0].ending.records()

    # -------------------------------------------------------------------------------- collectives

    def _issue(self, call: Call, steps: Steps) -> Work:
        work = super()._issue(call, steps)
        # Arrays on a GPU stay with the thread whose current device it is.
        if not (work.done or self._sees_gpu):
            job, group = self._joined()
            if group.channel is group.messages:
                job.advance_meanwhile()
        return work

    _steps_all_reduce = _through("all_reduce")
    _steps_reduce_scatter = _through("reduce_scatter")
    _steps_all_gather = _through("all_gather")
    _steps_broadcast = _through("broadcast")
    _steps_scatter = _through("scatter")
    _steps_gather = _through("gather")
    _steps_all_to_all = _through("all_to_all")

    def _steps_barrier(self, call: Call) -> Steps:
        yield from self._collectives.open(call)  # complete when every rank has sent its header

    def _steps_split(self, call: Call, color: int | None, key: int) -> Steps:
        job, group = self._joined()
        choice = np.array([-1 if color is None else color, key], np.int64)
        choices = (yield from self._collectives.open(call, choice)).integers(2)
        # MPI wants small colors, and a user's may exceed a C int.
        colors = sorted({c for c, _ in choices if c >= 0})
        members = sorted((k, r) for r, (c, k) in enumerate(choices) if c == color)
        mine = self._mpi.UNDEFINED if color is None else colors.index(color)
        place = 0 if color is None else members.index((key, self._rank))
        # MPI_Comm_split blocks. So earlier collectives must not need this rank any more. The first
        # fence ensures that no exception has cut off a rank in its wait for the headers. A rank
        # that has reached the second fence calls MPI_Comm_split whatever exception strikes, because
        # others may be in it then.
        yield Condition(lambda: self._pending[0].awaited is call)
        with job.making_group():
            job.tidy()
        yield group.exchange.fence()
        work = self._pending[0]
        with self._blocked_in(call), job.making_group():
            comm = call_uninterrupted(self._mpi, lambda: self._split_together(work, mine, place))
            if color is None:
                return None
            data, request = comm.Idup()
        yield group.keep(request, comm, data)
        child = self._alike(comm)
        child._job = job
        child._nodes = number_nodes([self._nodes[rank] for _, rank in members])
        child._world_ranks = tuple(self.world_ranks[rank] for _, rank in members)
        memory = yield from share_group_memory(self._mpi, data, group.in_flight, child._nodes)
        child._group = Group(self._mpi, comm, data, child._reducer, memory)
        return child

    def _split_together(self, work: Work, color: int, place: int) -> Comm:
        """Call MPI_Comm_split when every rank has come to it, which a cut-off rank never does."""
        job, group = self._joined()
        fence = group.exchange.fence()
        backoff = Backoff(job.crowded, lambda: self._check_peers(work))
        while not fence.test():
            backoff.pause()
        return group.comm.Split(color, place)

    def _steps_allocate_shared(self, call: Call, nbytes: int) -> Steps:
        _, group = self._joined()
        yield from self._collectives.open(call)
        # The requests use the communicator of data, so earlier collectives must have ended.
        yield from self._collectives.turn(call)
        steps = share_memory(self._mpi, group.data, group.in_flight, self.peers[0], nbytes)
        return (yield from steps)

    def _steps_reduce_into(self, call: Call, arrays: Mapping[int, Array], out: Array) -> Steps:
        return self._in_arenas.reduce_into(call, arrays, out)

    def _steps_reduce_in_place(self, call: Call, arrays: Mapping[int, Array]) -> Steps:
        return self._in_arenas.reduce_in_place(call, arrays)

    def _steps_gather_in_place(
        self, call: Call, arrays: Mapping[int, Array], piece: Array, once_per_node: bool
    ) -> Steps:
        return self._in_arenas.gather_in_place(call, arrays, piece, once_per_node)

    # ---------------------------------------------------------------------------- point to point

    def _send(self, array: Array, destination: int, tag: int) -> None:
        try:
            self._joined()[1].mail.send(array, destination, tag)
        except self._mpi.Exception as error:
            where = f"to send a message to rank {self.world_ranks[destination]}"
            raise self._explain(error, where) from error

    def _steps_send(self, array: Array, destination: int, tag: int) -> Steps:
        yield from self._joined()[1].mail.post(array, destination, tag)

    def _steps_receive(self, source: int, count: int, tag: int, dtype: DType | None) -> Steps:
        mail, sender = self._joined()[1].mail, self.world_ranks[source]
        array, on_device = yield from mail.receive(source, count, tag, dtype, sender)
        return to_device(array) if on_device else array

    # ---------------------------------------------------------------------------------- lost ranks

    def _require_survival(self, what: str) -> None:
        """Refuse ``what`` if the ranks of this world end together."""
        if self._on_failure == "abort":
            raise CommunicationError(
                f"{what}: {self.describe()} ends when one of its ranks does: it was made with "
                "on_failure='abort', and the first init() of the process decides; use "
                "mpishard.init(on_failure='shrink')"
            )

    def _shrink(self) -> Self:
        job, _ = self._joined()
        self._require_survival("shrink()")
        ulfm = job.ulfm
        if ulfm is None:
            raise CommunicationError(f"{self.describe()} has no other ranks that it could lose")
        made: list[Self] = []

        def build(comm: Comm) -> None:
            world = self._alike(comm, "shrink")
            made.append(world)
            # Ranks have other numbers now, and would replace the traces of the old world.
            world._may_record = False
            world.initialize()

        def undo() -> None:
            for world in made:
                hooks.remove(world)
                if world._job is not None:
                    world._job.retire()
            made.clear()

        stop_recording(self, ulfm.error)
        with job.wait(lambda: _IN_SHRINK):
            # Before ULFM's collective: ranks that still wait in this world would not come to it.
            job.call_off()
            ulfm.shrink(build, undo)
        successor = made[0]
        hooks.remove(self)
        job.retire()
        return successor


def _disown_all() -> None:
    """Take all worlds from a process that a rank has just forked, which is no rank."""
    for backend in tuple(_worlds):
        backend._disown()
    _worlds.clear()


os.register_at_fork(after_in_child=_disown_all)
