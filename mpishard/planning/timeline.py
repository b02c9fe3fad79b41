"""A schedule with times: its makespan, waiting, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpishard.pipeline import (
    IPipelineSchedule,
    PipelineOperationType,
    StageTimes,
    TimedOperation,
    bubble_fraction,
    run_clock,
)
from mpishard.pipeline.clock import spread

__all__ = ["Timeline", "simulate"]

Amounts = float | Sequence[float]


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """The result of `simulate`.

    Parameters
    ----------
    schedule_name : str
        The schedule's.
    num_stages, num_micro_batches, virtual_stages_per_rank : int
        Ranks P, micro-batches M, stages of a rank V.
    times : StageTimes
        Times of the run.
    ranks : tuple of tuple of TimedOperation
        The operations of each rank, in order.
    peak_live : tuple of float
        Of each rank, the most micro-batches between the beginning of their forward and the end of
        their backward, of the input if the halves are apart. One that is so in one of a rank's
        V stages counts 1/V.
    peak_held : tuple of float
        The same, to the end of the parameters' half: as long as anything is kept of them.
    peak_activation_bytes : tuple of float, optional
        Largest number of bytes that each rank keeps for backward, if `simulate` was given sizes.
    """

    schedule_name: str
    num_stages: int
    num_micro_batches: int
    virtual_stages_per_rank: int
    times: StageTimes
    ranks: tuple[tuple[TimedOperation, ...], ...]
    peak_live: tuple[float, ...]
    peak_held: tuple[float, ...]
    peak_activation_bytes: tuple[float, ...] | None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.schedule_name}, {self.num_stages} ranks, "
            f"{self.num_micro_batches} micro-batches, makespan {self.makespan:g}, "
            f"bubble {100 * self.bubble_fraction:.1f} %)"
        )

    @property
    def makespan(self) -> float:
        """Time from the first operation of all to the end of the last."""
        return max(timed[-1].end for timed in self.ranks)

    @property
    def spans(self) -> list[tuple[float, float]]:
        """First start and last end of each rank."""
        return [(timed[0].start, timed[-1].end) for timed in self.ranks]

    @property
    def work(self) -> list[float]:
        """Time that each rank computes."""
        return [sum(operation.duration for operation in timed) for timed in self.ranks]

    @property
    def bubble_fraction(self) -> float:
        """1 - work / (the longest span of a rank from its first start to its last end).

        It is what papers speak of. The work is that of the mean rank.
        """
        return bubble_fraction(self.ranks)

    @property
    def idle_fraction(self) -> float:
        """1 - work / makespan: what is lost of a step that all ranks begin and end together.

        A rank that begins late because the first micro-batch comes late waits, too: the bubble
        fraction leaves that out.
        """
        work = sum(self.work) / self.num_stages
        return max(0.0, 1 - work / self.makespan) if self.makespan else 0.0


def simulate(
    schedule: IPipelineSchedule,
    num_stages: int,
    num_micro_batches: int,
    times: StageTimes | None = None,
    *,
    activation_bytes: Amounts | None = None,
    pending_bytes: Amounts | None = None,
) -> Timeline:
    """Run a schedule on a virtual clock.

    Parameters
    ----------
    schedule : IPipelineSchedule
        Schedule that is run.
    num_stages, num_micro_batches : int
        Ranks P and micro-batches M.
    times : StageTimes, optional
        Of each global stage: a rank with V stages takes V of them for a micro-batch. Default: 1
        for forward and for each half of backward, no communication.
    activation_bytes : float or sequence of float, optional
        Bytes that a global stage keeps of a micro-batch for backward: one number for all, or one
        for each.
    pending_bytes : float or sequence of float, optional
        Bytes left of that between backward's halves, if they are apart; default all.

    Returns
    -------
    Timeline
        Times of all operations, and the figures that follow from them.

    Raises
    ------
    ValueError
        If `check_schedule` would raise it, for times or sizes of another number of stages,
        negative ones, and pending bytes without activation bytes.

    Examples
    --------
    >>> from mpishard.pipeline import OneForwardOneBackwardSchedule
    >>> from mpishard.planning import simulate
    >>> timeline = simulate(OneForwardOneBackwardSchedule(), num_stages=4, num_micro_batches=8)
    >>> timeline.makespan, round(timeline.bubble_fraction, 4), timeline.peak_live
    (33.0, 0.2727, (4.0, 3.0, 2.0, 1.0))
    """
    times = times or StageTimes()
    virtual = schedule.virtual_stages_per_rank
    ranks = run_clock(schedule, num_stages, num_micro_batches, times)
    sizes = _sizes(activation_bytes, pending_bytes, num_stages * virtual)
    peaks = [_peaks(timed, *sizes) for timed in ranks]
    return Timeline(
        schedule.name,
        num_stages,
        num_micro_batches,
        virtual,
        times,
        ranks,
        peak_live=tuple(live / virtual for live, _, _ in peaks),
        peak_held=tuple(held / virtual for _, held, _ in peaks),
        peak_activation_bytes=(
            None if activation_bytes is None else tuple(nbytes for _, _, nbytes in peaks)
        ),
    )


def _sizes(
    activation_bytes: Amounts | None, pending_bytes: Amounts | None, num_global_stages: int
) -> tuple[list[float], list[float]]:
    """Bytes of each global stage, kept until the backward of the input, and from then on."""
    if activation_bytes is None and pending_bytes is not None:
        raise ValueError("pending_bytes are a part of activation_bytes, which are not given")
    activations = 0.0 if activation_bytes is None else activation_bytes
    pending = activations if pending_bytes is None else pending_bytes
    both = (
        spread("activation_bytes", activations, num_global_stages, "global stages"),
        spread("pending_bytes", pending, num_global_stages, "global stages"),
    )
    if min(map(min, both)) < 0:
        raise ValueError("activation_bytes and pending_bytes must be 0 or more")
    return both


def _peaks(
    timed: Sequence[TimedOperation], activations: Sequence[float], pending: Sequence[float]
) -> tuple[int, int, float]:
    """The most that one rank holds: live, held at all (micro-batches x stages), and bytes."""
    live = held = peak_live = peak_held = 0
    nbytes = peak_bytes = 0.0
    for operation, stage, _, _ in timed:
        kind = operation.type
        if kind is PipelineOperationType.FORWARD:
            live, held = live + 1, held + 1
            nbytes += activations[stage]
            peak_live, peak_held = max(peak_live, live), max(peak_held, held)
        elif kind is PipelineOperationType.BACKWARD:
            live, held = live - 1, held - 1
            nbytes -= activations[stage]
        elif kind is PipelineOperationType.BACKWARD_INPUT:
            live -= 1
            nbytes += pending[stage] - activations[stage]
        else:
            held -= 1
            nbytes -= pending[stage]
        peak_bytes = max(peak_bytes, nbytes)
    return peak_live, peak_held, peak_bytes
