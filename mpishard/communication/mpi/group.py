"""The communicators of one MPI world or sub-world, and how its ranks leave it.

A rank that leaves answers every later collective with a LEAVE header, so that the others are told
by the collective itself. A rank that waits in a receive, or in a collective that not all have
reached, is told by a *notice*: a message that the leaving rank sends when the others do not leave
soon after it.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.communication.contract.backoff import yield_processor
from mpishard.communication.contract.call import Call, Kind
from mpishard.communication.contract.work import Waitable
from mpishard.communication.mpi.bounce import BounceBuffers
from mpishard.communication.mpi.headers import ROW_BYTES, Headers, make_row
from mpishard.communication.mpi.lanes import (
    Expected,
    Lane,
    Message,
    Pending,
    PendingAll,
    post_bytes,
)
from mpishard.communication.mpi.rings import Mailbox
from mpishard.communication.mpi.ulfm import is_loss
from mpishard.errors import CommunicationError

__all__ = ["Group"]

_ABANDON_SECONDS = 1.0
_abandoned: list[Group] = []
"""Those whose arrays MPI may still read and write."""

_HEADER_TAG = 1  # on a lane, where data have 0
_NOTICE_TAG = 2 * settings.MAXIMUM_TAG + 2  # 2 * MAXIMUM_TAG + 1 is the last of messages' data


class Group:
    """What the ranks of one world talk through.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : mpi4py.MPI.Intracomm
        A communicator that belongs to this group alone. It carries point to point, and headers
        where there is no mailbox; those of two ranks go on a lane.
    mailbox : Mailbox, optional
        What carries headers, where the ranks share memory.
    """

    def __init__(self, mpi: Any, comm: Any, mailbox: Mailbox | None = None) -> None:
        self.mpi = mpi
        self.comm = comm
        self.mailbox = mailbox
        self.node: Any = None
        """The ranks of this one's node, once memory was shared among them."""
        self.bounce: BounceBuffers | None = None
        """What private arrays pass through, once there were some."""
        self.has_no_bounce = False
        """Whether there was no memory for it."""
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self.lanes = tuple(Lane(c) for c in _duplicates(comm, 2))
        self._elements = {
            1: mpi.BYTE, 2: mpi.INT16_T, 4: mpi.INT32_T, 8: mpi.INT64_T,
            16: mpi.C_DOUBLE_COMPLEX,
        }  # fmt: skip
        self.in_flight: set[Pending] = set()
        self.expected: set[Expected] = set()
        """Receives that were posted ahead, until their message has come."""
        self.sequence = 0
        self.broken: CommunicationError | None = None
        """Why nothing can be called here any more."""
        self._kept: list[object] = []
        self._unread: list[tuple[Waitable, bytearray, Call]] = []  # headers under way
        self._answered_leave = False
        self.unanswered: Call | None = None
        """The first collective that others left without, and that nobody here waited for."""
        self._leaving: Waitable | None = None
        self._begun: tuple[int, Waitable, bytearray] | None = None
        self._leave_call: Call | None = None
        self._leave_rows = bytearray()
        self._left = False
        self._notified = False
        self._noticed: dict[int, int] = {}
        # Messages that this rank sent to each, and took from each: user's and notices.
        self.sent = np.zeros(self.world_size, np.int64)
        self.taken = np.zeros(self.world_size, np.int64)
        self._sent_here = np.zeros(self.world_size, np.int64)
        self._settling: Any = None

    def element(self, itemsize: int) -> Any:
        """An MPI type of ``itemsize`` bytes. What the bytes mean is nobody's business here."""
        return self._elements[itemsize]

    # ----------------------------------------------------------------------------------- headers

    def post_header(self, row: bytearray, own: Call) -> tuple[Waitable, bytearray]:
        """Send the header of ``own``; the rows are complete when the request is."""
        if self.has_begun(own):
            assert self._begun is not None
            _, posted, rows = self._begun
        else:
            posted, rows = self._post_row(row)
        self._begun = None
        self.expect(posted, rows, own)
        return posted, rows

    def expect(self, posted: Waitable, rows: bytearray, own: Call) -> None:
        """Take note of headers under way, which `read_headers` will be asked for."""
        self._unread.append((posted, rows, own))

    def _post_row(self, row: bytearray) -> tuple[Waitable, bytearray]:
        if self.mailbox is not None:
            letter = self.mailbox.post(row)
            return letter, letter.rows
        if self.world_size == 2:
            requests, rows = self.swap_headers(row)
            return PendingAll(self.mpi, requests, self.in_flight, row, rows, tries=1), rows
        rows = bytearray(self.world_size * ROW_BYTES)
        kind = self.mpi.BYTE
        request = self.comm.Iallgather([row, ROW_BYTES, kind], [rows, ROW_BYTES, kind])
        return Pending(request, self.in_flight, row, rows), rows

    def swap_headers(self, row: bytes | bytearray) -> tuple[list[Any], bytearray]:
        """Send the ``row`` of one of two ranks: the requests, and the rows as they will be.

        A library's nonblocking collective takes three times as long as its messages.
        """
        comm, kind, other = self.lanes[0].comm, self.mpi.BYTE, 1 - self.rank
        sent = comm.Isend([row, ROW_BYTES, kind], other, _HEADER_TAG)
        rows = bytearray(2 * ROW_BYTES)
        rows[self.rank * ROW_BYTES : (1 + self.rank) * ROW_BYTES] = row
        theirs = memoryview(rows)[other * ROW_BYTES : (1 + other) * ROW_BYTES]
        return [sent, comm.Irecv([theirs, ROW_BYTES, kind], other, _HEADER_TAG)], rows

    def take_up(self, own: Call, posted: Waitable, rows: bytearray) -> None:
        """Let the `post_header` of ``own`` find that its header was posted."""
        self._begun = own.sequence, posted, rows

    def has_begun(self, own: Call) -> bool:
        """Whether the header of ``own`` was posted, and is to be taken up."""
        return self._begun is not None and self._begun[0] == own.sequence

    def break_off(self, error: CommunicationError, *keep: object) -> None:
        """Refuse with ``error`` what is called from now on; MPI may use what is to be kept."""
        self.broken = error
        self._kept.extend(keep)

    def read_headers(self, rows: bytearray, own: Call) -> Headers:
        """The headers that have come."""
        self._unread = [unread for unread in self._unread if unread[1] is not rows]
        headers = Headers(rows, own, self.rank)
        if _has_leave(headers):
            self._answered_leave = True
            if self.is_leaving:
                self.unanswered, self._leave_call = own, None
        return headers

    # ----------------------------------------------------------------------------------- leaving

    @property
    def is_leaving(self) -> bool:
        """Whether this rank has left, or waits for the others to."""
        return self._left or self._leaving is not None

    @property
    def all_left(self) -> bool:
        """Whether every rank left in good order: the communicators are of no more use."""
        if not self._left or self._leave_call is None:
            return False
        calls = Headers(self._leave_rows, self._leave_call, self.rank).calls
        return all(call.kind is Kind.LEAVE for call in calls)

    def leave(self) -> None:
        """Answer the others' next collective with LEAVE. Does not wait. Idempotent."""
        if self.is_leaving:
            return
        for receive in tuple(self.expected):
            receive.withdraw()
        if self._answered_leave or (self.broken and self._unread):
            # The LEAVE of the rank that left first met a header of ours: nobody waits for another.
            self._left = True
            return
        call = self._leave_call = Call.describe(self.sequence + 1, Kind.LEAVE, None)
        self._leaving, self._leave_rows = self._post_row(make_row(call, None))

    def has_left(self) -> bool:
        """Whether every other rank has answered the LEAVE. Never blocks."""
        if not self._left and self._leaving is not None:
            self._left = self._leaving.test() or self._answered_leave or self._met_leave()
        return self._left

    def _met_leave(self) -> bool:
        """Whether a header that nobody here waits for met a LEAVE: then ours meets none."""
        for posted, rows, own in self._unread:
            if posted.test() and _has_leave(Headers(rows, own, self.rank)):
                self.unanswered, self._leave_call = own, None
                return True
        return False

    def notify(self) -> None:
        """Tell the others, wherever they wait, that this rank has left. Idempotent."""
        if self._notified or self._left or self._leaving is None:
            return
        self._notified = True
        notice = np.array([self.sequence], np.int64)
        for rank in range(self.world_size):
            if rank != self.rank:
                request = self.comm.Isend([notice, 1, self.mpi.INT64_T], rank, _NOTICE_TAG)
                self.sent[rank] += 1
                Message(request, self.in_flight, notice)

    def departures(self) -> dict[int, int]:
        """The ranks that sent a notice, each with the number of its last collective."""
        status = self.mpi.Status()
        while self.comm.Iprobe(self.mpi.ANY_SOURCE, _NOTICE_TAG, status):
            notice = np.empty(1, np.int64)
            rank = status.Get_source()
            self.comm.Recv([notice, 1, self.mpi.INT64_T], rank, _NOTICE_TAG)
            self.taken[rank] += 1
            self._noticed[rank] = int(notice[0])
        return self._noticed

    def stir(self) -> None:
        """Let MPI go on with what is under way: waiting at a mailbox does not call it."""
        if self.in_flight:
            self.comm.Iprobe(self.mpi.ANY_SOURCE, _NOTICE_TAG)

    def free(self) -> bool:
        """Give the communicators back to MPI; False where something is still under way.

        Those of a group that not `all_left` in good order are nobody's any more, and stay.
        """
        if not self.all_left:
            return True
        if not self.is_drained():
            return False
        if self.mailbox is not None:
            self.mailbox.close()
        for request in tuple(self.in_flight):
            request.test()
        if self.in_flight:
            return False
        for comm in (*(lane.comm for lane in self.lanes), self.node, self.comm):
            if comm is not None:
                comm.Free()
        return True

    def abandon(self) -> None:
        """Give up communicators of which not all ranks are left. Who still waits on them is told.

        They are freed where MPI lets go of all that was under way.
        """
        comms = [*(lane.comm for lane in self.lanes), self.node, self.comm]
        comms = [comm for comm in comms if comm is not None]
        for comm in comms:
            comm.Revoke()
        deadline = time.monotonic() + _ABANDON_SECONDS
        while self.in_flight and time.monotonic() < deadline:
            for request in tuple(self.in_flight):
                try:
                    request.test()
                except self.mpi.Exception as error:  # to be tested until nothing is under way
                    if not is_loss(self.mpi, error):
                        raise
            yield_processor()
        if self.in_flight:
            _abandoned.append(self)
            return
        for comm in comms:
            comm.Free()

    def is_drained(self) -> bool:
        """Whether all that was sent to this rank has come. Takes what nobody did. Never blocks.

        What is not received when a communicator is freed meets the next one that MPI gives the
        same identity: a rank of another world would be told that this one's have left, or be given
        a message of this one. True where not `all_left`: that communicator stays.
        """
        if not self.all_left:
            return True
        if self._settling is None:
            self._settling = self.comm.Ialltoall(self.sent, self._sent_here)
        if not self._settling.Test():
            return False
        self.departures()
        status, byte = self.mpi.Status(), self.mpi.BYTE
        while message := self.comm.Improbe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG, status):
            buffer = np.empty(status.Get_elements(byte), np.uint8)  # where a count may overflow
            request = post_bytes(self.mpi, message.Irecv, buffer)
            Message(request, self.in_flight, buffer)
            self.taken[status.Get_source()] += 1
        if (self.taken != self._sent_here).any():
            return False
        messages = [request for request in self.in_flight if isinstance(request, Message)]
        return sum(not request.test() for request in messages) == 0


def _has_leave(headers: Headers) -> bool:
    return not headers.identical and any(call.kind is Kind.LEAVE for call in headers.calls)


def _duplicates(comm: Any, count: int) -> list[Any]:
    """Duplicates of ``comm``. Collective; waits without holding the processor."""
    pairs = [comm.Idup() for _ in range(count)]
    for _, request in pairs:
        while not request.Test():
            yield_processor()
    return [duplicate for duplicate, _ in pairs]
