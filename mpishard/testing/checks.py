"""What the parts of the communication conformance suite have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpishard.communication.contract.call import DTYPES
from mpishard.communication.contract.reduction import ReductionOperation
from mpishard.testing.reference import shapes

__all__ = ["CommunicationChecks", "operations"]


class CommunicationChecks:
    """Checks of a backend: methods ``check_*`` that every rank of a world calls.

    Parameters
    ----------
    dtypes : sequence of dtype
        Those that travel on the backend. Default: all of the contract.
    """

    def __init__(self, dtypes: Sequence[np.dtype[Any]] = DTYPES) -> None:
        self.dtypes = tuple(dtypes)

    def _cases(self, world: int) -> Iterator[tuple[np.dtype[Any], tuple[int, ...]]]:
        for dtype in self.dtypes:
            for shape in shapes(world):
                yield dtype, shape

    def _has(self, name: str) -> np.dtype[Any] | None:
        """The dtype called ``name``, where it travels on the backend."""
        return next((dtype for dtype in self.dtypes if dtype.name == name), None)


def operations(dtype: np.dtype[Any]) -> list[ReductionOperation]:
    """The operations that have a meaning for ``dtype``."""
    found = [ReductionOperation.SUM, ReductionOperation.PRODUCT]
    if dtype.kind != "c":
        found += [ReductionOperation.MIN, ReductionOperation.MAX]
    if dtype.kind not in "iub":
        found.append(ReductionOperation.AVERAGE)
    return found
