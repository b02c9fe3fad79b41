"""The collectives over MPI that move data and combine nothing, as generators that post and yield.

After the headers (`mpishard.communication.mpi.reductions`):

=================  ==============================  =====================
collective         first phase                     second phase
=================  ==============================  =====================
all_gather         all-gather
broadcast          broadcast
gather             gather
scatter            scatter of lengths              scatter
all_to_all         all-to-all of shapes            all-to-all
=================  ==============================  =====================

On one node all_gather is messages from rank to rank instead
(`mpishard.communication.mpi.pairwise_collectives`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpishard import settings
from mpishard.arrays import Array, array_namespace
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.work import Steps
from mpishard.communication.mpi.headers import INLINE_BYTES
from mpishard.communication.mpi.lanes import LARGE_BYTES, Turn
from mpishard.communication.mpi.reductions import MPIReductions
from mpishard.communication.mpi.shared_collectives import (
    same_start,
    split_up,
    starts_of,
)

__all__ = ["MPICollectives"]

_SHAPE_LENGTH = 1 + settings.MAXIMUM_DIMS


class MPICollectives(MPIReductions):
    """The part of the MPI backend that moves data. Its subclass has the life cycle."""

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
