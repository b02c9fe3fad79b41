"""Schedules: complete, free of deadlock, and with the bubble and memory that papers give them."""

import os
from collections import Counter

import numpy as np
import pytest

from mpishard.pipeline import (
    SCHEDULE_NAMES,
    GPipeSchedule,
    Interleaved1F1BSchedule,
    IPipelineSchedule,
    LoopedBFSSchedule,
    OneForwardOneBackwardSchedule,
    PipelineOperationType,
    StageTimes,
    ZeroBubbleH1Schedule,
    ZeroBubbleH2Schedule,
    ZeroBubbleVSchedule,
    bubble_fraction,
    check_schedule,
    run_clock,
    schedule_by_name,
    simulate,
)

F, B, I, W = (  # noqa: E741
    PipelineOperationType.FORWARD,
    PipelineOperationType.BACKWARD,
    PipelineOperationType.BACKWARD_INPUT,
    PipelineOperationType.BACKWARD_WEIGHT,
)
VARIANTS = [
    *((name, None) for name in SCHEDULE_NAMES if name not in ("interleaved", "looped-bfs")),
    *((name, v) for name in ("interleaved", "looped-bfs") for v in (2, 3, 4)),
]
ZERO_BUBBLE = ("zb-h1", "zb-h2", "zb-v")


def published_bubble(name, p, m, v):
    """The formula, and None where the issue promises no more than 1F1B's."""
    if name in ("gpipe", "1f1b"):
        return (p - 1) / (m + p - 1)
    if name in ("interleaved", "looped-bfs"):
        return (p - 1) / (v * m + p - 1) if m % p == 0 else None
    if m < 2 * p - 1:
        return None
    return (p - 1) / (3 * m + p - 1) if name == "zb-h1" else 0


def published_peaks(name, p, m, v, s):
    """Micro-batches of rank s, in V-ths: live, held, and whether they are what is held or more."""
    if name in ("gpipe", "looped-bfs"):
        return m * v, m * v, True
    if name == "interleaved":
        peak = min(2 * (p - 1 - s) + (v - 1) * p + 1, m * v)
        return peak, peak, m % p == 0
    if name == "zb-v":
        return 2 * min(p, m), 2 * min(p, m), m >= 2 * p - 1
    live = min(2 * (p - s) - 1 if name == "zb-h2" else p - s, m)
    held = {"1f1b": live, "zb-h1": min(p, m), "zb-h2": min(2 * p - 1, m)}[name]
    return live, held, True


def micro_batch_counts(p):
    """1 to 32; by default all until the pipeline has long been full, and then one in four."""
    is_full = bool(os.environ.get("MPISHARD_TEST_FULL"))
    return [m for m in range(1, 33) if is_full or m <= 2 * p + 1 or m % 4 == p % 4]


def test_every_count_of_micro_batches_is_in_the_sample():
    for stages in (range(1, 5), range(5, 9)):
        assert {m for p in stages for m in micro_batch_counts(p)} == {*range(1, 33)}


@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
def test_bubble_and_peak_memory_are_those_published(name, virtual):
    schedule = schedule_by_name(name, virtual)
    v = schedule.virtual_stages_per_rank
    for p in range(1, 9):
        for m in micro_batch_counts(p):
            timeline = simulate(schedule, p, m)  # raises where anything is missing or waits
            case = f"{name} P={p} M={m} V={v}"
            measured, published = timeline.bubble_fraction, published_bubble(name, p, m, v)
            assert sum(timeline.work) == 3 * m * v * p, case
            assert measured <= (p - 1) / (m + p - 1) + 1e-12, case
            if published is not None:
                assert measured == pytest.approx(published, rel=0, abs=1e-12), case
            for s in range(p):
                live, held, is_exact = published_peaks(name, p, m, v, s)
                found = timeline.peak_live[s] * v, timeline.peak_held[s] * v
                assert found[0] <= live, case
                assert found[1] <= held, case
                assert found == (live, held) or not is_exact, case


