"""Memory that the ranks of a node share."""

from __future__ import annotations

import functools
import mmap
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpishard.base import Array, address, array_namespace, even_slice
from mpishard.communication.contract.call import (
    Call,
    CollectiveKind,
    check_array,
    check_out,
    sent_by_all_reduce,
)
from mpishard.communication.contract.reduction import (
    ReductionOperation,
    Subtree,
    accumulation_dtype,
    complete_subtrees,
)
from mpishard.communication.contract.work import Work

if TYPE_CHECKING:
    from mpishard.communication.contract.backend import CommunicationBackend


class Arena:
    """Vectors that the ranks of a node read and write in place: one for each rank, or one for all.

    `CommunicationBackend.allocate_arena` makes it. Its collectives read the vectors of a node's
    ranks in place; between nodes only sums and pieces travel, once to each node. A rank without
    shared memory may use the class with its own vector alone; its collectives then send messages.

    Every call carries the arena's number and the part of its vectors, which ranks must agree on.
    Ranks number their arenas alike, because all of them make the same arenas in the same order.

    Parameters
    ----------
    backend : CommunicationBackend
        The backend of the ranks that share.
    vectors : mapping of int to Array
        The vector of each rank of this node, by rank.
    number : int
        Number among the arenas of the backend, from 1; 0 if this rank's vector stands alone.
    start : int
        The element of the whole arena's vectors at which these begin: see `part`.
    once_per_node : bool
        Whether all ranks of a node have the same vector.
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        vectors: Mapping[int, Array],
        number: int = 0,
        start: int = 0,
        *,
        once_per_node: bool = False,
    ) -> None:
        self._backend = backend
        self._vectors = vectors
        self._number = number
        self._start = start
        self._once_per_node = once_per_node
        self.mine: Array = vectors[backend.rank]
        """This rank's vector."""

    def part(self, start: int, length: int) -> Arena:
        """Return an arena of ``length`` elements of each vector, from element ``start`` on."""
        # Views, so a part needs no memory and no collective of its own.
        vectors = {rank: v[start : start + length] for rank, v in self._vectors.items()}
        return Arena(
            self._backend,
            vectors,
            self._number,
            self._start + start,
            once_per_node=self._once_per_node,
        )

    def of(self, rank: int) -> Array:
        """Return the vector of ``rank``, a rank of this node."""
        return self._vectors[rank]

    def reduce_into(self, out: Array, part: slice = slice(None), *, subject: int = 0) -> Work:
        """Sum ``part`` of all ranks' vectors, and write this rank's piece of the sum to ``out``.

        Collective; returns without waiting. The pieces are those of `ShardLayout`. ``out`` may be
        the piece of `mine` itself. For 16-bit floats it may be float32: the sums are then not
        rounded. ``subject`` is compared, as in `CommunicationBackend.all_reduce`.

        Raises
        ------
        ValueError
            If ``out`` has another shape or dtype, or lies where other ranks read; if all ranks of a
            node have the same vector.
        CollectiveMismatchError
            If the arena or the part differs between ranks.
        """
        backend, mine = self._backend, self.mine[part]
        if not self._number:
            return backend.reduce_scatter_async(mine, out=out, subject=subject)
        self._require_own_vectors("reduce_into")
        own = self._piece_of(mine)
        wide = accumulation_dtype(mine.dtype)
        check_out(out, own.shape, wide if out.dtype == wide else mine.dtype, "reduce_into")
        arrays = self._views(part)
        _refuse_overlap("reduce_into: out", out, own, arrays)
        # As for messages; a backend that reads in place counts anew.
        sends = {"reduce_scatter": mine.nbytes - own.nbytes}
        call = self._describe(CollectiveKind.REDUCE_INTO, mine, part, subject, sends)
        return backend._start(call, backend._steps_reduce_into, arrays, out)

    def reduce_in_place(self, part: slice = slice(None), *, subject: int = 0) -> Work:
        """Replace ``part`` of all ranks' vectors by their sum.

        Collective; returns without waiting. ``subject`` and errors as in `reduce_into`.
        """
        backend, mine = self._backend, self.mine[part]
        if not self._number:
            return backend.all_reduce_async(mine, subject=subject)
        self._require_own_vectors("reduce_in_place")
        sends = sent_by_all_reduce(int(mine.size), mine.itemsize, backend.world_size, backend.rank)
        call = self._describe(CollectiveKind.REDUCE_IN_PLACE, mine, part, subject, sends)
        return backend._start(call, backend._steps_reduce_in_place, self._views(part))

    def gather_in_place(self, piece: Array, part: slice = slice(None), *, subject: int = 0) -> Work:
        """Collect the pieces of ``part`` of all ranks in the vectors.

        Collective; returns without waiting. If a node has one vector, a piece comes to it once.
        ``piece`` is this rank's piece by `ShardLayout`; it may lie there already. ``subject`` as in
        `reduce_into`.

        Raises
        ------
        ValueError
            If ``piece`` has another shape or dtype, or lies elsewhere in the part.
        CollectiveMismatchError
            If the arena or the part differs between ranks.
        """
        backend, mine = self._backend, self.mine[part]
        if not self._number:
            return backend.all_gather_async(piece, out=mine, subject=subject)
        own = self._piece_of(mine)
        check_array(piece, "gather_in_place")
        if piece.shape != own.shape or piece.dtype != own.dtype:
            raise ValueError(
                f"gather_in_place: this rank's piece has shape {own.shape} and dtype "
                f"{own.dtype.name}, got {piece.shape} and {piece.dtype.name}"
            )
        arrays = self._views(part)
        _refuse_overlap("gather_in_place: the piece", piece, own, arrays)
        sends = {"all_gather": piece.nbytes * (backend.world_size - 1)}
        call = self._describe(CollectiveKind.GATHER_IN_PLACE, mine, part, subject, sends)
        steps = backend._steps_gather_in_place
        return backend._start(call, steps, arrays, piece, self._once_per_node)

    def fence(self, *, subject: int = 0) -> Work:
        """Begin a fence, complete when every rank has called it; all earlier writes are seen then.

        Collective; returns without waiting. ``subject`` as in `reduce_into`.
        """
        return self._backend.barrier_async(subject=subject)

    def _piece_of(self, mine: Array) -> Array:
        """Return this rank's piece of its part ``mine``."""
        return mine[even_slice(mine.size, self._backend.world_size, self._backend.rank)]

    def _views(self, part: slice) -> dict[int, Array]:
        return {rank: vector[part] for rank, vector in self._vectors.items()}

    def _describe(
        self,
        kind: CollectiveKind,
        mine: Array,
        part: slice,
        subject: int,
        sends: Mapping[str, int],
    ) -> Call:
        start, _, step = part.indices(int(self.mine.size))
        if step != 1:
            raise ValueError(f"{kind.label} takes a part without a step, got {part}")
        is_sum = kind is not CollectiveKind.GATHER_IN_PLACE
        return Call.describe(
            kind,
            mine,
            operation=ReductionOperation.SUM if is_sum else None,
            subject=subject,
            arena=self._number,
            start=self._start + start,
            sends=sends,
        )

    def _require_own_vectors(self, name: str) -> None:
        if self._once_per_node:
            raise ValueError(
                f"{name} sums a vector of each rank, and this arena has one for each node: make it "
                "without once_per_node"
            )


