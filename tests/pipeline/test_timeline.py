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
    assert timeline.peak_activation_bytes is None


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


def test_bytes():
    one = OneForwardOneBackwardSchedule()
    assert simulate(one, 3, 4, activation_bytes=10).peak_activation_bytes == (30, 20, 10)
    assert simulate(one, 3, 4, activation_bytes=[1, 10, 100]).peak_activation_bytes == (3, 20, 100)
    h1 = ZeroBubbleH1Schedule()
    assert simulate(h1, 3, 6, activation_bytes=10).peak_activation_bytes == (30, 30, 30)
    # Between the halves 4 of 10 are kept: rank 2 has one micro-batch live and two pending.
    halves = simulate(h1, 3, 6, activation_bytes=10, pending_bytes=4)
    assert halves.peak_activation_bytes == (30, 24, 18)
    both = simulate(LoopedBFSSchedule(), 2, 3, activation_bytes=[1, 10, 100, 1000])
    assert both.peak_activation_bytes == (303, 3030)
    assert both.peak_live == both.peak_held == (3, 3)


def test_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match="activation_bytes must be one number or 2"):
        simulate(GPipeSchedule(), 2, 2, activation_bytes=[1, 2, 3])
    with pytest.raises(ValueError, match="pending_bytes are a part of activation_bytes"):
        simulate(GPipeSchedule(), 2, 2, pending_bytes=3)
    with pytest.raises(ValueError, match="must be 0 or more"):
        simulate(GPipeSchedule(), 2, 2, activation_bytes=-1)
    with pytest.raises(ValueError, match="num_stages must be 1 or more, got 0"):
        simulate(GPipeSchedule(), 0, 2)
