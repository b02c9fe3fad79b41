"""Memory that the ranks of a node share."""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.arrays import Array, address
from mpishard.communication.contract.reduction import Subtree, complete_subtrees
from mpishard.communication.contract.work import Work

Place = tuple[int, int]
"""A region of shared memory, by number, and a byte in it."""

PRIVATE: Place = (-1, -1)
"""The place of an array that other ranks cannot read."""

Places = tuple[Place, Place]
"""The place of a rank's array, and the place of its result."""

NOWHERE: Places = (PRIVATE, PRIVATE)
"""The places of an array and a result that other ranks cannot read."""


class Arena:
    """A vector for each rank of a node, which all of them read and write in place.

    Made by `CommunicationBackend.allocate_arena`. On one node a rank reads its peers' vectors
    instead of receiving copies; between nodes only sums and pieces travel. With its own vector
    alone a rank has no arena, and may use this class all the same: the sums are received.

    Parameters
    ----------
    vectors : dict of int to Array
        The vector of each rank of this node, by rank.
    rank : int
        This rank.
    reduce_scatter : callable
        `CommunicationBackend.reduce_scatter_async` of the ranks that share.
    barrier : callable
        Its `barrier_async`.
    """

    def __init__(
        self,
        vectors: dict[int, Array],
        rank: int,
        reduce_scatter: Callable[..., Work],
        barrier: Callable[[], Work],
    ) -> None:
        self._vectors = vectors
        self._rank = rank
        self._reduce_scatter = reduce_scatter
        self._barrier = barrier
        self.mine: Array = vectors[rank]
        """This rank's vector."""

    def part(self, start: int, length: int) -> Arena:
        """The same of ``length`` elements of each vector, from ``start`` on."""
        vectors = {rank: v[start : start + length] for rank, v in self._vectors.items()}
        return Arena(vectors, self._rank, self._reduce_scatter, self._barrier)

    def of(self, rank: int) -> Array:
        """The vector of ``rank``, a rank of this node."""
        return self._vectors[rank]

    def reduce_into(self, out: Array, part: slice = slice(None)) -> Work:
        """Sum ``part`` of all ranks' vectors; this rank's piece of the sum goes to ``out``.

        Collective, and not waited for. ``out`` may be the piece's own place in `mine`.
        """
        return self._reduce_scatter(self.mine[part], out=out)

    def fence(self) -> Work:
        """Complete when every rank has called it; then all see what each rank wrote before."""
        return self._barrier()


class Regions:
    """The shared regions of one backend, with the same numbers on all its ranks.

    A NumPy view knows the array that its memory belongs to, so an array tells by itself which
    region it lies in. A region lives as long as an array in it does.
    """

    def __init__(self) -> None:
        # Number, owner and start of each, by the id of the owner.
        self._regions: dict[int, tuple[int, weakref.ref[Any], int]] = {}
        self._memory: dict[int, weakref.ref[Any]] = {}  # by number
        self.count = 0
        """Regions that there ever were: the same on all ranks, unlike those still alive."""

    def add(self, memory: Array) -> None:
        """Number a region, of shape (bytes,) and dtype uint8. Every rank adds in one order."""
        number, owner = self.count, id(memory)
        self.count += 1
        self._regions[owner] = number, weakref.ref(memory), address(memory)
        self._memory[number] = weakref.ref(memory)

        def forget() -> None:
            self._regions.pop(owner, None)
            self._memory.pop(number, None)

        # At exit nobody looks for a region any more.
        weakref.finalize(memory, forget).atexit = False

    def locate(self, array: Array) -> Place:
        """Number of the region that contains ``array``, and the array's offset in bytes.

        `PRIVATE` if it lies in none.
        """
        owner = array.base if isinstance(array.base, np.ndarray) else array
        found = self._regions.get(id(owner))
        # An id is used again when its array is gone: another array may have it now.
        if found is None or owner is not found[1]():
            return PRIVATE
        return found[0], address(array) - found[2]

    def view(self, place: Place, like: Array) -> Array:
        """The array of the shape and dtype of ``like`` that begins at ``place``."""
        number, offset = place
        memory = self._memory[number]()
        assert memory is not None
        return memory[offset : offset + like.nbytes].view(like.dtype).reshape(like.shape)


def anonymous_memory(nbytes: int) -> Array:
    """Zeroed memory for the threads of this process, of shape (``nbytes``,) and dtype uint8."""
    # From whole pages, so that it begins where vector instructions and caches like it.
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def number_nodes(names: Sequence[Hashable]) -> tuple[int, ...]:
    """A number for the node of each rank, from names that only ranks of one node share.

    Examples
    --------
    >>> number_nodes(["b", "a", "b"])
    (0, 1, 0)
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


@dataclass(frozen=True)
class Nodes:
    """The node of each rank, and which ranks exchange data between nodes.

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
        """The ranks of ``node``, in order."""
        return [rank for rank, number in enumerate(self.numbers) if number == node]

    def agent(self, other: int, node: int | None = None) -> int:
        """The rank of ``node``, by default this rank's, that exchanges data with rank ``other``.

        On the node of ``other`` that is ``other`` itself. The ranks of other nodes are dealt out
        evenly, so that the ranks of a node share the work.
        """
        node = self.own if node is None else node
        if self.numbers[other] == node:
            return other
        ranks = self.ranks(node)
        outside = sum(number != node for number in self.numbers[:other])
        # In turn, so that the traffic with other nodes is spread over the ranks of this one.
        return ranks[outside % len(ranks)]

    @functools.cached_property
    def clients(self) -> list[int]:
        """The ranks of other nodes that this rank is agent for, in order."""
        return [
            other
            for other, number in enumerate(self.numbers)
            if number != self.own and self.agent(other) == self.rank
        ]

    def subtrees(self, node: int) -> tuple[Subtree, ...]:
        """The sums that ``node`` can make of its ranks' contributions: `complete_subtrees`."""
        return complete_subtrees(self.ranks(node), len(self.numbers))

    def arrays_are_shared(self, places: Sequence[Places]) -> bool:
        """Return whether ranks share a node and have their arrays in one region of its memory."""
        if self.count == len(self.numbers):
            return False
        regions: dict[int, int] = {}  # by node
        for node, (own, _) in zip(self.numbers, places, strict=True):
            if own == PRIVATE or regions.setdefault(node, own[0]) != own[0]:
                return False
        return True

    def results_are_shared(self, places: Sequence[Places]) -> bool:
        """Return whether the results of each node's ranks are one array."""
        arrays: dict[int, Place] = {}  # by node
        for node, (_, out) in zip(self.numbers, places, strict=True):
            if out == PRIVATE or arrays.setdefault(node, out) != out:
                return False
        return True
