"""What a backend is before it has collectives: a rank, a life, and ways to reach the others.

What is logged, and compared between ranks, stands here, once for all backends.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from mpishard import settings
from mpishard.arrays import Array
from mpishard.communication.contract.call import Call, Kind
from mpishard.communication.contract.matching import check_calls, group_label
from mpishard.communication.contract.nodes import Places, same_everywhere, shared_by_node
from mpishard.communication.contract.reduction import ReductionOperation, TreeReducer
from mpishard.communication.contract.status import RankState, StatusPage
from mpishard.communication.contract.traffic_booking import TrafficBooking
from mpishard.communication.contract.work import CollectiveWork, Steps, Transfer, Work
from mpishard.communication.mpi.node_memory import PRIVATE, Regions
from mpishard.communication.tracing.recorder import CollectiveInFlight, Recorder, current_recorder
from mpishard.communication.tracing.session import stop_recording
from mpishard.errors import CommunicationError, NotInitializedError
from mpishard.logs import set_up_logging

__all__ = ["Transport"]


class Transport(TrafficBooking):
    """Life cycle, calls under way, and what a subclass must give.

    A subclass gives what is abstract here: `rank`, `world_size`, `abort`, the two life-cycle
    hooks, ``_steps_<collective>`` generators, `_drive`, `_send` and `_steps_receive`.
    `CommunicationBackend` builds the public collectives on them. It may give `nodes`,
    `_steps_send` and `_steps_allocate_shared`, and ``_rank_is_process = False`` for threads.

    For its use there are `_verify`, which compares the ranks' calls; ``_reducer``, which combines
    contributions in the one tree; ``_count_<collective>``, which book the bytes sent;
    ``_sequence``, the number of this rank's last collective; ``_is_root``, false for a world that
    was split off; and ``group``, the name of this world, the same on its ranks alone.

    A ``_steps_`` generator yields a `Waitable` whenever it has to wait for other ranks, and
    returns the collective's result, which nobody else's arrays share memory with. Its arguments
    have been checked on this rank alone: before it uses what others sent it hands all ranks'
    calls, in rank order, to `_verify`. It is run for a world of one, too. After it has returned
    the caller may change ``array``.
    """

    status: StatusPage
    """What this rank does, in all its worlds; there from `initialize` on."""
    _rank_is_process = True  # and not a thread of it
    _heir: Self | None  # the world after this one, without the ranks that were lost

    def __init__(self) -> None:
        super().__init__()
        self._initialized = False
        self._is_root = True  # and was not split off another world
        self._heir = None
        self._sequence = 0
        self._pending: deque[CollectiveWork] = deque()
        self._transfers: list[Transfer] = []
        self._rounds = 0
        self._reducer = TreeReducer()
        self._regions = Regions()
        self.check_collectives = True
        """Whether every collective compares the ranks' calls before data is mixed.

        Results do not depend on it. False saves what a backend can do without; set it alike on
        all ranks. Under MPI it saves the header of `all_reduce` and `reduce_scatter` above 128
        bytes, and of `barrier` where headers are messages: one between each pair of ranks, and
        the wait for it. On one node headers go through shared memory, and cost a few
        microseconds; an `all_reduce` up to 2 MiB (of two ranks, 8) keeps its header there, which
        says that the array is ready. The other collectives need it to learn lengths, and keep it
        and its checks. In memory there is no header: it saves nothing, and calls are compared all
        the same. Nor does it in a world of one, where nothing is compared.
        """
        self.label = ""
        """The name of this world in reports; empty for a root world."""
        self.group, self.axis = "world", ""
        """What traces call this world, the same on its ranks alone, and its axis of a mesh."""
        self.recorder: Recorder | None = None
        """What records a trace until this backend is shut down."""

    # -------------------------------------------------------------------------------- life cycle

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the buffers that this backend keeps from one collective to the next.

        Memory beside the arrays of its callers, for an account of what a rank needs. A world that
        was split off has buffers of its own, and counts those alone.
        """
        return self._reducer.scratch_bytes

    @property
    def is_initialized(self) -> bool:
        """Whether collectives may be called."""
        return self._initialized

    def initialize(self) -> None:
        """Make the backend ready. Idempotent.

        Raises
        ------
        ValueError
            For an environment variable of the package that has no meaning.
        """
        if self._heir is not None:
            raise self._not_ready_error()
        if not self._initialized:
            settings.check()
            if self._is_root:
                self.status = StatusPage(self.rank, self.world_size)
            self._on_initialize()
            if self._is_root:
                set_up_logging(self.rank, is_process=self._rank_is_process)
            self._initialized = True
            if self._is_root:
                self.status.end(RankState.RUNNING)

    def shutdown(self) -> None:
        """Leave the world. Idempotent. Peers that still wait for this rank are told."""
        if self._initialized:
            stop_recording(self)
            self._on_shutdown()
            self._initialized = False
            if self._is_root:
                self.status.end(RankState.LEFT)

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Tell every rank that this one failed, so that none waits for it.

        In memory the others raise `PeerError`; under MPI the job ends.
        """

    def __enter__(self) -> Self:
        self.initialize()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # sys.exit is a way to leave, not a failure.
        if error is None or isinstance(error, SystemExit):
            self.shutdown()
        else:
            self.abort(error)

    def print(self, *values: object) -> None:
        """Print on rank 0 only. Not collective."""
        if self.rank == 0:
            print(*values, flush=True)  # noqa: T201

    def progress(self) -> None:
        """Let what was issued, and not waited for, go on as far as it can. Never blocks.

        Worth calling between pieces of a long computation, where a `Work` should advance.
        """
        if not self._pending and not self._transfers:
            return
        for pending in (*self._pending, *self._transfers):
            pending.advance()
        self._forget_done()

    def describe(self) -> str:
        """One line that names this backend in messages."""
        return f"{type(self).__name__}(rank {self.rank} of {self.world_size})"

    def _name_group(self, purpose: str) -> None:
        """Let reports say what this group, which was split off another, is for."""
        steps = [step.partition(".")[0] for step in self.group.split("/")[1:]]
        self.label = group_label(purpose, ".".join(steps), self.world_ranks)

    # -------------------------------------------------------------------------- for the transport

    @abstractmethod
    def _on_initialize(self) -> None:
        """Enter the world. Also called for a world that `_steps_split` returns."""

    @abstractmethod
    def _on_shutdown(self) -> None:
        """Leave in good order: tell the others, and see that what was sent goes out.

        Where this is the root, the worlds that were split from it end with it.
        """

    @abstractmethod
    def _drive(self, work: Work) -> None:
        """Wait until ``work`` is done.

        Meanwhile all of this rank's collectives and messages go on (`progress`), in all worlds
        that were split from one another, so that ranks may wait in different orders.

        Raises
        ------
        PeerError
            Where a rank that ``work`` waits for has failed or left.
        CollectiveTimeoutError
            Where one has not arrived in time.
        """

    def _explain(self, error: Exception, where: str) -> Exception:
        """What a rank that waits ``where`` raises for ``error``; here, that itself."""
        return error

    def _shrink(self) -> Self:
        """A new, initialised root world of the ranks that are left. This one is then `_retire`d.

        Here, where no rank outlives another, an error.
        """
        raise CommunicationError(f"{self.describe()} ends where one of its ranks does")

    def _retire(self, heir: Self) -> None:
        """Be done with: ``heir`` is the world of the ranks that are left."""
        stop_recording(self)
        if self._is_root and self._initialized:
            self.status.end(RankState.LEFT)
        self._initialized, self._heir = False, heir
        self._pending.clear()
        self._transfers.clear()

    @property
    def _newest(self) -> Self:
        """What became of this world as ranks were lost; itself where none was."""
        newest = self
        while newest._heir is not None:
            newest = newest._heir
        return newest

    @abstractmethod
    def _steps_all_reduce(self, call: Call, array: Array, out: Array) -> Steps:
        """Combine all ranks' arrays into ``out``, which may be ``array``; return ``out``."""

    @abstractmethod
    def _steps_reduce_scatter(
        self, call: Call, array: Array, counts: tuple[int, ...], out: Array
    ) -> Steps:
        """Combine into ``out`` this rank's ``counts[rank]`` rows; return ``out``.

        ``out`` may lie in ``array``, whose other rows stay as they are; of 16-bit floats it may be
        float32.
        """

    @abstractmethod
    def _steps_all_gather(self, call: Call, array: Array, out: Array | None) -> Steps:
        """All ranks' rows in ``out``, in any part of which ``array`` may lie, or a new array."""

    @abstractmethod
    def _steps_broadcast(self, call: Call, array: Array | None, root: int) -> Steps:
        """The root's array: itself there, elsewhere in ``array`` or a new one."""

    @abstractmethod
    def _steps_scatter(
        self, call: Call, array: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Steps:
        """A new array of this rank's rows; ``counts`` is None beside the root, which knows."""

    @abstractmethod
    def _steps_gather(self, call: Call, array: Array, root: int) -> Steps:
        """All ranks' rows, a new array, on the root; None elsewhere."""

    @abstractmethod
    def _steps_all_to_all(self, call: Call, parts: Sequence[Array]) -> Steps:
        """A list of new arrays, one from each rank, whose shapes this rank does not know."""

    @abstractmethod
    def _steps_barrier(self, call: Call) -> Steps:
        """End when every rank has called it."""

    @abstractmethod
    def _steps_split(self, call: Call, color: int | None, key: int) -> Steps:
        """A backend for the ranks of this color, by (key, rank), not initialised; or None.

        Its ``_world_ranks`` may be set here, to what `world_ranks` will be; otherwise the new
        group exchanges them, by one all_gather.
        """

    def _steps_allocate_shared(self, call: Call, nbytes: int) -> Steps:
        """Zeroed bytes that this rank's node shares, or None; here, where no node shares any."""
        yield from self._steps_barrier(call)
        return None

    @abstractmethod
    def _send(self, array: Array, destination: int, tag: int) -> None:
        """Send a copy; do not wait, not even where the receiver has left."""

    def _steps_send(self, array: Array, destination: int, tag: int) -> Steps:
        """Send ``array``, which stays as it is until this ends; here, where a copy is made."""
        self._send(array, destination, tag)
        yield from ()

    @abstractmethod
    def _steps_receive(
        self, source: int, count: int, tag: int, dtype: np.dtype[Any] | None
    ) -> Steps:
        """Take the next message that no earlier receive of (source, tag) takes; a new array.

        ``dtype`` is None where the caller takes any; given, memory may be ready ahead of it. A
        message that `refuse_other_message` refuses stays for the next receive, and so does the
        place in line where the generator is closed.
        """

    # ------------------------------------------------------------------------------------ shared

    def _issue(self, call: Call, steps: Steps, in_flight: CollectiveInFlight | None = None) -> Work:
        work = CollectiveWork(self, steps, call, in_flight or self._record(call))
        self._pending.append(work)
        work.advance()
        self._forget_done()
        work.begun()
        return work

    def _record(self, call: Call) -> CollectiveInFlight | None:
        """What a collective is recorded with from now on; None where no trace is."""
        recorder = current_recorder.get()
        if recorder is None:
            return None
        return CollectiveInFlight(recorder, call, self.group, self.axis)

    def _begin(self, transfer: Transfer) -> Transfer:
        """Issue a message. It stands beside the collectives: they do not wait for it."""
        self._transfers.append(transfer)
        transfer.advance()
        self._forget_done()
        transfer.begun()
        return transfer

    def _forget_done(self) -> None:
        while self._pending and self._pending[0].done:
            self._pending.popleft()
        if self._transfers:
            self._transfers = [transfer for transfer in self._transfers if not transfer.done]

    def _verify(self, calls: Sequence[Call]) -> None:
        """Refuse, on every rank alike, calls that do not belong together."""
        # One call belongs to itself; the rows of its ``out`` may still be wrong.
        if len(calls) == 1 and calls[0].out_rows < 0:
            return
        check_calls(calls, self.world_ranks, self.label, self._parting)

    def _parting(self, sequence: int) -> str:
        """Where the ranks went different ways, up to collective ``sequence``, as far as is known.

        Here, where no rank knows of the others' earlier collectives, empty.
        """
        return ""

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
        self._ready()
        self._admit(kind, self._sequence + 1)
        self._sequence += 1
        call = Call.describe(
            self._sequence, kind, array, operation=operation, root=root, counts=counts,
            out_rows=out_rows,
        )  # fmt: skip
        self.status.record(call, self.label, sys._getframe(1))
        return call

    def _admit(self, kind: Kind, sequence: int) -> None:
        """Hear of a collective before it is called; raise where nothing can be called any more."""

    def _ready(self) -> None:
        if not self._initialized:
            raise self._not_ready_error()

    def _not_ready_error(self) -> CommunicationError:
        if self._heir is not None:
            return NotInitializedError(
                f"{self.describe()} has lost ranks and is no more: go on with the backend of "
                f"{self._heir.world_size} that shrink() returned, and with groups, models and "
                "optimizers that are made on it"
            )
        return NotInitializedError(
            f"{self.describe()} is not initialised; call initialize(), or use "
            "mpishard.init() which returns an initialised backend"
        )

    # Who shares memory with whom: decided by what all ranks say, and so alike on all of them.

    def _places(self, array: Array, out: Array | None) -> Places:
        return self._regions.locate(array), PRIVATE if out is None else self._regions.locate(out)

    def _arrays_are_shared(self, places: Sequence[Places] | None) -> bool:
        return places is not None and shared_by_node([own for own, _ in places], self.nodes)

    def _out_is_shared(self, places: Sequence[Places] | None) -> bool:
        return places is not None and same_everywhere([out for _, out in places], self.nodes)
