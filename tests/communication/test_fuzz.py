"""Random sequences of collectives, without a mismatch and with one."""

import os

import numpy as np
import pytest

from mpishard import run_in_threads
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.reduction import TreeReducer
from mpishard.errors import CollectiveMismatchError
from mpishard.testing.fuzz import fuzz_sequence
from mpishard.testing.fuzz_plan import draw_plan, spoil
from mpishard.testing.worlds import in_worlds

FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))
# With --full 10,000 sequences in memory, of which half go well: more than 100,000 good calls.
BLOCKS = 25 if FULL else 1
IN_MEMORY = {1: 6, 2: 14, 3: 12, 4: 8, 5: 5, 6: 3, 7: 3, 8: 3}
UNDER_MPI = 100 if FULL else 8
LENGTH = 30

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)


def run_block(backend, block, count):
    """``count`` sequences, every other one with a mismatch; the ranks' mean of good calls."""
    good = 0
    for seed in range(block * count, (block + 1) * count):
        for mismatch in (False, True):
            made = fuzz_sequence(backend, seed, length=LENGTH, mismatch=mismatch)
            good += 0 if mismatch else made
    return backend.all_reduce(np.array([good]))[0] / backend.world_size


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(BLOCKS))
@in_worlds(1, 2, 3, 4, 5, 6, 7, 8)
def test_sequences(backend, block, record_property, request):
    """No right call is refused, no result is wrong, and every mismatch is found."""
    under_mpi = request.config.getoption("with_mpi", default=False)
    count = UNDER_MPI if under_mpi else IN_MEMORY[backend.world_size]
    count = 50 if FULL and not under_mpi else count
    good = run_block(backend, block, count)
    assert good >= count * LENGTH * 0.5, "few calls were made"
    if backend.rank == 0:
        record_property("good calls of a block of sequences", float(good))


@by_path
@in_worlds(2, 3, 4)
def test_sequences_by_every_transport(backend, path):
    """The transports: memory that a node shares, messages alone, and several nodes."""
    assert run_block(backend, 1000, 4) > 0


def test_plans_contain_every_kind_of_step():
    plans = [draw_plan(seed, 4, 60) for seed in range(60)]
    steps = [step for plan in plans for step in plan]
    collectives = [step for step in steps if step.method not in ("split", "message")]
    assert {step.method for step in steps} == {
        "all_reduce",
        "reduce_scatter",
        "all_gather",
        "broadcast",
        "scatter",
        "gather",
        "all_to_all",
        "barrier",
        "split",
        "message",
        "allocate_arena",
        "reduce_into",
        "reduce_in_place",
        "gather_in_place",
    }
    assert len({step.dtype for step in steps}) == 15
    assert len({step.operation for step in steps}) == 5
    assert {step.group for step in steps} > {0, 1, 2, 3}
    for method in ("all_reduce", "reduce_scatter", "all_gather"):
        mine = [step for step in collectives if step.method == method]
        for wanted in ("is_twin", "has_out", "is_adversarial"):
            assert {getattr(step, wanted) for step in mine} == {False, True}
    sizes = [sum(s.rows) // len(s.rows) * s.dtype.itemsize for s in collectives if s.rows]
    assert min(sizes) == 0
    assert sum(size <= 128 for size in sizes) > 100
    assert sum(size > 4096 for size in sizes) > 100
    spoiled = [spoil(plan, seed) for seed, plan in enumerate(plans)]
    assert {s.rank for s in spoiled} == {0, 1, 2, 3}
    assert len({s.step.method for s in spoiled}) == 8
    assert str(draw_plan(3, 4, 60)) == str(plans[3])
    assert str(draw_plan(3, 5, 60)) != str(plans[3])


def fails(message, count, *, mismatch=False):
    """Whether one of ``count`` sequences fails, saying so."""

    def sequences(backend):
        for seed in range(count):
            fuzz_sequence(backend, seed, mismatch=mismatch)

    with pytest.raises((AssertionError, CollectiveMismatchError), match=message) as caught:
        run_in_threads(3, sequences, timeout=5)
    assert any("fuzz_sequence of seed" in note for note in caught.value.__notes__)


def test_a_wrong_order_of_a_sum_is_detected(monkeypatch):
    reduce = TreeReducer.reduce

    def swap(self, contributions, operation, out):
        turned = [contributions[i] for i in (0, 2, 1)] if len(contributions) == 3 else contributions
        reduce(self, turned, operation, out)

    monkeypatch.setattr(TreeReducer, "reduce", swap)
    fails(r"(?s)step \d+: (all_reduce|reduce_).* is not ", 12)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of data that are mixed then
def test_an_accepted_mismatch_is_detected(monkeypatch):
    check = CommunicationBackend._verify

    def blind(self, calls):
        if len({call.operation for call in calls}) == 1 or len({call.kind for call in calls}) > 1:
            check(self, calls)

    monkeypatch.setattr(CommunicationBackend, "_verify", blind)
    fails("was not refused", 60, mismatch=True)


def test_a_false_refusal_is_detected(monkeypatch):
    def jumpy(self, calls):
        if calls[0].sequence == 20:
            raise CollectiveMismatchError("there is nothing wrong")

    monkeypatch.setattr(CommunicationBackend, "_verify", jumpy)
    fails("nothing wrong", 2)
