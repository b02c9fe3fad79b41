"""Pipelines: schedules as data, how layers are dealt to stages, and what runs a schedule."""

from mpishard.pipeline.activation_checkpointing import (
    ActivationCheckpointConfig,
    RecomputeStrategy,
)
from mpishard.pipeline.clock import (
    StageTimes,
    TimedOperation,
    bubble_fraction,
    check_schedule,
    run_clock,
)
from mpishard.pipeline.executor import (
    IPipelineStage,
    OperationTimes,
    PipelineExecutor,
    PipelineRecord,
)
from mpishard.pipeline.layers import measured_layer_costs, partition_layers
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
from mpishard.pipeline.schedules import (
    SCHEDULE_NAMES,
    GPipeSchedule,
    Interleaved1F1BSchedule,
    LoopedBFSSchedule,
    OneForwardOneBackwardSchedule,
    RuleSchedule,
    ZeroBubbleH1Schedule,
    ZeroBubbleH2Schedule,
    ZeroBubbleVSchedule,
    schedule_by_name,
)

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
