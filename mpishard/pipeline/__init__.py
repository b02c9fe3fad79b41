"""Pipelines: schedules as data, how layers are dealt to stages, and what runs a schedule."""

from mpishard.pipeline.executor import PipelineExecutor
from mpishard.pipeline.operations import (
    IPipelineSchedule,
    PipelineOperation,
    PipelineOperationType,
)
from mpishard.pipeline.record import OperationTimes, PipelineRecord
from mpishard.pipeline.stage import IPipelineStage

__all__ = [
    "IPipelineSchedule",
    "IPipelineStage",
    "OperationTimes",
    "PipelineExecutor",
    "PipelineOperation",
    "PipelineOperationType",
    "PipelineRecord",
]
