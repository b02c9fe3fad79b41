"""What a run of a pipeline took: when each operation waited and computed, and what was live."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from mpishard.pipeline.operations import PipelineOperation, PipelineOperationType

__all__ = ["OperationTimes", "PipelineRecord"]


class OperationTimes(NamedTuple):
    """When one operation was begun, had its input, and ended, in seconds of `time.perf_counter`."""

    operation: PipelineOperation
    begun: float
    ready: float
    ended: float


@dataclass(slots=True)
class PipelineRecord:
    """One run of one rank.

    Attributes
    ----------
    operations : list of OperationTimes
        In order.
    begun, ended : float
        Of the run, in seconds of `time.perf_counter`; after the last operation it waits until
        what was sent has been taken.
    peak_live : list of int
        Of each virtual stage, the most micro-batches at a time that were through with forward and
        not with backward (with its second half, where it is split). 0 for forward alone.
    """

    operations: list[OperationTimes] = field(default_factory=list)
    begun: float = 0.0
    ended: float = 0.0
    peak_live: list[int] = field(default_factory=list)

    def computing(self, kind: PipelineOperationType | None = None) -> float:
        """Seconds spent in operations of this kind, or of any."""
        return sum(
            times.ended - times.ready
            for times in self.operations
            if kind in (None, times.operation.type)
        )

    def waiting(self, kind: PipelineOperationType | None = None) -> float:
        """Seconds that operations of this kind, or of any, waited for what they take."""
        return sum(
            times.ready - times.begun
            for times in self.operations
            if kind in (None, times.operation.type)
        )
