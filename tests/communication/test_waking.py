"""A waiting thread-rank is woken by the event that it waits for, and not by its next poll."""

import threading
import time

import numpy as np
import pytest

from mpishard import run_in_threads
from mpishard.communication.threads import world
from mpishard.errors import PeerError

LATE = 5.0  # seconds after which a rank polls if no other rank woke it


@pytest.fixture
def woken(monkeypatch):
    """Return a list that records for each wait of a rank whether another rank ended it."""
    ends = []
    wait = threading.Condition.wait

    def recorded(condition, timeout=None):
        ended = wait(condition, timeout)
        if timeout is not None:
            ends.append(ended)
        return ended

    monkeypatch.setattr(world, "READ_EVERY", LATE)
    monkeypatch.setattr(threading.Condition, "wait", recorded)
    return ends


def act_in_turn(backend, act, first):
    """Let one of two ranks act late, so that the other rank waits for it."""
    if backend.rank != first:
        time.sleep(0.02)
    act(backend, 1 - backend.rank, first)


def meet(backend, other, first):
    backend.all_reduce(np.ones(3))


def send_to_a_late_rank(backend, other, first):
    if backend.rank == first:
        backend.send_async(np.ones(3), other).wait()
    else:
        backend.receive(other, 3)


def receive_from_a_late_rank(backend, other, first):
    if backend.rank == first:
        backend.receive(other, 3)
    else:
        backend.send(np.ones(3), other)


@pytest.mark.parametrize("act", [meet, send_to_a_late_rank, receive_from_a_late_rank])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("in_groups", [False, True])
def test_a_rank_is_woken_by_the_ranks_that_it_waits_for(act, first, in_groups, woken):
    def main(backend):
        # The groups have other numbers for their ranks than the world has.
        group = backend.split(backend.rank % 2, -backend.rank) if in_groups else backend
        act_in_turn(group, act, first)

    run_in_threads(4 if in_groups else 2, main)
    assert woken
    assert all(woken)


def test_a_rank_is_woken_if_a_rank_leaves_or_fails_in_another_group(woken):
    def leave(backend):
        group = backend.split(backend.rank % 2)
        if backend.rank == 0:
            time.sleep(0.02)
            return
        with pytest.raises(PeerError, match="rank 0 left"):
            (group if backend.rank == 2 else backend).barrier()

    def fail(backend):
        group = backend.split(backend.rank // 2)
        if backend.rank == 0:
            time.sleep(0.02)
            raise ValueError("boom")
        if backend.rank == 3:
            backend.barrier()
        group.barrier()

    run_in_threads(3, leave)
    with pytest.raises(ValueError, match="boom"):
        run_in_threads(4, fail)
    assert all(woken)


def test_the_last_rank_that_calls_shrink_wakes_the_others(woken):
    def main(backend):
        if backend.rank == 2:
            raise ValueError("boom")
        with pytest.raises(PeerError):
            backend.barrier()
        return backend.shrink().world_size

    assert run_in_threads(3, main, on_failure="shrink") == [2, 2, None]
    assert all(woken)


def test_a_rendezvous_of_one_group_wakes_no_rank_of_another():
    shared = world.World.root("waking", 4)
    pairs = shared.split([(rank % 2, -rank) for rank in range(4)], 1)
    notified = []
    for rank, condition in enumerate(shared.conditions):
        condition.notify_all = lambda rank=rank: notified.append(rank)
    for local in (0, 1):
        pairs[1].meet(1, 0, local, None)
    assert sorted(notified) == [1, 3]
    with shared.lock:
        pairs[0].wake([0])
    assert notified[2:] == [2]
