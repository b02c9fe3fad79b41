"""How the ranks of one node stand to one another in a collective on memory that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpishard.communication.contract.reduction import Subtree, complete_subtrees
from mpishard.communication.mpi.node_memory import PRIVATE, Place

__all__ = ["Nodes", "Places", "same_everywhere", "shared_by_node"]

Places = tuple[Place, Place]
"""Where the array of a rank lies in memory that its node shares, and where its result."""


@dataclass(frozen=True)
class Nodes:
    """Who is on which node, and who deals with whom.

    Parameters
    ----------
    numbers : tuple of int
        The node of each rank.
    rank : int
        This rank.
    """

    numbers: tuple[int, ...]
    rank: int

    @property
    def own(self) -> int:
        """The node of this rank."""
        return self.numbers[self.rank]

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(set(self.numbers))

    def ranks(self, node: int) -> list[int]:
        """The ranks of ``node``, in order."""
        return [rank for rank, number in enumerate(self.numbers) if number == node]

    def agent(self, other: int, node: int | None = None) -> int:
        """The rank of ``node``, by default this rank's, that deals with rank ``other``.

        That is ``other`` itself on its own node. Those of other nodes are dealt out, so that the
        ranks of a node share the work evenly.
        """
        node = self.own if node is None else node
        if self.numbers[other] == node:
            return other
        ranks = self.ranks(node)
        outside = sum(number != node for number in self.numbers[:other])
        return ranks[outside % len(ranks)]

    def clients(self) -> list[int]:
        """The ranks of other nodes that this rank is agent for, in order."""
        return [
            other
            for other, number in enumerate(self.numbers)
            if number != self.own and self.agent(other) == self.rank
        ]

    def subtrees(self, node: int) -> tuple[Subtree, ...]:
        """What ``node`` can combine of the ranks' contributions: see `complete_subtrees`."""
        return complete_subtrees(self.ranks(node), len(self.numbers))

    def sent_to_reduce(self, sizes: Sequence[int]) -> int:
        """Elements that this rank sends in a reduction to pieces of ``sizes``."""
        return sum(sizes[rank] for rank in self.clients()) * len(self.subtrees(self.own))

    def sent_to_gather(self, sizes: Sequence[int]) -> int:
        """Elements that this rank sends when pieces of ``sizes`` are gathered."""
        return sizes[self.rank] * (self.count - 1)


def shared_by_node(places: Sequence[Place], nodes: Sequence[int]) -> bool:
    """Whether there are nodes of several ranks, and those of each have arrays in one region."""
    if len(set(nodes)) == len(nodes):
        return False  # nobody shares with anybody
    regions = {(node, place[0]) for node, place in zip(nodes, places, strict=True)}
    return PRIVATE not in places and len(regions) == len(set(nodes))


def same_everywhere(places: Sequence[Place], nodes: Sequence[int]) -> bool:
    """Whether each node's ranks mean one and the same array."""
    arrays = set(zip(nodes, places, strict=True))
    return PRIVATE not in places and len(arrays) == len(set(nodes))
