"""How long each stage of a pipeline takes for a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mpishard.pipeline.operations import PipelineOperationType

__all__ = ["StageTimes", "Times", "spread"]

Times = float | Sequence[float]
"""One number, or one for each stage."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """How long a global stage takes for a micro-batch, in any unit of time.

    Parameters
    ----------
    forward, backward_input, backward_weight : float or sequence of float
        Of each global stage, or one number for all. A combined backward takes the sum of both
        halves.
    communication : float or sequence of float
        From one global stage to the next and, for gradients, back: one number, or one for each
        of the boundaries between G global stages, G-1 of them. Nothing is sent, and no time
        passes, where one rank has both stages. A rank computes while its messages are under way.

    Raises
    ------
    ValueError
        For a time that is negative or not finite.
    """

    forward: Times = 1.0
    backward_input: Times = 1.0
    backward_weight: Times = 1.0
    communication: Times = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "communication"):
            given = getattr(self, name)
            for value in [given] if isinstance(given, int | float) else given:
                if not (math.isfinite(value) and value >= 0):
                    raise ValueError(f"{name} must be 0 or more and finite, got {value}")

    def of_stages(self, kind: PipelineOperationType, num_global_stages: int) -> list[float]:
        """Seconds, or whatever the unit is, of an operation in each global stage.

        Raises
        ------
        ValueError
            Where there are times for another number of stages.
        """
        if kind is PipelineOperationType.BACKWARD:
            inputs = self.of_stages(PipelineOperationType.BACKWARD_INPUT, num_global_stages)
            weights = self.of_stages(PipelineOperationType.BACKWARD_WEIGHT, num_global_stages)
            return [i + w for i, w in zip(inputs, weights, strict=True)]
        return spread(kind.value, getattr(self, kind.value), num_global_stages, "global stages")

    def of_boundaries(self, num_global_stages: int) -> list[float]:
        """Of a message between each global stage and the next.

        Raises
        ------
        ValueError
            Where there are times for another number of boundaries.
        """
        return spread("communication", self.communication, num_global_stages - 1, "boundaries")


def spread(name: str, given: Times, count: int, what: str) -> list[float]:
    """One number for each of ``count`` of ``what``.

    Raises
    ------
    ValueError
        For a sequence of another length.
    """
    if isinstance(given, int | float):
        return [float(given)] * count
    if len(given) != count:
        raise ValueError(f"{name} must be one number or {count}, for each of the {what}; "
                         f"got {len(given)}")  # fmt: skip
    return [float(value) for value in given]
