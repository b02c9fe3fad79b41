"""The communicators of one MPI world or group, and how its ranks leave it.

A rank that leaves sends a *notice* to each other rank: the number of its last collective. A rank
that waits for it there, or in a receive, looks for notices; a rank that leaves waits for those of
all others. A rank that was cut off in a collective says so in its notice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.arrays import Array
from mpishard.communication.contract.backoff import yield_processor
from mpishard.communication.contract.reduction import TreeReducer
from mpishard.communication.contract.work import Steps
from mpishard.communication.mpi.headers import MessageExchange, RingExchange
from mpishard.communication.mpi.messages import (
    Message,
    MessageChannel,
    Messages,
    Pending,
    post_bytes,
)
from mpishard.communication.mpi.node_memory import RowChannel, share_memory
from mpishard.communication.mpi.ulfm import is_loss

Channel = MessageChannel | RowChannel
"""The channel of the data of collectives; `MessageChannel` describes the methods of both."""

_ABANDON_SECONDS = 1.0
_abandoned: list[Group] = []
"""Groups whose arrays MPI may still read and write."""

CUT_OFF = -1
"""In a notice, instead of a last collective: the rank was cut off in one, and the world ends."""

_NOTICE_TAG = 2 * settings.MAXIMUM_TAG + 2  # 2 * MAXIMUM_TAG + 1 is the last of messages' data


def share_group_memory(mpi: Any, comm: Any, in_flight: set[Pending], nodes: Sequence[int]) -> Steps:
    """The memory of a group for headers and data; None if its ranks share none. Collective.

    ``nodes`` holds the node of each rank of ``comm``; the rest is as in `share_memory`.
    """
    ranks = len(nodes)
    if ranks == 1 or len(set(nodes)) > 1 or not RingExchange.is_possible():
        return None
    nbytes = RowChannel.nbytes(ranks) + RingExchange.nbytes(ranks)
    return (yield from share_memory(mpi, comm, in_flight, 0, nbytes))


class Group:
    """The communicators and channels of the ranks of one world.

    MPI asks that all ranks post the collectives of one communicator in one order. Data can only be
    posted when the headers have come, and that time differs from rank to rank. So data have a
    communicator of their own, and each collective takes a `turn` there, in the order of issue.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm, data : mpi4py.MPI.Intracomm
        Communicators that belong to this group alone. ``comm`` carries messages, and headers if
        the ranks share no memory; ``data`` the data of collectives.
    reducer : TreeReducer
        Combines contributions.
    memory : Array or None
        What `share_group_memory` returned.
    """

    def __init__(
        self, mpi: Any, comm: Any, data: Any, reducer: TreeReducer, memory: Array | None
    ) -> None:
        self.mpi = mpi
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()
        self.data = data
        self.in_flight: set[Pending] = set()
        self.mail = Messages(mpi, comm, self.in_flight)
        """The user's messages."""
        self.messages = MessageChannel(mpi, data, self.in_flight, reducer)
        """The channel of data on GPUs, and of all data if the ranks share no memory."""
        self.channel: Channel = self.messages
        """The channel of data."""
        self.exchange: MessageExchange | RingExchange
        if memory is None:
            self.exchange = MessageExchange(mpi, comm, data, self.in_flight)
        else:
            place, end = (self.rank, self.world_size), RowChannel.nbytes(self.world_size)
            self.exchange = RingExchange(memory[end:], *place)
            self.channel = RowChannel(memory[:end], *place, reducer, self.exchange.fence)
        self.sequence = 0
        self.is_leaving = False
        """Whether this rank has left, or waits for the others to."""
        self.is_cut_off = False
        """Whether a rank was cut off in a collective, as all are told: it answers no more."""
        self._notified = 0  # ranks, the first ones
        # Of each rank that sent a notice, its last collective and its messages to this rank.
        self._notices: dict[int, tuple[int, int]] = {}

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept from one collective to the next."""
        shared = self.channel.scratch_bytes if self.channel is not self.messages else 0
        return self.messages.scratch_bytes + shared

    def keep(self, request: Any, *arrays: object) -> Pending:
        """A request under way, which reads and writes ``arrays``."""
        return Pending([request], self.in_flight, *arrays)

    # ----------------------------------------------------------------------------------- leaving

    def leave(self) -> None:
        """Notify the others that this rank has left. Do not wait. Idempotent."""
        self.is_leaving = True
        self.send_notices(self.sequence)

    def has_left(self) -> bool:
        """Return whether this rank and every other rank have left. Never block."""
        if not self.is_leaving:
            return False
        return len(self.departures()) == self.world_size - 1 or self.is_cut_off

    def send_notices(self, last: int) -> None:
        """Send the others the number of this rank's ``last`` collective, or `CUT_OFF`. Once."""
        # An exception may strike here, too; then the next call goes on from there.
        for rank in range(self._notified, self.world_size):
            if rank != self.rank:
                notice = np.array([last, self.mail.sent[rank]], np.int64)
                request = self.comm.Isend([notice, 2, self.mpi.INT64_T], rank, _NOTICE_TAG)
                Message([request], self.in_flight, notice)
            self._notified = rank + 1

    def departures(self) -> dict[int, int]:
        """The ranks that sent a notice, each with its last collective, or `CUT_OFF`."""
        status = self.mpi.Status()
        while self.comm.Iprobe(self.mpi.ANY_SOURCE, _NOTICE_TAG, status):
            notice = np.empty(2, np.int64)
            rank = status.Get_source()
            self.comm.Recv([notice, 2, self.mpi.INT64_T], rank, _NOTICE_TAG)
            last, sent = notice.tolist()
            self._notices[rank] = last, sent
            self.is_cut_off |= last == CUT_OFF
        return {rank: last for rank, (last, _) in self._notices.items()}

    def stir(self) -> None:
        """Let MPI progress the requests under way: waiting at a ring does not call it."""
        if self.in_flight:
            self.comm.Iprobe(self.mpi.ANY_SOURCE, _NOTICE_TAG)

    def free(self) -> bool:
        """Give the communicators back to MPI; False if something is still under way.

        Those of a group that not all ranks left after the same collective stay: they may still be
        in use elsewhere.
        """
        if not self.is_drained():
            return False
        if self._is_in_good_order():
            for request in tuple(self.in_flight):
                request.test()
            if self.in_flight:
                return False
            for comm in (self.data, self.comm):
                comm.Free()
        return True

    def keeps_arrays(self) -> bool:
        """True if a rank was cut off; then arrays that MPI may still use must be kept."""
        if self.is_cut_off and self.in_flight:
            _abandoned.append(self)
        return self.is_cut_off

    def abandon(self) -> None:
        """Revoke communicators that have lost a rank. Ranks that wait there are notified.

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

    def _is_in_good_order(self) -> bool:
        """Return whether every rank has left after the same collective."""
        lasts = [last for last, _ in self._notices.values()]
        return self.is_leaving and lasts == [self.sequence] * (self.world_size - 1)

    def is_drained(self) -> bool:
        """Return whether all messages to this rank have arrived; receive the rest. Never block.

        A message that is not received when a communicator is freed meets the next one that MPI
        gives the same identity: a rank of another world would be given a message of this one.
        True if the ranks did not leave in good order: that communicator stays.
        """
        if not self._is_in_good_order():
            return True
        status, byte = self.mpi.Status(), self.mpi.BYTE
        while message := self.comm.Improbe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG, status):
            buffer = np.empty(status.Get_elements(byte), np.uint8)  # where a count may overflow
            request = post_bytes(self.mpi, message.Irecv, buffer)
            Message([request], self.in_flight, buffer)
            self.mail.taken[status.Get_source()] += 1
        if any(self.mail.taken[rank] != sent for rank, (_, sent) in self._notices.items()):
            return False
        messages = [request for request in self.in_flight if isinstance(request, Message)]
        return sum(not request.test() for request in messages) == 0
