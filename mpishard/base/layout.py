"""Division of consecutive elements into one range for each rank."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mpishard.base.arguments import as_count, as_integer

__all__ = ["LeafLayout", "ShardLayout", "even_sizes", "even_slice"]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """An even split of ``length`` elements over ``world_size`` ranks.

    Rank ``r`` owns ``length // world_size`` elements, and one more if ``r < length % world_size``.
    If there are more ranks than elements, the last ranks own nothing.

    Parameters
    ----------
    length : int
        Number of elements, 0 or more.
    world_size : int
        Number of ranks, 1 or more.

    Raises
    ------
    TypeError, ValueError
        If one is no integer, ``length`` is negative, or ``world_size`` is below 1.

    Examples
    --------
    >>> layout = ShardLayout(10, 3)
    >>> [(layout.start(r), layout.size(r)) for r in range(3)]
    [(0, 4), (4, 3), (7, 3)]
    >>> layout.owner(6)
    1
    """

    length: int
    world_size: int

    def __post_init__(self) -> None:
        as_count("length", self.length, 0)
        as_count("world_size", self.world_size)

    def start(self, rank: int) -> int:
        """Return the index of the first element that ``rank`` owns."""
        self._check_rank(rank)
        base, rest = divmod(self.length, self.world_size)
        # The longer shares come first, so that a start needs no sum over ranks.
        return rank * base + min(rank, rest)

    def size(self, rank: int) -> int:
        """Return the number of elements that ``rank`` owns."""
        self._check_rank(rank)
        base, rest = divmod(self.length, self.world_size)
        return base + (rank < rest)

    def slice(self, rank: int) -> slice:
        """Return the elements that ``rank`` owns, as a slice."""
        start = self.start(rank)
        return slice(start, start + self.size(rank))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each rank, in rank order."""
        base, rest = divmod(self.length, self.world_size)
        return (base + 1,) * rest + (base,) * (self.world_size - rest)

    def owner(self, index: int) -> int:
        """Return the rank that owns the element at ``index``.

        Raises
        ------
        IndexError
            If ``index`` is outside ``[0, length)``.
        """
        if not 0 <= as_integer("index", index) < self.length:
            raise IndexError(f"index {index} is outside [0, {self.length})")
        base, rest = divmod(self.length, self.world_size)
        # The first elements lie in the longer shares. If base is 0, these have all elements, and
        # nothing is divided by 0.
        wide = rest * (base + 1)
        return index // (base + 1) if index < wide else rest + (index - wide) // base

    def _check_rank(self, rank: int) -> None:
        if not 0 <= as_integer("rank", rank) < self.world_size:
            raise ValueError(f"rank {rank} is outside [0, {self.world_size})")


@functools.lru_cache(maxsize=4096)
def even_sizes(length: int, world_size: int) -> tuple[int, ...]:
    """Return `ShardLayout.sizes` from a cache, because each training step uses the same sizes."""
    return ShardLayout(length, world_size).sizes


@functools.lru_cache(maxsize=4096)
def even_slice(length: int, world_size: int, rank: int) -> slice:
    """Return `ShardLayout.slice` from a cache, as `even_sizes`."""
    return ShardLayout(length, world_size).slice(rank)


@dataclass(frozen=True, slots=True)
class LeafLayout:
    """A batch, cut into leaves that are assigned to the ranks in turn.

    ``ShardLayout(samples, leaves)`` cuts the batch, whatever the number of ranks. With P ranks,
    rank r has the leaves r, r + P, r + 2P, .. . So the n-th leaves of all ranks are P adjacent
    leaves: a whole subtree of the tree in which all leaves are summed. If P does not divide the
    number of leaves, only the first ranks have samples, as many as the largest power of two. The
    other ranks have the same number of leaves, without samples.

    Parameters
    ----------
    samples : int
        Number of samples of the global batch, 0 or more.
    leaves : int
        Number of leaves, a multiple of `computing`.
    world_size : int
        Number of ranks, 1 or more.

    Raises
    ------
    ValueError
        If ``samples`` is negative, or ``leaves`` no multiple of `computing`.

    Examples
    --------
    >>> layout = LeafLayout(samples=10, leaves=4, world_size=2)
    >>> [[(own.start, own.stop) for own in layout.slices(rank)] for rank in range(2)]
    [[(0, 3), (6, 8)], [(3, 6), (8, 10)]]
    >>> layout.sizes
    (5, 5)
    >>> LeafLayout(samples=10, leaves=4, world_size=3).sizes
    (5, 5, 0)
    """

    samples: int
    leaves: int
    world_size: int

    def __post_init__(self) -> None:
        ShardLayout(self.samples, self.world_size)  # refuses numbers below 0 or 1
        if self.leaves < 1 or self.leaves % self.computing:
            raise ValueError(
                f"{self.leaves} leaves cannot be divided evenly among {self.world_size} ranks"
            )

    @property
    def computing(self) -> int:
        """Number of ranks that have leaves with samples: the first ones."""
        world = self.world_size
        # A power of two of ranks divides the leaves, whose adjacent ones then are whole subtrees.
        return world if self.leaves % world == 0 else 1 << (world.bit_length() - 1)

    def slices(self, rank: int) -> list[slice]:
        """Return the samples of each leaf of ``rank``, as slices of the global batch, in order."""
        if rank >= self.computing:
            # Empty ones, because all ranks take part in the sum of every round of leaves.
            return [slice(self.samples, self.samples)] * (self.leaves // self.computing)
        cut = ShardLayout(self.samples, self.leaves)
        return [cut.slice(leaf) for leaf in range(rank, self.leaves, self.computing)]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of samples of each rank, in rank order."""
        ranks = [self.slices(rank) for rank in range(self.world_size)]
        return tuple(sum(part.stop - part.start for part in own) for own in ranks)
