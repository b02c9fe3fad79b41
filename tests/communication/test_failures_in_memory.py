"""Thread-ranks that fail, leave or disagree: every rank raises within a short time."""

import sys
import threading
import time

import numpy as np
import pytest

from mpishard import InMemoryCommunicationBackend, run_in_threads
from mpishard.communication.threads import backend as memory
from mpishard.communication.threads import run
from mpishard.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicationError,
    NotInitializedError,
    PeerError,
)


def outcomes(world_size, body, timeout=30.0):
    """Return the exception or result of each rank, and the seconds of the slowest."""
    started = time.monotonic()
    ends = [None] * world_size

    def run(backend):
        try:
            ends[backend.rank] = body(backend)
        except BaseException as error:
            ends[backend.rank] = error
            raise

    with pytest.raises(BaseException):  # noqa: B017, PT011 - each test looks at `ends`
        run_in_threads(world_size, run, timeout=timeout)
    return ends, time.monotonic() - started


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("waits_in", ["collective", "receive", "group"])
def test_an_exception_on_one_rank_raises_on_all(world_size, waits_in):
    def body(backend):
        group = backend.split(0)
        backend.barrier()
        if backend.rank == 1:
            raise ValueError("boom")
        if waits_in == "collective":
            backend.all_reduce(np.ones(3))
        elif waits_in == "receive":
            backend.receive(1, 1)
        else:
            group.all_reduce(np.ones(3))

    ends, seconds = outcomes(world_size, body)
    assert seconds < 2
    assert isinstance(ends[1], ValueError)
    for rank, error in enumerate(ends):
        if rank != 1:
            assert isinstance(error, PeerError)
            assert error.rank == 1
            for words in ("rank 1 failed after collective 2, barrier()", "ValueError: boom"):
                assert words in str(error)


def test_the_first_failure_is_raised_with_its_rank():
    def body(backend):
        if backend.rank == 2:
            raise KeyError("lost")
        backend.barrier()

    with pytest.raises(KeyError) as caught:
        run_in_threads(3, body)
    assert "raised on rank 2 of 3" in caught.value.__notes__


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_leaves_is_named(world_size):
    def body(backend):
        backend.barrier()
        if backend.rank != 1:
            backend.all_reduce(np.ones(3))

    ends, seconds = outcomes(world_size, body)
    assert seconds < 2
    for rank, error in enumerate(ends):
        if rank != 1:
            assert isinstance(error, PeerError)
            assert "rank 1 left after collective 1" in str(error)


def test_a_rank_that_exits_with_0_before_the_others_ends_the_job_as_an_error():
    def body(backend):
        backend.barrier()
        if backend.rank == 1:
            sys.exit(0)
        backend.barrier()

    with pytest.raises(PeerError, match="rank 1 left after collective 1"):
        run_in_threads(3, body)


def test_ranks_that_exit_with_0_after_their_last_collective_end_no_other_rank(monkeypatch):
    monkeypatch.setattr(run, "_GRACE_SECONDS", 0.1)

    def body(backend):
        backend.barrier()
        if backend.rank > 0:
            sys.exit()
        time.sleep(0.8)  # rank 0 draws its figures
        return "drawn"

    assert run_in_threads(3, body) == ["drawn", None, None]


def test_the_job_exits_if_every_rank_exits():
    with pytest.raises(SystemExit) as ended:
        run_in_threads(2, lambda backend: sys.exit(0))
    assert ended.value.code == 0


def test_a_message_of_a_rank_that_left_can_be_received():
    def body(backend):
        if backend.rank == 1:
            backend.send(np.arange(3), 0)
            return None
        time.sleep(0.05)
        message = backend.receive(1, 3).tolist()
        with pytest.raises(PeerError, match="rank 1 left"):
            backend.receive(1, 3)
        return message

    assert run_in_threads(2, body)[0] == [0, 1, 2]


