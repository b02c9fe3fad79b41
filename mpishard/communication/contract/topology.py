"""Who a rank is, who the others are, and which of them share a node."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["Topology"]


class Topology(ABC):
    """A rank's place among the ranks of a world and their nodes.

    A subclass gives `rank` and `world_size`, and may give `nodes`; of a world that was split off
    another, it sets ``_world_ranks``.
    """

    def __init__(self) -> None:
        self._world_ranks: tuple[int, ...] | None = None

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this thread, in ``[0, world_size)``."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The number in the root world of each of these ranks; errors and reports give that.

        In a root world, which was not split off another, 0, 1 and so on.
        """
        return self._world_ranks or tuple(range(self.world_size))

    @property
    def nodes(self) -> tuple[int, ...]:
        """The number of the node that each rank runs on; nodes are numbered by first rank."""
        return (0,) * self.world_size

    @property
    def local_rank(self) -> int:
        """The rank's number among the ranks of its node."""
        nodes = self.nodes
        return nodes[: self.rank].count(nodes[self.rank])

    @property
    def node_count(self) -> int:
        """Number of nodes that the ranks run on."""
        return len(set(self.nodes))

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks of this rank's node, itself among them, in order."""
        nodes = self.nodes
        return tuple(rank for rank, node in enumerate(nodes) if node == nodes[self.rank])
