"""The communicators of one MPI world or group, and how its ranks leave it.

A rank that leaves answers every later collective with a LEAVE header, so the collective itself
tells the others. A rank that waits in a receive, or in a collective that not all have reached, is
told by a *notice*: a message that the leaving rank sends if the others do not leave soon after it.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.communication.contract.backoff import yield_processor
from mpishard.communication.contract.call import Call, Kind
from mpishard.communication.contract.reduction import TreeReducer
from mpishard.communication.mpi.headers import (
    Exchange,
    Headers,
    MessageExchange,
    Posted,
    PostedMessage,
    RingExchange,
    make_row,
)
from mpishard.communication.mpi.messages import (
    Channel,
    Message,
    MessageChannel,
    Pending,
    post_bytes,
)
from mpishard.communication.mpi.node_memory import RowChannel
from mpishard.communication.mpi.ulfm import is_loss
from mpishard.errors import CommunicationError

__all__ = ["CUT_OFF", "Group"]

_ABANDON_SECONDS = 1.0
_abandoned: list[Group] = []
"""Groups whose arrays MPI may still read and write."""

CUT_OFF = -1
"""In a notice, instead of a last collective: the rank was cut off in one, and the world ends."""

_NOTICE_TAG = 2 * settings.MAXIMUM_TAG + 2  # 2 * MAXIMUM_TAG + 1 is the last of messages' data


class Group:
    """What the ranks of one world communicate through.

    MPI asks that all ranks post the collectives of one communicator in one order. Data can only be
    posted when the headers have come, and that time differs from rank to rank. So data have a
    communicator of their own, and each collective takes a `turn` there, in the order of issue.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm, data : mpi4py.MPI.Intracomm
        Communicators that belong to this group alone. ``comm`` carries messages, and headers if
        there are no rings; ``data`` the data of collectives.
    reducer : TreeReducer
        Combines contributions.
    rings : RingExchange, optional
        The exchange of headers, if the ranks share memory.
    rows : tuple of (Array, list of int), optional
        The memory for data of a group with rings, and the pair of rows of each rank.
    """

    def __init__(
        self,
        mpi: Any,
        comm: Any,
        data: Any,
        reducer: TreeReducer,
        rings: RingExchange | None = None,
        rows: tuple[Any, list[int]] | None = None,
    ) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self.data = data
        self.in_flight: set[Pending] = set()
        self.exchange: Exchange = rings or MessageExchange(mpi, comm, self.data, self.in_flight)
        self.messages = MessageChannel(mpi, self.data, self.in_flight, reducer)
        """The channel of data on GPUs, and of all data if there are no rows."""
        self.channel: Channel = self.messages
        """The channel of data."""
        if rings is not None and rows is not None:
            self.channel = RowChannel(*rows, self.rank, reducer, rings.fence)
        self.sequence = 0
        self.broken: CommunicationError | None = None
        """Why nothing can be called here any more."""
        self.is_cut_off = False
        """Whether a rank was cut off in a collective, as all are told: it answers no LEAVE."""
        self._answered_leave = False
        self.unanswered: Call | None = None
        """The first collective that others left without, and that nobody here waited for."""
        self._leaving: Posted | PostedMessage | None = None
        self._leave_call: Call | None = None
        self._left = False
        self._notified = 0  # ranks, the first ones
        self._noticed: dict[int, int] = {}
        # Messages that this rank sent to each, and took from each: user's and notices.
        self.sent = np.zeros(self.world_size, np.int64)
        self.taken = np.zeros(self.world_size, np.int64)
        self._sent_here = np.zeros(self.world_size, np.int64)
        self._settling: Any = None

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept from one collective to the next."""
        shared = self.channel.scratch_bytes if self.channel is not self.messages else 0
        return self.messages.scratch_bytes + shared

    def keep(self, request: Any, *arrays: object) -> Pending:
        """A request under way, which reads and writes ``arrays``."""
        return Pending(request, self.in_flight, *arrays)

    # ----------------------------------------------------------------------------------- leaving

    @property
    def is_leaving(self) -> bool:
        """Whether this rank has left, or waits for the others to."""
        return self._left or self._leaving is not None

    @property
    def all_left(self) -> bool:
        """Whether every rank left in good order: the communicators are of no more use."""
        if not self._left or self._leave_call is None or self._leaving is None:
            return False
        calls = Headers(self._leaving.rows, self._leave_call, self.rank).calls
        return all(call.kind is Kind.LEAVE for call in calls)

    def note_leave(self, own: Call) -> None:
        """Take note of a LEAVE of another rank that the header of ``own`` met."""
        self._answered_leave = True
        if self.is_leaving:
            self.unanswered, self._leave_call = own, None

    def leave(self) -> None:
        """Answer the others' next collective with LEAVE. Does not wait. Idempotent."""
        if self.is_leaving:
            return
        if self.is_cut_off or self._answered_leave or (self.broken and self.exchange.unread):
            # The LEAVE of the rank that left first met a header of ours: nobody waits for another.
            self._left = True
            return
        call = self._leave_call = Call.describe(self.sequence + 1, Kind.LEAVE, None)
        self._leaving = self.exchange.post(make_row(call), call)
        del self.exchange.unread[self._leaving]

    def has_left(self) -> bool:
        """Whether every other rank has answered the LEAVE. Never blocks."""
        if not self._left and self._leaving is not None:
            self._left = (
                self._leaving.test() or self._answered_leave or self._met_leave() or self.is_cut_off
            )
        return self._left

    def _met_leave(self) -> bool:
        """Whether a header that nobody here waits for met a LEAVE: then ours meets none."""
        for posted, own in self.exchange.unread.items():
            if posted.test() and Headers(posted.rows, own, self.rank).has_leave:
                self.unanswered, self._leave_call = own, None
                return True
        return False

    def notify(self) -> None:
        """Tell the others, wherever they wait, that this rank has left. Idempotent."""
        if not self._left and self._leaving is not None:
            self.send_notice(self.sequence)

    def send_notice(self, last: int) -> None:
        """Tell the others the number of this rank's ``last`` collective, or `CUT_OFF`. Once."""
        notice = np.array([last], np.int64)
        # An exception may strike here, too; then the next call goes on from there.
        for rank in range(self._notified, self.world_size):
            if rank != self.rank:
                request = self.comm.Isend([notice, 1, self.mpi.INT64_T], rank, _NOTICE_TAG)
                Message(request, self.in_flight, notice)
                self.sent[rank] += 1
            self._notified = rank + 1

    def departures(self) -> dict[int, int]:
        """The ranks that sent a notice, each with its last collective, or `CUT_OFF`."""
        status = self.mpi.Status()
        while self.comm.Iprobe(self.mpi.ANY_SOURCE, _NOTICE_TAG, status):
            notice = np.empty(1, np.int64)
            rank = status.Get_source()
            self.comm.Recv([notice, 1, self.mpi.INT64_T], rank, _NOTICE_TAG)
            self.taken[rank] += 1
            self._noticed[rank] = int(notice[0])
            self.is_cut_off |= int(notice[0]) == CUT_OFF
        return self._noticed

    def stir(self) -> None:
        """Let MPI go on with requests under way: waiting at a ring does not call it."""
        if self.in_flight:
            self.comm.Iprobe(self.mpi.ANY_SOURCE, _NOTICE_TAG)

    def free(self) -> bool:
        """Give the communicators back to MPI; False if something is still under way.

        Those of a group that not `all_left` in good order stay: they may still be in use elsewhere.
        """
        if not self.all_left:
            return True
        if not self.is_drained():
            return False
        self.exchange.close()
        for request in tuple(self.in_flight):
            request.test()
        if self.in_flight:
            return False
        for comm in (self.data, self.comm):
            comm.Free()
        return True

    def learns_of_cut_off(self) -> bool:
        """Read the notices; return whether a rank was cut off in a collective."""
        self.departures()
        return self.is_cut_off

    def keeps_arrays(self) -> bool:
        """Whether a rank was cut off here: then keep what MPI may still read and write."""
        if self.is_cut_off and self.in_flight:
            _abandoned.append(self)
        return self.is_cut_off

    def abandon(self) -> None:
        """Give up communicators of which not all ranks are left. Ranks that wait there are told.

        They are freed when MPI lets go of all that was under way.
        """
        for comm in (self.data, self.comm):
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
        for comm in (self.data, self.comm):
            comm.Free()

    def is_drained(self) -> bool:
        """Whether all that was sent to this rank has come. Takes what nobody did. Never blocks.

        A message that is not received when a communicator is freed meets the next one that MPI
        gives the same identity: a rank of another world would be told that this one's have left,
        or be given a message of this one. True if not `all_left`: that communicator stays.
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