def _refuse_overlap(what: str, array: Array, own: Array, vectors: Mapping[int, Array]) -> None:
    """Refuse an ``array`` in the part of an arena that ranks of the node read or write.

    It may be ``own``, this rank's piece.
    """
    for rank, vector in vectors.items():
        if array_namespace(vector).may_share_memory(array, vector):
            # Asked last, because to look up an address takes longer.
            if array.dtype == own.dtype and address(array) == address(own):
                return
            raise ValueError(
                f"{what} overlaps the vector of rank {rank}, which all ranks of the node use: pass "
                "memory of its own, or this rank's piece of its own vector"
            )


def anonymous_memory(nbytes: int) -> Array:
    """Return zeroed memory for the threads of this process: shape (``nbytes``,), dtype uint8."""
    # Mapped pages, and not np.zeros: it must begin on a cache line, aligned for vector loads.
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def number_nodes(names: Sequence[Hashable]) -> tuple[int, ...]:
    """Return a number for the node of each rank, from names that only ranks of one node share.

    Examples
    --------
    >>> number_nodes(["b", "a", "b"])
    (0, 1, 0)
    """
    # By first occurrence, so that the numbers do not depend on names such as process ids.
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


@dataclass(frozen=True)
class Nodes:
    """The node of each rank, and the ranks that exchange data between nodes.

    Parameters
    ----------
    numbers : tuple of int
        The node of each rank.
    rank : int
        This rank.
    """

    numbers: tuple[int, ...]
    rank: int

    @functools.cached_property
    def own(self) -> int:
        """The node of this rank."""
        return self.numbers[self.rank]

    @functools.cached_property
    def count(self) -> int:
        """Number of nodes."""
        return len(set(self.numbers))

    @functools.cached_property
    def peers(self) -> tuple[int, ...]:
        """The ranks of this rank's node, itself among them, in order."""
        return tuple(self.ranks(self.own))

    def ranks(self, node: int) -> list[int]:
        """Return the ranks of ``node``, in order."""
        return [rank for rank, number in enumerate(self.numbers) if number == node]

    def agent(self, other: int, node: int | None = None) -> int:
        """Return the rank of ``node`` (default: this rank's) that exchanges data with ``other``.

        On the node of ``other`` that is rank ``other`` itself.
        """
        node = self.own if node is None else node
        if self.numbers[other] == node:
            return other
        ranks = self.ranks(node)
        outside = sum(number != node for number in self.numbers[:other])
        # In turn, so that the ranks of the node share the traffic with other nodes evenly.
        return ranks[outside % len(ranks)]

    @functools.cached_property
    def clients(self) -> list[int]:
        """The ranks of other nodes for which this rank is the agent, in order."""
        return [
            other
            for other, number in enumerate(self.numbers)
            if number != self.own and self.agent(other) == self.rank
        ]

    def subtrees(self, node: int) -> tuple[Subtree, ...]:
        """Return the subtrees that ``node`` can sum by itself: see `complete_subtrees`."""
        return complete_subtrees(self.ranks(node), len(self.numbers))
