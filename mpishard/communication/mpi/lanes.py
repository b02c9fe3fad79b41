"""The order in which ranks post their data, and what they wait for.

MPI asks that all ranks post the nonblocking collectives of one communicator in one order. Data
can only be posted when the headers have come, and when that is differs from rank to rank. So each
phase of data has a communicator of its own, a *lane*, and on a lane every rank posts in the order
in which the collectives were issued: nobody overtakes, and different phases do not wait for each
other.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from mpishard.communication.contract.work import Waitable
from mpishard.communication.mpi.ulfm import is_loss

__all__ = [
    "LARGE_BYTES",
    "Condition",
    "Expected",
    "Lane",
    "Message",
    "Pending",
    "PendingAll",
    "ScratchPool",
    "Turn",
    "post_bytes",
]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

LARGE_BYTES = 1 << 30
"""More than this is too much for one call of a library: lengths and places are C ints."""

_BLOCK_BYTES = 1 << 20
_TRIES = 16


def post_bytes(mpi: Any, post: Callable[..., Any], buffer: Bytes, *where: int) -> Any:
    """The request of ``post``, an ``Isend`` or the like, of all of ``buffer`` as one message.

    What is large goes as one element of a type of that many bytes, made of blocks.
    """
    if buffer.size <= LARGE_BYTES:
        return post([buffer, buffer.size, mpi.BYTE], *where)
    blocks, rest = divmod(buffer.size, _BLOCK_BYTES)
    block = mpi.BYTE.Create_contiguous(_BLOCK_BYTES)
    whole = mpi.Datatype.Create_struct([blocks, rest], [0, blocks * _BLOCK_BYTES],
                                       [block, mpi.BYTE]).Commit()  # fmt: skip
    block.Free()
    request = post([buffer, 1, whole], *where)
    whole.Free()  # MPI keeps it until the message is through
    return request


class Pending(Waitable):
    """An MPI request under way.

    Stands in ``in_flight`` until it is complete, so that what the library still reads and writes
    outlives a collective that nobody waits for.
    """

    __slots__ = ("_in_flight", "_keep", "_request")

    def __init__(self, request: Any, in_flight: set[Pending], *keep: object) -> None:
        self._request = request
        self._in_flight = in_flight
        self._keep = keep
        in_flight.add(self)

    def test(self) -> bool:
        if self._request.Test():
            self._in_flight.discard(self)
            return True
        return False


class PendingAll(Pending):
    """Several MPI requests under way: true when all are complete.

    MPICH moves what a message has of a few pages at each call, and a long one takes many: so
    ``tries`` are made at a time.
    """

    __slots__ = ("_mpi", "_tries")

    def __init__(
        self,
        mpi: Any,
        requests: list[Any],
        in_flight: set[Pending],
        *keep: object,
        tries: int = _TRIES,
    ) -> None:
        super().__init__(requests, in_flight, *keep)
        self._mpi = mpi
        self._tries = tries

    def test(self) -> bool:
        testall, requests = self._mpi.Request.Testall, self._request
        for _ in range(self._tries):
            if testall(requests):
                self._in_flight.discard(self)
                return True
        return False


class Message(Pending):
    """A request of point to point: its other half is posted when the world ends, if not before."""

    __slots__ = ()


class Expected(Message):
    """A receive that was posted before anything came, into ``buffer``.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    request : mpi4py.MPI.Request
        Of the receive.
    in_flight : set of Pending
        As `Pending`.
    expected : set of Expected
        In which it stands, too: what the end of a world withdraws.
    buffer : ndarray
        Where the message goes.
    taken : ndarray
        Counts messages, by sender.
    source : int
        Whose message it is.
    """

    __slots__ = ("_expected", "_mpi", "_source", "_taken", "buffer", "is_lost")

    def __init__(
        self, mpi: Any, request: Any, in_flight: set[Pending], expected: set[Expected],
        buffer: Bytes, taken: np.ndarray[Any, np.dtype[np.int64]], source: int,
    ) -> None:  # fmt: skip
        super().__init__(request, in_flight, buffer)
        self._mpi = mpi
        self._expected = expected
        self._taken = taken
        self._source = source
        self.buffer = buffer
        self.is_lost = False
        """Whether the message was longer than ``buffer``."""
        expected.add(self)

    def test(self) -> bool:
        if self not in self._expected:
            return True
        status = self._mpi.Status()
        try:
            if not self._request.Test(status):
                return False
        except self._mpi.Exception as error:
            if is_loss(self._mpi, error):
                raise
            self.is_lost = True
        self._in_flight.discard(self)
        self._expected.discard(self)
        if not status.Is_cancelled():
            self._taken[self._source] += 1
        return True

    def withdraw(self) -> None:
        """Take the receive back, where nothing has come."""
        self._request.Cancel()
        while not self.test():
            pass


class Condition(Waitable):
    """Anything that can be asked whether it has happened."""

    __slots__ = ("_happened",)

    def __init__(self, happened: Callable[[], bool]) -> None:
        self._happened = happened

    def test(self) -> bool:
        return self._happened()


class Turn(Waitable):
    """One collective's place on a lane: true when all that were issued before have posted.

    Used as a context manager by the collective, which gives the place up when it has posted, or
    when it ends without.
    """

    __slots__ = ("_queue", "comm")

    def __init__(self, comm: Any, queue: deque[Turn]) -> None:
        self.comm = comm
        self._queue = queue
        queue.append(self)

    def test(self) -> bool:
        return self._queue[0] is self

    def release(self) -> None:
        """Let the next collective post. Idempotent."""
        if self in self._queue:
            self._queue.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Lane:
    """A communicator for one phase of data, and the collectives that will post on it."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._queue: deque[Turn] = deque()

    def turn(self) -> Turn:
        """A place behind all that were asked for before."""
        return Turn(self.comm, self._queue)


def _size(buffer: Bytes) -> int:
    return buffer.size


class ScratchPool:
    """Byte buffers that grow and are kept, one for each operation under way.

    Parameters
    ----------
    make : callable
        Makes a buffer of so many bytes.
    """

    def __init__(
        self, make: Callable[[int], Bytes] = lambda nbytes: np.empty(nbytes, np.uint8)
    ) -> None:
        self._free: list[Bytes] = []  # the largest last
        self._make = make

    @property
    def nbytes(self) -> int:
        """Bytes kept for later operations."""
        return sum(int(buffer.size) for buffer in self._free)

    def take(self, nbytes: int) -> Bytes:
        """A buffer of at least ``nbytes``, out of the pool until `give`."""
        if self._free:
            best = self._free.pop()
            if best.size >= nbytes:
                return best
        return self._make(nbytes)

    def give(self, buffer: Bytes) -> None:
        """Return a buffer that nothing reads or writes any more."""
        insort(self._free, buffer, key=_size)
