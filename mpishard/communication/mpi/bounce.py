"""Memory that a node's ranks share, through which the arrays pass that they do not share."""

from __future__ import annotations

import numpy as np

from mpishard.arrays import Array

__all__ = ["BOUNCE_BYTES", "BOUNCE_SETS", "WHOLE_BYTES", "BounceBuffers", "longest_bounced"]

BOUNCE_BYTES = 1 << 21
"""Of a row. Longer arrays are quicker as messages."""

PAIR_BYTES = 1 << 22
"""Of a row of two ranks, which takes half of an array."""

WHOLE_BYTES = 1 << 15
"""The longest array that two ranks copy as a whole."""

BOUNCE_SETS = 2


def longest_bounced(world_size: int) -> int:
    """Bytes of the longest array that passes."""
    return 2 * PAIR_BYTES if world_size == 2 else BOUNCE_BYTES


class BounceBuffers:
    """Two sets of a row for each rank, which it fills, and of one for a common result of several.

    Collectives take the sets in turn: who writes a row has met all others in the collective
    before, and by then they had read what that row held.

    Parameters
    ----------
    memory : Array
        Of `nbytes` bytes, shared by the ranks; dtype uint8.
    world_size, rank : int
        How many there are, and which of them this is.
    """

    def __init__(self, memory: Array, world_size: int, rank: int) -> None:
        self._sets = memory.reshape(BOUNCE_SETS, *self._shape(world_size))
        self._world_size = world_size
        self._rank = rank
        self.turn = 0
        """The set whose turn it is, the same on all ranks."""

    @staticmethod
    def nbytes(world_size: int) -> int:
        """Bytes for so many ranks."""
        rows, nbytes = BounceBuffers._shape(world_size)
        return BOUNCE_SETS * rows * nbytes

    @staticmethod
    def _shape(world_size: int) -> tuple[int, int]:
        """Rows of a set, and the bytes of each."""
        return (2, PAIR_BYTES) if world_size == 2 else (world_size + 1, BOUNCE_BYTES)

    @property
    def nbytes_each(self) -> int:
        """Bytes that this rank answers for."""
        return self.nbytes(self._world_size) // self._world_size

    def own_row(self, dtype: np.dtype[np.generic], length: int) -> Array:
        """The begin of this rank's row of the set in turn, of shape (``length``,)."""
        return self._view(self._rank, dtype, length)

    def rows(
        self, dtype: np.dtype[np.generic], length: int, turn: int | None = None
    ) -> list[Array]:
        """That of each rank's; of another set, where ``turn`` says which."""
        return [self._view(rank, dtype, length, turn) for rank in range(self._world_size)]

    def result(self, dtype: np.dtype[np.generic], length: int) -> Array:
        """That of the row in which each rank writes a part of its own."""
        return self._view(self._world_size, dtype, length)

    def end_turn(self) -> None:
        """Go on to the other set. All ranks end their turns alike."""
        self.turn = (self.turn + 1) % BOUNCE_SETS

    def _view(
        self, row: int, dtype: np.dtype[np.generic], length: int, turn: int | None = None
    ) -> Array:
        turn = self.turn if turn is None else turn
        return self._sets[turn, row, : length * dtype.itemsize].view(dtype)
