"""Memory that the ranks of a node share."""

from __future__ import annotations

import functools
import mmap
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mpishard.base import Array, OutMismatchError, address
from mpishard.communication.contract.reduction import Subtree, complete_subtrees
from mpishard.communication.contract.work import Work

# A location travels in headers as two integers. A pointer would not do, because every process
# maps an allocation at an address of its own.
Location = tuple[int, int]
"""The number of an allocation of shared memory, and the offset of a byte in it."""

PRIVATE: Location = (-1, -1)
"""The location of an array that other ranks cannot read."""

Locations = tuple[Location, Location]
"""The locations of a rank's array and of its result."""

NOWHERE: Locations = (PRIVATE, PRIVATE)
"""The locations of an array and a result that other ranks cannot read."""


class Arena:
    """A vector for each rank of a node, which all of them read and write in place.

    `CommunicationBackend.allocate_arena` makes it. On one node a rank reads its peers' vectors
    instead of receiving copies; between nodes only sums and pieces travel. A rank without shared
    memory may use the class with its own vector alone, and then receives the sums.

    Parameters
    ----------
    vectors : dict of int to Array
        The vector of each rank of this node, by rank.
    rank : int
        This rank.
    reduce_scatter : callable
        `CommunicationBackend.reduce_scatter_async` of the ranks that share.
    barrier : callable
        `CommunicationBackend.barrier_async` of the same ranks.
    """

    def __init__(
        self,
        vectors: dict[int, Array],
        rank: int,
        reduce_scatter: Callable[..., Work],
        barrier: Callable[..., Work],
    ) -> None:
        self._vectors = vectors
        self._rank = rank
        self._reduce_scatter = reduce_scatter
        self._barrier = barrier
        self.mine: Array = vectors[rank]
        """This rank's vector."""

    def part(self, start: int, length: int) -> Arena:
        """Return an arena of ``length`` elements of each vector, from element ``start`` on."""
        # Views, so a part needs no memory and no collective of its own.
        vectors = {rank: v[start : start + length] for rank, v in self._vectors.items()}
        return Arena(vectors, self._rank, self._reduce_scatter, self._barrier)

    def of(self, rank: int) -> Array:
        """Return the vector of ``rank``, a rank of this node."""
        return self._vectors[rank]

    def reduce_into(self, out: Array, part: slice = slice(None), *, subject: int = 0) -> Work:
        """Sum ``part`` of all ranks' vectors, and write this rank's piece of the sum to ``out``.

        Collective; returns without waiting. ``out`` may be the piece of `mine` itself.
        ``subject`` is compared, as in `CommunicationBackend.all_reduce`.
        """
        return self._reduce_scatter(self.mine[part], out=out, subject=subject)

    def fence(self, *, subject: int = 0) -> Work:
        """Begin a fence, complete when every rank has called it; all earlier writes are seen then.

        Collective; returns without waiting. ``subject`` as in `reduce_into`.
        """
        return self._barrier(subject=subject)


class Allocations:
    """The shared allocations of one backend, with the same numbers on all its ranks.

    A NumPy view refers to the array that owns its memory, so the allocation of an array can be
    found from the array alone. It lives as long as an array in it does.
    """

    def __init__(self) -> None:
        # Number, owner and start of each, by the id of the owner.
        self._allocations: dict[int, tuple[int, weakref.ref[Array], int]] = {}
        self._memory: dict[int, weakref.ref[Array]] = {}  # by number
        self.count = 0
        """Number of allocations so far, the same on all ranks; the number still alive is not."""

    def add(self, memory: Array) -> None:
        """Add an allocation, of shape (bytes,) and dtype uint8. All ranks add them in one order."""
        # Numbers are never used again: ranks collect garbage at different times, so a reused number
        # could mean two allocations.
        number, owner = self.count, id(memory)
        self.count += 1
        self._allocations[owner] = number, weakref.ref(memory), address(memory)
        self._memory[number] = weakref.ref(memory)

        def forget() -> None:
            self._allocations.pop(owner, None)
            self._memory.pop(number, None)

        # At exit no allocation is looked up any more.
        weakref.finalize(memory, forget).atexit = False

    def locate(self, array: Array) -> Location:
        """Return the allocation that contains ``array``, and the array's offset in it in bytes.

        Return `PRIVATE` if ``array`` lies in no allocation.
        """
        # NumPy collapses chains of views: `base` is the owner, also for a view of a view.
        owner = array.base if isinstance(array.base, np.ndarray) else array
        found = self._allocations.get(id(owner))
        # Python reuses an id when its object is gone, so another array may have it now.
        if found is None or owner is not found[1]():
            return PRIVATE
        return found[0], array.ctypes.data - found[2]

    def view(self, location: Location, like: Array) -> Array:
        """Return the array at ``location``, with the shape and dtype of ``like``."""
        number, offset = location
        memory = self._memory[number]()
        assert memory is not None
        view: Array = memory[offset : offset + like.nbytes].view(like.dtype)
        return view.reshape(like.shape)

    def shared_arrays(
        self,
        locations: Sequence[Locations],
        nodes: Nodes,
        like: Array,
        out_bytes: int,
        offsets: Sequence[int],
    ) -> dict[int, Array]:
        """Return views of the arrays of this node's ranks, by rank; none if not all are shared.

        Refuse, on all ranks, results that overlap arrays which other ranks still read: a result may
        lie in a shared array only in the range that its rank alone reads.

        Parameters
        ----------
        locations : sequence of Locations
            Of each rank's array and result.
        nodes : Nodes
            The node of each rank.
        like : Array
            This rank's array, flat; all ranks' have its length and dtype.
        out_bytes : int
            Bytes of each result.
        offsets : sequence of int
            Where the range that a rank alone reads begins, in bytes behind the array's start.

        Raises
        ------
        OutMismatchError
            Naming the two ranks.
        """
        # All ranks have the same locations from the headers, so all of them take the same way here.
        if not nodes.arrays_are_shared(locations):
            return {}
        for rank, (_, (number, start)) in enumerate(locations):
            if number == PRIVATE[0]:
                continue
            for other, ((theirs, begin), _) in enumerate(locations):
                # The test is in bytes and only between ranks of one node, because an allocation has
                # one copy on each node.
                distance = start - begin
                if (
                    theirs == number
                    and -out_bytes < distance < like.nbytes
                    and distance != offsets[rank]
                    and nodes.numbers[rank] == nodes.numbers[other]
                ):
                    raise OutMismatchError(
                        f"out of rank {rank} overlaps the array of rank {other}, which all ranks "
                        "of the node read: give it memory of its own"
                    )
        return {rank: self.view(locations[rank][0], like) for rank in nodes.peers}


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

    def arrays_are_shared(self, locations: Sequence[Locations]) -> bool:
        """Return whether some ranks share a node, and each node's arrays lie in one allocation."""
        if self.count == len(self.numbers):
            return False
        # If one rank's array were private, its peers could not read it, so all must use messages
        # then.
        allocations: dict[int, int] = {}  # by node
        for node, (own, _) in zip(self.numbers, locations, strict=True):
            if own == PRIVATE or allocations.setdefault(node, own[0]) != own[0]:
                return False
        return True

    def results_are_shared(self, locations: Sequence[Locations]) -> bool:
        """Return whether the ranks of each node have one shared array as their result."""
        # One array, and not only one allocation: several ranks would otherwise write different
        # results.
        arrays: dict[int, Location] = {}  # by node
        for node, (_, out) in zip(self.numbers, locations, strict=True):
            if out == PRIVATE or arrays.setdefault(node, out) != out:
                return False
        return True
