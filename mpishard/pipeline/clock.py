"""A virtual clock for schedules: start and end of each operation, or a report of a deadlock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np

from mpishard.base import as_amount, as_count, as_number, require_type
from mpishard.pipeline.operations import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    IPipelineSchedule,
    Order,
    PipelineOperation,
    PipelineOperationType,
)

Times = float | Sequence[float]
"""A number for all stages, or one for each."""


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Time of each global stage for one micro-batch, in any unit.

    Parameters
    ----------
    forward, backward_input, backward_weight : float or sequence of float
        Time in each global stage, or one number for all. A combined backward takes the sum of both
        halves.
    communication : float or sequence of float
        Time from one global stage to the next and, for gradients, back: one number, or one for each
        of the boundaries between G global stages, G-1 of them. Nothing is sent, and no time
        passes, if one rank has both stages. A rank computes while its messages are under way.

    Raises
    ------
    ValueError
        For a time that is negative or not finite.
    """

    forward: Times = 1.0
    backward_input: Times = 1.0
    backward_weight: Times = 1.0
    communication: Times = 0.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward_input", "backward_weight", "communication"):
            given = getattr(self, name)
            # The number of stages is known only when the times are used: see `spread`.
            for value in [given] if np.ndim(given) == 0 else given:
                as_amount(name, value)

    def of_stages(self, kind: PipelineOperationType, num_global_stages: int) -> list[float]:
        """Return the time of an operation in each global stage, in the unit of the arguments.

        Raises
        ------
        ValueError
            If there are times for another number of stages.
        """
        if kind is BACKWARD:
            halves = [
                self.of_stages(k, num_global_stages) for k in (BACKWARD_INPUT, BACKWARD_WEIGHT)
            ]
            return [i + w for i, w in zip(*halves, strict=True)]
        return spread(kind.value, getattr(self, kind.value), num_global_stages, "global stages")

    def of_boundaries(self, num_global_stages: int) -> list[float]:
        """Return the time of a message between each global stage and the next.

        Raises
        ------
        ValueError
            If there are times for another number of boundaries.
        """
        return spread("communication", self.communication, num_global_stages - 1, "boundaries")


def spread(name: str, given: Times, count: int, what: str) -> list[float]:
    """Return ``given`` as a list of ``count`` numbers, one for each of the ``what``.

    Raises
    ------
    ValueError
        For a sequence of another length.
    """
    if np.ndim(given) == 0:
        return [as_number(name, given)] * count
    given = cast("Sequence[float]", given)
    if len(given) != count:
        raise ValueError(
            f"{name} must be one number or {count}, for each of the {what}; got {len(given)}"
        )
    return [float(value) for value in given]


_WHOLE = {FORWARD, BACKWARD}
_HALVES = {FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT}


def describe(operation: PipelineOperation, global_stage: int) -> str:
    """Return an operation in words."""
    kind = operation.type.replace("_", " ")
    return f"{kind} of micro-batch {operation.micro_batch_index} in global stage {global_stage}"


def stages_of_ranks(schedule: IPipelineSchedule, num_stages: int) -> list[list[int]]:
    """Return the global stages of each rank, by virtual index.

    Raises
    ------
    TypeError
        For a schedule of another type.
    ValueError
        For fewer than one rank, or if a global stage is not on one rank.
    """
    require_type("schedule", schedule, IPipelineSchedule)
    as_count("num_stages", num_stages)
    virtual = range(schedule.virtual_stages_per_rank)
    stages = [[schedule.global_stage(r, v, num_stages) for v in virtual] for r in range(num_stages)]
    # A stage on two ranks, or on none, would deadlock or train twice.
    found = sorted(g for own in stages for g in own)
    if found != list(range(num_stages * len(virtual))):
        raise ValueError(
            f"{schedule.name} must place each of {num_stages * len(virtual)} global stages on one "
            f"rank; it places {found}"
        )
    return stages


def check_completeness(order: Order, stages: Sequence[int], num_micro_batches: int) -> None:
    """Check that the order of a rank with these global stages has each operation once.

    Raises
    ------
    ValueError
        For a wrong or missing operation. The message continues a sentence that names the rank.
    """
    kinds: dict[tuple[int, int], list[PipelineOperationType]] = {
        (virtual, micro_batch): []
        for virtual in range(len(stages))
        for micro_batch in range(num_micro_batches)
    }
    for position, operation in enumerate(order):
        micro_batch, virtual = operation.micro_batch_index, operation.virtual_stage_index
        # None for an unknown micro-batch or stage, an empty list for one that has done nothing yet.
        done = kinds.get((virtual, micro_batch))
        if done is None:
            raise ValueError(
                f"has at position {position} the {operation.type.replace('_', ' ')} of micro-batch "
                f"{micro_batch} in its virtual stage {virtual}; it has {num_micro_batches} "
                f"micro-batches and {len(stages)} virtual stages"
            )
        if operation.type in done:
            raise ValueError(f"does the {describe(operation, stages[virtual])} twice")
        done.append(operation.type)
    for (virtual, micro_batch), done in kinds.items():
        # The order within a rank is left to the clock, which finds a backward before its forward.
        if set(done) not in (_WHOLE, _HALVES):
            have = ", ".join(kind.replace("_", " ") for kind in done) or "nothing"
            raise ValueError(
                f"does {have} of micro-batch {micro_batch} in global stage {stages[virtual]}; it "
                "must do forward and backward, or forward, backward input and backward weight"
            )


