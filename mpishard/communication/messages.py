"""Point-to-point messages over MPI: in order for each (pair of ranks, tag), sent without waiting.

A message is a head (dtype, shape) with the data behind it where they are few, else followed by a
second MPI message with the data. Both carry the user's tag, and MPI keeps their order.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.arrays import Array, is_device_array, to_host
from mpishard.communication.call import DTYPES
from mpishard.communication.group import Group
from mpishard.communication.lanes import Pending

__all__ = ["Incoming", "Messages"]

_HEAD_LENGTH = 3 + settings.MAXIMUM_DIMS
_HEAD_BYTES = 8 * _HEAD_LENGTH
_TOGETHER_BYTES = 4096


class Incoming:
    """A message whose head has come, and its data if they came with it."""

    def __init__(self, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        head = buffer[:_HEAD_BYTES].view(np.int64).tolist()
        self.dtype = DTYPES[head[0]]
        self.on_device = bool(head[1])
        self.shape = tuple(head[3 : 3 + head[2]])
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.nbytes = self.size * self.dtype.itemsize
        self.data: Array | None = None
        if self.nbytes <= _TOGETHER_BYTES:
            self.data = buffer[_HEAD_BYTES:].view(self.dtype).reshape(self.shape).copy()


class Messages:
    """The messages of one rank in one group: those under way, and those not taken yet."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._sent: deque[Pending] = deque()
        self._heads: dict[tuple[int, int], Incoming] = {}

    def send(self, array: Array, destination: int, tag: int) -> None:
        """Send a copy of ``array``; the copy is kept until MPI has taken it."""
        host = to_host(array)
        head = np.zeros(_HEAD_LENGTH, np.int64)
        head[:3] = DTYPES.index(host.dtype), is_device_array(array), host.ndim
        head[3 : 3 + host.ndim] = host.shape
        data = host.reshape(-1).view(np.uint8)
        first = head.view(np.uint8)
        if data.size <= _TOGETHER_BYTES:
            self._post(np.concatenate([first, data]), destination, tag)
        else:
            self._post(first, destination, tag)
            self._post(data.copy() if host is array else data, destination, tag)
        self.reap()

    def _post(self, data: Any, destination: int, tag: int) -> None:
        group = self._group
        request = group.comm.Isend([data, data.size, group.mpi.BYTE], destination, tag)
        self._sent.append(Pending(request, group.in_flight, data))

    def reap(self) -> None:
        """Let go of the copies that MPI has taken."""
        while self._sent and self._sent[0].test():
            self._sent.popleft()

    def poll(self, source: int, tag: int) -> Incoming | None:
        """The next message of ``source``, if its head has come; it stays queued until `take`."""
        if (source, tag) in self._heads:
            return self._heads[source, tag]
        group = self._group
        status = group.mpi.Status()
        message = group.comm.Improbe(source, tag, status)
        if message is None:
            return None
        buffer = np.empty(status.Get_count(group.mpi.BYTE), np.uint8)
        message.Recv([buffer, buffer.size, group.mpi.BYTE])
        incoming = Incoming(buffer)
        self._heads[source, tag] = incoming
        return incoming

    def take(self, source: int, tag: int) -> tuple[Array, Pending | None]:
        """Take the message that `poll` gave: its array, and the request that fills it, if any."""
        incoming = self._heads.pop((source, tag))
        if incoming.data is not None:
            return incoming.data, None
        group = self._group
        array = np.empty(incoming.shape, incoming.dtype)
        data = array.reshape(-1).view(np.uint8)
        request = group.comm.Irecv([data, data.size, group.mpi.BYTE], source, tag)
        return array, Pending(request, group.in_flight, data)
