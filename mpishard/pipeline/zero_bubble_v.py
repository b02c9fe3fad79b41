"""ZB-V: the model goes down the ranks and up again, and no rank waits."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.pipeline.operations import PipelineOperation, PipelineOperationType
from mpishard.pipeline.schedule import Row, RuleSchedule, with_phases

__all__ = ["ZeroBubbleVSchedule"]

_F = PipelineOperationType.FORWARD
_B = PipelineOperationType.BACKWARD_INPUT
_W = PipelineOperationType.BACKWARD_WEIGHT
_DOWN, _UP = 0, 1  # virtual stages: global stages r and 2P-1-r


class ZeroBubbleVSchedule(RuleSchedule):
    """Two stages per rank in the shape of a V: rank r has global stages r and 2P-1-r.

    Qi et al., "Zero bubble pipeline parallelism", 2023 (arXiv:2401.10241), and "Pipeline
    parallelism with controllable memory", 2024 (arXiv:2405.15362). Bubble 0 for M >= 2P-1 and
    equal times. Every rank holds at most 2P pairs of micro-batch and stage, each of half a rank's
    layers: the memory of P micro-batches, as rank 0 does in 1F1B.

    Rank 0 has the model's first *and* last layers, so that loss and tied embeddings stay on it,
    and what rank P-1 hands from one of its stages to the other is not sent.

    With fewer than 2P-1 micro-batches the schedule is that of 2P-1, with those left out that are
    not there.
    """

    @property
    def name(self) -> str:
        return "ZB-V"

    @property
    def virtual_stages_per_rank(self) -> int:
        """Two: down and up."""
        return 2

    def global_stage(self, stage_id: int, virtual_stage_index: int, num_stages: int) -> int:
        """Stage r on the way down, 2P-1-r on the way up."""
        return stage_id if virtual_stage_index == _DOWN else 2 * num_stages - 1 - stage_id

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        rows = _Rows()
        count = max(num_micro_batches, 2 * num_stages - 1)
        # Forwards only, until the first micro-batch has come up again.
        for _ in range(2 * (num_stages - rank) - 1):
            rows.add(_F, _DOWN)
        for _ in range(rank):
            rows.add(_F, _UP)
            rows.add(_F, _DOWN)
        warmup = len(rows.rows)
        # The way up goes both directions; the gradient of the way down is not here yet.
        for _ in range(num_stages - rank):
            rows.add(_F, _UP)
            rows.add(_B, _UP)
            rows.add(_W, _UP)
        while rows.done(_F, _UP) < count:
            if rows.done(_F, _DOWN) < count:
                rows.add(_F, _DOWN)
            rows.add(_B, _DOWN)
            rows.add(_W, _DOWN)
            rows.add(_F, _UP)
            rows.add(_B, _UP)
            rows.add(_W, _UP)
        steady_until = len(rows.rows)
        # B before W: other ranks wait for it.
        for _ in range(rank):
            rows.add(_B, _DOWN)
            rows.add(_B, _UP)
        for _ in range(num_stages - rank):
            rows.add(_B, _DOWN)
            rows.add(_W, _DOWN)
        for virtual_stage in (_UP, _DOWN):
            while rows.done(_W, virtual_stage) < count:
                rows.add(_W, virtual_stage)
        operations = with_phases(rows.rows, warmup, len(rows.rows) - steady_until)
        return [op for op in operations if op.micro_batch_index < num_micro_batches]

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        return 0.0 if num_micro_batches >= 2 * num_stages - 1 else None


class _Rows:
    """Operations whose micro-batches, of each type and stage, come in order."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._done: dict[tuple[PipelineOperationType, int], int] = {}

    def done(self, kind: PipelineOperationType, virtual_stage: int) -> int:
        """How many micro-batches have had this operation."""
        return self._done.get((kind, virtual_stage), 0)

    def add(self, kind: PipelineOperationType, virtual_stage: int) -> None:
        """Do it to the next micro-batch."""
        micro_batch = self.done(kind, virtual_stage)
        self.rows.append((kind, micro_batch, virtual_stage))
        self._done[kind, virtual_stage] = micro_batch + 1
