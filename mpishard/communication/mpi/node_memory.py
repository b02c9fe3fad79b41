"""Memory that a node's ranks share: its allocation, and the rows through which data pass.

The node's first rank makes an anonymous file in memory (memfd), and the others open it through
``/proc``. A killed job leaves no file behind, because it has no name, and only memory limits its
size.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpishard.base import Array, DType, settings
from mpishard.communication.contract.backoff import yield_processor
from mpishard.communication.contract.reduction import ReductionOperation, TreeReducer
from mpishard.communication.contract.work import Steps, Waitable
from mpishard.communication.mpi.messages import Pending

if TYPE_CHECKING:
    from mpi4py.MPI import Comm

_NONCE_BYTES = 16
_PATH_BYTES = 112  # fixed, because an all-gather needs rows of one length
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_log = logging.getLogger("mpishard")


class _RowViews(NamedTuple):
    """Rows of all ranks as arrays of one dtype."""

    whole: list[Array]
    outgoing: list[Array]
    """Slots of this rank's row, one for each rank."""
    incoming: list[Array]
    """Slots for this rank, one in each rank's row."""


class RowChannel:
    """Data through memory of the node, with the methods of `MessageChannel`.

    Each rank of a group has two rows of that memory. It alone writes them, and it takes them in
    turn, so it has passed a fence since the others read the row that it writes. In a round every
    rank copies the data for the others to its row; after a fence each reads from the others' rows.
    Data that were written before their header need no fence. A rank writes them early only if all
    its earlier collectives have ended, so its header implies that it has read all rows.

    Parameters
    ----------
    memory : Array
        Of `nbytes` bytes, shared by the group's ranks; dtype uint8.
    rank, ranks : int
        This rank of the group, and their number.
    reducer : TreeReducer
        Combines contributions.
    fence : callable
        `RingExchange.fence` of the group.
    """

    ROW_BYTES = 1 << 20
    """Size of a row: with the arrays that are combined it stays in the processor's caches."""

    def __init__(
        self,
        memory: Array,
        rank: int,
        ranks: int,
        reducer: TreeReducer,
        fence: Callable[[], Waitable],
    ) -> None:
        self._sets = memory.reshape(2, ranks, self.ROW_BYTES)
        # Kept, because to make the views of each round takes longer than to copy small data.
        self._views: dict[tuple[int, DType], _RowViews] = {}
        self._turn = 0
        self.bytes_all = self.ROW_BYTES
        # Each slot of a row begins on a cache line, and so is aligned for every dtype.
        self.bytes_each = self.ROW_BYTES // ranks // 64 * 64
        self.scratch_bytes = 0
        """Bytes of this rank's rows, once it has written one."""
        self._rank = rank
        self._reducer = reducer
        self._fence = fence

    @classmethod
    def nbytes(cls, ranks: int) -> int:
        """Bytes of rows for ``ranks`` ranks, which take no pages until they are first written."""
        return ranks * 2 * cls.ROW_BYTES

    def reduce(
        self,
        parts: Sequence[Array],
        operation: ReductionOperation,
        piece: Array,
        *,
        is_sent: bool = False,
    ) -> Steps:
        """See `MessageChannel`."""
        own = parts[self._rank]
        if not is_sent:
            self._write_row(parts)
            yield self._fence()
        contributions = [slot[: own.size] for slot in self._take(own.dtype)]
        contributions[self._rank] = own
        self._reducer.reduce(contributions, operation, piece)

    def move(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Steps:
        """See `MessageChannel`."""
        self._write_row(outgoing)
        yield self._fence()
        for other, slot in enumerate(self._take(outgoing[0].dtype)):
            if other != self._rank:
                incoming[other][...] = slot[: incoming[other].size]

    def spread(self, parts: Sequence[Array]) -> Steps:
        """See `MessageChannel`."""
        own, rank = parts[self._rank], self._rank
        rows = self._next_rows(own.dtype).whole
        rows[rank][: own.size] = own
        yield self._fence()
        self._turn = 1 - self._turn
        for other, part in enumerate(parts):
            if other != rank:
                part[...] = rows[other][: part.size]

    def broadcast(self, array: Array, root: int) -> Steps:
        """See `MessageChannel`."""
        ranks = range(self._sets.shape[1])
        yield from self.spread([array if rank == root else array[:0] for rank in ranks])

    def send_early(self, parts: Sequence[Array]) -> bool:
        """See `MessageChannel`."""
        self._write_row(parts)
        return True

    def _write_row(self, parts: Sequence[Array]) -> None:
        """Copy ``parts[r]`` to the slot of rank r in this rank's next row."""
        for other, slot in enumerate(self._next_rows(parts[0].dtype).outgoing):
            if other != self._rank:
                slot[: parts[other].size] = parts[other]

    def _take(self, dtype: DType) -> list[Array]:
        """Return the slots of all rows that are meant for this rank, and end the round."""
        slots = self._next_rows(dtype).incoming
        self._turn = 1 - self._turn
        return slots

    def _next_rows(self, dtype: DType) -> _RowViews:
        """Return the ranks' rows in the set that is next in turn, as arrays of ``dtype``."""
        # Two sets, because with one a rank would have to wait for the readers of its last round.
        turn = 1 - self._turn
        rows = self._views.get((turn, dtype))
        if rows is None:
            whole = [row.view(dtype) for row in self._sets[turn]]
            slots = [row[: len(whole) * self.bytes_each].view(dtype) for row in self._sets[turn]]
            slots = [row.reshape(len(whole), -1) for row in slots]
            incoming = [row[self._rank] for row in slots]
            rows = self._views[turn, dtype] = _RowViews(whole, list(slots[self._rank]), incoming)
            self.scratch_bytes = 2 * self.ROW_BYTES
        return rows


def share_memory(
    mpi: ModuleType, comm: Comm, in_flight: set[Pending], first: int, nbytes: int
) -> Steps:
    """Make zeroed memory, of shape (``nbytes``,) and dtype uint8, that a node's ranks share.

    Collective over ``comm``; the steps never block. A page is allocated in the NUMA domain of the
    rank that first writes it.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : mpi4py.MPI.Intracomm
        All ranks.
    in_flight : set of Pending
        Requests under way.
    first : int
        The first rank of this rank's node.
    nbytes : int
        Size in bytes, 1 or more.

    Returns
    -------
    Array or None
        None, on every rank, if ``MPISHARD_ARENA=off`` or a rank cannot have the memory: because of
        the system or the container, or because file descriptors or memory are used up.
    """
    if not settings.shares_memory():
        return None
    memory, error = yield from _map(comm, in_flight, first, nbytes)
    failed, any_failed = np.array([memory is None], np.int32), np.empty(1, np.int32)
    # All ranks use the memory or none does, because a channel is common to all.
    request = comm.Iallreduce(failed, any_failed, op=mpi.MAX)
    yield Pending([request], in_flight, failed, any_failed)
    if isinstance(error, OSError) and error.errno in _USED_UP:
        _log.warning(
            "ranks share no more memory here and send messages instead: %s (each model takes two "
            "file descriptors, and each group one: see ulimit -n)",
            error,
        )
    if any_failed[0]:
        return None
    if comm.Get_rank() == first:
        memory[:_NONCE_BYTES] = 0  # all ranks have compared the nonce
    yield Pending([comm.Ibarrier()], in_flight)
    return memory


def at_once(steps: Steps) -> Any:
    """Take all steps of a collective, and yield the processor during its waits."""
    while True:
        try:
            waitable = next(steps)
        except StopIteration as stop:
            return stop.value
        while not waitable.test():
            yield_processor()


def _map(comm: Comm, in_flight: set[Pending], first: int, nbytes: int) -> Steps:
    """Map the file that rank ``first`` of a node makes on all ranks of the node.

    The file begins with a random nonce, by which ranks recognise it, because the same path may be
    another file in another container. Return the memory or None, and the error or None.
    """
    handle, memory, error = -1, None, None
    is_first = comm.Get_rank() == first
    message = np.zeros(_NONCE_BYTES + _PATH_BYTES, np.uint8)
    messages = np.empty((comm.Get_size(), message.size), np.uint8)
    if is_first:
        try:
            handle = os.memfd_create("mpishard-arena")
            os.ftruncate(handle, nbytes)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            os.pwrite(handle, nonce[:nbytes], 0)
            text = nonce + f"/proc/{os.getpid()}/fd/{handle}".encode()
            message[: len(text)] = np.frombuffer(text, np.uint8)
        except (OSError, AttributeError) as reason:  # no memfd_create on this system
            error = reason
    yield Pending([comm.Iallgather(message, messages)], in_flight, message, messages)
    message = messages[first]
    nonce, text = message[:_NONCE_BYTES].tobytes(), message[_NONCE_BYTES:].tobytes()
    path = text.rstrip(b"\0").decode()
    if path:
        try:
            if not is_first:
                handle = os.open(path, os.O_RDWR)
            mapped = mmap.mmap(handle, nbytes)
            if mapped[:_NONCE_BYTES] == nonce[:nbytes]:
                memory = np.frombuffer(mapped, np.uint8)
        except OSError as reason:
            error = reason
        except ValueError:
            pass  # the path is that of another, shorter file
    # The path is valid while its owner keeps the descriptor open, so until all have mapped it.
    yield Pending([comm.Ibarrier()], in_flight)
    if handle >= 0:
        os.close(handle)
    return memory, error
