"""Point-to-point messages over MPI: in order for each (pair of ranks, tag), sent without waiting.

A message is a head (dtype, shape) with the data behind it where they are few, else followed by a
second MPI message with the data, on a tag of its own. MPI keeps the order of each tag, so that the
n-th head with data elsewhere and the n-th of these belong together, whoever posted the memory
that they came into.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.arrays import Array, is_device_array, to_host
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.contract.point_to_point import refuse_other_message
from mpishard.communication.contract.work import Steps, Waitable
from mpishard.communication.mpi.group import Group
from mpishard.communication.mpi.lanes import Expected, Message, Pending, Turn, post_bytes
from mpishard.errors import CommunicationError

__all__ = ["Messages"]

_HEAD_LENGTH = 3 + settings.MAXIMUM_DIMS
_HEAD_BYTES = 8 * _HEAD_LENGTH
_TOGETHER_BYTES = 4096
_DATA_TAGS = settings.MAXIMUM_TAG + 1


class Incoming:
    """A message whose head has come, and its data if they came with it."""

    def __init__(self, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        head = buffer[:_HEAD_BYTES].view(np.int64).tolist()
        self.dtype = DTYPES[head[0]]
        self.on_device = bool(head[1])
        self.shape = tuple(head[3 : 3 + head[2]])
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.data: Array | None = None
        if self.nbytes <= _TOGETHER_BYTES:
            data = buffer[_HEAD_BYTES : _HEAD_BYTES + self.nbytes]
            self.data = data.view(self.dtype).reshape(self.shape).copy()


class Stream:
    """What one rank sends this one with one tag."""

    __slots__ = ("arrived", "data", "heads", "turns")

    def __init__(self) -> None:
        self.turns: deque[Turn] = deque()  # receives that want a message, oldest first
        self.heads: deque[Expected] = deque()  # posted ahead, in MPI's order
        self.data: deque[Expected] = deque()  # the same, of data that come by themselves
        self.arrived: deque[Incoming] = deque()  # read, and taken by nobody yet

    @property
    def is_idle(self) -> bool:
        """Whether nobody wants a message, and none is under way or waits to be taken."""
        return not (self.turns or self.heads or self.data or self.arrived)


class Messages:
    """The messages of one rank in one group: those under way, and those not taken yet.

    Parameters
    ----------
    group : Group
        What they are sent through.
    world_ranks : sequence of int
        What errors call its ranks: their numbers in the root world.
    """

    def __init__(self, group: Group, world_ranks: Sequence[int]) -> None:
        self._group = group
        # Open MPI 5 writes past the end of memory that is too short for a large message. There
        # memory is posted when the head has told the size.
        self._posts_ahead = "Open MPI" not in group.mpi.Get_library_version()
        self._world_ranks = world_ranks
        self._sent: deque[Pending] = deque()
        self._streams: dict[tuple[int, int], Stream] = {}

    # ----------------------------------------------------------------------------------- sending

    def send(self, array: Array, destination: int, tag: int) -> None:
        """Send a copy of ``array``; the copy is kept until MPI has taken it."""
        is_long = array.nbytes > _TOGETHER_BYTES
        host = array.copy() if is_long and not is_device_array(array) else array
        self._sent.extend(self.post(host, destination, tag))
        self.reap()

    def post(self, array: Array, destination: int, tag: int) -> list[Pending]:
        """Send ``array``, which must stay as it is until these have happened."""
        host = to_host(array)
        head = np.zeros(_HEAD_LENGTH, np.int64)
        head[:3] = DTYPES.index(host.dtype), is_device_array(array), host.ndim
        head[3 : 3 + host.ndim] = host.shape
        data = host.reshape(-1).view(np.uint8)
        first = head.view(np.uint8)
        if data.size <= _TOGETHER_BYTES:
            return [self._isend(np.concatenate([first, data]), destination, tag)]
        return [
            self._isend(first, destination, tag),
            self._isend(data, destination, _DATA_TAGS + tag),
        ]

    def _isend(self, data: Any, destination: int, tag: int) -> Pending:
        group = self._group
        request = post_bytes(group.mpi, group.comm.Isend, data, destination, tag)
        group.sent[destination] += 1
        return Message(request, group.in_flight, data)

    def reap(self) -> None:
        """Let go of the copies that MPI has taken."""
        while self._sent and self._sent[0].test():
            self._sent.popleft()

    # --------------------------------------------------------------------------------- receiving

    def receive(self, source: int, count: int, tag: int, dtype: np.dtype[Any] | None) -> Steps:
        """Take the next message that no earlier receive takes: its array, and its `on_device`."""
        stream = self._streams.setdefault((source, tag), Stream())
        try:
            with Turn(None, stream.turns) as turn:
                if dtype is not None:
                    self._expect(stream, source, tag, count * dtype.itemsize)
                yield turn
                incoming = yield from self._next(stream, source, tag)
                stream.arrived.appendleft(incoming)
                refuse_other_message(
                    incoming.size, incoming.dtype, count, dtype, self._world_ranks[source], tag
                )
                array = yield from self._data(stream, incoming, source, tag)
                stream.arrived.popleft()
        finally:
            if stream.is_idle:
                self._streams.pop((source, tag), None)
        return array, incoming.on_device

    def _expect(self, stream: Stream, source: int, tag: int, nbytes: int) -> None:
        """Post the memory for one more message, so that MPI need not keep it for us."""
        head = np.empty(_HEAD_BYTES + _TOGETHER_BYTES, np.uint8)
        stream.heads.append(self._irecv(head, source, tag))
        if self._posts_ahead and nbytes > _TOGETHER_BYTES:
            self._expect_data(stream, source, tag, nbytes)

    def _expect_data(self, stream: Stream, source: int, tag: int, nbytes: int) -> None:
        buffer = np.empty(nbytes, np.uint8)
        stream.data.append(self._irecv(buffer, source, _DATA_TAGS + tag))

    def _irecv(self, buffer: Any, source: int, tag: int) -> Expected:
        group = self._group
        request = post_bytes(group.mpi, group.comm.Irecv, buffer, source, tag)
        return Expected(
            group.mpi, request, group.in_flight, group.expected, buffer, group.taken, source
        )

    def _next(self, stream: Stream, source: int, tag: int) -> Steps:
        """The head of the next message, out of the stream."""
        if stream.arrived:
            return stream.arrived.popleft()
        if stream.heads:
            yield stream.heads[0]
            incoming = Incoming(stream.heads.popleft().buffer)
        else:
            probe = _Probe(self._group, source, tag)
            yield probe
            incoming = Incoming(probe.read())
        # Its data are the next: a receive that is posted later must not get them.
        if incoming.data is None and not stream.data:
            self._expect_data(stream, source, tag, incoming.nbytes)
        return incoming

    def _data(self, stream: Stream, incoming: Incoming, source: int, tag: int) -> Steps:
        """The array of a message."""
        if incoming.data is not None:
            return incoming.data
        yield stream.data[0]
        receive = stream.data.popleft()
        if receive.is_lost:
            stream.arrived.popleft()
            raise CommunicationError(
                f"a message with tag {tag} from rank {self._world_ranks[source]} has "
                f"{incoming.nbytes} bytes, and came where {receive.buffer.size} were expected; it "
                "is lost"
            )
        return receive.buffer[: incoming.nbytes].view(incoming.dtype).reshape(incoming.shape)


class _Probe(Waitable):
    """A message that nothing was posted for."""

    __slots__ = ("_group", "_message", "_source", "_status", "_tag")

    def __init__(self, group: Group, source: int, tag: int) -> None:
        self._group = group
        self._source = source
        self._tag = tag
        self._status = group.mpi.Status()
        self._message: Any = None

    def test(self) -> bool:
        if self._message is None:
            self._message = self._group.comm.Improbe(self._source, self._tag, self._status)
        return self._message is not None

    def read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of the message."""
        byte = self._group.mpi.BYTE
        buffer = np.empty(self._status.Get_count(byte), np.uint8)
        self._message.Recv([buffer, buffer.size, byte])
        self._group.taken[self._source] += 1
        return buffer
