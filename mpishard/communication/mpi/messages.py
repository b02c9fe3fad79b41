"""Messages over MPI: requests under way, data of collectives, and the user's point to point.

A user's message is a head (dtype, shape) with the data behind it if they are few, else followed by
a second MPI message with the data, on a tag of its own. MPI keeps the order of each tag, so that
the n-th head with data elsewhere and the n-th of these belong together, whoever posted the memory
that they came into.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import numpy as np

from mpishard import settings
from mpishard.arrays import Array, array_namespace, is_device_array, synchronize, to_host
from mpishard.communication.contract.backend import refuse_other_message
from mpishard.communication.contract.call import DTYPES
from mpishard.communication.contract.reduction import ReductionOperation, TreeReducer
from mpishard.communication.contract.work import Steps, Waitable
from mpishard.communication.mpi.ulfm import is_loss
from mpishard.errors import CommunicationError

__all__ = [
    "Channel",
    "Condition",
    "Expected",
    "Message",
    "MessageChannel",
    "Messages",
    "Pending",
    "ScratchPool",
    "Turn",
    "post_bytes",
]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_LARGE_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 20
_TRIES = 16

_HEAD_LENGTH = 3 + settings.MAXIMUM_DIMS
_HEAD_BYTES = 8 * _HEAD_LENGTH
_TOGETHER_BYTES = 4096
_DATA_TAGS = settings.MAXIMUM_TAG + 1


def post_bytes(mpi: Any, post: Callable[..., Any], buffer: Any, *where: int) -> Any:
    """The request of ``post``, an ``Isend`` or the like, of all of ``buffer`` as one message.

    A large buffer goes as one element of a type of that many bytes, made of blocks, because
    lengths in MPI's calls are C ints.
    """
    if buffer.size <= _LARGE_BYTES:
        return post([buffer, buffer.size, mpi.BYTE], *where)
    blocks, rest = divmod(buffer.size, _BLOCK_BYTES)
    block = mpi.BYTE.Create_contiguous(_BLOCK_BYTES)
    whole = mpi.Datatype.Create_struct([blocks, rest], [0, blocks * _BLOCK_BYTES],
                                       [block, mpi.BYTE]).Commit()  # fmt: skip
    block.Free()
    request = post([buffer, 1, whole], *where)
    whole.Free()  # MPI keeps it until the message is through
    return request


class Condition(Waitable):
    """A question that is asked until the answer is yes."""

    __slots__ = ("test",)

    def __init__(self, happened: Callable[[], bool]) -> None:
        self.test = happened  # type: ignore[method-assign]


class Pending(Waitable):
    """An MPI request under way, or several.

    Stands in ``in_flight`` until it is complete, so that the memory that the library still reads
    and writes outlives a collective that nobody waits for.
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
    """Several MPI requests under way: true when all are complete."""

    __slots__ = ("_testall",)

    def __init__(self, mpi: Any, requests: Any, in_flight: set[Pending], *keep: object) -> None:
        super().__init__(requests, in_flight, *keep)
        self._testall = mpi.Request.Testall

    def test(self) -> bool:
        # MPICH moves a few pages of a message at each call, and a long one takes many calls.
        for _ in range(_TRIES):
            if self._testall(self._request):
                self._in_flight.discard(self)
                return True
        return False


class Turn(Waitable):
    """A place in a queue: true when all that came before have given theirs up.

    Used as a context manager, which gives the place up at the end.
    """

    __slots__ = ("_queue",)

    def __init__(self, queue: deque[Turn]) -> None:
        self._queue = queue
        queue.append(self)

    def test(self) -> bool:
        return self._queue[0] is self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.remove(self)


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
        insort(self._free, buffer, key=len)


