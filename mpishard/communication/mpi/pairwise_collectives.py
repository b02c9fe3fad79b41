"""Collectives by messages, on one node and of what is large: each rank sends each other its part.

On a node a message is a copy, and what a collective costs is copies and waits. The libraries'
nonblocking collectives go through schedules of their own, which took 1.2 to 3.5 times as long as
the messages that they consist of (1 MiB, 2 ranks, MPICH 5.0.2 and Open MPI 5.0.11). Here the
messages are posted as they are, a large piece as several: while one is combined the next ones come,
and what is combined goes on to the others while it is still in the cache. Short arrays of two ranks
are swapped whole, where they are not to be overwritten.

Between nodes a message is the network's, and a piece would travel once to each rank of the other
node: there `mpishard.communication.mpi.collectives` leaves it to the library, which knows the way,
up to the `LARGE_BYTES` that libraries can count.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, is_device_array, synchronize
from mpishard.communication.contract.reduction import ReductionOperation, is_one_step
from mpishard.communication.contract.work import Steps
from mpishard.communication.mpi.bounce_collectives import BounceCollectives
from mpishard.communication.mpi.lanes import LARGE_BYTES, Pending, PendingAll, Turn
from mpishard.communication.mpi.shared_collectives import SCRATCH_BYTES, split_up

__all__ = ["DATA_TAG", "SWAP_BYTES", "PairwiseCollectives"]

CHUNK_BYTES = 1 << 20
"""The longest message of a reduction of short pieces. All ranks cut alike, wherever their arrays
lie."""

SWAP_BYTES = 1 << 22
"""The longest array that two ranks swap whole."""

_SHORT = 2
_LONG = 8
# In chunks: two ranks send pieces of more than _SHORT in messages of _LONG. Short ones are combined
# and go on while the cache has them. Where long ones overwrite the array, what the other rank has
# just read is slow to write, as its cache holds it still: some MiB later it does not.

DATA_TAG = 0
"""Of messages on a lane: headers may go there, too."""


class PairwiseCollectives(BounceCollectives):
    """The part of the MPI backend that sends from rank to rank within a node."""

    @abstractmethod
    def _begun(self) -> None:
        """Hear that a request was begun that moves data."""

    def _spec(self, array: Array, count: int, *, itemsize: int = 1) -> list[Any]:
        """``count`` elements of ``array``, whatever its dtype, for mpi4py."""
        return [_as_bytes(array), count, self._talk.element(itemsize)]

    def _parts(
        self, array: Array, sizes: Sequence[int], starts: Sequence[int], *, itemsize: int
    ) -> list[Any]:
        return [_as_bytes(array), sizes, starts, self._talk.element(itemsize)]

    def _keep(self, request: Any, *keep: object) -> Pending:
        pending = Pending(request, self._talk.in_flight, *keep)
        self._begun()
        return pending

    def _keep_all(self, requests: list[Any], *keep: object) -> PendingAll:
        pending = PendingAll(self._talk.mpi, requests, self._talk.in_flight, *keep)
        self._begun()
        return pending

    def _take_beside(self, array: Array, nbytes: int) -> Array:
        """A buffer where ``array`` lies: of the pool, or of CuPy, which has its own."""
        if is_device_array(array):
            return array_namespace(array).empty(nbytes, np.uint8)
        return self._pool.take(nbytes)

    def _give_back(self, buffer: Array) -> None:
        if not is_device_array(buffer):
            self._pool.give(buffer)

    # -------------------------------------------------------------------------------- collectives

    @property
    def _sends_pairwise(self) -> bool:
        """Whether pieces go from rank to rank; else the library moves them."""
        return self.node_count == 1 < self.world_size

    def _pairwise_reduce(
        self,
        turn: Turn,
        array: Array,
        sizes: Sequence[int],
        operation: ReductionOperation,
        piece: Array,
        gather: tuple[Turn, Array] | None = None,
        *,
        is_apart: bool = False,
    ) -> Steps:
        """Send each rank its piece of flat ``array``, and combine those that come into ``piece``.

        ``piece`` may lie in ``array``, where this rank's own is. With ``gather``, a turn and a
        flat result, each part is sent on to all as soon as it is combined, and theirs are received
        in the result; that may be ``array`` itself, for where a part goes was sent before.
        ``is_apart`` says that it is another on all ranks.
        """
        pieces = split_up(array, sizes)
        wholes = pieces
        if gather is not None and gather[1] is not array:
            wholes = split_up(gather[1], sizes)
        others, length = self._others, max(sizes)
        chunk = self._message_length(length, array.itemsize, is_apart=is_apart)
        step = chunk * max(1, SCRATCH_BYTES // (chunk * array.itemsize * self.world_size))
        gathering = []
        yield turn
        for low in range(0, length, step):
            parts = [slice(at, at + chunk) for at in range(low, min(low + step, length), chunk)]
            own = pieces[self.rank][low : low + step]
            nbytes = own.nbytes * len(others)
            buffer = self._take_beside(array, nbytes)
            room = buffer[:nbytes].view(array.dtype).reshape(len(others), own.size)
            incoming = dict(zip(others, room, strict=True))
            exchanges = [
                self._exchange(
                    turn,
                    {rank: pieces[rank][part] for rank in others},
                    {rank: a[part.start - low : part.stop - low] for rank, a in incoming.items()},
                )
                for part in parts
            ]
            if low + step >= length:
                turn.release()
            if gather is not None:
                yield gather[0]
            for part, exchange in zip(parts, exchanges, strict=True):
                yield exchange
                here = slice(part.start - low, part.stop - low)
                contributions = [
                    own[here] if rank == self.rank else incoming[rank][here]
                    for rank in range(self.world_size)
                ]
                combined = piece[part]
                self._reducer.reduce(contributions, operation, combined)
                if gather is not None:
                    synchronize(combined)
                    gathering.append(
                        self._exchange(
                            gather[0],
                            dict.fromkeys(others, combined),
                            {rank: wholes[rank][part] for rank in others},
                        )
                    )
            self._give_back(buffer)
        if gather is not None:
            gather[0].release()
        yield from gathering

    def _pairwise_gather(self, turn: Turn, out: Array, sizes: Sequence[int]) -> Steps:
        """Send this rank's part of flat ``out`` to all, and receive theirs."""
        synchronize(out)
        others, pieces = self._others, split_up(out, sizes)
        outgoing = dict.fromkeys(others, pieces[self.rank])
        yield from self._transfer(turn, outgoing, {rank: pieces[rank] for rank in others})

    def _message_length(self, longest: int, itemsize: int, *, is_apart: bool = False) -> int:
        """Elements of the longest message of a reduction whose longest piece has ``longest``.

        ``is_apart`` says that on both ranks the result overwrites nothing that the other read.
        """
        nbytes = CHUNK_BYTES
        if self.world_size == 2 and not is_apart and longest * itemsize > _SHORT * CHUNK_BYTES:
            nbytes *= _LONG
        return max(1, nbytes // itemsize)

    def _may_swap(self, array: Array, operation: ReductionOperation) -> bool:
        """Whether two ranks swap whole arrays such as ``array``, where their results lie apart.

        Halves there and halves back are as many bytes, and a wait more. Of long arrays it costs
        more to combine them whole on both ranks.
        """
        return (
            self.world_size == 2
            and self._sends_pairwise
            and array.nbytes <= SWAP_BYTES
            and is_one_step(array.dtype, operation)
        )

    def _swap_and_combine(
        self, turn: Turn, array: Array, operation: ReductionOperation, result: Array
    ) -> Steps:
        """Combine flat ``array`` and the other rank's, which is received in ``result``."""
        other = {1 - self.rank: array}
        yield turn
        exchange = self._exchange(turn, other, dict.fromkeys(other, result))
        turn.release()
        yield exchange
        arrays = [array, result] if self.rank == 0 else [result, array]
        self._reducer.reduce(arrays, operation, result)

    @staticmethod
    def _is_large(nbytes: int) -> bool:
        """Whether so many bytes are more than a library can be given at once."""
        return nbytes > LARGE_BYTES

    def _transfer(
        self, turn: Turn, outgoing: Mapping[int, Array], incoming: Mapping[int, Array]
    ) -> Steps:
        """Send flat arrays of any length to other ranks, and receive theirs."""
        arrays = [*outgoing.values(), *incoming.values()]
        longest = max((array.size for array in arrays), default=0)
        lengths = range(0, longest, max(1, SCRATCH_BYTES // arrays[0].itemsize) if longest else 1)
        yield turn
        exchanges = [
            self._exchange(
                turn,
                {rank: array[low : low + lengths.step] for rank, array in outgoing.items()},
                {rank: array[low : low + lengths.step] for rank, array in incoming.items()},
            )
            for low in lengths
        ]
        turn.release()
        yield from exchanges

    def _pairwise_scatter(
        self, turn: Turn, array: Array | None, sizes: Sequence[int], piece: Array, root: int
    ) -> Steps:
        """Send each rank its part of the root's ``array``, which is None elsewhere."""
        if array is None:
            yield from self._transfer(turn, {}, {root: piece.reshape(-1)})
            return
        outgoing = dict(enumerate(split_up(array.reshape(-1), sizes)))
        piece.reshape(-1)[...] = outgoing.pop(root)
        yield from self._transfer(turn, outgoing, {})

    def _pairwise_gather_to(
        self, turn: Turn, array: Array, sizes: Sequence[int], result: Array | None, root: int
    ) -> Steps:
        """Send ``array`` to the root, whose ``result`` takes all; it is None elsewhere."""
        if result is None:
            yield from self._transfer(turn, {root: array.reshape(-1)}, {})
            return
        incoming = dict(enumerate(split_up(result.reshape(-1), sizes)))
        incoming.pop(root)[...] = array.reshape(-1)
        yield from self._transfer(turn, {}, incoming)

    def _pairwise_all_to_all(
        self, turn: Turn, parts: Sequence[Array], shapes: Sequence[tuple[int, ...]]
    ) -> Steps:
        """Send each rank its part, and receive arrays of ``shapes``."""
        received = [np.empty(shape, parts[0].dtype) for shape in shapes]
        received[self.rank][...] = parts[self.rank]
        yield from self._transfer(
            turn,
            {rank: parts[rank].reshape(-1) for rank in self._others},
            {rank: received[rank].reshape(-1) for rank in self._others},
        )
        return received

    @property
    def _others(self) -> list[int]:
        """The other ranks, from the next one on: not all send to rank 0 first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]

    def _exchange(
        self, turn: Turn, outgoing: Mapping[int, Array], incoming: Mapping[int, Array]
    ) -> PendingAll:
        """Post a message to, and one from, each rank whose flat array has elements.

        One that is there already may be copied by the call that asks for it: the others, which
        would wait for that, are sent theirs before.
        """
        group, comm, requests = self._talk, turn.comm, []
        for post, arrays in ((comm.Isend, outgoing), (comm.Irecv, incoming)):
            for rank, array in arrays.items():
                if array.size:
                    spec = [array.view(np.uint8), array.size, group.element(array.itemsize)]
                    requests.append(post(spec, rank, DATA_TAG))
        return self._keep_all(requests, outgoing, incoming)


def _as_bytes(array: Array) -> Array:
    # MPI gets bytes, because NumPy exports no buffer of bfloat16.
    return array.reshape(-1).view(np.uint8)
