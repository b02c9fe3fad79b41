"""The communicators of one MPI world or group, and the exit of its ranks.

A rank that leaves sends a *notice* with the number of its last collective to each other rank. Ranks
look for notices while they wait. A rank that leaves waits for the notices of all others. The notice
of a rank that was cut off in a collective says so.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from mpishard.base import Array, settings
from mpishard.communication.contract.backoff import yield_processor
from mpishard.communication.contract.reduction import TreeReducer
from mpishard.communication.contract.work import Steps, Work
from mpishard.communication.mpi.headers import MessageExchange, RingExchange
from mpishard.communication.mpi.messages import (
    MessageChannel,
    MessageRequest,
    Messages,
    Pending,
    post_bytes,
)
from mpishard.communication.mpi.node_memory import RowChannel, share_memory
from mpishard.communication.mpi.ulfm import is_loss

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request

Channel = MessageChannel | RowChannel
"""The channel of the data of collectives; `MessageChannel` describes the methods of both."""

_ABANDON_SECONDS = 1.0
_abandoned: list[Group] = []
"""Groups whose arrays MPI may still read and write."""

CUT_OFF = -1
"""The value in a notice of a rank that was cut off in a collective, which ends the world."""

_NOTICE_TAG = 2 * settings.MAXIMUM_TAG + 2  # behind the tags of messages and of their data


def share_group_memory(
    mpi: ModuleType, comm: Comm, in_flight: set[Pending], nodes: Sequence[int]
) -> Steps:
    """Return the memory of a group for headers and data; None if it shares none. Collective.

    ``nodes`` has the node of each rank of ``comm``. The other parameters are those of
    `share_memory`.
    """
    ranks = len(nodes)
    if ranks == 1 or len(set(nodes)) > 1 or not RingExchange.is_possible():
        return None
    # One allocation for both, because each takes a file descriptor of every rank.
    nbytes = RowChannel.nbytes(ranks) + RingExchange.nbytes(ranks)
    return (yield from share_memory(mpi, comm, in_flight, 0, nbytes))


class Group:
    """The communicators and channels of the ranks of one world.

    MPI requires that all ranks post the collectives of one communicator in one order. A rank posts
    data when the headers have come, and that time differs between ranks. So data have a
    communicator of their own, where collectives take turns in the order of issue
    (`Collectives.turn`).

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm, data : mpi4py.MPI.Intracomm
        Communicators that belong to this group alone. ``comm`` carries messages, and headers if
        the ranks share no memory. ``data`` carries the data of collectives.
    reducer : TreeReducer
        Combines contributions.
    memory : Array or None
        The memory from `share_group_memory`.
    """

    def __init__(
        self,
        mpi: ModuleType,
        comm: Comm,
        data: Comm,
        reducer: TreeReducer,
        memory: Array | None,
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
        self.pending: Collection[Work] = ()
        """The collectives under way. They keep the backend, which the user may have dropped."""
        self.sequence = 0
        """The number of this rank's last collective, which its notice tells the others."""
        self.is_leaving = False
        """Whether this rank has left, or waits until the others leave."""
        self.is_cut_off = False
        """Whether a rank was cut off in a collective, according to its notice."""
        self._notified = 0  # number of ranks that were sent a notice, in order from rank 0
        # The last collective of each rank that sent a notice, and its number of messages to this
        # rank.
        self._notices: dict[int, tuple[int, int]] = {}

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept from one collective to the next."""
        shared = self.channel.scratch_bytes if self.channel is not self.messages else 0
        return self.messages.scratch_bytes + shared

    def keep(self, request: Request, *arrays: object) -> Pending:
        """Return a request under way, which keeps the ``arrays`` that it reads and writes."""
        return Pending([request], self.in_flight, *arrays)

    # ----------------------------------------------------------------------------------- leaving

    def leave(self) -> None:
        """Notify the others that this rank has left, without waiting. Idempotent."""
        self.is_leaving = True
        self.send_notices(self.sequence)

    def has_left(self) -> bool:
        """Return whether all ranks have left, or one was cut off. Never block."""
        if not self.is_leaving:
            return False
        return len(self.departures()) == self.world_size - 1 or self.is_cut_off

    def send_notices(self, last: int) -> None:
        """Send the others, once, the number of this rank's ``last`` collective, or `CUT_OFF`."""
        # If an exception interrupts this loop, the next call goes on with the remaining ranks.
        for rank in range(self._notified, self.world_size):
            if rank != self.rank:
                notice = np.array([last, self.mail.sent[rank]], np.int64)
                request = self.comm.Isend([notice, 2, self.mpi.INT64_T], rank, _NOTICE_TAG)
                MessageRequest([request], self.in_flight, notice)
            self._notified = rank + 1

    def departures(self) -> dict[int, int]:
        """Return the last collective, or `CUT_OFF`, of each rank that sent a notice, by rank."""
        status = self.mpi.Status()
        while self.comm.Iprobe(self.mpi.ANY_SOURCE, _NOTICE_TAG, status):
            notice = np.empty(2, np.int64)
            rank = status.Get_source()
            self.comm.Recv([notice, 2, self.mpi.INT64_T], rank, _NOTICE_TAG)
            last, sent = notice.tolist()
            self._notices[rank] = last, sent
            self.is_cut_off |= last == CUT_OFF
        return {rank: last for rank, (last, _) in self._notices.items()}

    def progress_mpi(self) -> None:
        """Let MPI progress the requests under way. A wait at a ring makes no call of MPI."""
        if self.in_flight:
            self.comm.Iprobe(self.mpi.ANY_SOURCE, _NOTICE_TAG)

    def free(self) -> bool:
        """Free the communicators; return False if something is still under way.

        If the ranks did not all leave after the same collective, the communicators are not freed:
        other ranks may still use them.
        """
        # A message left there could be delivered to a later communicator of the same identity.
        # Other ranks may wait for this one in a collective that it has issued and not waited for.
        if not all(work.done for work in self.pending) or not self.is_drained():
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
        """Return whether a rank was cut off; if so, keep the arrays that MPI may still use."""
        if self.is_cut_off and self.in_flight:
            _abandoned.append(self)
        return self.is_cut_off

    def abandon(self) -> None:
        """Revoke communicators that have lost a rank, which ends the waits of other ranks there.

        They are freed if all requests end in time. Otherwise the group is kept for ever.
        """
        for comm in (self.data, self.comm):
            comm.Revoke()
        deadline = time.monotonic() + _ABANDON_SECONDS
        while self.in_flight and time.monotonic() < deadline:
            for request in tuple(self.in_flight):
                try:
                    request.test()
                except self.mpi.Exception as error:  # the other requests must still be tested
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
        """Receive the remaining messages to this rank; return whether all have arrived.

        MPI may give a later communicator the identity of a freed one, and would deliver a message
        that was not received to a rank of another world. If the ranks did not leave in good order
        the result is True, because the communicator is not freed. It never blocks.
        """
        if not self._is_in_good_order():
            return True
        status, byte = self.mpi.Status(), self.mpi.BYTE
        while message := self.comm.Improbe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG, status):
            # Get_elements, because a count of a long message may overflow a C int.
            buffer = np.empty(status.Get_elements(byte), np.uint8)
            request = post_bytes(self.mpi, message.Irecv, buffer)
            MessageRequest([request], self.in_flight, buffer)
            self.mail.taken[status.Get_source()] += 1
        if any(self.mail.taken[rank] != sent for rank, (_, sent) in self._notices.items()):
            return False
        messages = [request for request in self.in_flight if isinstance(request, MessageRequest)]
        return sum(not request.test() for request in messages) == 0
