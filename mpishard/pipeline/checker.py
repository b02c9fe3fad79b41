"""Whether a schedule computes what training needs, each thing once, and comes to an end."""

from __future__ import annotations

from mpishard.pipeline.clock import run_clock
from mpishard.pipeline.operations import IPipelineSchedule

__all__ = ["check_schedule"]


def check_schedule(schedule: IPipelineSchedule, num_stages: int, num_micro_batches: int) -> None:
    """Execute a schedule's data, as ranks would that send what they can and wait for the rest.

    Every micro-batch must pass each global stage forward once and backward once, whole or in its
    two halves; each global stage must be on one rank; and each rank must come to the end of its
    operations, which it does in order, each when what it needs is there (`run_clock` says what
    that is). Which rank is how fast does not matter: an order that ends for some times ends for
    all of them.

    Parameters
    ----------
    schedule : IPipelineSchedule
        Any, of this package or not.
    num_stages, num_micro_batches : int
        Ranks P and micro-batches M.

    Raises
    ------
    ValueError
        Naming the rank and the operation that is missing, done twice, of no micro-batch or stage
        that there is, or that is waited for in vain.

    Examples
    --------
    >>> from mpishard.pipeline import OneForwardOneBackwardSchedule, check_schedule
    >>> check_schedule(OneForwardOneBackwardSchedule(), num_stages=4, num_micro_batches=8)
    """
    run_clock(schedule, num_stages, num_micro_batches)