class TimedOperation(NamedTuple):
    """An operation with its stage and its times.

    Attributes
    ----------
    operation : PipelineOperation
        The operation.
    global_stage : int
        Index of the model's stage that the operation belongs to.
    start : float
        Begin, in the unit of the `StageTimes`; the first operation of all begins at 0.
    end : float
        End, in the same unit.
    """

    operation: PipelineOperation
    global_stage: int
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Time from start to end."""
        return self.end - self.start


def run_clock(
    schedule: IPipelineSchedule,
    num_stages: int,
    num_micro_batches: int,
    times: StageTimes | None = None,
) -> tuple[tuple[TimedOperation, ...], ...]:
    """Run a schedule without computing anything.

    Each rank runs its operations in order. An operation begins as soon as its inputs are there:

    * a forward needs the forward of the stage before;
    * a backward, or a backward of the input, needs the forward of its own stage and the backward
      of the stage behind;
    * a backward of the parameters needs the backward of the input.

    Parameters
    ----------
    schedule : IPipelineSchedule
        Schedule to run.
    num_stages, num_micro_batches : int
        Number of ranks, P, and of micro-batches, M.
    times : StageTimes, optional
        Duration of each operation. Default: 1 for the forward and for each half of the backward,
        0 for communication.

    Returns
    -------
    tuple of tuple of TimedOperation
        The operations of each rank, in order.

    Raises
    ------
    TypeError
        If the schedule or the times are of another type.
    ValueError
        If `check_schedule` would refuse the schedule, or if the times do not fit it.
    """
    times = StageTimes() if times is None else times
    require_type("times", times, StageTimes)
    return _Clock(schedule, num_stages, num_micro_batches, times).run()


def bubble_fraction(ranks: Sequence[Sequence[TimedOperation]]) -> float:
    """Return 1 - work / (the longest span of a rank from its first start to its last end).

    The work is the mean over the ranks. The result is 0 if no operation takes time.
    """
    longest = max(timed[-1].end - timed[0].start for timed in ranks)
    work = sum(operation.duration for timed in ranks for operation in timed) / len(ranks)
    # If no rank waits, the two sums may still differ in the last bit: their order differs.
    return max(0.0, 1 - work / longest) if longest else 0.0


class _Clock:
    """The operations of all ranks, the times at which they ended, and the ranks that wait."""

    def __init__(
        self,
        schedule: IPipelineSchedule,
        num_stages: int,
        num_micro_batches: int,
        times: StageTimes,
    ) -> None:
        self._stages = stages = stages_of_ranks(schedule, num_stages)
        self._orders = orders = [
            schedule.get_schedule(rank, num_stages, num_micro_batches) for rank in range(num_stages)
        ]
        self._num_micro_batches = num_micro_batches
        self._name = (
            f"{schedule.name} with {num_stages} ranks and {num_micro_batches} micro-batches"
        )
        # Checked before the clock runs, because it would take a missing operation for a deadlock.
        for rank, order in enumerate(orders):
            try:
                check_completeness(order, stages[rank], num_micro_batches)
            except ValueError as error:
                raise ValueError(f"{self._name}: rank {rank} {error}") from None
        count = sum(map(len, stages))
        self._last_stage = count - 1
        self._seconds = {kind: times.of_stages(kind, count) for kind in PipelineOperationType}
        rank_of = {stage: rank for rank, own in enumerate(stages) for stage in own}
        self._boundaries = [
            # Neighbouring stages on one rank hand arrays over without a message.
            0.0 if rank_of[g] == rank_of[g + 1] else seconds
            for g, seconds in enumerate(times.of_boundaries(count))
        ]
        # End times of forwards (True) and backwards (False) by stage and micro-batch, and the rank
        # that waits for each.
        self._ends: dict[bool, list[float | None]] = {
            is_forward: [None] * (count * num_micro_batches) for is_forward in (True, False)
        }
        self._waiters: dict[tuple[bool, int], int] = {}
        self._timed: list[list[TimedOperation]] = [[] for _ in orders]
        # Ranks that may advance. The rank that another one waits for puts that one back.
        self._runnable = deque(range(len(orders)))

    def run(self) -> tuple[tuple[TimedOperation, ...], ...]:
        # Each rank comes back only when an input of it has arrived, so that the run is linear in
        # operations.
        while self._runnable:
            self._advance(self._runnable.popleft())
        for order, timed in zip(self._orders, self._timed, strict=True):
            # No rank can run, and one has operations left.
            if len(timed) < len(order):
                raise ValueError(self._deadlock())
        return tuple(map(tuple, self._timed))

    def _advance(self, rank: int) -> None:
        """Run operations of a rank until one needs an input that is not there."""
        order, timed, stages = self._orders[rank], self._timed[rank], self._stages[rank]
        # A rank runs in its schedule's order: it resumes where it had to wait.
        now = timed[-1].end if timed else 0.0
        for position in range(len(timed), len(order)):
            operation = order[position]
            kind, stage = operation.type, stages[operation.virtual_stage_index]
            key = stage * self._num_micro_batches + operation.micro_batch_index
            arrival = self._arrival(rank, kind, stage, key)
            if arrival is None:
                return
            start = max(now, arrival)
            now = start + self._seconds[kind][stage]
            timed.append(TimedOperation(operation, stage, start, now))
            if kind is BACKWARD_WEIGHT:  # no operation of another rank needs its result
                continue
            self._ends[kind is FORWARD][key] = now
            # At most one rank waits for each result: every forward and backward has one successor.
            waiter = self._waiters.pop((kind is FORWARD, key), None)
            if waiter is not None:
                self._runnable.append(waiter)

    def _arrival(
        self, rank: int, kind: PipelineOperationType, stage: int, key: int
    ) -> float | None:
        """Return the time at which an operation's input arrived, or None if it has not.

        If another rank computes the input, this rank is recorded as waiting for it. An input that
        the rank itself should have computed has no waiter: the schedule comes to a stop.
        """
        if kind is BACKWARD_WEIGHT:
            # Its own B comes first in any valid order; None here is a deadlock, found by `run`.
            return self._ends[False][key]
        is_forward = kind is FORWARD
        if stage == (0 if is_forward else self._last_stage):
            return 0.0 if is_forward else self._ends[True][key]
        # The backward of the next stage comes after this stage's forward in any case.
        sender = stage - 1 if is_forward else stage + 1
        # Keys of neighbouring stages lie one row of micro-batches apart.
        needed = key + (sender - stage) * self._num_micro_batches
        end = self._ends[is_forward][needed]
        if end is None:
            self._waiters[is_forward, needed] = rank
            return None
        # A gradient takes as long back as an activation takes forward.
        return end + self._boundaries[min(sender, stage)]

    def _deadlock(self) -> str:
        """Describe the operation at which each rank stopped, and the rank that it waits for."""
        positions = {
            (
                operation.type is FORWARD,
                self._stages[rank][operation.virtual_stage_index],
                operation.micro_batch_index,
            ): (rank, position)
            for rank, order in enumerate(self._orders)
            for position, operation in enumerate(order)
            if operation.type is not BACKWARD_WEIGHT
        }
        lines = [f"{self._name} comes to a stop:"]
        for rank, (order, timed) in enumerate(zip(self._orders, self._timed, strict=True)):
            if len(timed) == len(order):
                continue
            operation = order[len(timed)]
            stage = self._stages[rank][operation.virtual_stage_index]
            for is_forward, where in self._needs(operation.type, stage):
                other, position = positions[is_forward, where, operation.micro_batch_index]
                # Inputs that are there already do not explain why the rank waits.
                if position >= len(self._timed[other]):
                    word = "forward" if is_forward else "backward"
                    lines.append(
                        f"  rank {rank} waits at its operation {len(timed)}, "
                        f"{describe(operation, stage)}; its {word} in global stage {where} is "
                        f"operation {position} of rank {other}, not yet done"
                    )
        return "\n".join(lines)

    def _needs(self, kind: PipelineOperationType, stage: int) -> list[tuple[bool, int]]:
        """Return the operations that must come before, as pairs (is a forward, global stage)."""
        if kind is FORWARD:
            return [(True, stage - 1)]
        if kind is BACKWARD_WEIGHT:
            return [(False, stage)]
        return [(True, stage)] + [(False, stage + 1)] * (stage < self._last_stage)


def check_schedule(schedule: IPipelineSchedule, num_stages: int, num_micro_batches: int) -> None:
    """Check that a schedule is complete and comes to its end, by running it on the virtual clock.

    Every micro-batch must pass each global stage forward once and backward once, as a whole or in
    two halves. Each global stage must be on one rank. Each rank must come to the end of its
    operations, which it runs in order, each as soon as its inputs are there (see `run_clock`). The
    speeds of ranks do not matter: an order that ends for some times ends for all.

    Parameters
    ----------
    schedule : IPipelineSchedule
        Any, of this package or not.
    num_stages, num_micro_batches : int
        Ranks P and micro-batches M.

    Raises
    ------
    ValueError
        Naming the rank and the operation that is missing, done twice, of an unknown micro-batch or
        stage, or never reached.

    Examples
    --------
    >>> from mpishard.pipeline import OneForwardOneBackwardSchedule, check_schedule
    >>> check_schedule(OneForwardOneBackwardSchedule(), num_stages=4, num_micro_batches=8)
    """
    # Times of 1 do: if one order of events ends, no other order can block.
    run_clock(schedule, num_stages, num_micro_batches)
