"""Interleaved 1F1B: several smaller stages per rank, so that the pipeline fills sooner."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.pipeline.operations import PipelineOperation, PipelineOperationType
from mpishard.pipeline.schedule import RuleSchedule, check_virtual_stages, with_phases

__all__ = ["Interleaved1F1BSchedule"]


class Interleaved1F1BSchedule(RuleSchedule):
    """1F1B over V stages per rank: P micro-batches through one of them, then through the next.

    Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", SC 2021 (arXiv:2104.04473), section 2.2. Bubble (P-1)/(VM+P-1) where P divides
    M. Rank s holds activations of at most (V-1)P + 2(P-1-s) + 1 pairs of micro-batch and stage:
    on rank 0 those of 1F1B's P micro-batches times 1 + (P-1)/(PV). It sends V times the messages.

    The paper wants P to divide M. Where it does not, the schedule is that of the next multiple
    of P, with the micro-batches left out that are not there.

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
        return "Interleaved-1F1B"

    @property
    def virtual_stages_per_rank(self) -> int:
        return self._virtual_stages

    def _operations(
        self, rank: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        stages = range(self._virtual_stages)
        groups = range(-(-num_micro_batches // num_stages))
        forwards, backwards = [], []
        for group in groups:
            members = range(group * num_stages, (group + 1) * num_stages)
            forwards += [(PipelineOperationType.FORWARD, m, v) for v in stages for m in members]
            backwards += [
                (PipelineOperationType.BACKWARD, m, v) for v in reversed(stages) for m in members
            ]
        # Twice 1F1B's warm-up: a rank does not wait for the backward of what it has just sent on.
        warmup = (self._virtual_stages - 1) * num_stages + 2 * (num_stages - 1 - rank)
        warmup = min(warmup, len(forwards))
        rows = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            rows += [forward, backward]
        rows += backwards[len(backwards) - warmup :]
        operations = with_phases(rows, warmup, warmup)
        return [op for op in operations if op.micro_batch_index < num_micro_batches]

    def published_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float | None:
        if num_micro_batches % num_stages:
            return None
        return (num_stages - 1) / (self._virtual_stages * num_micro_batches + num_stages - 1)
