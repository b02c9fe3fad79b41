"""Operations of a pipeline's ranks, as data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["IPipelineSchedule", "PipelineOperation", "PipelineOperationType"]


class PipelineOperationType(StrEnum):
    """The computation of one micro-batch in one stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"

    # As the mirrored hierarchy spells them.
    Forward = FORWARD
    Backward = BACKWARD
    BackwardInput = BACKWARD_INPUT
    BackwardWeight = BACKWARD_WEIGHT


@dataclass(frozen=True, slots=True)
class PipelineOperation:
    """One operation of a schedule.

    Parameters
    ----------
    type : PipelineOperationType
        What. BACKWARD is both halves at once.
    micro_batch_index : int
        Index of the micro-batch.
    is_warmup, is_cooldown : bool
        Whether it comes before the first, or after the last time that forward and backward
        alternate.
    virtual_stage_index : int
        Index among the rank's stages.
    """

    type: PipelineOperationType
    micro_batch_index: int
    is_warmup: bool = False
    is_cooldown: bool = False
    virtual_stage_index: int = 0


class IPipelineSchedule(ABC):
    """The order in which each rank of a pipeline works on its stages and micro-batches.

    Ranks are called stages in its arguments, as in the papers. Where a rank has V *virtual*
    stages, the P V *global* stages are the model's, in order of layers, and `global_stage` says
    whose they are.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in the papers."""

    @property
    def virtual_stages_per_rank(self) -> int:
        """V, the number of stages that each rank has."""
        return 1

    @abstractmethod
    def get_schedule(
        self, stage_id: int, num_stages: int, num_micro_batches: int
    ) -> Sequence[PipelineOperation]:
        """The operations of one rank, in order.

        Raises
        ------
        ValueError
            For fewer than one rank or micro-batch (first), or a rank outside [0, num_stages).
        """

    @abstractmethod
    def estimate_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float:
        """The published fraction of time that a rank waits; 0 for P <= 1 or M <= 0."""

    def global_stage(self, stage_id: int, virtual_stage_index: int, num_stages: int) -> int:
        """Index, among the model's P V stages, of one virtual stage of rank ``stage_id``.

        Round robin unless a schedule places them otherwise: r, r + P, r + 2 P, ...
        """
        return virtual_stage_index * num_stages + stage_id
