"""What every collective over MPI begins with, and the reductions.

Each begins with a small exchange, in which every rank says what it calls; arrays of up to
`INLINE_BYTES` travel in it. On one node it goes through memory that the ranks share
(`mpishard.communication.mpi.rings`), elsewhere as a message. Larger data follow as bytes, so that
any dtype does, and are combined by `TreeReducer`: no reduction of the library is used, whose order
nobody knows. Reductions are generators that post and yield:

=================  ==============================  =====================
collective         first phase                     second phase
=================  ==============================  =====================
all_reduce         all-to-all of pieces, combine   all-gather of pieces
reduce_scatter     all-to-all of pieces, combine
=================  ==============================  =====================

On one node they read where arrays lie that the ranks share; private ones pass through shared
memory while they are short, and are messages from rank to rank where they are long.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.arrays import Array, is_own, synchronize
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.nodes import Places
from mpishard.communication.contract.reduction import ReductionOperation
from mpishard.communication.contract.status import (
    PLACE_BYTES,
    MessageWait,
    decode_place,
    encode_place,
)
from mpishard.communication.contract.work import Steps, Waitable
from mpishard.communication.mpi.headers import INLINE_BYTES, Headers, Readiness, make_row
from mpishard.communication.mpi.lanes import Pending, Turn
from mpishard.communication.mpi.node_memory import PRIVATE
from mpishard.communication.mpi.pairwise_collectives import PairwiseCollectives
from mpishard.communication.mpi.shared_collectives import (
    SCRATCH_BYTES,
    same_start,
    starts_of,
)
from mpishard.errors import CollectiveMismatchError, PeerError
from mpishard.layout import ShardLayout

__all__ = ["MPIReductions"]


class MPIReductions(PairwiseCollectives):
    """The part of the MPI backend that exchanges headers and reduces."""

    @property
    def scratch_bytes(self) -> int:
        return super().scratch_bytes + self._pool.nbytes

    @abstractmethod
    def _left_error(self, local: int, last: int, awaited: Call | MessageWait) -> PeerError:
        """The error of a rank that waits for one that left after its collective ``last``."""

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
            posted, rows = group.post_header(row, call)
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
                group.broken = self._left_error(local, last, call)
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
                readiness = self._copy_ahead(call, first, array, places)
                is_apart = is_own(out) and not np.may_share_memory(array, out)
                if readiness is Readiness.AT_HOME and is_apart:
                    readiness = Readiness.APART
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
                    flat = result if array is out else array.reshape(-1)
                    yield from self._bounced_all_reduce(first, bounce, call.operation, flat, result)
                    self._count_all_reduce(call, sizes)
                    return out
            is_apart = headers is not None and headers.all_apart
            if is_apart and self._may_swap(array, call.operation):
                second.release()
                flat = array.reshape(-1)
                yield from self._swap_and_combine(first, flat, call.operation, result)
                self._count_all_reduce(call, sizes)
                return out
            if _overlap_askew(array, out):
                array = array.copy()
            flat = result if array is out else array.reshape(-1)
            piece = result[starts_of(sizes)[self.rank] :][: sizes[self.rank]]
            if self._sends_pairwise or self._is_large(array.nbytes):
                yield from self._pairwise_reduce(
                    first, flat, sizes, call.operation, piece, (second, result), is_apart=is_apart
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


def _overlap_askew(array: Array, out: Array) -> bool:
    """Whether two arrays of one shape share memory and are not the same."""
    if array is out:
        return False
    return bool(np.may_share_memory(array, out)) and not same_start(array, out)
