"""The bytes that a rank is booked with for each collective, the same on every backend."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.arena import Nodes
from mpishard.communication.contract.call import Call, Kind
from mpishard.communication.contract.reduction import accumulation_dtype

__all__ = ["Traffic"]


class _Member(Protocol):
    """A rank of a world, as far as `Traffic` asks."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def topology(self) -> Nodes: ...


class Traffic:
    """Counts of the bytes that one rank sent to others, by collective.

    A collective is booked by its definition, whatever messages it is made of, so that figures
    compare between backends; each call once, when it is done. A piece that a rank keeps for
    itself is not counted, nor are headers. A broadcast is booked on the root: (world size - 1)
    times the array.

    Parameters
    ----------
    member : CommunicationBackend
        The rank, for its place among the others.
    """

    def __init__(self, member: _Member) -> None:
        self._member: _Member = weakref.proxy(member)  # which holds this
        self.bytes_sent: Counter[str] = Counter()
        self.bytes_read: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    @property
    def total_bytes(self) -> int:
        """Bytes sent to other ranks since the last `reset`."""
        return sum(self.bytes_sent.values())

    def reset(self) -> None:
        """Start counting from zero."""
        self.bytes_sent.clear()
        self.bytes_read.clear()
        self.calls.clear()

    def count(self, kind: str, nbytes: int) -> None:
        """Add one call of ``kind`` that sent ``nbytes`` to other ranks."""
        self.calls[kind] += 1
        self.bytes_sent[kind] += nbytes

    def count_read(self, kind: str, nbytes: int) -> None:
        """Add ``nbytes`` that a call of ``kind`` read from memory of other ranks."""
        self.bytes_read[kind] += nbytes

    # Each of these books one collective.

    def count_reduce_scatter(self, call: Call, counts: Sequence[int]) -> None:
        """Book a reduction to pieces of ``counts`` rows."""
        rows = sum(counts)
        row_bytes = call.nbytes // rows if rows else 0
        self.count("reduce_scatter", (rows - counts[self._member.rank]) * row_bytes)

    def count_all_reduce(self, call: Call, sizes: Sequence[int]) -> None:
        """Book a reduction to pieces of ``sizes`` elements, which are then gathered."""
        total, own = sum(sizes), sizes[self._member.rank]
        itemsize = call.nbytes // total if total else 0
        self.count("reduce_scatter", (total - own) * itemsize)
        self.count("all_gather", own * itemsize * (self._member.world_size - 1))

    def count_all_gather(self, array: Array) -> None:
        """Book ``array``, sent to all others."""
        self.count("all_gather", array.nbytes * (self._member.world_size - 1))

    def count_shared_reduce(self, sizes: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Book a reduction to pieces of ``sizes``, of arrays that each node's ranks share."""
        nodes = self._member.topology
        sent = sum(sizes[rank] for rank in nodes.clients()) * len(nodes.subtrees(nodes.own))
        self.count("reduce_scatter", sent * accumulation_dtype(dtype).itemsize)
        read = (len(nodes.peers) - 1) * sizes[nodes.rank] * dtype.itemsize
        self.count_read("reduce_scatter", read)

    def count_shared_gather(self, sizes: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Book pieces of ``sizes`` that were gathered once on each node."""
        nodes = self._member.topology
        self.count("all_gather", sizes[nodes.rank] * (nodes.count - 1) * dtype.itemsize)

    def count_broadcast(self, array: Array, root: int) -> None:
        """Book the root's ``array``, sent to all others."""
        is_root = self._member.rank == root
        nbytes = array.nbytes * (self._member.world_size - 1) if is_root else 0
        self.count(Kind.BROADCAST.label, nbytes)

    def count_scatter(self, sent: Array | None, piece: Array) -> None:
        """Book a scatter; ``sent`` is the root's array, None elsewhere."""
        self.count(Kind.SCATTER.label, 0 if sent is None else sent.nbytes - piece.nbytes)

    def count_gather(self, array: Array, root: int) -> None:
        """Book ``array``, sent to the root."""
        self.count(Kind.GATHER.label, 0 if self._member.rank == root else array.nbytes)

    def count_all_to_all(self, parts: Sequence[Array]) -> None:
        """Book ``parts``, each sent to its rank."""
        own = parts[self._member.rank]
        self.count(Kind.ALL_TO_ALL.label, sum(part.nbytes for part in parts) - own.nbytes)
