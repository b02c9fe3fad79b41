"""Two threads of one rank: one at a time may call its backend and the groups split off it."""

import threading
import time

import numpy as np
import pytest

from mpishard.communication.contract.work import Session
from mpishard.communication.mpi import progress
from mpishard.communication.mpi.progress import ProgressThread
from mpishard.errors import CommunicationError
from mpishard.testing.worlds import in_worlds

CALLS = {
    "a collective": lambda backend, group: backend.all_reduce(np.ones(3)),
    "a collective of the group": lambda backend, group: group.all_gather(np.ones(3)),
    "an async collective": lambda backend, group: group.all_reduce_async(np.ones(3)),
    "a split": lambda backend, group: backend.split(0),
    "a receive": lambda backend, group: backend.receive(1, 1),
    "an async receive": lambda backend, group: group.receive_async(1, 1, dtype=np.float64),
    "a send": lambda backend, group: backend.send(np.ones(1), 1),
    "an async send": lambda backend, group: backend.send_async(np.ones(1), 1),
}


def wait_until_inside(backend):
    """Return when another thread has been inside a call of ``backend`` for 0.05 s."""
    looks = 0
    while looks < 10:
        time.sleep(0.005)
        looks = looks + 1 if repr(backend._session._lock).startswith("<locked") else 0


@in_worlds(2)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("waits_in", ["world", "group"])
def test_a_second_thread_is_refused_at_once_by_name(backend, waits_in, call, shared_path):
    group = backend.split(0)
    busy = {"world": backend, "group": group}[waits_in]
    refused = shared_path / "refused"
    if backend.rank == 0:
        first = threading.Thread(target=busy.barrier, name="first")
        first.start()
        wait_until_inside(backend)
        numbers = backend._sequence, group._sequence
        started = time.monotonic()
        with pytest.raises(CommunicationError) as caught:
            CALLS[call](backend, group)
        assert time.monotonic() - started < 1
        me = threading.current_thread().name
        for words in (f"thread {me!r} of rank 0 calls", "thread 'first' is in one", "at a time"):
            assert words in str(caught.value)
        assert numbers == (backend._sequence, group._sequence)
        refused.touch()
        first.join()
    else:
        while not refused.exists():
            time.sleep(0.005)
        busy.barrier()
    assert backend.all_reduce(np.ones(2)).tolist() == [2, 2]
    assert group.all_reduce(np.ones(2)).tolist() == [2, 2]


@in_worlds(2)
def test_a_wait_of_a_second_thread_is_refused_and_may_be_repeated(backend, shared_path):
    refused = shared_path / "refused"
    if backend.rank == 0:
        work = backend.all_reduce_async(np.full(2, backend.rank))
        first = threading.Thread(target=backend.barrier, name="first")
        first.start()
        wait_until_inside(backend)
        for call in (work.wait, backend.progress):
            with pytest.raises(CommunicationError, match="thread 'first' is in one"):
                call()
        refused.touch()
        first.join()
    else:
        while not refused.exists():
            time.sleep(0.005)
        work = backend.all_reduce_async(np.full(2, backend.rank))
        backend.barrier()
    assert work.wait().tolist() == [1, 1]


@in_worlds(2)
def test_threads_of_a_rank_may_call_one_after_the_other(backend):
    group = backend.split(0)
    works, sums = [], []

    def issue():
        works.append(group.all_reduce_async(np.full(2, group.rank)))

    for call in (issue, lambda: sums.append(works[0].wait().tolist()), backend.barrier):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert sums == [[1, 1]]
    assert backend.all_gather(np.array([backend.rank])).tolist() == [0, 1]


def test_the_progress_thread_ends_at_once_in_the_pause_after_a_long_look(monkeypatch):
    thread, has_looked = ProgressThread(Session(0)), threading.Event()

    def look():
        time.sleep(0.3)
        has_looked.set()

    monkeypatch.setattr(thread, "_is_needed", lambda: True)
    monkeypatch.setattr(thread, "_advance", look)
    thread.wake()
    assert has_looked.wait(20)
    began = time.monotonic()
    thread.end()
    assert time.monotonic() - began < 2  # that pause is ten times as long as the look


def test_the_progress_thread_ends_although_it_falls_asleep_meanwhile(monkeypatch):
    monkeypatch.setattr(progress, "_LINGER_SECONDS", 0.0)
    thread = ProgressThread(Session(0))
    enders = []

    def end_meanwhile():
        if not enders:  # on a rank's own thread, after this one has looked whether it should end
            enders.append(threading.Thread(target=thread.end, daemon=True))
            enders[0].start()
            time.sleep(0.2)
        return False

    monkeypatch.setattr(thread, "_is_needed", end_meanwhile)
    thread.wake()
    began = time.monotonic()
    while not enders and time.monotonic() - began < 20:
        time.sleep(0.01)
    enders[0].join(5)
    assert not enders[0].is_alive()
