"""The bytes that a rank is booked with for each collective, the same on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.call import Call, Kind
from mpishard.communication.contract.nodes import Nodes
from mpishard.communication.contract.reduction import accumulation_dtype
from mpishard.communication.contract.topology import Topology
from mpishard.communication.contract.traffic import Traffic

__all__ = ["TrafficBooking"]


class TrafficBooking(Topology):
    """Books what a collective sends by its definition, whatever messages it is made of.

    So that figures compare between backends. A transport books each call once, when it is done.
    """

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()
        """What this rank has sent and read."""

    def _count_reduce_scatter(self, call: Call, counts: Sequence[int]) -> None:
        rows = sum(counts)
        row_bytes = call.nbytes // rows if rows else 0
        self.traffic.count(Kind.REDUCE_SCATTER.label, (rows - counts[self.rank]) * row_bytes)

    def _count_all_reduce(self, call: Call, counts: Sequence[int]) -> None:
        self._count_reduce_scatter(call, counts)
        rows = sum(counts)
        piece = counts[self.rank] * (call.nbytes // rows) if rows else 0
        self.traffic.count(Kind.ALL_GATHER.label, piece * (self.world_size - 1))

    def _count_all_gather(self, array: Array) -> None:
        self.traffic.count(Kind.ALL_GATHER.label, array.nbytes * (self.world_size - 1))

    def _count_shared_reduce(self, sizes: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Book a reduction to pieces of ``sizes``, of arrays that each node's ranks share."""
        nodes = Nodes(self.nodes, self.rank)
        sent = nodes.sent_to_reduce(sizes) * accumulation_dtype(dtype).itemsize
        read = (len(self.peers) - 1) * sizes[self.rank] * dtype.itemsize
        self.traffic.count(Kind.REDUCE_SCATTER.label, sent)
        self.traffic.count_read(Kind.REDUCE_SCATTER.label, read)

    def _count_shared_gather(self, sizes: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Book pieces of ``sizes`` that were gathered once on each node."""
        sent = Nodes(self.nodes, self.rank).sent_to_gather(sizes) * dtype.itemsize
        self.traffic.count(Kind.ALL_GATHER.label, sent)

    def _count_broadcast(self, array: Array, root: int) -> None:
        nbytes = array.nbytes * (self.world_size - 1) if self.rank == root else 0
        self.traffic.count(Kind.BROADCAST.label, nbytes)

    def _count_scatter(self, sent: Array | None, piece: Array) -> None:
        """Book a scatter; ``sent`` is the root's array, None elsewhere."""
        self.traffic.count(Kind.SCATTER.label, 0 if sent is None else sent.nbytes - piece.nbytes)

    def _count_gather(self, array: Array, root: int) -> None:
        self.traffic.count(Kind.GATHER.label, 0 if self.rank == root else array.nbytes)

    def _count_all_to_all(self, parts: Sequence[Array]) -> None:
        nbytes = sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        self.traffic.count(Kind.ALL_TO_ALL.label, nbytes)
