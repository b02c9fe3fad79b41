"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.pipeline.operations import PipelineOperation, PipelineOperationType
from mpishard.pipeline.schedule import RuleSchedule, with_phases

__all__ = ["GPipeSchedule"]


class GPipeSchedule(RuleSchedule):
    """All forwards, then all backwards, the last micro-batch first.

    Huang et al., "GPipe: Efficient training of giant neural networks using pipeline parallelism",
    2019 (arXiv:1811.06965). Bubble (P-1)/(M+P-1); every rank holds the activations of all M
    micro-batches.

    Examples
    --------
    >>> from mpishard.pipeline import GPipeSchedule
    >>> [(str(op.type), op.micro_batch_index) for op in GPipeSchedule().get_schedule(0, 2, 2)]
    [('forward', 0), ('forward', 1), ('backward', 1), ('backward', 0)]
    """

    @property
    def name(self) -> str:
        return "GPipe"

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        forwards = [(PipelineOperationType.FORWARD, m, 0) for m in range(num_micro_batches)]
        backwards = [
            (PipelineOperationType.BACKWARD, m, 0) for m in reversed(range(num_micro_batches))
        ]
        return with_phases(forwards + backwards, num_micro_batches, num_micro_batches)

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float:
        return (num_stages - 1) / (num_micro_batches + num_stages - 1)
