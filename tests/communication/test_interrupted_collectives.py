"""A collective that an exception interrupts on one thread-rank, and that the script catches."""

import threading
import time

import numpy as np
import pytest

from mpishard import run_in_threads
from mpishard.communication.contract.reduction import TreeReducer
from mpishard.communication.threads.world import Rendezvous
from mpishard.errors import CommunicationError, PeerError

COLLECTIVES = {
    "all_reduce": lambda b: b.all_reduce(np.ones(6)),
    "reduce_scatter": lambda b: b.reduce_scatter(np.ones(6)),
    "all_gather": lambda b: b.all_gather(np.ones(2)),
    "broadcast": lambda b: b.broadcast(np.ones(2) if b.rank == 0 else None),
    "scatter": lambda b: b.scatter(np.ones(6) if b.rank == 0 else None),
    "gather": lambda b: b.gather(np.ones(2)),
    "all_to_all": lambda b: b.all_to_all([np.ones(2)] * b.world_size),
    "barrier": lambda b: b.barrier(),
    "split": lambda b: b.split(0),
    "allocate_shared": lambda b: b.allocate_shared(4, np.float64),
}


class AlarmError(Exception):
    """What a signal handler of a script raises."""


@pytest.fixture
def strike(monkeypatch):
    """Let the n-th test of a rendezvous from now on, on this thread, raise what is given."""
    victim = threading.local()
    test = Rendezvous.test

    def struck(rendezvous):
        victim.tests = getattr(victim, "tests", 0) - 1
        if victim.tests == 0:
            raise victim.error
        return test(rendezvous)

    def arm(error, number=1):
        victim.tests, victim.error = number, error

    monkeypatch.setattr(Rendezvous, "test", struck)
    return arm


def after(backend, call):
    """What ``call`` raises, which must come within a second."""

    def repeatedly():
        for _ in range(2):  # the first may be complete on this rank
            call(backend)

    started = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        repeatedly()
    assert time.monotonic() - started < 1
    return caught.value


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (KeyboardInterrupt(), 1),  # when it was issued
        (MemoryError("4 GiB"), 3),  # with the lock, before it waits
        (AlarmError("10 s"), 4),  # after it has waited
    ],
)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_rank_s_present_or_next_call_raises(strike, name, error, number):
    """Rank 2 is interrupted while it waits for rank 1, as rank 0 does."""
    is_struck = threading.Event()
    what = f"{type(error).__name__}: {error}".removesuffix(": ")

    def body(backend):
        backend.barrier()
        if backend.rank == 2:
            strike(error, number)
            with pytest.raises(type(error)):
                COLLECTIVES[name](backend)
            is_struck.set()
        elif backend.rank == 1:
            assert is_struck.wait(10)
        for called in (name, "barrier", "all_reduce"):
            ended = after(backend, COLLECTIVES[called])
            words = f"rank 2 was interrupted by {what}, in collective 2, {name}("
            assert words in str(ended)
            assert "shrink() on every rank" in str(ended)
            assert type(ended) is (CommunicationError if backend.rank == 2 else PeerError)
            assert getattr(ended, "rank", 2) == 2

    run_in_threads(3, body)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_rank_may_be_interrupted_when_all_have_come(strike, name):
    """The others may complete the collective, and raise in the next."""

    def body(backend):
        if backend.rank == 0:
            strike(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                COLLECTIVES[name](backend)
        ended = after(backend, COLLECTIVES[name])
        assert f"rank 0 was interrupted by KeyboardInterrupt, in collective 1, {name}(" in str(
            ended
        )

    run_in_threads(2, body)


def test_ranks_that_wait_elsewhere_are_told_and_may_go_on_with_shrink(monkeypatch):
    """In the root world, in another group and for a message."""

    def body(backend):
        group = backend.split(backend.rank // 2)
        waits_in = (backend.barrier, group.barrier, lambda: backend.receive(3, 1))
        if backend.rank == 3:
            time.sleep(0.1)
            with monkeypatch.context() as patch:
                patch.setattr(group._reducer, "reduce", None)  # a TypeError when all have come
                with pytest.raises(TypeError):
                    group.all_reduce(np.ones(3))
        else:
            if backend.rank == 2:
                group.all_reduce_async(np.ones(3))
            error = after(backend, lambda _: waits_in[backend.rank]())
            assert isinstance(error, PeerError)
            assert error.rank == 3
            assert "rank 3 was interrupted by TypeError" in str(error)
        heir = backend.shrink()
        return heir.world_size, float(heir.all_reduce(np.ones(1))[0])

    assert run_in_threads(4, body, timeout=10) == [(4, 4.0)] * 4


def test_works_under_way_on_the_rank_itself_do_not_go_on(strike):
    is_issued = threading.Event()

    def body(backend):
        mine = np.ones(3)
        first = backend.all_reduce_async(mine)
        if backend.rank == 0:
            assert is_issued.wait(10)
            strike(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                backend.barrier()
            error = after(backend, lambda _: first.wait())
            assert "rank 0 was interrupted by KeyboardInterrupt" in str(error)
            assert mine.tolist() == [1, 1, 1]
        else:
            is_issued.set()
            assert after(backend, lambda _: backend.barrier()).rank == 0

    run_in_threads(2, body)


def test_an_exception_that_is_not_caught_is_raised_by_run_in_threads(monkeypatch):
    def reduce(*_):
        raise MemoryError("no memory left")

    monkeypatch.setattr(TreeReducer, "reduce", reduce)
    with pytest.raises(MemoryError, match="no memory left"):
        run_in_threads(3, lambda backend: backend.all_reduce(np.ones(3)))


def test_refused_arguments_and_mismatches_leave_the_world_usable():
    def body(backend):
        with pytest.raises(TypeError):
            backend.all_reduce([1, 2])
        if backend.rank == 0:
            with pytest.raises(ValueError, match="C-contiguous"):
                backend.all_reduce(np.ones((4, 4))[:, 1:3])
        with pytest.raises(CommunicationError):
            backend.all_reduce(np.ones(3 + backend.rank))
        with pytest.raises(ValueError, match="rows"):
            backend.all_gather(np.ones(2), out=np.ones(3))
        return float(backend.all_reduce(np.ones(1))[0])

    assert run_in_threads(3, body) == [3.0] * 3


def test_a_world_of_one_goes_on(strike):
    def body(backend):
        strike(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            backend.all_reduce(np.ones(1))
        alone = backend.split(0)
        strike(AlarmError())
        with pytest.raises(AlarmError):
            alone.barrier()
        return float(alone.all_reduce(np.ones(1))[0]), float(backend.all_reduce(np.ones(1))[0])

    assert run_in_threads(1, body) == [(1.0, 1.0)]


def test_a_struck_call_that_had_no_number_can_be_made_again(monkeypatch):
    def body(backend):
        if backend.rank == 1:
            record = backend.status.record

            def struck(*_):
                backend.status.record = record
                raise KeyboardInterrupt

            backend.status.record = struck
            with pytest.raises(KeyboardInterrupt):
                backend.barrier()
        return float(backend.all_reduce(np.ones(1))[0])

    assert run_in_threads(2, body) == [2.0] * 2
