"""Collectives on memory that a node's ranks share: read in place on the node, sent between nodes.

On one node nothing is sent. A rank combines its piece from where the others' arrays lie; then a
*fence* tells it that all have done so. Between nodes a piece travels once to each node and not once
to each rank: on every node one rank is *agent* for it. To reduce, the agent sends the owner the
largest sums that its node can make without leaving the one order of reductions; to gather, it
receives the piece for its node.

Everything is written after the first message of a collective, the header: by then all ranks have
called it, and none still uses what an ``out`` that they share held before.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from mpishard.arrays import Array, address
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.call import Kind
from mpishard.communication.contract.nodes import Nodes, Places
from mpishard.communication.contract.reduction import (
    ReductionOperation,
    Subtree,
    accumulation_dtype,
)
from mpishard.communication.contract.work import Steps, Waitable
from mpishard.communication.mpi.headers import Headers
from mpishard.communication.mpi.lanes import Pending, ScratchPool, Turn
from mpishard.communication.mpi.node_memory import PRIVATE, synchronize_windows
from mpishard.layout import ShardLayout

__all__ = ["SCRATCH_BYTES", "SharedCollectives"]

SCRATCH_BYTES = 1 << 28
"""About how much scratch a collective takes: what is longer goes in rounds."""


class SharedCollectives(CommunicationBackend):
    """The part of the MPI backend that works on shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self._pool = ScratchPool()

    @abstractmethod
    def _begin_fence(self, turn: Turn) -> Waitable:
        """What is true when all ranks have begun this fence, in the order of their turns."""

    @abstractmethod
    def _exchange(
        self, turn: Turn, outgoing: Mapping[int, Array], incoming: Mapping[int, Array]
    ) -> Pending:
        """Post a message to, and one from, each rank that has elements to send or to receive."""

    @abstractmethod
    def _keep(self, request: Any, *keep: object) -> Pending:
        """Remember what the library reads and writes until ``request`` is complete."""

    @abstractmethod
    def _parts(
        self, array: Array, sizes: Sequence[int], starts: Sequence[int], *, itemsize: int
    ) -> list[Any]:
        """Each rank's part of ``array``, in elements of ``itemsize`` bytes, for mpi4py."""

    def _all_places(self, headers: Headers) -> list[Places] | None:
        """What all ranks say of theirs; None where any rank's array came with its header."""
        if not self._regions.ever or self.world_size == 1 or headers.any_inline:
            return None
        return [headers.places(rank) for rank in range(self.world_size)]

    def _refuse_overlaps(
        self, places: Sequence[Places], array: Array, out: Array, offsets: Sequence[int]
    ) -> None:
        """Refuse, on all ranks alike, results on top of what others still read.

        Where the result of a rank may lie in an array is the range that the rank alone reads:
        ``offsets`` bytes behind the array's start.

        Raises
        ------
        ValueError
            Naming the two ranks.
        """
        if all(into == PRIVATE for _, into in places):
            return
        if all(
            (own[0], own[1] + at) == into for (own, into), at in zip(places, offsets, strict=True)
        ):
            return
        nodes = self.nodes
        for rank, (_, into) in enumerate(places):
            for other, (own, _) in enumerate(places):
                distance = into[1] - own[1]
                if (
                    nodes[rank] == nodes[other]
                    and into[0] == own[0] != PRIVATE[0]
                    and -out.nbytes < distance < array.nbytes
                    and distance != offsets[rank]
                ):
                    raise ValueError(
                        f"out of rank {rank} overlaps the array of rank {other}, which all ranks "
                        "of the node read: give it memory of its own"
                    )

    def _peer_arrays(self, places: Sequence[Places], array: Array) -> dict[int, Array]:
        """The flat arrays of this node's ranks, where they lie."""
        like = array.reshape(-1)
        return {rank: self._regions.view(places[rank][0], like) for rank in self.peers}

    # -------------------------------------------------------------------------------- collectives

    def _shared_all_reduce(
        self,
        turn: Turn,
        arrays: Mapping[int, Array],
        operation: ReductionOperation,
        out: Array,
        *,
        out_is_shared: bool,
    ) -> Steps:
        """Combine ``arrays`` into flat ``out``; where that is private, it is this rank's array.

        No piece of a private ``out`` is read by others before it is complete: what a rank writes
        there is its own piece, and those that it is agent for.
        """
        nodes = Nodes(self.nodes, self.rank)
        layout = ShardLayout(int(out.size), self.world_size)
        yield from self._combine_shared(
            turn, arrays, layout.sizes, operation, out[layout.slice(self.rank)]
        )
        if nodes.count > 1:
            yield from self._exchange_pieces(turn, out, layout.sizes)
        if not out_is_shared:
            yield from self._fence(turn)
            for rank in range(self.world_size):
                source = nodes.agent(rank)
                if source != self.rank:
                    part = layout.slice(rank)
                    out[part] = arrays[source][part]
                    self.traffic.count_read(Kind.ALL_GATHER.label, out[part].nbytes)
        self._count_shared_gather(layout.sizes, out.dtype)
        yield from self._fence(turn, is_last=True)

    def _shared_reduce_scatter(
        self,
        turn: Turn,
        arrays: Mapping[int, Array],
        sizes: Sequence[int],
        operation: ReductionOperation,
        piece: Array,
    ) -> Steps:
        """Combine this rank's part of ``arrays`` into ``piece``, which may be that part itself."""
        yield from self._combine_shared(turn, arrays, sizes, operation, piece)
        yield from self._fence(turn, is_last=True)

    def _shared_all_gather(
        self, turn: Turn, array: Array, out: Array, sizes: Sequence[int]
    ) -> Steps:
        """Gather flat ``array`` into flat ``out``, which the ranks of a node share."""
        start = sum(sizes[: self.rank])
        mine = out[start : start + sizes[self.rank]]
        if not same_start(mine, array):
            mine[...] = array
        if self.node_count > 1:
            yield from self._exchange_pieces(turn, out, sizes)
        self._count_shared_gather(sizes, out.dtype)
        yield from self._fence(turn, is_last=True)

    # -------------------------------------------------------------------------------------- steps

    def _fence(self, turn: Turn, *, is_last: bool = False) -> Steps:
        """Wait until every rank has come here; what it wrote before is then seen."""
        yield turn
        synchronize_windows()
        fence = self._begin_fence(turn)
        if is_last:
            turn.release()
        yield fence
        synchronize_windows()

    def _combine_shared(
        self,
        turn: Turn,
        arrays: Mapping[int, Array],
        sizes: Sequence[int],
        operation: ReductionOperation,
        piece: Array,
    ) -> Steps:
        """Combine this rank's part of all arrays into ``piece``."""
        starts = starts_of(sizes)
        mine = slice(starts[self.rank], starts[self.rank] + sizes[self.rank])
        self._count_shared_reduce(sizes, piece.dtype)
        if self.node_count == 1:
            self._reducer.reduce([array[mine] for array in arrays.values()], operation, piece)
            return
        nodes = Nodes(self.nodes, self.rank)
        subtrees = [nodes.subtrees(node) for node in range(nodes.count)]
        own = {(rank, 0): array[mine] for rank, array in arrays.items()}
        wide = accumulation_dtype(piece.dtype)
        clients = nodes.clients()
        senders = [nodes.agent(self.rank, node) for node in range(nodes.count)]
        most = max(len(trees) for trees in subtrees)
        step = max(1, SCRATCH_BYTES // (wide.itemsize * self.world_size * most))
        for low in range(0, max(*sizes, 1), step):
            lengths = [max(0, min(step, size - low)) for size in sizes]
            outgoing = [0] * self.world_size
            for rank in clients:
                outgoing[rank] = lengths[rank] * len(subtrees[nodes.own])
            incoming = [0] * self.world_size
            for node, sender in enumerate(senders):
                if node != nodes.own:
                    incoming[sender] = lengths[self.rank] * len(subtrees[node])
            sent, received = self._take(sum(outgoing), wide), self._take(sum(incoming), wide)
            for rank in clients:
                first = starts[rank] + low
                part = slice(first, first + lengths[rank])
                self._combine_for(
                    [a[part] for a in arrays.values()], subtrees[nodes.own], operation,
                    sent.array[starts_of(outgoing)[rank] :][: outgoing[rank]],
                )  # fmt: skip
            yield turn
            request = turn.comm.Ialltoallv(
                self._parts(sent.array, outgoing, starts_of(outgoing), itemsize=wide.itemsize),
                self._parts(received.array, incoming, starts_of(incoming), itemsize=wide.itemsize),
            )
            yield self._keep(request, sent, received)
            known: dict[Subtree, Array] = {
                key: array[low : low + lengths[self.rank]] for key, array in own.items()
            }
            for node, sender in enumerate(senders):
                if node != nodes.own:
                    block = received.array[starts_of(incoming)[sender] :][: incoming[sender]]
                    known |= zip(
                        subtrees[node], block.reshape(len(subtrees[node]), -1), strict=True
                    )
            self._reducer.reduce_subtrees(
                known, self.world_size, operation, piece[low : low + lengths[self.rank]]
            )
            self._pool.give(sent.buffer)
            self._pool.give(received.buffer)

    def _combine_for(
        self,
        arrays: Sequence[Array],
        subtrees: Sequence[Subtree],
        operation: ReductionOperation,
        out: Array,
    ) -> None:
        """What this node sends of one piece: its part of each of its subtrees, end to end."""
        ranks = self.peers
        for (first, level), sums in zip(subtrees, out.reshape(len(subtrees), -1), strict=True):
            under = range(first, first + (1 << level))
            self._reducer.reduce_part(
                [a for rank, a in zip(ranks, arrays, strict=True) if rank in under],
                operation, sums,
            )  # fmt: skip

    def _exchange_pieces(self, turn: Turn, out: Array, sizes: Sequence[int]) -> Steps:
        """Send this rank's part of flat ``out`` to its agents; receive for whom this is agent."""
        nodes = Nodes(self.nodes, self.rank)
        pieces = split_up(out, sizes)
        agents = [nodes.agent(self.rank, n) for n in range(nodes.count) if n != nodes.own]
        step = max(1, SCRATCH_BYTES // out.itemsize)  # libraries fail above 2^31 bytes
        yield turn
        for low in range(0, max(*sizes, 1), step):
            yield self._exchange(
                turn,
                dict.fromkeys(agents, pieces[self.rank][low : low + step]),
                {rank: pieces[rank][low : low + step] for rank in nodes.clients()},
            )

    def _take(self, length: int, dtype: np.dtype[Any]) -> Scratch:
        return Scratch(self._pool.take(length * dtype.itemsize), length, dtype)


class Scratch:
    """A pooled buffer, and the part of it in use as an array of shape (length,)."""

    __slots__ = ("array", "buffer")

    def __init__(self, buffer: Array, length: int, dtype: np.dtype[Any]) -> None:
        self.buffer = buffer
        self.array = buffer[: length * dtype.itemsize].view(dtype)


def starts_of(sizes: Sequence[int]) -> list[int]:
    """Where each of several parts begins that lie end to end."""
    return [0, *accumulate(sizes[:-1])]


def split_up(array: Array, sizes: Sequence[int]) -> list[Array]:
    """Each rank's piece of a flat array in which they lie end to end."""
    return [
        array[start : start + size] for start, size in zip(starts_of(sizes), sizes, strict=True)
    ]


def same_start(a: Array, b: Array) -> bool:
    """Whether two arrays begin at one address."""
    return address(a) == address(b)
