"""Timings: the number of calls, and the figures computed from their times."""

import mmap
import sys

import numpy as np
import pytest

from mpishard.observe import Timing, memory_while, proportional_memory, time_alternately, time_chain
from mpishard.testing.worlds import in_worlds


def test_statistics():
    timing = Timing((4.0, 1.0, 2.0, 3.0, 10.0))
    assert timing.median == 3.0
    assert timing.quartiles == (2.0, 4.0)
    assert timing.spread == pytest.approx(2 / 3)
    assert Timing((0.0,)).spread == 0.0


def test_chain_counts_what_follows_the_warmup():
    calls = []
    timing = time_chain(lambda: calls.append(None), repeats=3, warmup=2)
    assert len(calls) == 5
    assert len(timing.seconds) == 3


@in_worlds(1, 2, 3)
def test_calls_take_turns_and_ranks_agree(backend):
    order = []
    calls = [
        lambda: order.append("a"),
        lambda: (order.append("b"), backend.all_reduce(np.ones(3))),
    ]
    timings = time_alternately(backend, calls, repeats=4)
    assert [len(timing.seconds) for timing in timings] == [4, 4]
    changes = "".join(x for x, y in zip(order, [*order[1:], ""], strict=True) if x != y)
    assert changes == "ab" * 6
    counts = np.array([len(order), *[t.median for t in timings]])
    assert (backend.all_gather(counts[None]) == counts).all()


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is Linux's")
def test_memory_of_this_process():
    held = []

    def hold():
        # Straight from the system: the allocator may have freed memory to give.
        held.append(mmap.mmap(-1, 1 << 23))
        np.frombuffer(held[-1], np.uint8)[:] = 1

    before = proportional_memory()
    resting, peak = memory_while(hold, 4)
    assert resting - before > 28e6
    assert peak >= resting
    assert proportional_memory(2**22 + 1) is None
