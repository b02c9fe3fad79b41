"""Whether a schedule has every operation once, and every stage on one rank."""

from __future__ import annotations

from collections.abc import Sequence

from mpishard.pipeline.operations import (
    IPipelineSchedule,
    PipelineOperation,
    PipelineOperationType,
)

__all__ = ["check_completeness", "describe", "stages_of_ranks"]

_FORWARD = PipelineOperationType.FORWARD
_WHOLE = {_FORWARD, PipelineOperationType.BACKWARD}
_HALVES = {
    _FORWARD,
    PipelineOperationType.BACKWARD_INPUT,
    PipelineOperationType.BACKWARD_WEIGHT,
}


def describe(operation: PipelineOperation, global_stage: int) -> str:
    """An operation in words."""
    kind = operation.type.replace("_", " ")
    return f"{kind} of micro-batch {operation.micro_batch_index} in global stage {global_stage}"


def stages_of_ranks(schedule: IPipelineSchedule, num_stages: int) -> list[list[int]]:
    """The global stages of each rank, by virtual index.

    Raises
    ------
    ValueError
        For fewer than one rank, or where a global stage is not on one rank.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages must be 1 or more, got {num_stages}")
    virtual = range(schedule.virtual_stages_per_rank)
    stages = [[schedule.global_stage(r, v, num_stages) for v in virtual] for r in range(num_stages)]
    found = sorted(g for own in stages for g in own)
    if found != list(range(num_stages * len(virtual))):
        raise ValueError(
            f"{schedule.name} must place each of {num_stages * len(virtual)} global stages on one "
            f"rank; it places {found}"
        )
    return stages


def check_completeness(
    order: Sequence[PipelineOperation], stages: Sequence[int], num_micro_batches: int
) -> None:
    """Whether a rank with these global stages does everything once.

    Raises
    ------
    ValueError
        With what the rank does instead, to be read behind its name.
    """
    kinds: dict[tuple[int, int], list[PipelineOperationType]] = {
        (virtual, micro_batch): []
        for virtual in range(len(stages))
        for micro_batch in range(num_micro_batches)
    }
    for place, operation in enumerate(order):
        micro_batch, virtual = operation.micro_batch_index, operation.virtual_stage_index
        done = kinds.get((virtual, micro_batch))
        if done is None:
            raise ValueError(
                f"has at place {place} the {operation.type.replace('_', ' ')} of micro-batch "
                f"{micro_batch} in its virtual stage {virtual}; it has {num_micro_batches} "
                f"micro-batches and {len(stages)} virtual stages"
            )
        if operation.type in done:
            raise ValueError(f"does the {describe(operation, stages[virtual])} twice")
        done.append(operation.type)
    for (virtual, micro_batch), done in kinds.items():
        if set(done) not in (_WHOLE, _HALVES):
            have = ", ".join(kind.replace("_", " ") for kind in done) or "nothing"
            raise ValueError(
                f"does {have} of micro-batch {micro_batch} in global stage {stages[virtual]}; it "
                "must do forward and backward, or forward, backward input and backward weight"
            )
