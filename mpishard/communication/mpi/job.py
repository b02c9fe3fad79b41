"""The job of one MPI process: the state that its worlds share, and its end."""

from __future__ import annotations

import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from mpishard.base import (
    CollectiveMismatchError,
    CommunicationError,
    PeerError,
    ShardLayout,
    products,
    settings,
)
from mpishard.communication.contract.arena import number_nodes
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.backoff import yield_processor
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.matching import grouped, who
from mpishard.communication.contract.status import RankState, StatusReader
from mpishard.communication.contract.work import Session
from mpishard.communication.failure.abort import (
    EXIT_LIMIT,
    Termination,
    flush_output,
    print_to_stderr,
)
from mpishard.communication.failure.links import LEFT, NodeLinks, Offer
from mpishard.communication.failure.stall import unfinished
from mpishard.communication.failure.watchdog import Wait, watchdog
from mpishard.communication.mpi.group import CUT_OFF, Group
from mpishard.communication.mpi.progress import ProgressThread
from mpishard.communication.mpi.ulfm import Ulfm, is_loss

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

_logger = logging.getLogger("mpishard")

_SPIN_SECONDS = 2e-3  # without a sleep, because ranks mostly leave together
_DOZE_SECONDS = 1e-3
_CLOSING_SECONDS = 0.2  # for the system to close all connections of a process that was killed
_FINISH_SECONDS = 1.0  # for the data, under way, of collectives without a wait

# In the messages of MPI libraries; a rank that gets one of them has not failed itself.
_LOST_CONNECTION = re.compile(
    r"socket closed|connection (closed|reset|refused|failure)|communication error with rank|"
    r"poll failed|unreachable|proc(ess)? ?_?failed",
    re.IGNORECASE,
)

IN_INIT = "in init() for the other ranks to call it"


