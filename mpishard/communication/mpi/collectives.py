"""The collectives over MPI, one generator each: headers, then data in rounds.

Every collective begins with the header exchange (`mpishard.communication.mpi.headers`), which
compares the ranks' calls; arrays of up to 128 bytes travel in it. Larger data pass through the
group's `Channel`: rows in the node's memory, or messages. The collectives of arenas are in
`mpishard.communication.mpi.arena`.

Data are combined by `TreeReducer`. The library's own reductions are not used, because the order in
which they combine is not known.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from mpishard.base import (
    Array,
    CollectiveMismatchError,
    address,
    array_namespace,
    even_sizes,
    is_device_array,
    settings,
)
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.reduction import (
    ReductionOperation,
    is_combined_whole,
)
from mpishard.communication.contract.status import PLACE_BYTES, decode_place, encode_place
from mpishard.communication.contract.work import Condition, Steps, Waitable
from mpishard.communication.mpi.group import Channel, Group
from mpishard.communication.mpi.headers import INLINE_BYTES, Headers, make_row

_SHAPE_LENGTH = 1 + settings.MAXIMUM_DIMS


class Collectives:
    """The collectives of one group of MPI ranks.

    Parameters
    ----------
    backend : CommunicationBackend
        The backend whose ranks and checks they use.
    group : Group
        The communicators and channels of its ranks.
    """

    def __init__(self, backend: CommunicationBackend, group: Group) -> None:
        # Weak, because a cycle would delay the end of the group: its ranks leave it when the last
        # reference to its backend is dropped.
        self._backend: CommunicationBackend = weakref.proxy(backend)
        self._pending = backend._pending
        self._group = group
        self._reducer = backend._reducer
        self._rank, self._world_size = backend.rank, backend.world_size
        self._by_pointer = settings.cuda_aware()

    # ------------------------------------------------------------------------------------ headers

    def turn(self, call: Call) -> Iterable[Waitable]:
        """Return the wait, if any, for the end of all collectives that were issued before."""
        pending = self._pending
        if pending[0].awaited is call:
            return ()
        return (Condition(lambda: next(w.awaited for w in pending if not w.done) is call),)

    def open(self, call: Call, payload: Array | None = None, *, is_sent: bool = False) -> Steps:
        """Exchange headers and refuse calls that do not match; return the `Headers`."""
        group = self._group
        group.sequence = call.sequence
        row = make_row(call, payload, is_sent=is_sent)
        if self._world_size == 1:
            headers = Headers([row], call, 0)
        else:
            posted = group.exchange.post(row)
            yield posted
            headers = Headers(posted.rows, call, self._rank)
        if headers.identical and call.out_rows < 0:
            return headers
        try:
            self._backend._verify(headers.calls)
        except CollectiveMismatchError:
            pass  # raised below, with the line of each rank's call
        else:
            return headers
        yield from self.turn(call)
        # Either all ranks come here or none does, because all compare the same rows. The lines of
        # the calls travel only now: a header with a path would be several times as long.
        line = np.frombuffer(encode_place(call), np.uint8)
        lines = np.empty((self._world_size, PLACE_BYTES), np.uint8)
        yield group.keep(group.data.Iallgather(line, lines), line, lines)
        for each, encoded in zip(headers.calls, lines, strict=True):
            decode_place(encoded.tobytes(), each)
        self._backend._verify(headers.calls)

    def _open_reduction(self, call: Call, array: Array, whole: Sequence[Array] = ()) -> Steps:
        """Begin a reduction: exchange its headers, and choose the channel of its data.

        ``whole`` has the parts for the channel that may be sent before the header, which saves a
        fence. Return the headers, if every rank's array came with its header, or else None; the
        channel; and whether the data of all ranks are in it already.
        """
        # Without checks, data alone need no header.
        small = array.nbytes <= INLINE_BYTES
        device = type(array) is not np.ndarray and is_device_array(array)
        if not (small or self._backend.check_collectives or device):
            self._group.sequence = call.sequence
            return None, self._group.channel, False
        # Before data are sent early, all earlier collectives must have ended: see `RowChannel`.
        is_sent = (
            bool(whole)
            and not (small or device)
            and self._pending[0].awaited is call
            and self._group.channel.send_early(whole)
        )
        headers = yield from self.open(call, array, is_sent=is_sent)
        if headers.all_inline:
            return headers, self._group.channel, False
        if not (whole or self._by_pointer):
            return None, self._group.channel, False
        any_on_device, all_sent = headers.flags()
        channel = self._device_channel(headers) if any_on_device else self._group.channel
        return None, channel, all_sent

    def _device_channel(self, headers: Headers) -> Channel:
        """Return the channel of data of which some are on a GPU, according to all ``headers``."""
        return self._group.messages

    def _reduce_inline(
        self,
        headers: Headers,
        own: Array,
        operation: ReductionOperation,
        out: Array,
        part: slice = slice(None),
    ) -> None:
        """Combine ``part`` of ``own``, this rank's flat array, and of those in the headers."""
        arrays = [own[part]]
        for rank in range(self._world_size):
            if rank != self._rank:
                arrays.insert(rank, headers.inline(rank)[part])
        self._reducer.reduce(arrays, operation, out)

    # --------------------------------------------------------------------------------- reductions

    def all_reduce(self, call: Call, array: Array, out: Array) -> Steps:
        """See `CommunicationBackend._steps_all_reduce`; so for all collectives here."""
        assert call.operation is not None
        flat = array if array.ndim == 1 else array.reshape(-1)
        whole: list[Array] = []
        # In one round of the channel, because several rounds would need a fence each.
        fits = INLINE_BYTES < flat.nbytes <= self._group.channel.bytes_each
        if fits and is_combined_whole(flat.nbytes, self._world_size):
            whole = [flat] * self._world_size
        inline, channel, is_sent = yield from self._open_reduction(call, array, whole)
        result = flat if out is array else out if out.ndim == 1 else out.reshape(-1)
        if inline is not None:
            self._reduce_inline(inline, flat, call.operation, result)
        else:
            yield from self.turn(call)
            if array is not out and _overlap(array, out):
                flat = flat.copy()
            if whole:
                # Each rank combines the whole itself, because another wait for the others takes
                # longer.
                whole = [flat] * self._world_size  # ``flat`` may be a copy by now
                yield from channel.reduce(whole, call.operation, result, is_sent=is_sent)
                return out
            # Large arrays: each rank combines one piece for all, so that a byte is read once and
            # not by every rank.
            sizes = even_sizes(result.size, self._world_size)
            start = starts_of(sizes)[self._rank]
            piece = result[start : start + sizes[self._rank]]
            yield from self._reduce_by(channel, flat, sizes, call.operation, piece, result)
        return out

    def reduce_scatter(
        self, call: Call, array: Array, counts: tuple[int, ...], out: Array
    ) -> Steps:
        """Combine this rank's rows of all ranks' arrays into ``out``."""
        assert call.operation is not None
        inline, channel, _ = yield from self._open_reduction(call, array)
        row = math.prod(array.shape[1:])
        sizes = counts if row == 1 else tuple([count * row for count in counts])
        starts = starts_of(sizes)
        mine = slice(starts[self._rank], starts[self._rank] + sizes[self._rank])
        flat, result = array.reshape(-1), out.reshape(-1)
        piece = result
        if _overlap(array, out, flat[mine]):
            piece = array_namespace(out).empty(result.shape, result.dtype)
        if inline is not None:
            self._reduce_inline(inline, flat, call.operation, piece, mine)
        else:
            yield from self.turn(call)
            yield from self._reduce_by(channel, flat, sizes, call.operation, piece)
        if piece is not result:
            result[...] = piece
        return out

    def _reduce_by(
        self,
        channel: Channel,
        array: Array,
        sizes: tuple[int, ...],
        operation: ReductionOperation,
        piece: Array,
        whole: Array | None = None,
    ) -> Steps:
        """Combine the pieces of ``array`` in rounds; ``piece`` receives that of this rank.

        If ``whole`` is given, it receives all pieces, and ``piece`` is a part of it. Each round's
        result is sent to all ranks at once, while it is in the processor's caches.
        """
        step = channel.bytes_each // array.itemsize
        starts = starts_of(sizes)
        # All ranks go through as many rounds as the longest piece needs: rounds are collective.
        for low in range(0, max(sizes), step):
            parts, targets = [], []
            for start, size in zip(starts, sizes, strict=True):
                part = slice(start + min(low, size), start + min(low + step, size))
                parts.append(array[part])
                if whole is not None:
                    targets.append(whole[part])
            yield from channel.reduce(parts, operation, piece[low : low + step])
            if whole is not None:
                yield from channel.spread(targets)

    # ----------------------------------------------------------------------------------- movement

    def all_gather(self, call: Call, array: Array, out: Array | None) -> Steps:
        """Collect the rows of all ranks in ``out``, or in a new array."""
        headers = yield from self.open(call, array)
        sizes = [call.size for call in headers.calls]
        if out is None:
            rows = sum(call.shape[0] for call in headers.calls)
            out = array_namespace(array).empty((rows, *array.shape[1:]), array.dtype)
        flat, result = array.reshape(-1), out.reshape(-1)
        if headers.all_inline:
            arrays = [headers.inline(r) for r in range(self._world_size)]
            np.concatenate(arrays, out=result)
        else:
            yield from self.turn(call)
            pieces = split_up(result, sizes)
            mine = pieces[self._rank]
            # Copied before data arrive: the array may lie where another rank's piece belongs.
            if address(mine) != address(flat):
                mine[...] = flat
            any_on_device, _ = headers.flags()
            channel = self._device_channel(headers) if any_on_device else self._group.channel
            step = channel.bytes_all // array.itemsize
            for low in range(0, max(sizes), step):
                yield from channel.spread([piece[low : low + step] for piece in pieces])
        return out

    def broadcast(self, call: Call, array: Array | None, root: int) -> Steps:
        """Send the root's array to all ranks."""
        payload = array if self._rank == root else None
        headers = yield from self.open(call, payload)
        sent = headers.calls[root]
        if array is None:
            array = np.empty(sent.shape or (), sent.dtype)
        if sent.nbytes <= INLINE_BYTES:
            if self._rank != root:
                array.reshape(-1)[...] = headers.inline(root)
        else:
            yield from self.turn(call)
            flat = array.reshape(-1)
            send, step = self._group.channel.broadcast, self._group.channel.bytes_all
            if self._by_pointer:
                send, step = self._group.messages.broadcast_pieces, self._group.messages.bytes_all
            step //= flat.itemsize
            for low in range(0, flat.size, step):
                yield from send(flat[low : low + step], root)
        return array

    def scatter(
        self, call: Call, array: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Steps:
        """Return a new array with this rank's rows of the root's array."""
        parts: Sequence[Array] = ()
        if array is not None and counts is not None:
            starts = starts_of(counts)
            parts = [array[low : low + n] for low, n in zip(starts, counts, strict=True)]
        received = yield from self._exchange(call, parts, [root])
        return received[root]

    def gather(self, call: Call, array: Array, root: int) -> Steps:
        """Collect the rows of all ranks in a new array on the root; None on the other ranks."""
        headers = yield from self.open(call, array)
        is_root = self._rank == root
        sizes = [call.size for call in headers.calls]
        rows = sum(call.shape[0] for call in headers.calls)
        result = np.empty((rows, *array.shape[1:]), array.dtype) if is_root else None
        if headers.all_inline:
            if result is not None:
                arrays = [headers.inline(rank) for rank in range(self._world_size)]
                np.concatenate(arrays, out=result.reshape(-1))
        else:
            yield from self.turn(call)
            nothing = np.empty(0, array.dtype)
            outgoing: list[Array] = [nothing] * self._world_size
            incoming: list[Array] = [nothing] * self._world_size
            outgoing[root] = array.reshape(-1)
            if result is not None:
                incoming = split_up(result.reshape(-1), sizes)
                incoming[root][...] = outgoing[root]
            yield from self._move(outgoing, incoming, max(sizes))
        return result

    def all_to_all(self, call: Call, parts: Sequence[Array]) -> Steps:
        """Send ``parts[r]`` to rank r, and return a list of new arrays, one from each rank."""
        received = yield from self._exchange(call, parts, range(self._world_size))
        return [received[rank] for rank in range(self._world_size)]

    def _exchange(self, call: Call, parts: Sequence[Array], senders: Sequence[int]) -> Steps:
        """Send ``parts[r]`` to rank r; return a dict of the received arrays by sender.

        Only ``senders`` have parts. Their shapes travel first, because no receiver knows them.
        """
        world = range(self._world_size)
        # In the header, because all ranks must make the same number of rounds.
        longest = np.array([max((part.size for part in parts), default=0)], np.int64)
        headers = yield from self.open(call, longest)
        yield from self.turn(call)
        dtype = headers.calls[senders[0]].dtype
        shapes = np.zeros((2, self._world_size, _SHAPE_LENGTH), np.int64)
        for shape, part in zip(shapes[0], parts, strict=False):
            shape[: 1 + part.ndim] = part.ndim, *part.shape
        is_sender = self._rank in senders
        outgoing = [shape if is_sender else shape[:0] for shape in shapes[0]]
        incoming = [shapes[1, r] if r in senders else shapes[1, r, :0] for r in world]
        shapes[1, self._rank] = shapes[0, self._rank]
        yield from self._group.channel.move(outgoing, incoming)
        received = {
            rank: np.empty(tuple(dims[:ndim]), dtype)
            for rank, (ndim, *dims) in enumerate(shapes[1].tolist())
            if rank in senders
        }
        if is_sender:
            received[self._rank][...] = parts[self._rank]
        nothing = np.empty(0, dtype)
        yield from self._move(
            [part.reshape(-1) for part in parts] or [nothing] * self._world_size,
            [received[r].reshape(-1) if r in senders else nothing for r in world],
            max(length for (length,) in headers.integers(1)),
        )
        return received

    def _move(self, outgoing: Sequence[Array], incoming: Sequence[Array], longest: int) -> Steps:
        """Send ``outgoing[r]`` to rank r, and receive its data in ``incoming[r]``.

        All ranks make as many rounds as the ``longest`` part of any rank needs.
        """
        step = self._group.channel.bytes_each // outgoing[0].itemsize
        for low in range(0, longest, step):
            yield from self._group.channel.move(
                [part[low : low + step] for part in outgoing],
                [part[low : low + step] for part in incoming],
            )


@functools.lru_cache(maxsize=4096)  # each training step uses the same sizes
def starts_of(sizes: tuple[int, ...]) -> list[int]:
    """The start of each of several parts that lie end to end."""
    return [0, *accumulate(sizes[:-1])]


def split_up(array: Array, sizes: Sequence[int]) -> list[Array]:
    """Consecutive parts of these ``sizes`` of a flat array."""
    return [
        array[start : start + size]
        for start, size in zip(starts_of(tuple(sizes)), sizes, strict=True)
    ]


def _overlap(array: Array, out: Array, own: Array | None = None) -> bool:
    """Return whether ``out`` shares memory with ``array``, but is not its part ``own``."""
    if not array_namespace(array).may_share_memory(array, out):
        return False
    return address(array if own is None else own) != address(out)
