"""Messages in flight: copies, errors of the waiting ranks, unreceived messages."""

import sys
import time
from contextlib import suppress

import numpy as np
import pytest

from mpishard import run_in_threads
from mpishard.communication import MPICommunicationBackend
from mpishard.errors import CollectiveTimeoutError, CommunicationError, PeerError
from mpishard.testing.worlds import in_worlds

LONG = 300_000  # elements: MPI asks the receiver before it sends so many


@in_worlds(2, 3, 4)
def test_bytes_are_counted_when_a_message_is_issued(backend):
    right, left = (backend.rank + 1) % backend.world_size, (backend.rank - 1) % backend.world_size
    backend.traffic.reset()
    coming = backend.receive_async(left, 100, dtype=np.float32)
    going = backend.send_async(np.ones((10, 10), np.float32), right)
    assert (backend.traffic.calls["send"], backend.traffic.bytes_sent["send"]) == (1, 400)
    assert coming.wait().shape == (10, 10)
    going.wait()
    assert backend.traffic.total_bytes == 400


@pytest.mark.parametrize("size", [2, LONG])
@in_worlds(2, 3, 4)
def test_collectives_and_messages_do_not_wait_for_each_other(backend, size):
    right, left = (backend.rank + 1) % backend.world_size, (backend.rank - 1) % backend.world_size
    for _ in range(2):
        coming = backend.receive_async(left, size, dtype=np.float64)
        group = backend.split(0)  # waits for all collectives that were issued before
        shared = backend.allocate_shared(4, np.float64)
        assert shared is not None
        pending = backend.all_reduce_async(np.ones(3000))
        going = backend.send_async(np.full(size, float(backend.rank)), right)
        assert coming.wait()[-1] == left
        assert pending.wait()[0] == backend.world_size
        going.wait()
        group.shutdown()


@in_worlds(2)
def test_the_sender_may_change_its_array_after_wait(backend):
    if backend.rank == 0:
        mine = np.zeros(LONG)
        backend.send_async(mine, 1).wait()
        mine[...] = 1.0
        backend.barrier()
    else:
        time.sleep(0.01)
        coming = backend.receive_async(0, LONG, dtype=np.float64)
        got = coming.wait()
        backend.barrier()
        assert not got.any()


def test_in_memory_a_send_is_copied_once_by_its_receiver():
    def body(backend):
        if backend.rank == 1:
            backend.barrier()
            return backend.receive(0, 2).tolist()
        mine = np.zeros(2)
        going = backend.send_async(mine, 1)
        mine[...] = 7.0  # against the rules: shows that nobody has copied it yet
        assert not going.done
        backend.barrier()
        return going.wait()

    assert run_in_threads(2, body)[1] == [7.0, 7.0]


def waiting_in(call):
    """Return a function of ``ends``, the end of rank 0, with the errors of two ranks."""

    def outcome(ends, timeout=10.0):
        raised = [None, None]

        def body(backend):
            try:
                if backend.rank == 0:
                    backend.barrier()
                    return ends()
                work = call(backend)
                backend.barrier()
                return work.wait()
            except BaseException as error:
                raised[backend.rank] = error
                raise

        started = time.monotonic()
        with pytest.raises(BaseException):  # noqa: B017, PT011 - `raised` is looked at
            run_in_threads(2, body, timeout=timeout)
        assert time.monotonic() - started < 5
        return raised[1]

    return outcome


