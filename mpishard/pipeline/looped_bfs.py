"""Looped BFS: all micro-batches through one of a rank's stages, then through the next."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.pipeline.operations import PipelineOperation, PipelineOperationType
from mpishard.pipeline.schedule import RuleSchedule, check_virtual_stages, with_phases

__all__ = ["LoopedBFSSchedule"]


class LoopedBFSSchedule(RuleSchedule):
    """Stage by stage, breadth first: all micro-batches forward, and all of them back.

    Lamy-Poirier, "Breadth-first pipeline parallelism", 2023 (arXiv:2211.05953). Bubble
    (P-1)/(VM+P-1) for M >= P. Every rank holds the activations of all M micro-batches; a stage's
    parameters are needed in two runs of operations only, one for each direction, which is what
    sharded parameters like: they are gathered once per run.

    Parameters
    ----------
    virtual_stages_per_rank : int
        V, 2 or more.

    Raises
    ------
    ValueError
        For fewer than 2 virtual stages.
    """

    def __init__(self, virtual_stages_per_rank: int = 2) -> None:
        self._virtual_stages = check_virtual_stages(virtual_stages_per_rank)

    @property
    def name(self) -> str:
        return "Looped-BFS"

    @property
    def virtual_stages_per_rank(self) -> int:
        return self._virtual_stages

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        stages = range(self._virtual_stages)
        members = range(num_micro_batches)
        forwards = [(PipelineOperationType.FORWARD, m, v) for v in stages for m in members]
        backwards = [
            (PipelineOperationType.BACKWARD, m, v) for v in reversed(stages) for m in members
        ]
        return with_phases(forwards + backwards, len(forwards), len(backwards))

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        if num_micro_batches < num_stages:
            return None
        return (num_stages - 1) / (self._virtual_stages * num_micro_batches + num_stages - 1)
