"""Execution of schedules: exact gradients, counts of messages, and runs after a failed one."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from mpishard import InMemoryCommunicationBackend, run_in_threads
from mpishard.base import settings
from mpishard.errors import PeerError
from mpishard.pipeline import PipelineExecutor, PipelineOperation, PipelineOperationType
from mpishard.testing.worlds import in_worlds

_SPEC = importlib.util.spec_from_file_location(
    "toy_pipeline", Path(__file__).with_name("toy_pipeline.py")
)
toy = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(toy)
SCHEDULES, ToyModel, ToySchedule, ToyStages = (
    toy.SCHEDULES, toy.ToyModel, toy.ToySchedule, toy.ToyStages
)  # fmt: skip
FORWARD, BACKWARD = PipelineOperationType.FORWARD, PipelineOperationType.BACKWARD
HALVES = PipelineOperationType.BACKWARD_INPUT, PipelineOperationType.BACKWARD_WEIGHT
M = 6


def train(backend, schedule, model, executor=None, seed=None):
    """The stages of this rank after a run, and what ran them."""
    if executor is None:
        executor = PipelineExecutor(backend, schedule, model.micro_batches, np.float64)
    stages = ToyStages(model, schedule, backend.rank, backend.world_size, seed=seed)
    executor.run(stages)
    assert not stages.saved
    assert not stages.pending
    return stages, executor


def assert_exact(stages, model):
    """Every gradient and output of these stages, to the bit, and nothing else."""
    expected = model.gradients()
    assert stages.gradients.keys() == {
        (g, m) for g in stages.stages for m in range(model.micro_batches)
    }
    for (g, m), gradient in stages.gradients.items():
        assert gradient.tobytes() == expected[g][m].tobytes()
    if len(model.matrices) - 1 in stages.stages:
        assert len(stages.outputs) == model.micro_batches


def halves_of(schedule, rank, ranks):
    """The calls of a rank's stages in the schedule's order, with backward as its two halves."""
    return [
        (half, schedule.global_stage(rank, operation.virtual_stage_index, ranks),
         operation.micro_batch_index)
        for operation in schedule.get_schedule(rank, ranks, M)
        for half in (HALVES if operation.type is BACKWARD else (operation.type,))
    ]  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
@in_worlds(1, 2, 3, 4, 5)
def test_every_schedule_gives_the_exact_gradients(backend, name):
    """Uneven micro-batches, one of them empty; ranks that doze; each run twice."""
    schedule = SCHEDULES[name]
    stages = backend.world_size * schedule.virtual_stages_per_rank
    for samples in (13, M - 1):
        model = ToyModel(stages, samples, M)
        executor = None
        for run in range(2):
            here, executor = train(backend, schedule, model, executor, seed=run)
            assert_exact(here, model)
            assert here.log == halves_of(schedule, backend.rank, backend.world_size)


@pytest.mark.parametrize("name", SCHEDULES)
@in_worlds(1, 2, 3, 4, 5)
def test_forward_alone_gives_every_output_in_order(backend, name):
    schedule = SCHEDULES[name]
    model = ToyModel(backend.world_size * schedule.virtual_stages_per_rank, 13, M)
    for micro_batches in (M, 1):
        model = ToyModel(len(model.matrices), 13, micro_batches)
        executor = PipelineExecutor(backend, schedule, micro_batches, np.float64)
        stages = ToyStages(
            model, schedule, backend.rank, backend.world_size, training=False, seed=3
        )
        executor.run_forward(stages)
        is_last = len(model.matrices) - 1 in stages.stages
        expected = model.outputs() if is_last else []
        assert [y.tobytes() for y in stages.outputs] == [y.tobytes() for y in expected]


@pytest.mark.parametrize("name", SCHEDULES)
@in_worlds(1, 2, 3, 4)
def test_messages_and_bytes_are_the_formula_s(backend, name):
    """2 (T - 1) M messages, fewer by those between stages of one rank."""
    schedule, ranks = SCHEDULES[name], backend.world_size
    virtual = schedule.virtual_stages_per_rank
    model = ToyModel(ranks * virtual, 13, M)
    backend.traffic.reset()
    train(backend, schedule, model)
    sent = backend.traffic.calls["send"], backend.traffic.bytes_sent["send"]
    backend.traffic.reset()
    stages = ToyStages(model, schedule, backend.rank, ranks, training=False)
    PipelineExecutor(backend, schedule, M, np.float64).run_forward(stages)
    forward = backend.traffic.calls["send"], backend.traffic.bytes_sent["send"]
    totals = backend.all_reduce(np.array([*sent, *forward]))
    between = range(1, ranks * virtual)  # boundaries of stages
    if ranks == 1:
        between = ()
    elif name in ("ZB-V", "toy, three stages in a zigzag", "toy, split"):
        between = [b for b in between if b % ranks]  # where it turns, it stays on the rank
    numbers = 8 * 13 * sum(model.widths[b] for b in between)
    messages = len(between) * M
    assert totals.tolist() == [2 * messages, 2 * numbers, messages, numbers]


@in_worlds(2, 3, 4)
def test_the_most_micro_batches_live_are_the_schedule_s(backend):
    ranks = backend.world_size
    for name, expected in (("GPipe", M), ("1F1B", min(ranks - backend.rank, M))):
        stages, _ = train(backend, SCHEDULES[name], ToyModel(ranks, 13, M))
        assert stages.most_saved == expected


@in_worlds(2, 3)
def test_the_next_receive_is_posted_before_a_rank_computes(backend):
    asked = []
    receive = backend.receive_async

    def receive_async(source, count, tag, *, dtype):
        asked.append((source, len(stages.log)))  # after so many operations
        return receive(source, count, tag, dtype=dtype)

    backend.receive_async = receive_async
    schedule = SCHEDULES["GPipe"]
    model = ToyModel(backend.world_size, 13, M)
    stages = ToyStages(model, schedule, backend.rank, backend.world_size)
    PipelineExecutor(backend, schedule, M, np.float64).run(stages)
    del backend.receive_async
    rank, last = backend.rank, backend.world_size - 1
    needs = []
    if rank > 0:  # while micro-batch m is computed, m + 1 is under way
        needs += [(rank - 1, max(m - 1, 0)) for m in range(M)]
    if rank < last:
        before = [M - 1, *range(M, 3 * M, 2)][:M] if rank > 0 else [0, *range(M, 3 * M, 2)][:M]
        needs += [(rank + 1, after) for after in before]
    assert asked == needs


@in_worlds(2, 3)
def test_micro_batches_may_be_used_in_another_order_than_they_are_sent(backend):
    class Backwards(ToySchedule):
        def get_schedule(self, stage_id, num_stages, num_micro_batches):
            order = list(range(num_micro_batches))
            if stage_id % 2:
                order.reverse()
            return [PipelineOperation(kind, m) for kind in (FORWARD, BACKWARD) for m in order]

    model = ToyModel(backend.world_size, 13, M)
    stages, _ = train(backend, Backwards(), model)
    assert_exact(stages, model)


@in_worlds(2, 4)
def test_tags_differ_from_run_to_run_and_stay_in_bounds(backend):
    schedule = SCHEDULES["ZB-V"]
    model = ToyModel(2 * backend.world_size, 5, 2)
    executor = PipelineExecutor(backend, schedule, 2, np.float64)
    used = []
    send = backend.send_async

    def send_async(array, destination, tag):
        used[-1].add(tag)
        return send(array, destination, tag)

    backend.send_async = send_async
    for start in (0, executor._generations - 1):
        backend._rounds = start
        for _ in range(2):
            used.append(set())
            stages, _ = train(backend, schedule, model, executor)
            assert_exact(stages, model)
    del backend.send_async
    assert not used[0] & used[1]
    assert not used[2] & used[3]
    assert used[3] == used[0], "the tags after the last are the first again"
    assert max(used[2]) <= settings.MAXIMUM_TAG


class Failing(ToyStages):
    """Fails in the forward of a micro-batch."""

    fails_in = 2

    def forward(self, virtual_stage, micro_batch, x):
        if micro_batch == self.fails_in:
            raise ZeroDivisionError("no such micro-batch")
        return super().forward(virtual_stage, micro_batch, x)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-V"])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_all_ranks_raise_if_a_stage_fails(world_size, name):
    schedule = SCHEDULES[name]
    model = ToyModel(world_size * schedule.virtual_stages_per_rank, 13, M)
    ends = [None] * world_size

    def body(backend):
        kind = Failing if backend.rank == 1 else ToyStages
        stages = kind(model, schedule, backend.rank, world_size, seed=1)
        try:
            PipelineExecutor(backend, schedule, M, np.float64).run(stages)
        except Exception as error:
            ends[backend.rank] = error
            assert not [t for t in backend._transfers if not t.awaited.is_send and not t.done]
            assert not backend._receives
            raise

    with pytest.raises(ZeroDivisionError):
        run_in_threads(world_size, body)
    assert isinstance(ends.pop(1), ZeroDivisionError)
    for error in ends:
        assert isinstance(error, PeerError)
        assert error.rank == 1


@pytest.mark.parametrize("name", ["GPipe", "ZB-V"])
@in_worlds(2, 3, 4)
def test_a_run_after_one_that_failed_everywhere_is_not_disturbed(backend, name):
    """What was sent, and what was asked for, in the failed run stays where it is."""
    schedule, ranks = SCHEDULES[name], backend.world_size
    model = ToyModel(ranks * schedule.virtual_stages_per_rank, 13, M)
    for _ in range(3):  # each run has an executor of its own, as models on one mesh have
        executor = PipelineExecutor(backend, schedule, M, np.float64)
        stages = Failing(model, schedule, backend.rank, ranks)
        stages.fails_in = ranks - 1 - backend.rank
        if name == "GPipe" and backend.rank == 0:
            stages.fails_in += 2  # what the next rank does not take
        with pytest.raises(ZeroDivisionError):
            executor.run(stages)
        stages, _ = train(backend, schedule, model)
        assert_exact(stages, model)
    backend.barrier()


class Liar(ToyStages):
    """Its outputs are not what it announces."""

    wrong = None

    def forward(self, virtual_stage, micro_batch, x):
        return self.wrong(super().forward(virtual_stage, micro_batch, x))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda y: y.astype(np.float32), r"gave float32\[3, 5\] as the input of global stage 1"),
        (lambda y: y[1:], r"gave float64\[2, 5\] as .* it announced float64\[3, 5\]"),
        (lambda y: None, "gave None as the input of global stage 1, micro-batch 0"),
    ],
)
def test_an_output_that_was_not_announced_is_refused(wrong, words):
    schedule = SCHEDULES["1F1B"]
    model = ToyModel(2, 13, M)

    def body(backend):
        kind = Liar if backend.rank == 0 else ToyStages
        stages = kind(model, schedule, backend.rank, 2)
        stages.wrong = wrong
        PipelineExecutor(backend, schedule, M, np.float64).run(stages)

    with pytest.raises(ValueError, match=words):
        run_in_threads(2, body)


def test_different_batches_on_the_ranks_are_refused_with_both_shapes():
    schedule = SCHEDULES["1F1B"]

    class Turned(ToyStages):
        def input_shape(self, virtual_stage, micro_batch):
            return super().input_shape(virtual_stage, micro_batch)[::-1]

    def body(backend):
        kind = Turned if backend.rank == 1 else ToyStages
        stages = kind(ToyModel(2, 13, M), schedule, backend.rank, 2)
        PipelineExecutor(backend, schedule, M, np.float64).run(stages)

    with pytest.raises(ValueError, match=r"with shape \(3, 5\); this rank expects \(5, 3\)"):
        run_in_threads(2, body)


def test_a_schedule_that_does_not_end_is_refused_before_anything_is_sent():
    class Forgetful(ToySchedule):
        def get_schedule(self, stage_id, num_stages, num_micro_batches):
            operations = super().get_schedule(stage_id, num_stages, num_micro_batches)
            return operations[:-1] if stage_id == 1 else operations

    def body(backend):
        stages = ToyStages(ToyModel(2, 13, M), Forgetful(), backend.rank, 2)
        with pytest.raises(ValueError, match="does forward of micro-batch 5 in global stage 1"):
            PipelineExecutor(backend, Forgetful(), M, np.float64).run(stages)
        backend.barrier()
        return backend.traffic.total_bytes, stages.log

    assert run_in_threads(2, body) == [(0, [])] * 2


def test_executors_without_micro_batches_or_tags_are_refused():
    backend = InMemoryCommunicationBackend(0, 2, "refused by the executor")
    with pytest.raises(ValueError, match="micro_batches must be 1 or more, got 0"):
        PipelineExecutor(backend, SCHEDULES["1F1B"], 0, np.float64)
    with pytest.raises(ValueError, match="= 10000 stages need 20000 tags, and there are 16383"):
        PipelineExecutor(backend, ToySchedule(virtual=5000), 1, np.float64)
