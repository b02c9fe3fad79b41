"""Which consecutive elements of a length belong to which rank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ShardLayout"]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """An even split of ``length`` elements over ``world_size`` ranks, remainder to the first.

    Rank ``r`` owns ``length // world_size`` elements, one more where
    ``r < length % world_size``. Ranks beyond the length own nothing.

    Parameters
    ----------
    length : int
        Number of elements, 0 or more.
    world_size : int
        Number of ranks, 1 or more.

    Raises
    ------
    ValueError
        Where ``length`` is negative or ``world_size`` is below 1.

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
        if self.length < 0:
            raise ValueError(f"length must be 0 or more, got {self.length}")
        if self.world_size < 1:
            raise ValueError(f"world_size must be 1 or more, got {self.world_size}")

    def start(self, rank: int) -> int:
        """Index of the first element that ``rank`` owns."""
        self._check_rank(rank)
        base, rest = divmod(self.length, self.world_size)
        return rank * base + min(rank, rest)

    def size(self, rank: int) -> int:
        """Number of elements that ``rank`` owns."""
        self._check_rank(rank)
        base, rest = divmod(self.length, self.world_size)
        return base + (rank < rest)

    def slice(self, rank: int) -> slice:
        """The elements that ``rank`` owns, as a slice."""
        start = self.start(rank)
        return slice(start, start + self.size(rank))

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of elements of each rank, in rank order."""
        base, rest = divmod(self.length, self.world_size)
        return (base + 1,) * rest + (base,) * (self.world_size - rest)

    def owner(self, index: int) -> int:
        """The rank that owns the element at ``index``.

        Raises
        ------
        IndexError
            Where ``index`` is outside ``[0, length)``.
        """
        if not 0 <= index < self.length:
            raise IndexError(f"index {index} is outside [0, {self.length})")
        base, rest = divmod(self.length, self.world_size)
        wide = rest * (base + 1)
        return index // (base + 1) if index < wide else rest + (index - wide) // base

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside [0, {self.world_size})")