@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
def test_the_estimated_bubble_is_that_of_the_clock(name, virtual):
    schedule = schedule_by_name(name, virtual)
    v = schedule.virtual_stages_per_rank
    for p in (1, 2, 3, 5, 8):
        for m in (1, 2, 5, 8, 15, 16):
            estimate = schedule.estimate_bubble_fraction(p, m)
            measured = bubble_fraction(run_clock(schedule, p, m))
            assert estimate == pytest.approx(measured, rel=0, abs=1e-12), (p, m)
            if published_bubble(name, p, m, v) is not None:
                assert schedule.published_bubble_fraction(p, m) == pytest.approx(estimate)
    assert schedule.estimate_bubble_fraction(1, 4) == 0
    assert schedule.estimate_bubble_fraction(0, 4) == 0
    assert schedule.estimate_bubble_fraction(4, 0) == 0


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_only_zero_bubble_schedules_split_backward(name):
    schedule = schedule_by_name(name)
    v, p, m = schedule.virtual_stages_per_rank, 3, 6
    kinds = {F, I, W} if name in ZERO_BUBBLE else {F, B}
    counts = Counter(op.type for rank in range(p) for op in schedule.get_schedule(rank, p, m))
    assert counts == dict.fromkeys(kinds, v * p * m)


@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
def test_warmup_and_cooldown(name, virtual):
    schedule = schedule_by_name(name, virtual)
    v = schedule.virtual_stages_per_rank
    for p, m in [(1, 2), (2, 2), (3, 1), (4, 3), (4, 8), (5, 13)]:
        for s in range(p):
            ops = schedule.get_schedule(s, p, m)
            warm = [op for op in ops if op.is_warmup]
            cool = [op for op in ops if op.is_cooldown]
            assert ops[: len(warm)] == warm
            assert ops[len(ops) - len(cool) :] == cool
            assert {op.type for op in warm} <= {F}
            assert F not in {op.type for op in cool}
            expected = {
                "gpipe": m,
                "looped-bfs": m * v,
                "1f1b": min(p - 1 - s, m),
                "zb-h1": min(p - 1 - s, m),
                "zb-h2": min(2 * (p - s) - 1, m),
            }
            if name in expected:
                assert len(warm) == expected[name]
            if name == "interleaved" and m % p == 0:
                assert len(warm) == len(cool) == min((v - 1) * p + 2 * (p - 1 - s), m * v)
            if name == "zb-v" and m >= 2 * p - 1:
                assert len(warm) == 2 * p - 1
            if name in ("gpipe", "looped-bfs", "1f1b"):
                assert len(cool) == len(warm)


def letters(schedule, rank, p, m):
    return " ".join(
        {F: "F", B: "B", I: "B", W: "W"}[op.type]
        + str(op.micro_batch_index)
        + "'" * op.virtual_stage_index
        for op in schedule.get_schedule(rank, p, m)
    )


