"""Pipelines: schedules as data, layers of each stage, and the execution of a schedule.

Begin with ``operations.py``, the data of a schedule and the messages of one rank, and
``schedules.py``, the seven schedules of the package. ``clock.py`` runs a schedule on a virtual
clock, which also checks it.

``layers.py`` cuts a flat vector, or a chain of layers, into stages. ``executor.py`` runs one rank's
operations and sends its messages.
``planning.py`` simulates and draws a schedule before a run, and
``activation_checkpointing.py`` chooses the activations that backward computes again. This room
imports nn, observe, communication and contracts.
"""

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
    PipelineExecutor,
)
from mpishard.pipeline.layers import (
    Costs,
    IPipelinePartitionStrategy,
    LoadBalancedPartitionStrategy,
    UniformPartitionStrategy,
    measured_layer_costs,
    partition_layers,
)
from mpishard.pipeline.operations import (
    IPipelineSchedule,
    PipelineOperation,
    PipelineOperationType,
    most_saved,
)
from mpishard.pipeline.planning import Timeline, plot_timelines, simulate, text_chart
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
    about_schedule,
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
    "PipelineExecutor",
    "PipelineOperation",
    "PipelineOperationType",
    "RecomputeStrategy",
    "RuleSchedule",
    "StageTimes",
    "TimedOperation",
    "Timeline",
    "UniformPartitionStrategy",
    "ZeroBubbleH1Schedule",
    "ZeroBubbleH2Schedule",
    "ZeroBubbleVSchedule",
    "bubble_fraction",
    "check_schedule",
    "measured_layer_costs",
    "partition_layers",
    "plot_timelines",
    "run_clock",
    "schedule_by_name",
    "simulate",
    "text_chart",
]
