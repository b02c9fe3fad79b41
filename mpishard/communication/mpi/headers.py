"""The header exchange that begins every collective: each rank's call, and small arrays.

On one node headers go through *rings* in memory that its ranks share: a few stores and loads
instead of messages. A group has one ring for each of its ranks, which that rank alone writes. The
number n of an exchange is the same on all ranks, and its row stands in slot ``n % SLOTS`` of each
ring. The mark before the row is n, and is written after the row. A rank writes a slot again only
when every other rank has stored that it has read it. Only the row's own bytes are written, because
cache lines of a slot that do not change need not be fetched again.

Rings need a processor whose stores other cores see in the order in which they are made, such as
x86-64. Headers are messages on other processors, and if a group spans several nodes or shares no
memory.
"""

from __future__ import annotations

import platform
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from mpishard.base import Array, is_device_array
from mpishard.communication.contract.call import HEADER_BYTES, Call
from mpishard.communication.contract.work import Waitable
from mpishard.communication.mpi.messages import Pending

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

INLINE_BYTES = 128
"""Most bytes of an array that travels in the header, and so needs no second exchange."""

ROW_BYTES = HEADER_BYTES + INLINE_BYTES
"""Most bytes that each rank sends."""

_HEADER = struct.Struct(f"=q{HEADER_BYTES - 8}s")
# The header of a larger array is followed by its flags.
_ON_DEVICE, _SENT = 1, 2


def make_row(call: Call, payload: Array | None = None, *, is_sent: bool = False) -> bytes:
    """Return the row of one rank: up to `ROW_BYTES` bytes.

    A ``payload`` of up to `INLINE_BYTES` travels in the row. For a larger one the row has flags.
    ``is_sent`` says that its data are in the channel already.
    """
    content = b""
    if payload is not None:
        if payload.nbytes <= INLINE_BYTES:
            content = payload.tobytes()
        else:
            flags = _SENT if is_sent else 0
            if type(payload) is not np.ndarray and is_device_array(payload):
                flags |= _ON_DEVICE
            content = bytes((flags,))
    return _HEADER.pack(call.sequence, call.description) + content


class Headers:
    """The rows of all ranks.

    Parameters
    ----------
    rows : sequence of bytes
        Each rank's row.
    own : Call
        This rank's call.
    rank : int
        This rank.
    """

    def __init__(self, rows: Sequence[bytes], own: Call, rank: int) -> None:
        self._rows = rows
        # The usual case is that all rows begin alike, which is compared as bytes without decoding
        # any.
        header = rows[rank][:HEADER_BYTES]
        self.identical = True
        """Whether all ranks called the same."""
        self.calls: Sequence[Call] = (own,) * len(rows)
        self.all_inline = own.nbytes <= INLINE_BYTES
        """Whether every rank's array came with its header."""
        for row in rows:  # takes half the time of all()
            if not row.startswith(header):
                self.identical = False
                self.calls = [Call.decode(row) for row in rows]
                self.all_inline = all(call.nbytes <= INLINE_BYTES for call in self.calls)
                break

    def inline(self, rank: int) -> Array:
        """Return a 1-D view of the elements that ``rank`` sent in its header."""
        call = self.calls[rank]
        return np.frombuffer(self._rows[rank], call.dtype, call.size, HEADER_BYTES)

    def on_device(self, rank: int) -> bool:
        """Return whether ``rank`` has an array on a GPU that did not come with its header."""
        flags = self._rows[rank][HEADER_BYTES] if self.calls[rank].nbytes > INLINE_BYTES else 0
        return bool(flags & _ON_DEVICE)

    def flags(self) -> tuple[bool, bool]:
        """Return whether any array is on a GPU, and whether all are in the channel already.

        An array that came with its header counts as neither.
        """
        some, every = 0, _SENT
        for rank, row in enumerate(self._rows):  # half the time of zip()
            flags = row[HEADER_BYTES] if self.calls[rank].nbytes > INLINE_BYTES else 0
            some |= flags
            every &= flags
        return bool(some & _ON_DEVICE), bool(every)

    def integers(self, count: int) -> list[list[int]]:
        """Return the ``count`` int64 values that each rank sent in its header."""
        return [np.frombuffer(r, np.int64, count, HEADER_BYTES).tolist() for r in self._rows]


class Posted(Waitable):
    """One exchange of rows; when it is ``done``, ``rows`` has every rank's row."""

    __slots__ = ("_exchange", "done", "number", "row", "rows")

    def __init__(self, exchange: RingExchange, number: int, row: bytes) -> None:
        self._exchange, self.number, self.row = exchange, number, row
        self.rows: Sequence[bytes] = ()
        self.done = False

    def test(self) -> bool:
        if not self.done:
            self._exchange.collect()
        return self.done


class Fence(Waitable):
    """A fence of a `RingExchange`: complete when every rank has reached it."""

    __slots__ = ("_number", "_numbers", "_peers")

    def __init__(self, numbers: memoryview, own: int, peers: Sequence[int]) -> None:
        self._numbers, self._peers = numbers, peers
        # Numbers only grow, so a fence needs no reset, and a peer may be at the next one already.
        self._number = numbers[own] = numbers[own] + 1

    def test(self) -> bool:
        numbers, number = self._numbers, self._number
        for peer in self._peers:  # noqa: SIM110 - takes half the time of all()
            if numbers[peer] < number:
                return False
        return True


