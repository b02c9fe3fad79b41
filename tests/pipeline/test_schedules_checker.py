"""`check_schedule` finds every error of a schedule, and the clock uses the given times."""

from dataclasses import replace

import pytest

from mpishard.pipeline import (
    SCHEDULE_NAMES,
    GPipeSchedule,
    Interleaved1F1BSchedule,
    IPipelineSchedule,
    OneForwardOneBackwardSchedule,
    PipelineOperationType,
    StageTimes,
    ZeroBubbleH1Schedule,
    ZeroBubbleVSchedule,
    check_schedule,
    run_clock,
    schedule_by_name,
)

F, B, I, W = (  # noqa: E741
    PipelineOperationType.FORWARD,
    PipelineOperationType.BACKWARD,
    PipelineOperationType.BACKWARD_INPUT,
    PipelineOperationType.BACKWARD_WEIGHT,
)
VARIANTS = [
    *((name, None) for name in SCHEDULE_NAMES if name not in ("interleaved", "looped-bfs")),
    *((name, v) for name in ("interleaved", "looped-bfs") for v in (2, 3)),
]


def naive_ends(schedule, p, m):
    """When each operation ends, found by going round the ranks: no code of the clock's."""
    v = schedule.virtual_stages_per_rank
    last = p * v - 1
    orders = [list(schedule.get_schedule(rank, p, m)) for rank in range(p)]
    free, ends, moved = [0] * p, {}, True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while order:
                op = order[0]
                g = schedule.global_stage(rank, op.virtual_stage_index, p)
                mb = op.micro_batch_index
                needs = {
                    F: [("F", g - 1, mb)] * (g > 0),
                    B: [("F", g, mb), *[("B", g + 1, mb)] * (g < last)],
                    I: [("F", g, mb), *[("B", g + 1, mb)] * (g < last)],
                    W: [("B", g, mb)],
                }[op.type]
                if any(need not in ends for need in needs):
                    break
                start = max([free[rank], *(ends[need] for need in needs)])
                free[rank] = start + (2 if op.type is B else 1)
                ends[{F: "F", B: "B", I: "B", W: "W"}[op.type], g, mb] = free[rank]
                order.pop(0)
                moved = True
    return None if any(orders) else (free, ends)


@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
@pytest.mark.parametrize(("p", "m"), [(2, 1), (3, 4), (5, 12)])
def test_clock_is_a_plain_execution(name, virtual, p, m):
    schedule = schedule_by_name(name, virtual)
    free, ends = naive_ends(schedule, p, m)
    ranks = run_clock(schedule, p, m)
    assert [timed[-1].end for timed in ranks] == free
    for rank, timed in enumerate(ranks):
        assert tuple(t.operation for t in timed) == tuple(schedule.get_schedule(rank, p, m))
        for operation, stage, _, end in timed:
            letter = {F: "F", B: "B", I: "B", W: "W"}[operation.type]
            assert ends[letter, stage, operation.micro_batch_index] == end


class Changed(IPipelineSchedule):
    """Another schedule, of which one rank's operations are changed."""

    def __init__(self, inner, rank, change):
        self.inner, self.rank, self.change = inner, rank, change

    name = property(lambda self: self.inner.name)
    virtual_stages_per_rank = property(lambda self: self.inner.virtual_stages_per_rank)

    def get_schedule(self, stage_id, num_stages, num_micro_batches):
        ops = list(self.inner.get_schedule(stage_id, num_stages, num_micro_batches))
        if stage_id == self.rank:
            self.change(ops)
        return ops

    def estimate_bubble_fraction(self, num_stages, num_micro_batches):
        raise NotImplementedError

    def global_stage(self, stage_id, virtual_stage_index, num_stages):
        return self.inner.global_stage(stage_id, virtual_stage_index, num_stages)


@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
def test_a_missing_and_a_doubled_operation_are_named(name, virtual):
    schedule, p, m = schedule_by_name(name, virtual), 2, 3
    check_schedule(Changed(schedule, 1, lambda ops: None), p, m)
    for place, op in enumerate(schedule.get_schedule(1, p, m)):
        stage = schedule.global_stage(1, op.virtual_stage_index, p)
        where = f"of micro-batch {op.micro_batch_index} in global stage {stage}"
        with pytest.raises(ValueError, match=f"rank 1 does .* {where}; it must do forward and"):
            check_schedule(Changed(schedule, 1, lambda ops, place=place: ops.pop(place)), p, m)
        with pytest.raises(ValueError, match=f"rank 1 does the .* {where} twice"):
            check_schedule(Changed(schedule, 1, lambda ops, op=op: ops.append(op)), p, m)


@pytest.mark.parametrize(("name", "virtual"), VARIANTS)
def test_swapped_operations_are_refused_if_they_deadlock(name, virtual):
    schedule, p, m = schedule_by_name(name, virtual), 2, 2
    outcomes = []
    for rank in range(p):
        count = len(schedule.get_schedule(rank, p, m))
        for i in range(count):
            for j in range(i + 1, count):

                def swap(ops, i=i, j=j):
                    ops[i], ops[j] = ops[j], ops[i]

                changed = Changed(schedule, rank, swap)
                works = naive_ends(changed, p, m) is not None
                outcomes.append(works)
                if works:
                    check_schedule(changed, p, m)
                else:
                    with pytest.raises(ValueError, match=f"{schedule.name} .* comes to a stop"):
                        check_schedule(changed, p, m)
    assert True in outcomes
    assert False in outcomes


