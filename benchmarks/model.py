"""The alpha-beta model of the cost of a step, from collectives measured in the same run.

A collective of n bytes takes alpha + beta n seconds (Hockney, "The communication challenge for
MPP", Parallel Computing 20, 1994). A step under FSDP takes the time of a step alone, with 1/N of
the update on each of N ranks. Each unit of parameters adds a reduce-scatter and two gathers: one
for the last unit, which stays gathered, and none in shared memory, where units are read in place.
The model assumes no overlap.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

ITEM = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Line:
    """Time against bytes."""

    alpha: float
    beta: float

    def __call__(self, nbytes: float) -> float:
        """Seconds of one collective of ``nbytes``."""
        return self.alpha + self.beta * nbytes

    @classmethod
    def fit(cls, points: Iterable[tuple[float, float]]) -> "Line":
        """The line with the least relative errors through (bytes, seconds)."""
        nbytes, seconds = np.array(sorted(points), float).T
        matrix = np.stack([1 / seconds, nbytes / seconds], axis=1)
        # Both are at least 0: if the best alpha or beta is negative, only the other is fitted.
        both, *_ = np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)
        if both.min() >= 0:
            return cls(*(float(value) for value in both))
        only = int(both[0] < 0)
        column = matrix[:, only]
        value = float(column.sum() / (column @ column))
        return cls(*((0.0, value) if only else (value, 0.0)))


@dataclass(frozen=True)
class Costs:
    """The cost of collectives on these ranks.

    Parameters
    ----------
    reduce_scatter, all_gather : Line
        Seconds as a function of the bytes of the whole array.
    shared : bool
        Whether units live in memory that the ranks share.
    """

    reduce_scatter: Line
    all_gather: Line
    shared: bool

    def communication(self, units: Sequence[int], ranks: int) -> float:
        """Seconds of a step's collectives, for the numbers of elements of its units."""
        if ranks == 1:
            return 0.0
        total = self.all_gather.alpha  # loss, weight and norm in one small all-reduce
        for length in units:
            total += self.reduce_scatter(length * ITEM)
            if not self.shared:
                total += 2 * self.all_gather(length * ITEM)
        return total - (0 if self.shared else self.all_gather(units[-1] * ITEM))

    def step(self, alone: float, update: float, units: Sequence[int], ranks: int) -> float:
        """Seconds of a step, given those of the step alone and of its whole update."""
        return alone - update * (1 - 1 / ranks) + self.communication(units, ranks)


def bytes_sent(units: Sequence[int], ranks: int) -> int:
    """Bytes of a step by messages, all ranks together: 3 (N-1) (S-K) + 2 (N-1) K."""
    size, kept = sum(units) * ITEM, units[-1] * ITEM
    return (ranks - 1) * (3 * (size - kept) + 2 * kept)