class MPIJob:
    """One root world of this process, with every world that was split off it.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : mpi4py.MPI.Intracomm
        The root world. `meet` is collective over it.
    kind : str
        The backend and its settings, which must be the same on every rank.
    survives : bool
        Whether its ranks go on if another is gone.
    """

    def __init__(self, mpi: ModuleType, comm: Comm, kind: str, *, survives: bool = False) -> None:
        self._comm, self._kind, self._survives = comm, kind, survives
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self.mpi = mpi
        self.session = Session(self.rank)
        """The state that this rank's worlds share, and the error of a broken one."""
        self.statuses = StatusReader(self.rank, self.world_size, _launched_ranks(mpi, comm))
        self.ending = Termination(self.rank, self.world_size, self.statuses, self._finish_traces)
        self._groups: dict[Group, weakref.ref[CommunicationBackend]] = {}
        self.progress_thread: ProgressThread | None = None
        """The thread that advances collectives between hosts; None unless there were any."""
        self.ulfm: Ulfm | None = None
        """The lost ranks, which this rank outlives; None if it ends with them."""

    def guard(self) -> None:
        """Let the watchdog guard this job until `leave`. Idempotent."""
        self.statuses.page.end(RankState.STARTED)
        if self.world_size > 1:
            watchdog.guard(self.ending)

    def meet(self) -> None:
        """Determine the nodes of the other ranks, and set up the memory that ranks share.

        Raises
        ------
        CollectiveMismatchError
            On every rank, if settings differ between ranks.
        """
        mpi, comm, survives = self.mpi, self._comm, self._survives
        node = comm.Split_type(mpi.COMM_TYPE_SHARED, self.rank)
        ranks = node.allgather(self.rank)
        # Tests divide one machine into several nodes by a setting.
        pretended = ShardLayout(len(ranks), settings.virtual_nodes())
        on_failure = "shrink" if survives else "abort"
        mine = {**settings.alike(), "on_failure": on_failure, "backend": self._kind}
        # One exchange for the node of each rank and for the settings that must be alike.
        offer = self._offer_link()
        chosen = products.choice() if self.rank == 0 else ""
        rows = comm.allgather((ranks[0], pretended.owner(node.Get_rank()), mine, offer, chosen))
        _require_alike([row[2] for row in rows])
        # Each machine may keep another choice, and ranks of one job must round alike.
        products.agree(rows[0][4])
        self.nodes = number_nodes([row[:2] for row in rows])
        """The number of the node that each rank runs on."""
        has_affinity = hasattr(os, "sched_getaffinity")
        usable = os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1)
        # Launchers bind ranks to cores or let them share all, so that counting cores is not enough.
        cores = node.allgather(set(usable))
        self.cores_per_rank = _cores_per_rank(usable, cores)
        """Number of cores for this rank: its share of those on which it may run."""
        self.crowded = self.cores_per_rank < 1
        self.statuses.share(comm.allgather, ranks)
        node.Free()
        if settings.job_folder() is None:
            unlink_mpich_files()
        if rows[0][3] is not None:
            self._link_nodes({row[0] for row in rows}, rows[0][3])
        if survives and self.world_size > 1:
            self.ulfm = ulfm = Ulfm(mpi, comm)
            self.ending.leaves_alone = True
            # MPI reports a dead rank to the others, which go on; but it overlooks some.
            self.ending.overlooked = lambda dead: ulfm.overlooks(
                dead, is_waiting=bool(watchdog.waits)
            )

    def _offer_link(self) -> Offer | None:
        """Let rank 0 listen for other nodes, unless agents of `mpishard run` watch over them."""
        if self.rank or self.world_size == 1 or self._survives or settings.job_folder() is not None:
            return None
        self.ending.links = NodeLinks()
        try:
            return self.ending.links.offer()
        except OSError:  # no sockets here: then time limits must do
            self.ending.links = None
            return None

    def _link_nodes(self, first_ranks: Collection[int], offer: Offer) -> None:
        """Connect the first rank of each node with rank 0."""
        links = self.ending.links
        if len(first_ranks) == 1:
            if links is not None:
                links.end(LEFT)
            self.ending.links = None
        elif self.rank and self.rank in first_ranks:
            links = NodeLinks()
            if links.connect(self.rank, offer):
                self.ending.links = links
            else:
                _logger.warning(
                    "rank %d cannot connect to rank 0 (%s, port %d): if one of them is killed, the "
                    "other ends after MPISHARD_TIMEOUT",
                    self.rank,
                    ", ".join(offer[0]),
                    offer[1],
                )

    # ---------------------------------------------------------------------------------- worlds

    @contextmanager
    def making_group(self) -> Iterator[None]:
        """Context in which MPI makes communicators of a group, whose number it limits.

        Raises
        ------
        CommunicationError
            With the number of this rank's groups, if MPI makes no more.
        """
        try:
            yield
        except self.mpi.Exception as error:
            if is_loss(self.mpi, error):
                raise
            raise CommunicationError(
                f"MPI made no communicators for another group ({str(error).partition(chr(10))[0]})"
                f", and rank {self.rank} is in {len(self._groups)} of them, the world included. "
                "Each takes 3 or more of those that the MPI library can make (MPICH: some 2000). "
                "Call shutdown() on groups that are not needed any more, on all of their ranks, or "
                "let go of them"
            ) from error

    def join(self, group: Group, backend: CommunicationBackend) -> None:
        """Add a world to this job."""
        group.pending = backend._pending
        self._groups[group] = weakref.ref(backend)

    def tidy(self) -> None:
        """Leave the worlds whose backend is no longer referenced; free those that all have left."""
        # Not by a finalizer: Python's garbage collector may run on another thread or inside a call
        # of MPI.
        for group, reference in list(self._groups.items()):
            if reference() is None:
                group.leave()
            if group.has_left() and group.free():
                del self._groups[group]

    def advance_meanwhile(self) -> None:
        """Let a thread advance the collectives under way, while this rank computes."""
        # Otherwise only one thread may be in MPI, and the rank's own thread sends at any time.
        if self.mpi.Query_thread() < self.mpi.THREAD_MULTIPLE:
            return
        if self.progress_thread is None:
            self.progress_thread = ProgressThread(self.session)
        self.progress_thread.wake()

    def _end_progress(self) -> None:
        if self.progress_thread is not None:
            self.progress_thread.end()

    def progress_mpi(self) -> None:
        """Let MPI progress the operations under way in any world."""
        for group in self._groups:
            group.progress_mpi()

    # ------------------------------------------------------------------------------------ ends

    def leave(self) -> None:
        """Leave every world, and wait until the others have left or were notified.

        Another rank may have work of its own to finish. This rank names the ranks that it waits for
        once, after ``MPISHARD_WARN_AFTER``, and ends the job after ``MPISHARD_EXIT_TIMEOUT``.
        Collectives that this rank has issued go on meanwhile. If ranks outlive each other and one
        is gone, this rank takes part in the `shrink` of the others, and is not in their new world.
        """
        self._end_progress()
        self.statuses.page.end(RankState.LEAVING)
        try:
            if self.ulfm is not None and self.ulfm.error is not None:
                raise self.ulfm.error
            with watchdog.wait(
                lambda: unfinished(self.ending.records(), time.time()),
                self.ending,
                limit=EXIT_LIMIT,
            ):
                self._leave_in_good_order()
        except (self.mpi.Exception, PeerError) as error:
            if self.ulfm is None or not (isinstance(error, PeerError) or is_loss(self.mpi, error)):
                raise
            self.call_off()
            self.ulfm.shrink(None, lambda: None)
        self.retire()

    def _leave_in_good_order(self) -> None:
        groups = list(self._groups)
        for group in groups:
            group.leave()
        flush_output()  # this rank may be ended while it waits, and its last lines must not be lost
        start = time.monotonic()
        while sum(not group.has_left() for group in groups):
            self.session.progress()
            self.progress_mpi()
            # Limited by time and not by count: on a busy machine a hundred yields take seconds.
            if time.monotonic() - start < _SPIN_SECONDS:
                yield_processor()
                continue
            time.sleep(_DOZE_SECONDS)
            self.check_losses("for the others to leave")
            if any(group.is_cut_off for group in groups):
                break
        if sum(group.keeps_arrays() for group in groups):
            return  # a rank was cut off, and sends nothing any more
        for _, calls, last in self._pending_calls():
            for call in [call for call, _ in calls if call.sequence > last][:1]:
                print_to_stderr(
                    f"mpishard: {self.ending.name} has left {call.name} called at {call.place}: "
                    "other ranks left without it, and nobody waited for its result"
                )
        deadline = time.monotonic() + _FINISH_SECONDS
        # Collectives that all ranks have begun must end before their communicator is freed: MPI may
        # give a later communicator its identity, and would deliver a late message there.
        while (
            unfinished := [
                group
                for group, calls, last in self._pending_calls()
                if any(not is_done and call.sequence <= last for call, is_done in calls)
            ]
        ) and time.monotonic() < deadline:
            self.session.progress()
            self.progress_mpi()
            yield_processor()
        waiting = groups
        while waiting := [group for group in waiting if not group.is_drained()]:
            yield_processor()
        for group in groups:
            if group not in unfinished:
                group.free()

    def _pending_calls(self) -> Iterator[tuple[Group, list[tuple[Call, bool]], int]]:
        """Yield for each world its pending calls, and the last call in which all ranks took part.

        A pending call, which nobody waited for, comes with a flag that says whether it is done.
        """
        for group in self._groups:
            works = group.pending
            calls = [(work.awaited, work.done) for work in works if isinstance(work.awaited, Call)]
            yield group, calls, min(group.departures().values(), default=group.sequence)

    # ---------------------------------------------------------------------------------- lost ranks

    def check_losses(self, where: str) -> None:
        """Raise `PeerError` if ranks outlive each other and one is gone."""
        if self.ulfm is not None and (loss := self.ulfm.find_loss(where)):
            self.session.broken = loss
            raise loss

    def explain(self, error: Exception, where: str) -> Exception:
        """Return the error for ``error``, which MPI raised while this rank waits ``where``."""
        if self.ulfm is None:
            # Open MPI may raise because a rank is gone. Then report that rank, and not this one.
            for record in self.ending.records():
                if not (record.is_alive or record.has_left):
                    self.ending.report_dead_rank(record.rank, f"while it waited {where}")
            if isinstance(error, self.mpi.Exception) and _LOST_CONNECTION.search(str(error)):
                time.sleep(_CLOSING_SECONDS)
                if (dead := self.ending.dead_rank()) is not None:
                    self.ending.report_dead_rank(dead, f"while it waited {where}")
                self.ending.report_lost_connection(str(error), f"while it waited {where}")
            return error
        explained = self.ulfm.explain(error, where)
        if isinstance(explained, PeerError):
            self.session.broken = explained
        return explained

    def send_notices(self) -> None:
        """Notify the ranks of every world that this rank was interrupted in a collective."""
        for group in self._groups:
            if not group.is_leaving:
                group.is_cut_off = True
                group.send_notices(CUT_OFF)

    def call_off(self) -> None:
        """Revoke every world, so that no rank waits in one of them any more."""
        assert self.ulfm is not None
        self._end_progress()
        self.ulfm.revoke()
        for group in self._groups:
            group.abandon()

    def retire(self) -> None:
        """Finish worlds that this rank has left, or that were revoked."""
        self._end_progress()
        self._groups.clear()
        self.statuses.page.end(RankState.LEFT)
        watchdog.release(self.ending)
        if self.ending.links is not None:
            self.ending.links.end(LEFT)

    def wait(self, where: Callable[[], str]) -> Wait:
        """Return a context in which this rank waits at ``where`` for others, with a time limit."""
        return watchdog.wait(where, self.ending)

    def _finish_traces(self, report: str) -> None:
        for backend in self.session.worlds():
            if backend.recorder is not None:
                backend.recorder.finish(report.partition("\n")[0])


