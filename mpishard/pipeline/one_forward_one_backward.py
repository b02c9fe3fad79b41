"""1F1B: as soon as a micro-batch can go back, it does."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.pipeline.operations import PipelineOperation, PipelineOperationType
from mpishard.pipeline.schedule import RuleSchedule, with_phases

__all__ = ["OneForwardOneBackwardSchedule"]


class OneForwardOneBackwardSchedule(RuleSchedule):
    """After min(P-1-s, M) forwards of warm-up, rank s alternates one forward and one backward.

    Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021 (arXiv:2006.09503),
    as PipeDream-Flush. Bubble (P-1)/(M+P-1), which is GPipe's; rank s holds the activations of
    min(P-s, M) micro-batches at most, however many there are.
    """

    @property
    def name(self) -> str:
        return "1F1B"

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        warmup = min(num_stages - 1 - rank, num_micro_batches)
        forwards = [(PipelineOperationType.FORWARD, m, 0) for m in range(num_micro_batches)]
        backwards = [(PipelineOperationType.BACKWARD, m, 0) for m in range(num_micro_batches)]
        rows = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            rows += [forward, backward]
        rows += backwards[num_micro_batches - warmup :]
        return with_phases(rows, warmup, warmup)

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float:
        return (num_stages - 1) / (num_micro_batches + num_stages - 1)
