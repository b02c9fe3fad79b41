"""Messages over MPI: requests under way, data of collectives, and the user's point to point.

A user's message is a head (dtype, shape), followed by the data if these are short. Long data travel
in a second MPI message, with a tag of its own. MPI keeps the order of each tag, so the n-th head
without data and the n-th message of data belong together. The receiver allocates memory for data
when it has read their size in the head, so messages of any length are possible.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mpishard.base import (
    Array,
    DType,
    ShardLayout,
    array_namespace,
    is_device_array,
    settings,
    synchronize,
    to_host,
)
from mpishard.communication.contract.call import DTYPES, refuse_other_message
from mpishard.communication.contract.reduction import ReductionOperation, TreeReducer
from mpishard.communication.contract.work import Steps, Waitable

if TYPE_CHECKING:
    from mpi4py.MPI import Comm, Request
    from mpi4py.MPI import Message as MPIMessage

Bytes = npt.NDArray[np.uint8]

_LARGE_BYTES = 1 << 30  # a length above 2^31 - 1 would overflow MPI's C int
_BLOCK_BYTES = 1 << 20  # counted in these blocks, up to 2 PiB fit in a C int
_TRIES = 16  # calls of MPI in one test of requests

_HEAD_LENGTH = 3 + settings.MAXIMUM_DIMS
_HEAD_BYTES = 8 * _HEAD_LENGTH
_TOGETHER_BYTES = 4096  # most bytes of data that go with the head: one message instead of two
_DATA_TAGS = settings.MAXIMUM_TAG + 1


def post_bytes(
    mpi: ModuleType, post: Callable[..., Request], buffer: Array, *where: int
) -> Request:
    """Return the request of ``post``, such as ``Isend``, for all of ``buffer`` as one message.

    A large buffer is sent as one element of a datatype of that many bytes, made of blocks, because
    lengths in MPI's calls are C ints. ``where`` are the further arguments of ``post``.
    """
    if buffer.size <= _LARGE_BYTES:
        return post([buffer, buffer.size, mpi.BYTE], *where)
    blocks, rest = divmod(buffer.size, _BLOCK_BYTES)
    block = mpi.BYTE.Create_contiguous(_BLOCK_BYTES)
    whole = mpi.Datatype.Create_struct(
        [blocks, rest], [0, blocks * _BLOCK_BYTES], [block, mpi.BYTE]
    ).Commit()
    block.Free()
    request = post([buffer, 1, whole], *where)
    whole.Free()  # MPI keeps the datatype until the message is complete
    return request


class Pending(Waitable):
    """MPI requests under way.

    The object is in ``in_flight`` until all are complete. So the arrays that the library still
    reads and writes are kept, even if nobody waits for the collective.
    """

    __slots__ = ("_in_flight", "_keep", "_requests")

    def __init__(self, requests: list[Request], in_flight: set[Pending], *keep: object) -> None:
        self._requests = requests
        self._in_flight = in_flight
        self._keep = keep
        in_flight.add(self)

    def test(self) -> bool:
        requests = self._requests
        # MPICH moves a few pages of a message at each call, so a long message takes many calls.
        for _ in range(_TRIES):
            # Test of a single request raises the error itself, and not ERR_IN_STATUS as Testall.
            if not requests or (
                requests[0].Test() if len(requests) == 1 else requests[0].Testall(requests)
            ):
                self._in_flight.discard(self)
                return True
        return False


class ScratchPool:
    """A pool of byte buffers, from which each operation under way takes one.

    Parameters
    ----------
    make : callable
        Makes a buffer of the given number of bytes.
    """

    def __init__(
        self, make: Callable[[int], Bytes] = lambda nbytes: np.empty(nbytes, np.uint8)
    ) -> None:
        self._free: list[Bytes] = []  # by rising size
        self._make = make

    @property
    def nbytes(self) -> int:
        """Bytes kept for later operations."""
        return sum(int(buffer.size) for buffer in self._free)

    def take(self, nbytes: int) -> Bytes:
        """Take a buffer of at least ``nbytes`` out of the pool, until `give`."""
        if self._free:
            # The largest, which is last: lengths mostly repeat, so that it fits.
            best = self._free.pop()
            if best.size >= nbytes:
                return best  # a buffer that is too small is dropped for a larger one
        return self._make(nbytes)

    def give(self, buffer: Bytes) -> None:
        """Return a buffer that nothing reads or writes any more."""
        insort(self._free, buffer, key=len)


class MessageChannel:
    """The channel of data as messages, for ranks of several nodes or without shared memory.

    A channel carries the data of collectives between the ranks of a group, in rounds. Every rank
    makes the same calls in the same order. All arrays are flat and of one dtype, and have at most
    `bytes_all` or `bytes_each` bytes.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : mpi4py.MPI.Intracomm
        A communicator that carries only the group's data.
    in_flight : set of Pending
        Requests under way.
    reducer : TreeReducer
        Combines contributions.
    """

    ROUND_BYTES = 1 << 23
    """Number of bytes, about, that a rank receives in one round of a reduction."""

    def __init__(
        self, mpi: ModuleType, comm: Comm, in_flight: set[Pending], reducer: TreeReducer
    ) -> None:
        self._mpi, self._comm = mpi, comm
        self._rank: int = comm.Get_rank()
        self._world_size: int = comm.Get_size()
        self._in_flight = in_flight
        self._reducer = reducer
        self._pool = ScratchPool()
        self.bytes_all = _LARGE_BYTES
        """Most bytes that a rank sends to all others in one round of `spread` or `broadcast`."""
        # At least one element of complex128, the widest dtype.
        self.bytes_each = max(16, self.ROUND_BYTES // max(1, self._world_size - 1))
        """Most bytes that a rank sends to each other rank in one round of `reduce` or `move`."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept from one collective to the next."""
        return self._pool.nbytes

    def reduce(
        self,
        parts: Sequence[Array],
        operation: ReductionOperation,
        piece: Array,
        *,
        is_sent: bool = False,
    ) -> Steps:
        """Send ``parts[r]`` to rank r; combine the received parts and this rank's into ``piece``.

        ``piece`` may be this rank's own part. ``is_sent`` says that all ranks have sent the parts
        by `send_early`.
        """
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
        # This rank's place has length 0, so that nothing is received from itself.
        incoming.insert(self._rank, own[:0])
        yield from self.move(parts, incoming)
        incoming[self._rank] = own
        self._reducer.reduce(incoming, operation, piece)
        if not on_device:
            self._pool.give(buffer)

    def send_early(self, parts: Sequence[Array]) -> bool:
        """Send the parts of the next `reduce` before its headers; return whether they were sent.

        Messages are not sent early, because MPI requires one order of messages on all ranks.
        """
        return False

    def spread(self, parts: Sequence[Array]) -> Steps:
        """Send this rank's part to all; receive ``parts[r]`` from rank r."""
        yield from self.move([parts[self._rank]] * self._world_size, parts)

    def move(self, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Steps:
        """Send ``outgoing[r]`` to rank r, and receive ``incoming[r]`` from it.

        All arrays lie on one device.
        """
        # Before anything is posted: the GPU may still write to the arrays, and CuPy gives memory
        # that a kernel still reads to the next array, which may be one to receive.
        synchronize(outgoing[self._rank])
        # In flight before anything is posted, so that an exception between two posts frees no
        # memory that MPI uses.
        requests: list[Request] = []
        pending = Pending(requests, self._in_flight, outgoing, incoming)
        for rank in range(self._world_size):
            # Receives are posted first, because MPI has to buffer a message without a receive.
            if rank != self._rank and incoming[rank].size:
                buffer = _as_bytes(incoming[rank])
                requests.append(post_bytes(self._mpi, self._comm.Irecv, buffer, rank, 0))
        for rank in range(self._world_size):
            if rank != self._rank and outgoing[rank].size:
                buffer = _as_bytes(outgoing[rank])
                requests.append(post_bytes(self._mpi, self._comm.Isend, buffer, rank, 0))
        yield pending

    def broadcast(self, array: Array, root: int) -> Steps:
        """Send ``array`` of the root to all other ranks, which receive it in their ``array``.

        All arrays are on the host: see `broadcast_pieces`.
        """
        # The library's own broadcast, a tree, is faster than messages of the root to all.
        request = post_bytes(self._mpi, self._comm.Ibcast, _as_bytes(array), root)
        yield Pending([request], self._in_flight, array)

    def broadcast_pieces(self, array: Array, root: int) -> Steps:
        """As `broadcast`, for arrays on the host or a GPU, by messages alone.

        Open MPI's non-blocking collectives cannot read GPU memory. The root sends each rank a
        piece, which that rank sends to all others, so that no rank sends more than two arrays.
        """
        ranks = range(self._world_size)
        layout = ShardLayout(int(array.size), self._world_size)
        pieces = [array[layout.slice(rank)] for rank in ranks]
        own, nothing, is_root = pieces[self._rank], array[:0], self._rank == root
        yield from self.move(
            pieces if is_root else [nothing] * self._world_size,
            [nothing if is_root or rank != root else own for rank in ranks],
        )
        yield from self.move(
            [nothing if rank == root else own for rank in ranks],
            [nothing if is_root else piece for piece in pieces],
        )


def _as_bytes(array: Array) -> Array:
    return array.view(np.uint8)


class MessageRequest(Pending):
    """A request of point to point. Its other half is posted at the end of the world at latest."""

    __slots__ = ()


class Incoming:
    """A message whose head has arrived, with its data if they came with the head."""

    def __init__(self, buffer: Bytes) -> None:
        head = buffer[:_HEAD_BYTES].view(np.int64).tolist()
        self.dtype = DTYPES[head[0]]
        self.on_device = bool(head[1])
        self.shape = tuple(head[3 : 3 + head[2]])
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.data: Bytes | None = None
        """Its elements as bytes; None if they travel apart and no memory is allocated yet."""
        self.pending: MessageRequest | None = None
        """The request for its data, if they travel apart."""
        if self.nbytes <= _TOGETHER_BYTES:
            self.data = buffer[_HEAD_BYTES : _HEAD_BYTES + self.nbytes].copy()


class Messages:
    """The messages of one rank in one group: those under way, and those not received yet.

    Parameters
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : mpi4py.MPI.Intracomm
        The communicator of the messages.
    in_flight : set of Pending
        Requests under way.
    """

    def __init__(self, mpi: ModuleType, comm: Comm, in_flight: set[Pending]) -> None:
        self._mpi, self._comm = mpi, comm
        self._in_flight = in_flight
        self._waiting: deque[Pending] = deque()  # copies that MPI has not taken yet
        # Messages that were read and that no receive has taken yet, by source and tag.
        self._arrived: dict[tuple[int, int], Incoming] = {}
        self.sent = np.zeros(comm.Get_size(), np.int64)
        """Number of MPI messages sent to each rank."""
        self.taken = np.zeros(comm.Get_size(), np.int64)
        """Number of MPI messages taken from each rank."""

    # ----------------------------------------------------------------------------------- sending

    def send(self, array: Array, destination: int, tag: int) -> None:
        """Send a copy of ``array``; the copy is kept until MPI has taken it."""
        is_long = array.nbytes > _TOGETHER_BYTES
        host = array.copy() if is_long and not is_device_array(array) else array
        self._waiting.extend(self.post(host, destination, tag))
        self.reap()

    def post(self, array: Array, destination: int, tag: int) -> list[Pending]:
        """Send ``array``, which must not change until the returned requests are complete."""
        host = to_host(array)
        # Of one length, so that a receiver knows where the data begin.
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

    def _isend(self, data: Bytes, destination: int, tag: int) -> Pending:
        request = post_bytes(self._mpi, self._comm.Isend, data, destination, tag)
        # A rank that leaves sends this number to the receiver, which takes as many messages before
        # it frees the communicator.
        self.sent[destination] += 1
        return MessageRequest([request], self._in_flight, data)

    def reap(self) -> None:
        """Release the copies that MPI has sent."""
        while self._waiting and self._waiting[0].test():
            self._waiting.popleft()

    # --------------------------------------------------------------------------------- receiving

    def receive(self, source: int, count: int, tag: int, dtype: DType | None, sender: int) -> Steps:
        """Take the next message; return its array, and whether it came from a GPU.

        ``sender`` is the number of ``source`` in the root world, for errors.
        """
        incoming = self._arrived.get((source, tag))
        if incoming is None:
            head = _Probe(self, source, tag)
            yield head
            incoming = self._arrived[source, tag] = Incoming(head.read())
        # A message that is refused, or whose receive is cancelled, stays for the next receive.
        refuse_other_message(incoming.size, incoming.dtype, count, dtype, sender, tag)
        if incoming.data is None:
            data = _Probe(self, source, _DATA_TAGS + tag)
            yield data
            incoming.data = np.empty(incoming.nbytes, np.uint8)
            incoming.pending = data.read_into(incoming.data)
        if incoming.pending is not None:
            yield incoming.pending
        del self._arrived[source, tag]
        return incoming.data.view(incoming.dtype).reshape(incoming.shape), incoming.on_device


class _Probe(Waitable):
    """The next message from one rank with one tag."""

    __slots__ = ("_message", "_messages", "_source", "_status", "_tag")

    def __init__(self, messages: Messages, source: int, tag: int) -> None:
        self._messages = messages
        self._source = source
        self._tag = tag
        self._status = messages._mpi.Status()
        self._message: MPIMessage | None = None

    def test(self) -> bool:
        # A matched probe takes the message out of MPI's queue, so it is called once only.
        if self._message is None:
            self._message = self._messages._comm.Improbe(self._source, self._tag, self._status)
        return self._message is not None

    def read_into(self, buffer: Bytes) -> MessageRequest:
        """Begin to receive the message into ``buffer``, which has its size."""
        assert self._message is not None
        messages = self._messages
        messages.taken[self._source] += 1
        request = post_bytes(messages._mpi, self._message.Irecv, buffer)
        return MessageRequest([request], messages._in_flight, buffer)

    def read(self) -> Bytes:
        """Return the bytes of the message, which is short."""
        assert self._message is not None
        byte = self._messages._mpi.BYTE
        buffer = np.empty(self._status.Get_count(byte), np.uint8)
        self._message.Recv([buffer, buffer.size, byte])
        self._messages.taken[self._source] += 1
        return buffer