def _require_alike(rows: Sequence[Mapping[str, str]]) -> None:
    """Refuse settings that differ between ranks; ``rows`` has those of each rank.

    Raises
    ------
    CollectiveMismatchError
        On every rank, with the names of the settings that differ, and their values by rank.
    """
    differing = []
    for name in rows[0]:
        given = [row[name] for row in rows]
        ranks = grouped(range(len(given)), given.__getitem__)
        if len(ranks) > 1:
            values = [f"{value} on {who(of)}" for value, of in ranks.items()]
            differing.append(f"{name} is {', '.join(values)}")
    if differing:
        raise CollectiveMismatchError(
            f"init(): {'; '.join(differing)}. Every rank of a job needs the same settings: set "
            "them for all, as `mpishard run` passes on the variables of its environment"
        )


def _launched_ranks(mpi: ModuleType, comm: Comm) -> list[int]:
    """Return the number in ``COMM_WORLD`` of each rank of ``comm``, without communication."""
    # Groups are local objects, so this needs no communication, which could hang before `meet`.
    ours, all_of_launcher = comm.Get_group(), mpi.COMM_WORLD.Get_group()
    ranks: list[int] = mpi.Group.Translate_ranks(ours, None, all_of_launcher)
    ours.Free()
    all_of_launcher.Free()
    return ranks


