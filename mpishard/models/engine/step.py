"""What a step hands to an update rule, and what it tells afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from mpishard.arrays import Array
from mpishard.sharding import Piece

__all__ = ["StepReport", "Update"]


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step found, the same on every rank.

    ``loss`` is the mean over all samples of the round, NaN where a black box does not tell it,
    ``weight`` their total weight,
    ``gradient_norm`` the Euclidean norm of the mean gradient before clipping; None for a step
    that only accumulated.
    """

    loss: float
    weight: float
    gradient_norm: float | None


@dataclass(frozen=True, slots=True)
class Update:
    """What an update rule gets for one owned piece.

    ``parameters`` and ``gradients`` are 1-D views of equal length; the gradient is the *sum*
    over samples, to be multiplied by ``1 / report.weight``. It is read-only: other ranks may read
    the same memory.
    """

    piece: Piece
    parameters: Array
    gradients: Array
