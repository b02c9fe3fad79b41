"""What all schedules share: arguments checked, phases marked, the bubble of their paper."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from mpishard.arguments import as_integer
from mpishard.pipeline.clock import bubble_fraction, run_clock
from mpishard.pipeline.operations import (
    IPipelineSchedule,
    PipelineOperation,
    PipelineOperationType,
)

__all__ = ["Row", "RuleSchedule", "check_virtual_stages", "with_phases"]

Row = tuple[PipelineOperationType, int, int]
"""Type, micro-batch and virtual stage of an operation."""


class RuleSchedule(IPipelineSchedule):
    """A schedule that is written down by rules, without a search.

    A subclass gives `name`, `_operations` and `published_bubble_fraction`.
    """

    def get_schedule(
        self, stage_id: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        num_stages = as_integer("num_stages", num_stages)
        num_micro_batches = as_integer("num_micro_batches", num_micro_batches)
        for count, what in (
            (num_stages, "num_stages"),
            (num_micro_batches, "num_micro_batches"),
        ):
            if count < 1:
                raise ValueError(f"{what} must be 1 or more, got {count}")
        if not 0 <= as_integer("stage_id", stage_id) < num_stages:
            raise ValueError(
                f"stage_id must be in [0, {num_stages}), the ranks of the pipeline; got {stage_id}"
            )
        return self._operations(stage_id, num_stages, num_micro_batches)

    @abstractmethod
    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        """The operations of one rank, for arguments that are right."""

    @abstractmethod
    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        """The paper's formula for equal forward, backward-input and backward-weight times.

        None where the numbers of ranks and micro-batches are not those that it speaks of.
        """

    def estimate_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float:
        """The published fraction of time that a rank waits; 0 for P <= 1 or M <= 0.

        Outside of the formula's range it is the fraction on the virtual clock, with equal times
        and no communication.
        """
        if num_stages <= 1 or num_micro_batches <= 0:
            return 0.0
        published = self.published_bubble_fraction(num_stages, num_micro_batches)
        if published is not None:
            return published
        return bubble_fraction(run_clock(self, num_stages, num_micro_batches))


def with_phases(rows: Sequence[Row], warmup: int, cooldown: int) -> list[PipelineOperation]:
    """Operations of ``rows``, of which the first ``warmup`` and last ``cooldown`` are marked."""
    steady_until = len(rows) - cooldown
    return [
        PipelineOperation(kind, micro_batch, place < warmup, place >= steady_until, virtual_stage)
        for place, (kind, micro_batch, virtual_stage) in enumerate(rows)
    ]


def check_virtual_stages(virtual_stages_per_rank: int) -> int:
    """The number of virtual stages of a schedule that needs several.

    Raises
    ------
    ValueError
        For fewer than two.
    """
    count = as_integer("virtual_stages_per_rank", virtual_stages_per_rank)
    if count < 2:
        raise ValueError(
            f"virtual_stages_per_rank must be 2 or more, got {count}; with one stage per rank use "
            "OneForwardOneBackwardSchedule or GPipeSchedule"
        )
    return count
