"""Operations of a pipeline's ranks, as data, and one rank's plan of its messages.

The plan has the input of each operation with its sender, and the output with its receiver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from mpishard.base.mirrored import OperationSpellings


class PipelineOperationType(OperationSpellings, StrEnum):
    """The computation of one micro-batch in one stage."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"


@dataclass(frozen=True, slots=True)
class PipelineOperation:
    """One operation of a schedule.

    Parameters
    ----------
    type : PipelineOperationType
        Kind of computation. BACKWARD is both halves at once.
    micro_batch_index : int
        Index of the micro-batch.
    is_warmup, is_cooldown : bool
        Whether it comes before forwards and backwards begin to alternate, or after they end.
    virtual_stage_index : int
        Index among the rank's stages.
    """

    type: PipelineOperationType
    micro_batch_index: int
    is_warmup: bool = False
    is_cooldown: bool = False
    virtual_stage_index: int = 0


Order = Sequence[PipelineOperation]
"""The operations of one rank, in order."""


class IPipelineSchedule(ABC):
    """The order in which each rank of a pipeline works on its stages and micro-batches.

    Ranks are called stages in its arguments, as in the papers. If each of P ranks has V *virtual*
    stages, the P V *global* stages are the model's, in order of layers. `global_stage` maps the
    virtual stages of a rank to them.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name in the papers."""

    @property
    def virtual_stages_per_rank(self) -> int:
        """V, the number of stages that each rank has."""
        return 1

    def __repr__(self) -> str:
        virtual = self.virtual_stages_per_rank
        own = f"virtual_stages_per_rank={virtual}" if virtual > 1 else ""
        return f"{type(self).__name__}({own})"

    @abstractmethod
    def get_schedule(self, stage_id: int, num_stages: int, num_micro_batches: int) -> Order:
        """Return the operations of one rank, in order.

        Raises
        ------
        ValueError
            For fewer than one rank or micro-batch (first), or a rank outside [0, num_stages).
        """

    @abstractmethod
    def estimate_bubble_fraction(self, num_stages: int, num_micro_batches: int) -> float:
        """Return the published fraction of time that a rank waits; 0 for P <= 1 or M <= 0."""

    def global_stage(self, stage_id: int, virtual_stage_index: int, num_stages: int) -> int:
        """Return the index, among the model's P V stages, of a virtual stage of rank ``stage_id``.

        By default stages are placed round robin: rank r has r, r + P, r + 2 P, ...
        """
        return virtual_stage_index * num_stages + stage_id


# In the order of the members. Aliases are no members, and do not count.
FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = PipelineOperationType


class Flow(NamedTuple):
    """An array that enters a global stage: an activation, or the gradient of the stage's output.

    Parameters
    ----------
    is_gradient : bool
        Whether it is a gradient, which flows backwards.
    stage : int
        The global stage that receives it.
    micro_batch : int
        Index of the micro-batch.
    """

    is_gradient: bool
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        what = "gradient of the output" if self.is_gradient else "input"
        return f"{what} of global stage {self.stage}, micro-batch {self.micro_batch}"


@dataclass(frozen=True, slots=True)
class PlannedOperation:
    """One operation, with the flow that it receives and the flow that it sends, if any."""

    operation: PipelineOperation
    takes: Flow | None
    gives: Flow | None


class PipelinePlan:
    """The steps of one rank, and the messages that it receives.

    Parameters
    ----------
    schedule : IPipelineSchedule
        Placement of the stages on the ranks.
    rank : int
        The rank.
    orders : sequence of Order
        The operations of each rank.

    Attributes
    ----------
    steps : sequence of PlannedOperation
        In the rank's order.
    rank_of : sequence of int
        Rank of each global stage.
    virtual_of : mapping
        The rank's own global stages -> their virtual index.
    arrivals : mapping
        (is_gradient, global stage) -> the micro-batches that another rank sends there, in its
        order.
    """

    def __init__(self, schedule: IPipelineSchedule, rank: int, orders: Sequence[Order]) -> None:
        pairs = [
            (r, v) for r in range(len(orders)) for v in range(schedule.virtual_stages_per_rank)
        ]
        stages = {(r, v): schedule.global_stage(r, v, len(orders)) for r, v in pairs}
        # Sorted by stage, so that the list is indexed by it.
        self.rank_of = [r for r, _ in sorted(pairs, key=stages.__getitem__)]
        self.virtual_of = {stage: v for (r, v), stage in stages.items() if r == rank}
        self.arrivals: dict[tuple[bool, int], list[int]] = {}
        # Receives are posted in the order of sending, because messages of one tag keep their order.
        for other, order in enumerate(orders):
            steps = [
                _planned(operation, stages[other, operation.virtual_stage_index], len(stages) - 1)
                for operation in order
            ]
            if other == rank:
                self.steps = steps
                continue
            for flow in [step.gives for step in steps]:
                if flow is not None and self.rank_of[flow.stage] == rank:
                    link = flow.is_gradient, flow.stage
                    self.arrivals.setdefault(link, []).append(flow.micro_batch)

    def sender(self, flow: Flow) -> int:
        """Return the rank that sends a flow."""
        return self.rank_of[flow.stage + 1 if flow.is_gradient else flow.stage - 1]


def _planned(operation: PipelineOperation, stage: int, last: int) -> PlannedOperation:
    # Its input was saved by the backward of the input, and its result stays on the rank.
    if operation.type is BACKWARD_WEIGHT:
        return PlannedOperation(operation, None, None)
    is_gradient, micro_batch = operation.type is not FORWARD, operation.micro_batch_index
    # The first stage to compute in a direction takes no message, and the last one gives none.
    first, then = (last, stage - 1) if is_gradient else (0, stage + 1)
    return PlannedOperation(
        operation,
        Flow(is_gradient, stage, micro_batch) if stage != first else None,
        Flow(is_gradient, then, micro_batch) if 0 <= then <= last else None,
    )


def forward_orders(schedule: IPipelineSchedule, num_stages: int, micro_batches: int) -> list[Order]:
    """Return each rank's order of forwards alone, for prediction.

    The order is that of a clock on which each stage takes one unit of time: micro-batch m reaches
    global stage g at time m + g. So no operation waits for a later one of its rank, wherever the
    stages are placed.
    """
    orders: list[Order] = []
    for rank in range(num_stages):
        virtual = range(schedule.virtual_stages_per_rank)
        stages = [schedule.global_stage(rank, v, num_stages) for v in virtual]
        # If two could run at the same time, the later stage is first: its micro-batch is older.
        rows = sorted(
            (m + stages[v], -stages[v], m, v) for m in range(micro_batches) for v in virtual
        )
        orders.append([PipelineOperation(FORWARD, m, virtual_stage_index=v) for *_, m, v in rows])
    return orders


def most_saved(order: Order, virtual_stage: int) -> int:
    """Return the most micro-batches at a time whose saved activations a rank holds for a stage."""
    saved = most = 0
    for operation in order:
        if operation.virtual_stage_index == virtual_stage:
            if operation.type is FORWARD:
                saved += 1
                most = max(most, saved)
            # After it the caller keeps only what the backward of the parameters needs.
            elif operation.type in (BACKWARD, BACKWARD_INPUT):
                saved -= 1
    return most
