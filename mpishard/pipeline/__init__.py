"""Pipelines: schedules as data, how layers are dealt to stages, and what runs a schedule."""

from mpishard.pipeline.activation_checkpointing import (
    ActivationCheckpointConfig,
    RecomputeStrategy,
)
from mpishard.pipeline.checker import check_schedule
from mpishard.pipeline.clock import TimedOperation, bubble_fraction, run_clock
from mpishard.pipeline.executor import PipelineExecutor
from mpishard.pipeline.gpipe import GPipeSchedule
from mpishard.pipeline.interleaved import Interleaved1F1BSchedule
from mpishard.pipeline.layer_costs import measured_layer_costs
from mpishard.pipeline.layer_partition import partition_layers
from mpishard.pipeline.looped_bfs import LoopedBFSSchedule
from mpishard.pipeline.one_forward_one_backward import OneForwardOneBackwardSchedule
from mpishard.pipeline.operations import (
    IPipelineSchedule,
    PipelineOperation,
    PipelineOperationType,
)
from mpishard.pipeline.partition import (
    IPipelinePartitionStrategy,
    LoadBalancedPartitionStrategy,
    UniformPartitionStrategy,
)
from mpishard.pipeline.record import OperationTimes, PipelineRecord
from mpishard.pipeline.schedule import RuleSchedule
from mpishard.pipeline.schedules import SCHEDULE_NAMES, schedule_by_name
from mpishard.pipeline.stage import IPipelineStage
from mpishard.pipeline.stage_times import StageTimes
from mpishard.pipeline.zero_bubble import ZeroBubbleH1Schedule, ZeroBubbleH2Schedule
from mpishard.pipeline.zero_bubble_v import ZeroBubbleVSchedule

__all__ = [
    "SCHEDULE_NAMES",
    "ActivationCheckpointConfig",
    "GPipeSchedule",
    "IPipelinePartitionStrategy",
    "IPipelineSchedule",
    "IPipelineStage",
    "Interleaved1F1BSchedule",
    "LoadBalancedPartitionStrategy",
    "LoopedBFSSchedule",
    "OneForwardOneBackwardSchedule",
    "OperationTimes",
    "PipelineExecutor",
    "PipelineOperation",
    "PipelineOperationType",
    "PipelineRecord",
    "RecomputeStrategy",
    "RuleSchedule",
    "StageTimes",
    "TimedOperation",
    "UniformPartitionStrategy",
    "ZeroBubbleH1Schedule",
    "ZeroBubbleH2Schedule",
    "ZeroBubbleVSchedule",
    "bubble_fraction",
    "check_schedule",
    "measured_layer_costs",
    "partition_layers",
    "run_clock",
    "schedule_by_name",
]
