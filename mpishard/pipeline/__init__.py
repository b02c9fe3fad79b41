"""Pipelines: schedules as data, how layers are dealt to stages, and what runs a schedule."""

from mpishard.pipeline.operations import (
    IPipelineSchedule,
    PipelineOperation,
    PipelineOperationType,
)

__all__ = ["IPipelineSchedule", "PipelineOperation", "PipelineOperationType"]