CALLS = {
    "receive": lambda b: b.receive_async(0, 3, 5, dtype=float),
    "send": lambda b: b.send_async(np.ones(3), 0, 5),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wait_for_a_rank_that_leaves_or_fails_raises(name):
    outcome = waiting_in(CALLS[name])
    words = {
        "receive": "waits for a message with tag 5 from rank 0",
        "send": "waits for rank 0 to take a message with tag 5",
    }[name]
    error = outcome(lambda: None)
    assert isinstance(error, PeerError)
    assert "rank 0 left after collective 1, while rank 1 " + words in str(error)

    def fail():
        raise ZeroDivisionError("boom")

    error = outcome(fail)
    assert isinstance(error, PeerError)
    assert error.rank == 0
    assert "boom" in str(error)
    error = outcome(lambda: time.sleep(0.5), timeout=0.1)
    assert isinstance(error, CollectiveTimeoutError)
    assert "rank 1 waited 0.1 s " + words.removeprefix("waits ") in str(error)


def test_a_receive_can_wait_again_after_a_timeout():
    def body(backend):
        if backend.rank == 1:
            time.sleep(0.3)
            backend.send(np.arange(3), 0)
            return None
        coming = backend.receive_async(1, 3, dtype=int)
        with pytest.raises(CollectiveTimeoutError):
            backend.receive(1, 3)  # stands behind it, and gives its place up
        while not coming.done:
            backend.progress()
        return coming.wait().tolist()

    assert run_in_threads(2, body, timeout=0.1)[0] == [0, 1, 2]


class InterruptionError(Exception):
    """The exception of a signal handler of the script."""


def is_interrupted(number, call):
    """Make ``call``, interrupted at the n-th point of a signal handler; False if it ends first.

    Only points in the contract count: the beginnings of its functions, and the ends of calls of C.
    """
    reached = 0

    def profile(frame, event, _):
        nonlocal reached
        is_inside = "communication/contract" in frame.f_code.co_filename
        if is_inside and event in ("call", "c_return"):
            reached += 1
            if reached == number:
                raise InterruptionError

    before = sys.getprofile()
    sys.setprofile(profile)
    with suppress(InterruptionError):
        try:
            call()
        finally:
            sys.setprofile(before)
    return reached >= number


def test_a_receive_that_a_signal_handler_ends_takes_no_message():
    most = 60

    def body(backend):
        for number in range(1, most + 1):
            issued = []

            def issue(number=number, issued=issued):
                issued.append(backend.receive_async(1, 1, number, dtype=float))

            if backend.rank == 0 and not is_interrupted(number, issue):
                issued.pop().cancel()
                assert number > 20
            else:
                assert number < most or backend.rank == 1
            backend.barrier()
            if backend.rank == 1:
                backend.send(np.ones(1), 0, number)
            else:
                assert backend.receive(1, 1, number) == 1.0

    run_in_threads(2, body, timeout=0.5)


@pytest.mark.mpi
def test_a_message_that_is_too_long_for_its_memory_is_refused(backend):
    right, left = (backend.rank + 1) % backend.world_size, (backend.rank - 1) % backend.world_size
    if backend.world_size == 1:
        pytest.skip("needs two ranks")
    for sent, expected in ((LONG, LONG - 1), (LONG, 1000), (LONG, 3), (3, LONG), (1000, LONG)):
        coming = backend.receive_async(left, expected, 1, dtype=np.float64)
        backend.barrier()
        going = backend.send_async(np.ones(sent), right, 1)
        with pytest.raises(CommunicationError, match=f"has {sent} elements"):
            coming.wait()
        assert backend.receive(left, sent, 1).size == sent
        going.wait()
        # Those that come after it are as they were sent.
        for number in range(3):
            after = backend.receive_async(left, LONG, 1, dtype=np.float64)
            going = backend.send_async(np.full(LONG, float(number)), right, 1)
            assert (after.wait() == number).all()
            going.wait()


@pytest.mark.mpi
def test_an_unreceived_message_does_not_reach_a_later_world(backend):
    """MPI reuses the identity of a communicator, which must have no message when it is freed."""
    right, left = (backend.rank + 1) % backend.world_size, (backend.rank - 1) % backend.world_size
    if backend.world_size == 1:
        pytest.skip("needs two ranks")
    for number in range(3):
        with MPICommunicationBackend(backend._comm) as own:
            posted = own._group
            for size in (3, LONG):
                for tag in (0, 1):
                    own.send_async(np.full(size, -1.0), right, tag)
                own.receive_async(left, size, 2, dtype=np.float64)  # in vain
            own.barrier()
        assert not posted.in_flight, "the world was not freed"
        with MPICommunicationBackend(backend._comm) as own:
            for tag in (0, 1, 2):
                own.send(np.full(2, float(number)), right, tag)
                assert own.receive(left, 2, tag).tolist() == [number, number]