def test_a_rank_that_does_not_arrive_is_a_timeout():
    def body(backend):
        backend.barrier()
        if backend.rank == 0:
            time.sleep(1.0)
            return "slept"
        return backend.all_reduce(np.ones(2))

    ends, seconds = outcomes(3, body, timeout=0.3)
    assert seconds < 5
    for error in ends[1:]:
        assert isinstance(error, CollectiveTimeoutError | PeerError)
        assert "ranks [0] did not arrive" in str(error)
        assert "collective 2, all_reduce(SUM, float64[2])" in str(error)


def test_every_rank_raises_the_same_mismatch():
    def body(backend):
        if backend.rank == 1:
            backend.all_reduce(np.ones(3))
        else:
            backend.barrier()

    ends, _ = outcomes(3, body)
    messages = {str(error) for error in ends}
    assert all(isinstance(error, CollectiveMismatchError) for error in ends)
    assert len(messages) == 1
    (message,) = messages
    assert "rank 1: collective 1, all_reduce(SUM, float64[3]) at " in message
    assert "test_failures_in_memory.py:" in message


def test_life_cycle():
    backend = InMemoryCommunicationBackend(0, 1, "life")
    with pytest.raises(NotInitializedError, match="initialize"):
        backend.barrier()
    backend.initialize()
    backend.initialize()
    backend.barrier()
    backend.shutdown()
    backend.shutdown()
    with pytest.raises(NotInitializedError):
        backend.all_reduce(np.ones(1))
    with backend:
        assert backend.is_initialized
    assert not backend.is_initialized


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((0, 0), "world_size"), ((2, 2), "outside"), ((-1, 2), "outside"), ((0, 1, " "), "blank")],
)
def test_wrong_worlds_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        InMemoryCommunicationBackend(*arguments)


def test_a_rank_that_is_in_use_is_refused():
    first = InMemoryCommunicationBackend(0, 2, "taken")
    first.initialize()
    try:
        with pytest.raises(CommunicationError, match="taken"):
            InMemoryCommunicationBackend(0, 2, "taken").initialize()
        with pytest.raises(ValueError, match="2 ranks"):
            InMemoryCommunicationBackend(1, 3, "taken").initialize()
    finally:
        InMemoryCommunicationBackend.clear_environment("taken")


def test_with_reports_a_failure_on_threads_of_the_user():
    errors = []

    def run(rank):
        backend = InMemoryCommunicationBackend(rank, 2, "own threads", timeout=10)
        try:
            with backend:
                if rank == 0:
                    np.ones(2).reshape(3)
                backend.barrier()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    InMemoryCommunicationBackend.clear_environment("own threads")
    assert {type(error) for error in errors} == {ValueError, PeerError}


def in_threads(body, count=2):
    """Return the result or exception of ``body`` on each rank."""
    results = [None] * count

    def run(rank):
        try:
            results[rank] = body(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_a_world_that_begins_again_has_no_old_failure():
    backends = [InMemoryCommunicationBackend(r, 2, "again", timeout=0.05) for r in range(2)]
    for backend in backends:
        backend.initialize()
    group = in_threads(lambda rank: backends[rank].split(0))[0]
    with pytest.raises(CollectiveTimeoutError):
        group.barrier()
    del group
    for backend in backends:
        backend.shutdown()

    def again(rank):
        backends[rank]._timeout = 10
        backends[rank].initialize()
        total = backends[rank].all_reduce(np.ones(2))
        backends[rank].shutdown()
        return total.tolist(), len(backends[rank].status.read().calls)

    assert in_threads(again) == [([2, 2], 1)] * 2


def test_ranks_may_begin_again_before_others_leave_or_enter():
    first, second = (InMemoryCommunicationBackend(r, 2, "early", timeout=10) for r in range(2))
    for _ in range(2):
        first.initialize()
        first.shutdown()
    first.initialize()
    for _ in range(2):
        second.initialize()
        second.shutdown()
    second.initialize()
    backends = first, second

    def body(rank):
        return backends[rank].all_reduce(np.ones(1)).tolist()

    assert in_threads(body) == [[2], [2]]
    for backend in backends:
        backend.shutdown()
    assert "early" not in memory._environments