def test_orders_as_the_papers_draw_them():
    assert letters(GPipeSchedule(), 0, 3, 3) == "F0 F1 F2 B2 B1 B0"
    one = OneForwardOneBackwardSchedule()
    assert letters(one, 0, 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert letters(one, 2, 3, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert letters(Interleaved1F1BSchedule(), 0, 2, 2) == "F0 F1 F0' F1' B0' B1' B0 B1"
    assert letters(Interleaved1F1BSchedule(), 1, 2, 2) == "F0 F1 F0' B0' F1' B1' B0 B1"
    assert letters(LoopedBFSSchedule(), 1, 2, 2) == "F0 F1 F0' F1' B0' B1' B0 B1"
    # Figure 3 of arXiv:2401.10241, for fewer ranks.
    assert letters(ZeroBubbleH1Schedule(), 1, 2, 3) == "F0 B0 F1 B1 W0 F2 B2 W1 W2"
    assert letters(ZeroBubbleH2Schedule(), 0, 2, 4) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert letters(ZeroBubbleVSchedule(), 0, 1, 1) == "F0 F0' B0' W0' B0 W0"


def test_v_placement():
    v = ZeroBubbleVSchedule()
    assert [[v.global_stage(r, i, 4) for i in (0, 1)] for r in range(4)] == [
        [0, 7],
        [1, 6],
        [2, 5],
        [3, 4],
    ]
    loop = LoopedBFSSchedule(3)
    assert [[loop.global_stage(r, i, 2) for i in range(3)] for r in range(2)] == [
        [0, 2, 4],
        [1, 3, 5],
    ]


def test_many_ranks():
    for name in SCHEDULE_NAMES:
        check_schedule(schedule_by_name(name), 64, 3)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_bad_arguments(name):
    schedule = schedule_by_name(name)
    for stages in (0, -1):
        with pytest.raises(ValueError, match=f"num_stages must be 1 or more, got {stages}"):
            schedule.get_schedule(9, stages, 4)  # counts are checked first
    with pytest.raises(ValueError, match="num_micro_batches must be 1 or more, got 0"):
        schedule.get_schedule(9, 4, 0)
    for rank in (-1, 4):
        with pytest.raises(ValueError, match=rf"stage_id must be in \[0, 4\).*got {rank}"):
            schedule.get_schedule(rank, 4, 4)
    with pytest.raises(TypeError, match="num_micro_batches must be an integer"):
        schedule.get_schedule(0, 4, 2.5)


def test_names():
    made = [schedule_by_name(name) for name in SCHEDULE_NAMES]
    assert all(isinstance(schedule, IPipelineSchedule) for schedule in made)
    assert [(schedule.name, schedule.virtual_stages_per_rank) for schedule in made] == [
        ("GPipe", 1), ("1F1B", 1), ("Interleaved-1F1B", 2), ("Looped-BFS", 2), ("ZB-H1", 1),
        ("ZB-H2", 1), ("ZB-V", 2),
    ]  # fmt: skip
    assert schedule_by_name("Looped-BFS", 4).virtual_stages_per_rank == 4
    assert schedule_by_name("ZB-V", 2).name == "ZB-V"
    with pytest.raises(ValueError, match=r"one of gpipe, .*zb-v; got 'gpip'; did you mean gpipe"):
        schedule_by_name("gpip")
    lacks = r"got 'DualPipe'; DualPipe is a pipeline schedule that mpishard does not have"
    with pytest.raises(ValueError, match=lacks):
        schedule_by_name("DualPipe")
    with pytest.raises(ValueError, match="ZB-V has 2 virtual stages per rank, got 3"):
        schedule_by_name("zb-v", 3)
    for kind in (Interleaved1F1BSchedule, LoopedBFSSchedule):
        with pytest.raises(ValueError, match="virtual_stages_per_rank must be 2 or more, got 1"):
            kind(1)
        with pytest.raises(TypeError, match="must be an integer"):
            kind(2.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule_by_name(5), "schedule must be a str, got int"),
        (lambda: schedule_by_name("1f1b", 1.5), "virtual_stages_per_rank must be an integer"),
        (lambda: check_schedule("1f1b", 2, 4), "schedule must be an IPipelineSchedule, got str"),
        (lambda: run_clock(None, 2, 4), "schedule must be an IPipelineSchedule, got NoneType"),
        (lambda: run_clock(GPipeSchedule(), 2, 4, 5), "times must be a StageTimes, got int"),
        (lambda: StageTimes(forward=None), "forward must be a number, got None"),
        (lambda: GPipeSchedule().estimate_bubble_fraction(1.5, 4), "num_stages must be an integer"),
        (
            lambda: GPipeSchedule().estimate_bubble_fraction(2, "x"),
            "num_micro_batches must be an integer, got 'x'",
        ),
    ],
)
def test_arguments_of_another_type(call, message):
    with pytest.raises(TypeError, match=message):
        call()


def test_times_of_numpy_are_times():
    plain = run_clock(GPipeSchedule(), 2, 3, StageTimes(0.5, communication=0.25))
    for kind in (np.float32, np.array):
        times = StageTimes(kind(0.5), communication=kind(0.25))
        assert run_clock(GPipeSchedule(), 2, 3, times) == plain
