"""The collectives over MPI, as generators that post and yield.

Each begins with one small all-gather, in which every rank says what it calls; arrays of up to
`INLINE_BYTES` travel in it. On one node it goes through memory that the ranks share
(`mpishard.communication.mailbox`), elsewhere as a message. Larger data follow as bytes, so that
any dtype does, and are combined by `TreeReducer`: no reduction of the library is used, whose order
nobody knows.

=================  ==============================  =====================
collective         first phase                     second phase
=================  ==============================  =====================
all_reduce         all-to-all of pieces, combine   all-gather of pieces
reduce_scatter     all-to-all of pieces, combine
all_gather         all-gather
broadcast          broadcast
gather             gather
scatter            scatter of lengths              scatter
all_to_all         all-to-all of shapes            all-to-all
=================  ==============================  =====================

On one node reductions and all_gather are messages from rank to rank instead
(`mpishard.communication.pairwise_collectives`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.arrays import Array, array_namespace, synchronize
from mpishard.communication.arena import PRIVATE
from mpishard.communication.call import Call
from mpishard.communication.call_file import PLACE_BYTES, MessageWait, decode_place, encode_place
from mpishard.communication.header import INLINE_BYTES, Headers, Readiness, make_row
from mpishard.communication.lanes import LARGE_BYTES, Pending, Turn
from mpishard.communication.pairwise_collectives import PairwiseCollectives
from mpishard.communication.reduction import ReductionOperation
from mpishard.communication.shared_collectives import (
    SCRATCH_BYTES,
    same_start,
    split_up,
    starts_of,
)
from mpishard.communication.sharing import Places
from mpishard.communication.work import Steps, Waitable, in_call
from mpishard.errors import CollectiveMismatchError, PeerError
from mpishard.layout import ShardLayout

__all__ = ["MPICollectives"]

_SHAPE_LENGTH = 1 + settings.MAXIMUM_DIMS


class MPICollectives(PairwiseCollectives):
    """The part of the MPI backend that moves data. Its subclass has the life cycle."""

    @property
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + self._pool.nbytes

    @abstractmethod
    def _left_error(
        self, local: int, last: int, where: str, awaited: Call | MessageWait
    ) -> PeerError:
        """Say that this rank waits ``where`` for one that left after its collective ``last``."""

    # ----------------------------------------------------------------------------------- headers

    def _turn(self, phase: int) -> Turn:
        return self._talk.lanes[phase].turn()

    def _open(
        self,
        call: Call,
        turn: Turn,
        payload: Array | None = None,
        places: Places = (PRIVATE, PRIVATE),
        readiness: Readiness = Readiness.AT_HOME,
    ) -> Steps:
        """Exchange headers and refuse what does not match; return the `Headers`."""
        row = make_row(call, payload, places, readiness)
        group = self._talk
        if self.world_size == 1:
            headers = Headers(row, call, 0)
        else:
            posted, rows = group.post_header(row)
            self._begun()
            yield posted
            headers = group.read_headers(rows, call)
        if not headers.identical or call.out_rows >= 0:
            try:
                self._verify(headers.calls)
                mismatch = False
            except PeerError as error:
                local = self.world_ranks.index(error.rank)
                last = headers.calls[local].sequence - 1
                where = in_call(call, self.call_log.group)
                group.broken = self._left_error(local, last, where, call)
                raise group.broken from None
            except CollectiveMismatchError:
                mismatch = True
            if mismatch:
                yield from self._name_sites(headers.calls, call, turn)
                self._verify(headers.calls)
        return headers

    def _name_sites(self, calls: Sequence[Call], own: Call, turn: Turn) -> Steps:
        """Learn where each rank's call stands in its script. All ranks come here or none."""
        site = encode_place(own, "")
        sites = np.empty((self.world_size, PLACE_BYTES), np.uint8)
        yield turn
        yield self._post(
            turn,
            turn.comm.Iallgather(
                self._spec(np.frombuffer(site, np.uint8), PLACE_BYTES),
                self._spec(sites, PLACE_BYTES),
            ),
            site,
            sites,
        )
        for call, encoded in zip(calls, sites, strict=True):
            decode_place(encoded.tobytes(), call)

    # ----------------------------------------------------------------------------------- requests

    def _post(self, turn: Turn, request: Any, *keep: object) -> Pending:
        turn.release()
        return self._keep(request, *keep)

    def _begin_fence(self, turn: Turn) -> Waitable:
        mailbox = self._talk.mailbox
        return self._keep(turn.comm.Ibarrier()) if mailbox is None else mailbox.fence()

    def _needs_header(self, array: Array) -> bool:
        """Whether a reduction of ``array`` must know what the others call; alike on all ranks."""
        return self.check_collectives or array.nbytes <= INLINE_BYTES or self._regions.ever

    # -------------------------------------------------------------------------------- reductions

    def _steps_all_reduce(self, call: Call, array: Array, out: Array) -> Steps:
        with self._turn(0) as first, self._turn(1) as second:
            assert call.operation is not None
            result = out.reshape(-1)
            sizes = ShardLayout(result.size, self.world_size).sizes
            headers = None
            if self._is_to_bounce(array.nbytes) or self._needs_header(array):
                places = self._places(array, out)
                readiness = self._copy_ahead(first, array, places)
                headers = yield from self._open(call, first, array, places, readiness)
                if headers.all_inline:
                    self._combine_inline(headers, call.operation, result)
                    self._count_all_reduce(call, sizes)
                    return out
                if (yield from self._reduced_in_place(call, first, second, headers, array, out)):
                    return out
            if headers is not None and self._is_to_bounce(array.nbytes):
                bounce = yield from self._bounce(call, first, headers, array)
                if bounce is not None:
                    second.release()
                    yield from self._bounced_all_reduce(first, bounce, call.operation, result)
                    self._count_all_reduce(call, sizes)
                    return out
            if _overlap_askew(array, out):
                array = array.copy()
            flat = result if array is out else array.reshape(-1)
            piece = result[starts_of(sizes)[self.rank] :][: sizes[self.rank]]
            if self._sends_pairwise or self._is_large(array.nbytes):
                yield from self._pairwise_reduce(
                    first, flat, sizes, call.operation, piece, (second, result)
                )
            else:
                yield from self._combine_pieces(first, flat, sizes, call.operation, piece)
                yield from self._gather_pieces(second, result, sizes)
            self._count_all_reduce(call, sizes)
            return out

    def _reduced_in_place(
        self, call: Call, first: Turn, second: Turn, headers: Headers, array: Array, out: Array
    ) -> Steps:
        """Combine arrays that the ranks share, and return whether they do."""
        assert call.operation is not None
        places = self._all_places(headers)
        if places is None or not self._arrays_are_shared(places):
            return False
        self._refuse_overlaps(places, array, out, [0] * self.world_size)
        out_is_shared = self._out_is_shared(places)
        if not out_is_shared and any(own != into for own, into in places):
            return False
        second.release()
        yield from self._shared_all_reduce(
            first, self._peer_arrays(places, array), call.operation, out.reshape(-1),
            out_is_shared=out_is_shared,
        )  # fmt: skip
        return True

    def _steps_reduce_scatter(
        self, call: Call, array: Array, counts: tuple[int, ...], out: Array
    ) -> Steps:
        with self._turn(0) as turn:
            assert call.operation is not None
            row = int(np.prod(array.shape[1:], dtype=np.int64))
            sizes = [count * row for count in counts]
            start = sum(sizes[: self.rank])
            mine = slice(start, start + sizes[self.rank])
            piece = result = out.reshape(-1)
            if np.may_share_memory(array, out) and not same_start(array.reshape(-1)[mine], out):
                piece = np.empty_like(result)
            inline, places = False, None
            if self._needs_header(array):
                headers = yield from self._open(call, turn, array, self._places(array, out))
                inline = headers.all_inline
                places = self._all_places(headers)
            if places is not None and self._arrays_are_shared(places):
                offsets = [start * array.itemsize for start in starts_of(sizes)]
                self._refuse_overlaps(places, array, out, offsets)
                arrays = self._peer_arrays(places, array)
                yield from self._shared_reduce_scatter(turn, arrays, sizes, call.operation, piece)
                if piece is not result:
                    result[...] = piece
                return out
            if inline:
                self._combine_inline(headers, call.operation, piece, mine)
            else:
                pairwise = self._sends_pairwise or self._is_large(array.nbytes)
                reduce = self._pairwise_reduce if pairwise else self._combine_pieces
                yield from reduce(turn, array.reshape(-1), sizes, call.operation, piece)
            if piece is not result:
                result[...] = piece
            self._count_reduce_scatter(call, counts)
            return out

    def _combine_inline(
        self,
        headers: Headers,
        operation: ReductionOperation,
        out: Array,
        part: slice = slice(None),
    ) -> None:
        arrays = [headers.flat(rank)[part] for rank in range(self.world_size)]
        # Other ranks may read ``out`` where it is shared: they see results, and nothing on the way.
        result = np.empty_like(out)
        self._reducer.reduce(arrays, operation, result)
        out[...] = result

    def _combine_pieces(
        self,
        turn: Turn,
        array: Array,
        sizes: Sequence[int],
        operation: ReductionOperation,
        piece: Array,
    ) -> Steps:
        """Send each rank its piece of ``array``, shape (n,), and combine those that come.

        Large pieces go in rounds, so that scratch is bounded. ``piece`` may lie in ``array``,
        where this rank's own piece is.
        """
        if self.world_size == 1:
            self._reducer.reduce([array], operation, piece)
            return
        itemsize = array.itemsize
        starts = starts_of(sizes)
        own = array[starts[self.rank] : starts[self.rank] + sizes[self.rank]]
        step = max(1, SCRATCH_BYTES // (itemsize * self.world_size))
        yield turn
        for low in range(0, max(*sizes, 1), step):
            outgoing = [max(0, min(step, size - low)) for size in sizes]
            length = outgoing[self.rank]
            outgoing[self.rank] = 0
            incoming = [length] * self.world_size
            incoming[self.rank] = 0
            buffer = self._take_beside(array, length * itemsize * (self.world_size - 1))
            request = turn.comm.Ialltoallv(
                self._parts(array, outgoing, [s + low for s in starts], itemsize=itemsize),
                self._parts(buffer, incoming, starts_of(incoming), itemsize=itemsize),
            )
            if low + step >= max(sizes):
                turn.release()
            yield self._keep(request, array, buffer)
            received = iter(
                buffer[: length * itemsize * (self.world_size - 1)]
                .view(array.dtype)
                .reshape(self.world_size - 1, length)
            )
            contributions = [
                own[low : low + length] if rank == self.rank else next(received)
                for rank in range(self.world_size)
            ]
            self._reducer.reduce(contributions, operation, piece[low : low + length])
            self._give_back(buffer)

    def _gather_pieces(self, turn: Turn, out: Array, sizes: Sequence[int]) -> Steps:
        """Send this rank's piece of flat ``out`` to all, and receive theirs."""
        if self.world_size == 1:
            return
        synchronize(out)
        yield turn
        parts = self._parts(out, sizes, starts_of(sizes), itemsize=out.itemsize)
        yield self._post(turn, turn.comm.Iallgatherv(self._talk.mpi.IN_PLACE, parts), out)

    # ---------------------------------------------------------------------------------- movement

    def _steps_all_gather(self, call: Call, array: Array, out: Array | None) -> Steps:
        with self._turn(0) as turn:
            headers = yield from self._open(call, turn, array, self._places(array, out))
            rows = [c.shape[0] for c in headers.calls if c.shape is not None]
            if out is None:
                out = array_namespace(array).empty((sum(rows), *array.shape[1:]), array.dtype)
            row = int(np.prod(array.shape[1:], dtype=np.int64))
            sizes = [count * row for count in rows]
            starts = starts_of(sizes)
            result = out.reshape(-1)
            if headers.all_inline:
                np.concatenate([headers.flat(r) for r in range(self.world_size)], out=result)
            elif self._out_is_shared(self._all_places(headers)):
                yield from self._shared_all_gather(turn, array.reshape(-1), result, sizes)
                return out
            else:
                mine = result[starts[self.rank] : starts[self.rank] + sizes[self.rank]]
                if not same_start(mine, array):
                    mine[...] = array.reshape(-1)
                pairwise = self._sends_pairwise or self._is_large(out.nbytes)
                gather = self._pairwise_gather if pairwise else self._gather_pieces
                yield from gather(turn, result, sizes)
            self._count_all_gather(array)
            return out

    def _steps_broadcast(self, call: Call, array: Array | None, root: int) -> Steps:
        with self._turn(0) as turn:
            payload = array if self.rank == root else None
            headers = yield from self._open(call, turn, payload)
            sent = headers.calls[root]
            if array is None:
                array = np.empty(sent.shape or (), sent.dtype)
            if sent.nbytes <= INLINE_BYTES:
                if self.rank != root:
                    array[...] = headers.inline(root)
            elif self.world_size > 1:
                flat, step = array.reshape(-1), LARGE_BYTES // array.itemsize
                yield turn
                requests = [
                    turn.comm.Ibcast(self._spec(a, a.size, itemsize=a.itemsize), root)
                    for a in (flat[low : low + step] for low in range(0, flat.size, step))
                ]
                turn.release()
                yield self._keep_all(requests, array)
            self._count_broadcast(array, root)
            return array

    def _steps_scatter(
        self, call: Call, array: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Steps:
        with self._turn(0) as first, self._turn(1) as second:
            headers = yield from self._open(call, first)
            sent = headers.calls[root]
            assert sent.dtype is not None
            assert sent.shape is not None
            if self.rank != root:
                array = counts = None
            if self.world_size == 1:
                assert array is not None
                piece = array.copy()
            else:
                lengths = None if counts is None else np.array(counts, np.int64)
                length = np.empty(1, np.int64)
                yield first
                request = first.comm.Iscatter(
                    None if lengths is None else self._spec(lengths, 1, itemsize=8),
                    self._spec(length, 1, itemsize=8),
                    root,
                )
                yield self._post(first, request, lengths, length)
                piece = np.empty((int(length[0]), *sent.shape[1:]), sent.dtype)
                sizes = []
                if counts is not None:
                    row = int(np.prod(sent.shape[1:], dtype=np.int64))
                    sizes = [count * row for count in counts]
                scatter = self._pairwise_scatter if self._is_large(sent.nbytes) else self._scatterv
                yield from scatter(second, array, sizes, piece, root)
            self._count_scatter(array if self.rank == root else None, piece)
            return piece

    def _scatterv(
        self, turn: Turn, array: Array | None, sizes: Sequence[int], piece: Array, root: int
    ) -> Steps:
        parts = None
        if array is not None:
            parts = self._parts(array, sizes, starts_of(sizes), itemsize=array.itemsize)
        yield turn
        spec = self._spec(piece, piece.size, itemsize=piece.itemsize)
        yield self._post(turn, turn.comm.Iscatterv(parts, spec, root), array, piece)

    def _steps_gather(self, call: Call, array: Array, root: int) -> Steps:
        with self._turn(0) as turn:
            headers = yield from self._open(call, turn, array)
            result = None
            rows = [c.shape[0] for c in headers.calls if c.shape is not None]
            if self.rank == root:
                result = np.empty((sum(rows), *array.shape[1:]), array.dtype)
            row = int(np.prod(array.shape[1:], dtype=np.int64))
            sizes = [count * row for count in rows]
            if headers.all_inline:
                if result is not None:
                    arrays = [headers.inline(rank) for rank in range(self.world_size)]
                    np.concatenate(arrays, axis=0, out=result)
            elif self.world_size == 1:
                assert result is not None
                result[...] = array
            else:
                large = self._is_large(sum(sizes) * array.itemsize)
                gather = self._pairwise_gather_to if large else self._gatherv
                yield from gather(turn, array, sizes, result, root)
            self._count_gather(array, root)
            return result

    def _gatherv(
        self, turn: Turn, array: Array, sizes: Sequence[int], result: Array | None, root: int
    ) -> Steps:
        parts = None
        if result is not None:
            parts = self._parts(result, sizes, starts_of(sizes), itemsize=array.itemsize)
        yield turn
        spec = self._spec(array, array.size, itemsize=array.itemsize)
        yield self._post(turn, turn.comm.Igatherv(spec, parts, root), array, result)

    def _steps_all_to_all(self, call: Call, parts: Sequence[Array]) -> Steps:
        with self._turn(0) as first, self._turn(1) as second:
            yield from self._open(call, first)
            if self.world_size == 1:
                received = [parts[0].copy()]
            else:
                # A rank's shapes, and how much it sends in all.
                outgoing = np.zeros((self.world_size, 1 + _SHAPE_LENGTH), np.int64)
                outgoing[:, 0] = sum(part.nbytes for part in parts)
                for row, part in zip(outgoing[:, 1:], parts, strict=True):
                    row[: 1 + part.ndim] = part.ndim, *part.shape
                incoming = np.empty_like(outgoing)
                yield first
                request = first.comm.Ialltoall(
                    self._spec(outgoing, 1 + _SHAPE_LENGTH, itemsize=8),
                    self._spec(incoming, 1 + _SHAPE_LENGTH, itemsize=8),
                )
                yield self._post(first, request, outgoing, incoming)
                shapes = [tuple(dims[:ndim]) for _, ndim, *dims in incoming.tolist()]
                large = self._is_large(int(incoming[:, 0].sum()))
                exchange = self._pairwise_all_to_all if large else self._alltoallv
                received = yield from exchange(second, parts, shapes)
            self._count_all_to_all(parts)
            return received

    def _alltoallv(
        self, turn: Turn, parts: Sequence[Array], shapes: Sequence[tuple[int, ...]]
    ) -> Steps:
        dtype = parts[0].dtype
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        target = np.empty(sum(sizes), dtype)
        source = np.concatenate([part.reshape(-1) for part in parts])
        lengths = [int(part.size) for part in parts]
        yield turn
        request = turn.comm.Ialltoallv(
            self._parts(source, lengths, starts_of(lengths), itemsize=dtype.itemsize),
            self._parts(target, sizes, starts_of(sizes), itemsize=dtype.itemsize),
        )
        yield self._post(turn, request, source, target)
        arrays = zip(split_up(target, sizes), shapes, strict=True)
        return [array.reshape(shape) for array, shape in arrays]

    def _steps_barrier(self, call: Call) -> Steps:
        with self._turn(0) as turn:
            # A mailbox is quicker than the library's barrier.
            if self.check_collectives or self.world_size == 1 or self._talk.mailbox is not None:
                yield from self._open(call, turn)
            else:
                yield turn
                yield self._post(turn, turn.comm.Ibarrier())


def _overlap_askew(array: Array, out: Array) -> bool:
    """Whether two arrays of one shape share memory and are not the same."""
    if array is out:
        return False
    return bool(np.may_share_memory(array, out)) and not same_start(array, out)
