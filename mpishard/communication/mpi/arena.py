"""The collectives of arenas over MPI: a node's ranks read each other's vectors in place.

Between nodes a piece travels once to each node and not once to each rank: on every node one rank is
the *agent* for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mpishard.base import Array, DType, address, even_sizes, even_slice
from mpishard.communication.contract.arena import Nodes
from mpishard.communication.contract.call import Call, Traffic
from mpishard.communication.contract.reduction import (
    ReductionOperation,
    TreeReducer,
    accumulation_dtype,
)
from mpishard.communication.contract.work import Steps, Waitable
from mpishard.communication.mpi.collectives import Collectives, split_up, starts_of
from mpishard.communication.mpi.group import Group

_SUM = ReductionOperation.SUM


class ArenaCollectives:
    """The collectives of the arenas of one group of MPI ranks.

    Parameters
    ----------
    collectives : Collectives
        Exchanges headers, and keeps the order of the group's collectives.
    group : Group
        The group's channels and fences.
    nodes : Nodes
        The node of each rank.
    reducer : TreeReducer
        Combines contributions.
    traffic : Traffic
        Counts bytes.
    """

    def __init__(
        self,
        collectives: Collectives,
        group: Group,
        nodes: Nodes,
        reducer: TreeReducer,
        traffic: Traffic,
    ) -> None:
        self._collectives = collectives
        self._group = group
        self._nodes = nodes
        self._reducer = reducer
        self._traffic = traffic
        self._rank, self._world_size = nodes.rank, len(nodes.numbers)
        # Sums then travel as other reductions do: there is no vector to read in place.
        self._is_alone = nodes.count == self._world_size

    def reduce_into(self, call: Call, arrays: Mapping[int, Array], out: Array) -> Steps:
        """See `ITransport._steps_reduce_into`; so for all collectives here."""
        if self._is_alone:
            sizes, mine = even_sizes(call.size, self._world_size), arrays[self._rank]
            return (yield from self._collectives.reduce_scatter(call, mine, sizes, out))
        yield from self._collectives.open(call)
        yield from self._collectives.turn(call)
        yield from self._reduce(call, arrays, out)
        # Peers read this rank's array until this fence; then the caller may change it.
        yield self._group.exchange.fence()
        return out

    def reduce_in_place(self, call: Call, arrays: Mapping[int, Array]) -> Steps:
        """Combine all arrays into each: this rank's piece, which the others then copy."""
        if self._is_alone:
            mine = arrays[self._rank]
            return (yield from self._collectives.all_reduce(call, mine, mine))
        yield from self._collectives.open(call)
        yield from self._collectives.turn(call)
        pieces = split_up(arrays[self._rank], even_sizes(call.size, self._world_size))
        yield from self._reduce(call, arrays, pieces[self._rank])
        yield from self._spread(call, arrays, pieces, once_per_node=False)
        return arrays[self._rank]

    def gather_in_place(
        self, call: Call, arrays: Mapping[int, Array], piece: Array, once_per_node: bool
    ) -> Steps:
        """Collect all ranks' pieces in every array."""
        # After the headers no rank of the node uses the array's last values any more.
        yield from self._collectives.open(call)
        yield from self._collectives.turn(call)
        pieces = split_up(arrays[self._rank], even_sizes(call.size, self._world_size))
        if address(pieces[self._rank]) != address(piece):
            pieces[self._rank][...] = piece
        yield from self._spread(call, arrays, pieces, once_per_node=once_per_node)
        return arrays[self._rank]

    def _spread(
        self,
        call: Call,
        arrays: Mapping[int, Array],
        pieces: Sequence[Array],
        *,
        once_per_node: bool,
    ) -> Steps:
        """Give this rank's piece to all ranks; ``pieces`` are those of its own array."""
        nodes, sizes = self._nodes, even_sizes(call.size, self._world_size)
        if nodes.count > 1:
            yield from self._exchange_pieces(pieces)
        if not once_per_node:
            yield self._group.exchange.fence()
            for rank, start in enumerate(starts_of(sizes)):
                source, piece = nodes.agent(rank), pieces[rank]
                if source != self._rank:
                    piece[...] = arrays[source][start : start + sizes[rank]]
                    self._traffic.count_read("all_gather", piece.nbytes)
        self._traffic.share_gather(call, nodes, sizes, pieces[0].dtype)
        # The node's vector is complete, or no rank copies from another's any more.
        yield self._group.exchange.fence()

    def _reduce(self, call: Call, arrays: Mapping[int, Array], piece: Array) -> Iterable[Waitable]:
        """Combine this rank's part of all ranks' arrays into ``piece``, which may be that part."""
        sizes = even_sizes(call.size, self._world_size)
        mine = even_slice(call.size, self._world_size, self._rank)
        own = [array[mine] for array in arrays.values()]
        self._traffic.share_reduce(call, self._nodes, sizes, own[0].dtype)
        if self._nodes.count > 1:
            return self._reduce_between_nodes(arrays, own, sizes, piece)
        self._reducer.reduce(own, _SUM, piece)
        return ()

    def _reduce_between_nodes(
        self,
        arrays: Mapping[int, Array],
        own: Sequence[Array],
        sizes: tuple[int, ...],
        piece: Array,
    ) -> Steps:
        """Combine ``own``, the parts of ``arrays`` on this node, with the sums of other nodes."""
        starts = starts_of(sizes)
        nodes, world = self._nodes, range(self._world_size)
        trees = [nodes.subtrees(node) for node in range(nodes.count)]
        wide = accumulation_dtype(own[0].dtype)
        clients = nodes.clients
        senders = [nodes.agent(self._rank, n) for n in range(nodes.count) if n != nodes.own]
        # A node sends the sums of all its subtrees in one part, which must fit the channel. They
        # travel in the dtype of accumulation, so that 16-bit data are rounded once, at the end.
        step = max(1, self._group.channel.bytes_each // wide.itemsize // max(map(len, trees)))
        for low in range(0, max(sizes), step):
            lengths = [max(0, min(step, size - low)) for size in sizes]
            outgoing = [np.empty(0, wide) for _ in world]
            for rank in clients:
                part = slice(starts[rank] + low, starts[rank] + low + lengths[rank])
                outgoing[rank] = self._sums_for(
                    {r: array[part] for r, array in arrays.items()}, wide, lengths[rank]
                )
            incoming = [np.empty(0, wide) for _ in world]
            for sender in senders:
                count = len(trees[nodes.numbers[sender]])
                incoming[sender] = np.empty(count * lengths[self._rank], wide)
            yield from self._group.channel.move(outgoing, incoming)
            chunk = slice(low, low + lengths[self._rank])
            # Single slots of this node beside whole subtrees of others: the reducer takes both.
            known = {(rank, 0): array[chunk] for rank, array in zip(arrays, own, strict=True)}
            for sender in senders:
                subtrees = trees[nodes.numbers[sender]]
                sums = incoming[sender].reshape(len(subtrees), -1)
                known |= zip(subtrees, sums, strict=True)
            self._reducer.reduce_subtrees(known, self._world_size, _SUM, piece[chunk])

    def _sums_for(self, arrays: Mapping[int, Array], dtype: DType, length: int) -> Array:
        """Return this node's sums of one piece: one for each of its subtrees, end to end."""
        subtrees = self._nodes.subtrees(self._nodes.own)
        sums = np.empty((len(subtrees), length), dtype)
        for (first, level), target in zip(subtrees, sums, strict=True):
            # A subtree of consecutive slots is itself a tree of the same order.
            under = range(first, first + (1 << level))
            members = [array for rank, array in arrays.items() if rank in under]
            self._reducer.reduce(members, _SUM, target)
        return sums.reshape(-1)

    def _exchange_pieces(self, pieces: Sequence[Array]) -> Steps:
        """Send this rank's piece to its agents; receive those for which this rank is the agent."""
        nodes, own = self._nodes, pieces[self._rank]
        agents = {nodes.agent(self._rank, n) for n in range(nodes.count) if n != nodes.own}
        clients = nodes.clients
        outgoing = [own if r in agents else own[:0] for r in range(self._world_size)]
        incoming = [p if r in clients else p[:0] for r, p in enumerate(pieces)]
        # By messages, because the nodes share no memory.
        yield from self._group.messages.move(outgoing, incoming)