class PostedMessage(Pending):
    """One exchange of rows by messages, with the interface of `Posted`."""

    __slots__ = ("_buffer",)

    def __init__(
        self, request: Request, in_flight: set[Pending], row: bytes, buffer: Array
    ) -> None:
        super().__init__([request], in_flight, row)
        self._buffer = buffer

    @property
    def rows(self) -> list[bytes]:
        """Each rank's row."""
        return [row.tobytes() for row in self._buffer]


class MessageExchange:
    """The exchange of rows by messages, with the methods of `RingExchange`.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    headers, data : mpi4py.MPI.Intracomm
        Communicators of the group's headers and of its data. Fences are barriers of the latter.
    in_flight : set of Pending
        Requests under way.
    """

    def __init__(self, mpi: ModuleType, headers: Comm, data: Comm, in_flight: set[Pending]) -> None:
        self._byte = mpi.BYTE
        self._headers, self._data = headers, data
        self._in_flight = in_flight

    def post(self, row: bytes) -> PostedMessage:
        """See `RingExchange`."""
        # An all-gather needs rows of one length; in rings only the bytes of the row are written.
        row = row.ljust(ROW_BYTES, b"\0")
        rows = np.empty((self._headers.Get_size(), ROW_BYTES), np.uint8)
        request = self._headers.Iallgather([row, ROW_BYTES, self._byte], rows)
        return PostedMessage(request, self._in_flight, row, rows)

    def fence(self) -> Waitable:
        """See `RingExchange`."""
        return Pending([self._data.Ibarrier()], self._in_flight)


SLOTS = 32
"""Number of headers that a rank can be ahead of the slowest rank before it waits for room."""

_LINE = 64  # bytes of a cache line, which only one core can write at a time
# A ring has the number that its rank read last, its last fence in a line of its own, and slots.
_FENCE = _LINE
_ROWS = _FENCE + _LINE
_STRIDE = -(-(8 + ROW_BYTES) // _LINE) * _LINE  # bytes of a slot: its mark, its row, padding
_RING_BYTES = _ROWS + SLOTS * _STRIDE


class RingExchange:
    """The rings through which the ranks of one group exchange rows.

    Parameters
    ----------
    memory : Array
        Zeroed, of `nbytes` bytes, shared by the ranks; dtype uint8.
    rank, ranks : int
        This rank of the group, and their number.
    """

    def __init__(self, memory: Array, rank: int, ranks: int) -> None:
        # A memoryview, because reading one element of a NumPy array takes longer.
        self._bytes = memory.data
        self._numbers = self._bytes.cast("q")
        self._last = 0
        starts = range(0, ranks * _RING_BYTES, _RING_BYTES)
        peers = [other for other in range(ranks) if other != rank]
        slots = [[start + _ROWS + n * _STRIDE for start in starts] for n in range(SLOTS)]
        self._slots = [slot[rank] for slot in slots]
        # Positions of the other ranks' marks and rows, by slot; the latter beside their ranks.
        self._marks = [[slot[peer] // 8 for peer in peers] for slot in slots]
        self._rows = [
            [(peer, slice(slot[peer] + 8, slot[peer] + 8 + ROW_BYTES)) for peer in peers]
            for slot in slots
        ]
        self._read = starts[rank] // 8
        self._reads = [starts[peer] // 8 for peer in peers]
        fence = (starts[rank] + _FENCE) // 8
        peer_fences = [(starts[peer] + _FENCE) // 8 for peer in peers]
        self.fence: Callable[[], Waitable] = partial(Fence, self._numbers, fence, peer_fences)
        """Return a fence, which is complete when every rank has reached it.

        All ranks make the same fences in the same order.
        """
        self._room = 0
        self._sent = 0
        self._posted: deque[Posted] = deque()

    @staticmethod
    def is_possible() -> bool:
        """Return whether other cores see the stores of this core in order."""
        return platform.machine() in ("x86_64", "AMD64")

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Bytes of memory that a group of ``ranks`` ranks needs."""
        return ranks * _RING_BYTES

    def post(self, row: bytes) -> Posted:
        """Begin to exchange rows, without blocking. Each received row has `ROW_BYTES` bytes."""
        self._last += 1
        posted = Posted(self, self._last, row)
        self._posted.append(posted)
        self._send()
        return posted

    def collect(self) -> None:
        """Take the rows that have arrived, in order of issue, and send rows if there is room."""
        if self._sent < self._last:
            self._send()
        numbers, memory = self._numbers, self._bytes
        while self._posted and self._posted[0].number <= self._sent:
            posted = self._posted[0]
            number = posted.number
            for mark in self._marks[number % SLOTS]:
                if numbers[mark] < number:
                    return
            # This rank's own row does not pass through memory.
            rows = [posted.row]
            for rank, place in self._rows[number % SLOTS]:
                rows.insert(rank, bytes(memory[place]))
            posted.rows, posted.done = rows, True
            self._posted.popleft()
            # After the rows are copied: from then on the others may write their slots again.
            numbers[self._read] = number

    def _send(self) -> None:
        while self._sent < self._last:
            number = self._sent + 1
            if number > self._room:
                # Loaded only if needed: each peer's number is a cache line of another core.
                self._room = SLOTS + min([self._numbers[index] for index in self._reads])
                if number > self._room:
                    return
            slot, row = self._slots[number % SLOTS], self._posted[self._sent - self._last].row
            # The row is stored before its mark, so a peer that sees the mark sees the whole row.
            self._bytes[slot + 8 : slot + 8 + len(row)] = row
            self._numbers[slot // 8] = self._sent = number
