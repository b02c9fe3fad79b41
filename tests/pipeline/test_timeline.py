"""Timelines: makespan, bubble, and the peaks of live micro-batches and of memory."""

import pytest

from mpishard.pipeline import (
    GPipeSchedule,
    LoopedBFSSchedule,
    OneForwardOneBackwardSchedule,
    StageTimes,
    ZeroBubbleH1Schedule,
    ZeroBubbleH2Schedule,
    ZeroBubbleVSchedule,
    simulate,
)


def test_figures_of_a_small_pipeline():
    timeline = simulate(GPipeSchedule(), 2, 2)
    # Rank 0: F0 0-1, F1 1-2, then B1 5-7 and B0 7-9, which rank 1 does from 3 to 5 and from 5 to 7.
    assert [[(t.start, t.end) for t in timed] for timed in timeline.ranks] == [
        [(0, 1), (1, 2), (5, 7), (7, 9)],
        [(1, 2), (2, 3), (3, 5), (5, 7)],
    ]
    assert timeline.schedule_name == "GPipe"
    assert timeline.makespan == 9
    assert timeline.spans == [(0, 9), (1, 7)]
    assert timeline.work == [6, 6]
    assert timeline.bubble_fraction == pytest.approx(1 - 6 / 9)
    assert timeline.idle_fraction == pytest.approx(1 - 6 / 9)
    assert timeline.peak_live == timeline.peak_held == (2, 2)


@pytest.mark.parametrize("schedule", [ZeroBubbleH2Schedule(), ZeroBubbleVSchedule()])
def test_a_step_has_idle_time_even_if_the_bubble_is_zero(schedule):
    p, m, v = 4, 8, schedule.virtual_stages_per_rank
    timeline = simulate(schedule, p, m)
    assert timeline.bubble_fraction == 0
    assert timeline.makespan == 3 * m * v + p - 1  # the last rank begins P-1 operations late
    assert timeline.idle_fraction == pytest.approx((p - 1) / (3 * m * v + p - 1))


def test_unequal_stages():
    times = StageTimes(forward=[1, 3], backward_input=[1, 3], backward_weight=[1, 3])
    timeline = simulate(OneForwardOneBackwardSchedule(), 2, 4, times)
    assert timeline.work == [12, 36]
    # Rank 1 never waits; what is lost is that rank 0 has less to do.
    assert timeline.spans == [(0, 39), (1, 37)]
    assert timeline.bubble_fraction == pytest.approx(1 - 24 / 39)


def test_times_of_zero():
    timeline = simulate(GPipeSchedule(), 2, 2, StageTimes(0, 0, 0))
    assert timeline.bubble_fraction == timeline.idle_fraction == timeline.makespan == 0


def test_peaks_of_halves():
    timeline = simulate(ZeroBubbleH1Schedule(), 4, 8)
    assert timeline.peak_live == (4, 3, 2, 1)
    assert timeline.peak_held == (4, 4, 4, 4)
    timeline = simulate(ZeroBubbleH2Schedule(), 4, 8)
    assert timeline.peak_live == (7, 5, 3, 1)
    assert timeline.peak_held == (7, 7, 7, 7)


def test_peaks_of_virtual_stages():
    timeline = simulate(LoopedBFSSchedule(), 2, 3)
    assert timeline.peak_live == timeline.peak_held == (3, 3)


def test_arguments_that_do_not_fit():
    with pytest.raises(ValueError, match="forward must be one number or 2"):
        simulate(GPipeSchedule(), 2, 2, StageTimes(forward=[1, 2, 3]))
    with pytest.raises(ValueError, match="num_stages must be 1 or more, got 0"):
        simulate(GPipeSchedule(), 0, 2)