def _cores_per_rank(mine: Iterable[int], all_ranks: Sequence[Collection[int]]) -> float:
    """Return the sum of this rank's shares of its cores, each divided by the ranks that use it."""
    return sum(1 / sum(core in cores for cores in all_ranks) for core in mine)


# --------------------------------------------------------------- shared memory of the MPI library

# Names of the files of MPICH, Open MPI, Intel MPI, MVAPICH and the libraries below them. Other
# files there may be the user's own data. A file that has no name any more does not match: its line
# ends with "(deleted)".
_FILES = re.compile(
    r" (/dev/shm/(?:mpich|mpi_shm|sm_segment|vader_segment|osc_|ompi|open_?mpi|prte|pmix|ucx_shm|"
    r"ucp|psm|Intel_MPI|impi|mvapich|cray|xpmem)\S*)$",
    re.MULTILINE,
)


def unlink_mpich_files() -> None:
    """Remove the names of MPICH's files in ``/dev/shm``, which `mpishard run` otherwise does.

    All ranks of the node have mapped them by now, and a job that is killed would leave them. Ranks
    of Open MPI map theirs when they first communicate.
    """
    for path in library_files():
        if Path(path).name.startswith("mpich_"):
            with suppress(OSError):  # another rank of the node was faster
                Path(path).unlink()


def library_files() -> list[str]:
    """Return paths in ``/dev/shm`` that this process has mapped and a killed job leaves behind.

    They are files of this user with names of MPI libraries. There are none on a system without
    ``/proc/self/maps``.
    """
    found = []
    with suppress(OSError):
        text = Path("/proc/self/maps").read_text(errors="replace")
        for path in sorted(set(_FILES.findall(text))):
            with suppress(OSError):  # the file has been removed already
                if Path(path).stat().st_uid == os.getuid():
                    found.append(path)
    return found
