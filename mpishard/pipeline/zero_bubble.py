"""ZB-H1 and ZB-H2: the gradients of the parameters fill the time in which 1F1B waits.

Qi et al., "Zero bubble pipeline parallelism", 2023 (arXiv:2401.10241), section 2. F, B and W
are forward and backward's halves, of the input and of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.pipeline.operations import PipelineOperation, PipelineOperationType
from mpishard.pipeline.schedule import Row, RuleSchedule, with_phases

__all__ = ["ZeroBubbleH1Schedule", "ZeroBubbleH2Schedule"]

_F = PipelineOperationType.FORWARD
_B = PipelineOperationType.BACKWARD_INPUT
_W = PipelineOperationType.BACKWARD_WEIGHT


class _BackwardHalves:
    """Appends a rank's B in order, and each W when ``most_pending`` others wait already."""

    def __init__(self, rows: list[Row], most_pending: int, num_micro_batches: int) -> None:
        self._rows = rows
        self._most_pending = most_pending
        self._num_micro_batches = num_micro_batches
        self._num_inputs = 0
        self._num_weights = 0

    def go_back(self) -> None:
        """The next B, and the oldest W if too many would wait."""
        self._rows.append((_B, self._num_inputs, 0))
        self._num_inputs += 1
        if self._num_inputs - self._num_weights > self._most_pending:
            self._rows.append((_W, self._num_weights, 0))
            self._num_weights += 1

    def finish(self) -> None:
        """All that is left."""
        while self._num_inputs < self._num_micro_batches:
            self.go_back()
        for micro_batch in range(self._num_weights, self._num_micro_batches):
            self._rows.append((_W, micro_batch, 0))


class ZeroBubbleH1Schedule(RuleSchedule):
    """1F1B in which rank s puts off the parameters' gradients of up to s micro-batches.

    Bubble (P-1)/(3M+P-1) for M >= P and equal times: a third of 1F1B's. Rank s waits for the
    backward of min(P-s, M) micro-batches at most, as in 1F1B, and with what the halves that are
    put off keep it holds min(P, M): what rank 0 holds in 1F1B.
    """

    @property
    def name(self) -> str:
        return "ZB-H1"

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        warmup = min(num_stages - 1 - rank, num_micro_batches)
        rows: list[Row] = [(_F, m, 0) for m in range(warmup)]
        backward = _BackwardHalves(rows, rank, num_micro_batches)
        for micro_batch in range(warmup, num_micro_batches):
            rows.append((_F, micro_batch, 0))
            backward.go_back()
        steady_until = len(rows)
        backward.finish()
        return with_phases(rows, warmup, len(rows) - steady_until)

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        if num_micro_batches < num_stages:
            return None
        return (num_stages - 1) / (3 * num_micro_batches + num_stages - 1)


class ZeroBubbleH2Schedule(RuleSchedule):
    """Rank s begins with 2(P-s)-1 forwards, and puts off parameters' gradients of up to 2s.

    Bubble 0 for M >= 2P-1 and equal times: from its first operation to its last no rank waits.
    The ranks still begin one after the other, and who begins last ends last: it is time won only
    for who lets rank 0 begin the next step when it is done with this one. Rank s waits for the
    backward of min(2(P-s)-1, M) micro-batches at most, and holds min(2P-1, M) with what the
    halves that are put off keep.
    """

    @property
    def name(self) -> str:
        return "ZB-H2"

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        warmup = min(2 * (num_stages - rank) - 1, num_micro_batches)
        rows: list[Row] = [(_F, m, 0) for m in range(warmup)]
        backward = _BackwardHalves(rows, 2 * rank, num_micro_batches)
        for micro_batch in range(warmup, num_micro_batches):
            backward.go_back()
            rows.append((_F, micro_batch, 0))
        steady_until = len(rows)
        backward.finish()
        return with_phases(rows, warmup, len(rows) - steady_until)

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        return 0.0 if num_micro_batches >= 2 * num_stages - 1 else None