class Channel(Protocol):
    """How the data of collectives travel between the ranks of a group, in rounds.

    Every rank makes the same calls in the same order. All arrays are flat and of one dtype; each
    has at most as many bytes as `bytes_all` or `bytes_each` says.
    """

    bytes_all: int
    """Most bytes that a rank sends to all others in one round of `spread` or `broadcast`."""
    bytes_each: int
    """Most bytes that a rank sends to each other in one round of `reduce` or `move`."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept from one collective to the next."""

    def reduce(self, parts: Sequence[Array], operation: ReductionOperation, piece: Array) -> Steps:
        """Send ``parts[r]`` to rank r; combine what comes, and this rank's own, into ``piece``.

        ``piece`` may be this rank's own part.
        """

    def spread(self, parts: Sequence[Array]) -> Steps:
        """Send this rank's part to all; receive ``parts[r]`` from rank r."""

    def move(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Steps:
        """Send ``outgoing[r]`` to rank r, and receive ``incoming[r]`` from it."""

    def broadcast(self, array: Array, root: int) -> Steps:
        """Send ``array`` of the root to all others, which receive it there."""


class MessageChannel:
    """Data as messages, for ranks of several nodes or without shared memory; see `Channel`.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : mpi4py.MPI.Intracomm
        A communicator of the group's data alone.
    in_flight : set of Pending
        Requests under way.
    reducer : TreeReducer
        Combines contributions.
    """

    ROUND_BYTES = 1 << 23
    """About how much a rank receives in one round of a reduction."""

    def __init__(self, mpi: Any, comm: Any, in_flight: set[Pending], reducer: TreeReducer) -> None:
        self._mpi, self._comm = mpi, comm
        self._rank: int = comm.Get_rank()
        self._world_size: int = comm.Get_size()
        self._in_flight = in_flight
        self._reducer = reducer
        self._pool = ScratchPool()
        self.bytes_all = _LARGE_BYTES
        self.bytes_each = max(16, self.ROUND_BYTES // max(1, self._world_size - 1))

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept from one collective to the next."""
        return self._pool.nbytes

    def reduce(self, parts: Sequence[Array], operation: ReductionOperation, piece: Array) -> Steps:
        own = parts[self._rank]
        nbytes, others = own.nbytes, self._world_size - 1
        on_device = is_device_array(own)
        buffer = (
            array_namespace(own).empty(nbytes * others, np.uint8)
            if on_device
            else self._pool.take(nbytes * others)
        )
        received = buffer[: nbytes * others].view(own.dtype).reshape(others, own.size)
        incoming = list(received)
        incoming.insert(self._rank, own[:0])
        yield from self.move(parts, incoming)
        incoming[self._rank] = own
        self._reducer.reduce(incoming, operation, piece)
        if not on_device:
            self._pool.give(buffer)

    def spread(self, parts: Sequence[Array]) -> Steps:
        yield from self.move([parts[self._rank]] * self._world_size, parts)

    def move(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Steps:
        # In flight before it is posted: an exception between two posts frees no memory of theirs.
        requests: list[Any] = []
        pending = PendingAll(self._mpi, requests, self._in_flight, outgoing, incoming)
        for rank in range(self._world_size):
            if rank != self._rank and incoming[rank].size:
                buffer = _as_bytes(incoming[rank])
                requests.append(post_bytes(self._mpi, self._comm.Irecv, buffer, rank, 0))
        for rank in range(self._world_size):
            if rank != self._rank and outgoing[rank].size:
                synchronize(outgoing[rank])
                buffer = _as_bytes(outgoing[rank])
                requests.append(post_bytes(self._mpi, self._comm.Isend, buffer, rank, 0))
        yield pending

    def broadcast(self, array: Array, root: int) -> Steps:
        synchronize(array)
        # The library knows the network: a tree is faster than the root's own messages to all.
        request = post_bytes(self._mpi, self._comm.Ibcast, _as_bytes(array), root)
        yield Pending(request, self._in_flight, array)


def _as_bytes(array: Array) -> Array:
    return array.view(array_namespace(array).uint8)


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


class Mail(Protocol):
    """The part of a group that `Messages` uses."""

    mpi: Any
    comm: Any
    in_flight: set[Pending]
    expected: set[Expected]
    sent: np.ndarray[Any, np.dtype[np.int64]]
    taken: np.ndarray[Any, np.dtype[np.int64]]


class Messages:
    """The messages of one rank in one group: those under way, and those not taken yet.

    Parameters
    ----------
    group : Mail
        The communicator that they are sent on.
    world_ranks : sequence of int
        What errors call its ranks: their numbers in the root world.
    """

    def __init__(self, group: Mail, world_ranks: Sequence[int]) -> None:
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
            with Turn(stream.turns) as turn:
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

    def __init__(self, group: Mail, source: int, tag: int) -> None:
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