def test_a_deadlock_names_the_operations():
    def late(ops):
        ops.append(ops.pop(0))

    with pytest.raises(ValueError, match="comes to a stop") as caught:
        check_schedule(Changed(OneForwardOneBackwardSchedule(), 0, late), 2, 2)
    b0 = "backward of micro-batch 0 in global stage 0"
    assert str(caught.value).splitlines() == [
        "1F1B with 2 ranks and 2 micro-batches comes to a stop:",
        (
            f"  rank 0 waits at its operation 1, {b0}; its forward in global stage 0 is "
            "operation 3 of rank 0, not yet done"
        ),
        (
            f"  rank 0 waits at its operation 1, {b0}; its backward in global stage 1 is "
            "operation 1 of rank 1, not yet done"
        ),
        (
            "  rank 1 waits at its operation 0, forward of micro-batch 0 in global stage 1; its "
            "forward in global stage 0 is operation 3 of rank 0, not yet done"
        ),
    ]

    def weight_first(ops):
        ops.insert(0, ops.pop())

    message = "backward weight of micro-batch 0 in .* its backward in .* is operation 2 of rank 0"
    with pytest.raises(ValueError, match=message):
        check_schedule(Changed(ZeroBubbleH1Schedule(), 0, weight_first), 1, 1)


def test_operations_of_unknown_stages_and_micro_batches_are_refused():
    def other(**fields):
        def change(ops):
            ops[0] = replace(ops[0], **fields)

        return Changed(GPipeSchedule(), 0, change)

    for fields, what in (
        ({"micro_batch_index": 2}, "micro-batch 2 in its virtual stage 0"),
        ({"micro_batch_index": -1}, "micro-batch -1 in its virtual stage 0"),
        ({"virtual_stage_index": 1}, "micro-batch 0 in its virtual stage 1"),
    ):
        message = f"rank 0 has at position 0 the forward of {what}; it has 2 micro-batches and 1 v"
        with pytest.raises(ValueError, match=message):
            check_schedule(other(**fields), 2, 2)
    mixed = Changed(
        GPipeSchedule(),
        0,
        lambda ops: ops.append(replace(ops[-1], type=PipelineOperationType.BACKWARD_WEIGHT)),
    )
    with pytest.raises(ValueError, match="does forward, backward, backward weight of micro-b"):
        check_schedule(mixed, 2, 2)


def test_a_stage_on_two_ranks():
    class Folded(Interleaved1F1BSchedule):
        def global_stage(self, stage_id, virtual_stage_index, num_stages):
            return virtual_stage_index

    with pytest.raises(ValueError, match=r"each of 4 global stages on one rank; it places \[0, 0"):
        check_schedule(Folded(), 2, 2)


def ends(schedule, p, m, times):
    return [timed[-1].end for timed in run_clock(schedule, p, m, times)]


def test_given_times():
    one = OneForwardOneBackwardSchedule()
    times = StageTimes(forward=[2, 3], backward_input=[5, 7], backward_weight=11, communication=13)
    # Down: 2, 13, 3; back: 7 + 11, 13, 5 + 11.
    assert ends(one, 2, 1, times) == [65, 36]
    # The gradient leaves before the parameters' half begins, and not after both.
    assert ends(ZeroBubbleH1Schedule(), 2, 1, times) == [54, 36]
    # The V's two stages of the last rank hand over without a message: down 1, 10, 1, 1, 100, 1;
    # B 1, 100, 1, then the W of that stage, and B 1, 10, 1.
    times = StageTimes(1, 1, 1, communication=[10, 1000, 100])
    assert ends(ZeroBubbleVSchedule(), 2, 1, times) == [230, 219]
    # Messages are under way while a rank computes.
    first, second = run_clock(GPipeSchedule(), 2, 2, StageTimes(communication=0.5))
    assert [t.start for t in first] == [0, 1, 6, 8]
    assert [t.start for t in second] == [1.5, 2.5, 3.5, 5.5]


def test_times_that_do_not_fit():
    with pytest.raises(ValueError, match="forward must be one number or 2, for each of the"):
        ends(GPipeSchedule(), 2, 1, StageTimes(forward=[1, 1, 1]))
    with pytest.raises(ValueError, match="communication must be one number or 1, for each of the"):
        ends(GPipeSchedule(), 2, 1, StageTimes(communication=[1, 1]))
    with pytest.raises(ValueError, match="backward_weight must be 0 or more and finite, got -1"):
        StageTimes(backward_weight=[1, -1])
    with pytest.raises(ValueError, match="forward must be 0 or more and finite, got nan"):
        StageTimes(forward=float("nan"))
    assert ends(GPipeSchedule(), 2, 1, StageTimes(0, 0, 0)) == [0, 0]
