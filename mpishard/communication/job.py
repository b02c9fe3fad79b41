"""What all worlds of one MPI process share: how the job ends, in good order or not."""

from __future__ import annotations

import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mpishard import settings
from mpishard.communication.arena import at_once, number_nodes, share_memory
from mpishard.communication.backend import CommunicationBackend
from mpishard.communication.call_board import CallBoard
from mpishard.communication.call_file import RankState
from mpishard.communication.diagnosis import describe_stall, longest_waiting
from mpishard.communication.group import Group
from mpishard.communication.mailbox import NO_RING, Mailbox, PostOffice, Ring, stores_are_ordered
from mpishard.communication.patience import yield_processor
from mpishard.communication.progress import ProgressThread
from mpishard.layout import ShardLayout

__all__ = ["Job"]

_NOTICE_SECONDS = 0.2
_REPORT_GRACE_SECONDS = 1.0
_OUTPUT_SECONDS = 0.25
_DOZE_SECONDS = 1e-3
_CORES_FOR_PROGRESS = 2


class Job:
    """One root world of this process, with every world that was split from it.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : mpi4py.MPI.Intracomm
        The root world. The constructor is collective over it.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self.mpi = mpi
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self.board = CallBoard(self.rank, self.world_size) if self.world_size > 1 else None
        self._counted_heads = 0.0
        self._groups: dict[Group, weakref.ref[CommunicationBackend]] = {}
        self.is_waiting = False
        """Whether this rank is polling for a collective."""

        node = comm.Split_type(mpi.COMM_TYPE_SHARED, self.rank)
        ranks = node.allgather(self.rank)
        pretended = ShardLayout(len(ranks), settings.virtual_nodes())
        names = comm.allgather((ranks[0], pretended.owner(node.Get_rank())))
        self.nodes = number_nodes(names)
        """The number of the node that each rank runs on."""
        cores = [tuple(cores) for cores in node.allgather(_affinity())]
        self.cores_per_rank = _cores_per_rank(cores[node.Get_rank()], cores)
        """This rank's part of the cores that it may run on."""
        self.crowded = self.cores_per_rank < 1
        if self.board is not None:
            self.board.share(node, comm, ranks)
        node.Free()
        self._post_office = self._open_post_office(comm)
        self.progress_thread: ProgressThread | None = None
        """What moves data while this rank computes, where that is worth a thread."""
        self._progress_comm: Any = None

    def start_progress(self, comm: Any) -> None:
        """Start the progress thread, where it is wanted, until `leave`. Collective."""
        wanted = settings.progress_thread()
        if wanted is None:
            sends = len(set(self.nodes)) > 1 or not settings.arena_sources()
            wanted = sends and self.cores_per_rank >= _CORES_FOR_PROGRESS
        wanted = wanted and self.world_size > 1 and ProgressThread.is_possible(self.mpi)
        if comm.allreduce(wanted, op=self.mpi.MAX):
            self._progress_comm = comm.Dup()
            if wanted:
                self.progress_thread = ProgressThread(
                    self.mpi, self._progress_comm, self._is_anything_in_flight
                )

    def _stop_progress(self) -> None:
        if self.progress_thread is not None:
            self.progress_thread.stop()
            self.progress_thread = None
        if self._progress_comm is not None:
            self._progress_comm.Free()
            self._progress_comm = None

    def _is_anything_in_flight(self) -> bool:
        # A rank that waits calls MPI itself, and two threads would stand in each other's way.
        return not self.is_waiting and any(group.in_flight for group in tuple(self._groups))

    # ------------------------------------------------------------------------------- mailboxes

    def _open_post_office(self, comm: Any) -> PostOffice | None:
        if len(set(self.nodes)) == self.world_size or not stores_are_ordered():
            return None
        node = comm.Split(self.nodes[self.rank], self.rank)
        nbytes = PostOffice.nbytes(node.Get_size())
        memory = at_once(share_memory(self.mpi, node, comm, nbytes, settings.arena_sources()))
        local_rank = node.Get_rank()
        node.Free()
        return None if memory is None else PostOffice(memory, local_rank)

    def take_ring(self) -> Ring:
        """What this rank can give to the mailbox of a new group."""
        return NO_RING if self._post_office is None else self._post_office.take()

    def put_back_ring(self, ring: Ring) -> None:
        """Return what `take_ring` gave, where no mailbox came of it."""
        if self._post_office is not None:
            self._post_office.put_back(ring)

    def make_mailbox(
        self, rings: Sequence[Ring], nodes: Sequence[int], rank: int
    ) -> Mailbox | None:
        """The mailbox of a group whose ranks took ``rings`` and run on ``nodes``.

        None, on all of them alike, where they are on several nodes or one has no ring to give.
        """
        if self._post_office is None or len(rings) == 1 or len(set(nodes)) > 1 or NO_RING in rings:
            self.put_back_ring(rings[rank])
            return None
        return Mailbox(self._post_office, rings, rank)

    # ---------------------------------------------------------------------------------- worlds

    def join(self, group: Group, backend: CommunicationBackend) -> None:
        """Take a world into the account of this job."""
        self._groups[group] = weakref.ref(backend)

    def tidy(self) -> None:
        """Leave the worlds whose backend nobody holds any more; free those that all have left."""
        for group, reference in list(self._groups.items()):
            if reference() is None:
                group.leave()
            if group.has_left() and group.free():
                del self._groups[group]

    def count_pending(self) -> int:
        """Number of collectives and messages under way, in all worlds."""
        backends = [reference() for reference in self._groups.values()]
        return sum(
            len(backend._pending) + len(backend._transfers)
            for backend in backends
            if backend is not None
        )

    def progress(self) -> None:
        """Let the collectives of every world go on: a rank may wait in any of them."""
        for reference in tuple(self._groups.values()):
            backend = reference()
            if backend is not None:
                backend.progress()

    def stir(self) -> None:
        """Let MPI go on with what is under way in any world."""
        for group in self._groups:
            group.stir()

    # ------------------------------------------------------------------------------------ ends

    def leave(self) -> None:
        """Leave every world, and wait until the others have left, or were told.

        There is no time limit: another rank may have work of its own to finish. Their collectives
        that this rank takes part in go on meanwhile.
        """
        self.flush()
        if self.board is not None:
            self.board.journal.end(RankState.LEAVING)
        groups = list(self._groups)
        for group in groups:
            group.leave()
        start = time.monotonic()
        polls = 0
        while sum(not group.has_left() for group in groups):
            self.progress()
            self.stir()
            polls += 1
            if polls < 1000:
                yield_processor()
                continue
            time.sleep(_DOZE_SECONDS)
            if time.monotonic() - start > _NOTICE_SECONDS:
                for group in groups:
                    group.notify()
        waiting = groups
        while waiting := [group for group in waiting if not group.is_drained()]:
            yield_processor()
        self._stop_progress()
        for group in groups:
            group.free()
        self._groups.clear()

    def fail(self, error: BaseException, where: str) -> NoReturn:
        """End the job because ``error`` was raised on this rank and nobody caught it."""
        if isinstance(error, KeyboardInterrupt):
            self.end(
                f"mpishard: rank {self.rank} of {self.world_size} was interrupted {where}",
                settings.EXIT_INTERRUPT,
            )
        text = "".join(traceback.format_exception(error)).rstrip()
        self.end(
            f"mpishard: rank {self.rank} of {self.world_size} failed {where}; the job ends\n"
            f"{type(error).__name__}: {error}\n"
            f"--- traceback of rank {self.rank} ---\n{text}",
            settings.EXIT_FAILURE,
        )

    def mourn_the_dead(self, where: Callable[[], str]) -> None:
        """End the job if a rank of this node is gone, as after SIGKILL. Looks once a second."""
        now = time.monotonic()
        if self.board is None or now - self._counted_heads < 1:
            return
        self._counted_heads = now
        dead = self.board.dead_rank()
        if dead is not None:
            self.end(
                f"mpishard: the process of rank {dead} of {self.world_size} is gone (killed, or "
                f"out of memory?), while rank {self.rank} waits {where()}; the job ends",
                settings.EXIT_FAILURE,
            )

    def warn(self, text: str, give_up_after: float) -> None:
        """Say that this rank has waited for long, and the one that has for longest, why."""
        then = f"; the job ends after {give_up_after:g} s (MPISHARD_TIMEOUT)"
        stall = ""
        if self.board is not None and longest_waiting(self.board.records()) == self.rank:
            stall = "\n" + describe_stall(self.board)
        print(  # noqa: T201
            f"mpishard: {text}{then if give_up_after else ''}{stall}", file=sys.stderr, flush=True
        )

    def give_up(self, text: str) -> NoReturn:
        """End the job because this rank has waited for too long."""
        stall = "" if self.board is None else describe_stall(self.board)
        self.end(
            f"mpishard: {text}; the job ends (MPISHARD_TIMEOUT)\n{stall}", settings.EXIT_TIMEOUT
        )

    def end(self, report: str, code: int) -> NoReturn:
        """Print ``report`` unless a rank of this node has printed one, and end all ranks."""
        self.flush()
        for reference in tuple(self._groups.values()):
            backend = reference()
            if backend is not None and backend.recorder is not None:
                backend.recorder.finish(report.partition("\n")[0])
        if self.board is None or self.board.claim_report(code):
            print(report, file=sys.stderr, flush=True)  # noqa: T201
            # An aborted job's output is lost where the launcher has not read it yet.
            time.sleep(_OUTPUT_SECONDS)
        else:
            # The rank that reports ends this one too.
            time.sleep(_REPORT_GRACE_SECONDS)
        self.mpi.COMM_WORLD.Abort(code)
        # MPICH's may return while the launcher still ends the others.
        os._exit(code)

    @staticmethod
    def flush() -> None:
        """Write out what was printed: an aborted process does not."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()


def _affinity() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _cores_per_rank(mine: tuple[int, ...], all_ranks: list[tuple[int, ...]]) -> float:
    """Each core counts by the share of it that this rank has."""
    return sum(1 / sum(core in cores for cores in all_ranks) for core in mine)
