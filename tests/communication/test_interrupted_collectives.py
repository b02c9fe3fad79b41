"""A collective that an exception interrupts on one rank, and that the script catches."""

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

from mpishard import MPICommunicationBackend, as_distributed, nn, optimizers, run_in_threads
from mpishard.communication.contract.backoff import Backoff
from mpishard.communication.contract.reduction import TreeReducer
from mpishard.communication.contract.work import Waitable, Work
from mpishard.communication.failure.watchdog import Wait, watchdog
from mpishard.communication.mpi.messages import MessageChannel
from mpishard.communication.mpi.node_memory import RowChannel
from mpishard.communication.threads.world import Rendezvous
from mpishard.errors import CommunicationError, PeerError

FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))

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
    """The exception of a signal handler of the script."""


@pytest.fixture
def interrupt(monkeypatch):
    """Return a function that makes the n-th test of a rendezvous on this thread raise an error."""
    victim = threading.local()
    test = Rendezvous.test

    def interrupted(rendezvous):
        victim.tests = getattr(victim, "tests", 0) - 1
        if victim.tests == 0:
            raise victim.error
        return test(rendezvous)

    def arm(error, number=1):
        victim.tests, victim.error = number, error

    monkeypatch.setattr(Rendezvous, "test", interrupted)
    return arm


def after(backend, call, limit=1):
    """Return the exception of ``call``, which must come within ``limit`` seconds."""

    def repeatedly():
        for _ in range(2):  # the first may be complete on this rank
            call(backend)

    started = time.monotonic()
    with pytest.raises(CommunicationError) as caught:
        repeatedly()
    assert time.monotonic() - started < limit
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
def test_the_present_or_next_call_raises_on_every_rank(interrupt, name, error, number):
    """Rank 2 is interrupted while it waits for rank 1; rank 0 also waits for rank 1."""
    is_struck = threading.Event()
    what = f"{type(error).__name__}: {error}".removesuffix(": ")

    def body(backend):
        backend.barrier()
        if backend.rank == 2:
            interrupt(error, number)
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
def test_a_rank_that_is_interrupted_after_all_have_arrived(interrupt, name):
    """The others may complete the collective; then they raise in the next one."""

    def body(backend):
        if backend.rank == 0:
            interrupt(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                COLLECTIVES[name](backend)
        ended = after(backend, COLLECTIVES[name])
        assert f"rank 0 was interrupted by KeyboardInterrupt, in collective 1, {name}(" in str(
            ended
        )

    run_in_threads(2, body)


def test_ranks_in_other_waits_raise_and_may_shrink(monkeypatch):
    """They wait in the root world, in another group, and for a message."""

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


def test_pending_works_of_the_interrupted_rank_fail(interrupt):
    is_issued = threading.Event()

    def body(backend):
        mine = np.ones(3)
        first = backend.all_reduce_async(mine)
        if backend.rank == 0:
            assert is_issued.wait(10)
            interrupt(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                backend.barrier()
            error = after(backend, lambda _: first.wait())
            assert "rank 0 was interrupted by KeyboardInterrupt" in str(error)
            assert mine.tolist() == [1, 1, 1]
        else:
            is_issued.set()
            assert after(backend, lambda _: backend.barrier()).rank == 0

    run_in_threads(2, body)


def test_a_repeated_training_step_raises_the_error_of_the_world(interrupt):
    def body(backend):
        model = as_distributed(nn.MLP([3, 1], seed=0), backend, "ddp")
        optimizer = as_distributed(optimizers.SGD(learning_rate=1e-3), backend, "ddp")
        x = np.ones((4, 3))
        if backend.rank == 1:
            interrupt(MemoryError("4 GiB"))
            with pytest.raises(MemoryError):
                optimizer.step(model, x, x[:, :1])
        for _ in range(2):
            ended = after(backend, lambda _: optimizer.step(model, x, x[:, :1]))
            assert "rank 1 was interrupted by MemoryError: 4 GiB" in str(ended)

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


def test_a_world_of_one_goes_on(interrupt):
    def body(backend):
        interrupt(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            backend.all_reduce(np.ones(1))
        alone = backend.split(0)
        interrupt(AlarmError())
        with pytest.raises(AlarmError):
            alone.barrier()
        return float(alone.all_reduce(np.ones(1))[0]), float(backend.all_reduce(np.ones(1))[0])

    assert run_in_threads(1, body) == [(1.0, 1.0)]


def test_a_call_interrupted_before_its_number_can_be_repeated(monkeypatch):
    def body(backend):
        if backend.rank == 1:
            record = backend.status.record

            def interrupted(*_):
                backend.status.record = record
                raise KeyboardInterrupt

            backend.status.record = interrupted
            with pytest.raises(KeyboardInterrupt):
                backend.barrier()
        return float(backend.all_reduce(np.ones(1))[0])

    assert run_in_threads(2, body) == [2.0] * 2


# ------------------------------------------------------------------------------------- under MPI

ROUND = 1024
"""Bytes of a round in these worlds, so that larger arrays take several."""
LARGE = 5 * ROUND // 8

IN_ROUNDS = {
    "all_reduce": lambda b: b.all_reduce(np.ones(LARGE)),
    "reduce_scatter": lambda b: b.reduce_scatter(np.ones(LARGE)),
    "all_gather": lambda b: b.all_gather(np.ones(LARGE)),
    "broadcast": lambda b: b.broadcast(np.ones(LARGE) if b.rank == 0 else None),
    "scatter": lambda b: b.scatter(np.ones(LARGE) if b.rank == 0 else None),
    "gather": lambda b: b.gather(np.ones(LARGE)),
    "all_to_all": lambda b: b.all_to_all([np.ones(LARGE)] * b.world_size),
}


@pytest.fixture(params=["rows", "messages", "two nodes"])
def make_world(request, backend, monkeypatch):
    """Return a function that makes a world of these ranks with short rounds."""
    if backend.world_size == 1:
        pytest.skip("a world of one goes on")
    if not FULL and "Open MPI" in backend._mpi.Get_library_version():
        pytest.skip("its notices take long on a busy machine: run with --full")
    monkeypatch.setenv("MPISHARD_ARENA", "off" if request.param == "messages" else "auto")
    monkeypatch.setenv("MPISHARD_VIRTUAL_NODES", "2" if request.param == "two nodes" else "1")
    monkeypatch.setattr(RowChannel, "ROW_BYTES", ROUND)
    monkeypatch.setattr(MessageChannel, "ROUND_BYTES", ROUND)

    def make():
        own = MPICommunicationBackend(backend._comm)
        own.initialize()
        assert isinstance(own._group.channel, RowChannel) == (request.param == "rows")
        return own

    return make


class InterruptedWait(Waitable):
    """An event whose test raises the exception."""

    def __init__(self, error):
        self.error = error

    def test(self):
        raise self.error


def counted(steps, waits):
    """Yield the same steps, and append each to ``waits``."""
    try:
        while True:
            waits.append(next(steps))
            yield waits[-1]
    except StopIteration as stop:
        return stop.value


def interrupted_steps(steps, number, error, *, inside):
    """Yield the same steps; one raises after the n-th wait, or in the wait after that."""
    for _ in range(number):
        yield next(steps)
    if not inside:
        next(steps)
        yield InterruptedWait(error)
    elif number:
        steps.throw(error)
    raise error


@pytest.fixture
def change_steps(monkeypatch):
    """Return a function that changes the steps of the next collective of this rank."""
    original = Work.__init__

    def arm(change):
        def changed(work, driver, steps, *arguments):
            monkeypatch.setattr(Work, "__init__", original)
            original(work, driver, change(steps), *arguments)

        monkeypatch.setattr(Work, "__init__", changed)

    return arm


def assert_ended(own, odd, what, name, call, world=None):
    """Check that the next call of every rank raises the right error; return its seconds.

    The next call is in ``world``, by default in ``own``; those after it are in ``own``.
    """
    started = time.monotonic()
    ended = after(world or own, call, BUSY_SECONDS)
    seconds = time.monotonic() - started
    if own.rank == odd:
        assert type(ended) is CommunicationError
        assert f"rank {odd} was cut off by {what} in collective " in str(ended)
        assert f", {name}(" in str(ended)
    else:
        assert type(ended) is PeerError
        assert ended.rank == odd
        assert f"rank {odd} was cut off in a collective by an exception" in str(ended)
    for again in (call, COLLECTIVES["barrier"], COLLECTIVES["all_reduce"]):
        with pytest.raises(CommunicationError) as caught:
            again(own)
        assert str(caught.value) == str(ended)
    return seconds


BUSY_SECONDS = 5
"""The most that it may take on a machine that is busy with other jobs; a second is the promise."""

STRUCK = {**COLLECTIVES, **{f"{name}, in rounds": call for name, call in IN_ROUNDS.items()}}
SAMPLE = ("barrier", "allocate_shared", "all_reduce, in rounds", "all_gather, in rounds")

ERRORS = [KeyboardInterrupt(), MemoryError("4 GiB"), AlarmError("10 s")]


@pytest.mark.mpi
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "waiting"])
@pytest.mark.parametrize("case", STRUCK if FULL else SAMPLE)
def test_the_world_ends_on_every_process(backend, make_world, change_steps, case, inside):
    """The interruption comes before the header, during waits, at fences and between rounds."""
    name, call = case.removesuffix(", in rounds"), STRUCK[case]
    own, odd = make_world(), backend.world_size - 1
    waits = []
    change_steps(lambda steps: counted(steps, waits))
    call(own)
    own.shutdown()
    count = int(backend.all_gather(np.array([len(waits)]))[odd])
    assert count > (0 if call is COLLECTIVES[name] else 1)
    last = count if inside else count - 1
    points = sorted({0, min(1, last), min(2, last), last} if FULL else {min(1, last), last})
    took = []
    for number, error in zip(points, ERRORS * 2, strict=False):
        own = make_world()
        own.barrier()
        if own.rank == odd:
            change_steps(
                lambda steps, number=number, error=error: interrupted_steps(
                    steps, number, error, inside=inside
                )
            )
            with pytest.raises(type(error)):
                call(own)
        took.append(assert_ended(own, odd, type(error).__name__, name, call))
        own.shutdown()
    assert min(took) < 1, took
    assert backend.all_reduce(np.ones(1))[0] == backend.world_size


class InterruptedComm:
    """A communicator; a signal comes as ``MPI_Comm_split`` is called, or as it has returned."""

    def __init__(self, comm, when):
        self._comm, self._when = comm, when

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Split(self, *arguments):  # noqa: N802 - as mpi4py calls it
        if self._when == "before":
            signal.raise_signal(signal.SIGALRM)
            sum(range(100))  # handlers run between two steps
        made = self._comm.Split(*arguments)
        if self._when == "after":
            signal.raise_signal(signal.SIGALRM)
        return made


@pytest.mark.mpi
@pytest.mark.parametrize("of_group", [False, True], ids=["of the world", "of a group"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_split_leaves_no_rank_blocked(backend, make_world, when, of_group):
    def ring(*_):
        raise AlarmError

    own, odd = make_world(), backend.world_size - 1
    world = own.split(0) if of_group else own
    world.barrier()
    before = signal.signal(signal.SIGALRM, ring)
    try:
        if own.rank == odd:
            world._group.comm = InterruptedComm(world._group.comm, when)
            with pytest.raises(AlarmError):
                world.split(0)
    finally:
        signal.signal(signal.SIGALRM, before)
    seconds = assert_ended(own, odd, "AlarmError", "split", COLLECTIVES["split"], world=world)
    assert min(backend.all_gather(np.array([seconds]))) < 1
    own.shutdown()


@pytest.mark.mpi
def test_a_repeated_training_step_notifies_the_others(backend, request, make_world, change_steps):
    """The repeated step waits again for the reduction that the exception interrupted."""
    own, odd = make_world(), backend.world_size - 1
    model = as_distributed(nn.MLP([8, 40, 1], seed=0), own, "ddp")
    optimizer = as_distributed(optimizers.SGD(learning_rate=1e-3), own, "ddp")
    x = np.ones((4, 8))

    def step(_):
        optimizer.step(model, x, x[:, :1])

    step(own)
    own.barrier()
    if own.rank == odd:
        change_steps(lambda steps: interrupted_steps(steps, 1, AlarmError("10 s"), inside=False))
        with pytest.raises(AlarmError):
            step(own)
    names = {"rows": "reduce_into", "messages": "all_reduce", "two nodes": "reduce_in_place"}
    name = names[request.node.callspec.params["make_world"]]
    assert_ended(own, odd, "AlarmError", name, step)
    own.shutdown()


@pytest.mark.mpi
def test_an_interruption_of_another_collective_is_raised_at_once(backend, make_world, change_steps):
    """The others issue the second collective after the first, which this rank never completes."""
    is_armed = threading.Event()

    class Late(Waitable):
        def test(self):
            # As a handler of a signal, which no thread that moves messages runs.
            if is_armed.is_set() and threading.current_thread() is threading.main_thread():
                raise AlarmError
            return False

    def late_steps(steps):
        next(steps)
        yield Late()

    own, odd = make_world(), backend.world_size - 1
    own.barrier()
    if own.rank == odd:
        change_steps(late_steps)
        cut_off = own.all_reduce_async(np.ones(LARGE))
        later = own.barrier_async()
        is_armed.set()
        with pytest.raises(AlarmError):
            later.wait()
        for work in (later, cut_off):
            with pytest.raises(CommunicationError, match=f"rank {odd} was cut off by AlarmError"):
                work.wait()
    else:
        error = after(own, lambda b: (b.all_reduce(np.ones(LARGE)), b.barrier()), BUSY_SECONDS)
        assert f"rank {odd} was cut off in a collective" in str(error)
    own.shutdown()


@pytest.mark.mpi
def test_the_next_message_of_an_interrupted_rank_notifies_the_others(
    backend, make_world, change_steps
):
    own, odd = make_world(), backend.world_size - 1
    if own.rank == odd:
        change_steps(lambda steps: interrupted_steps(steps, 0, AlarmError("10 s"), inside=False))
        with pytest.raises(AlarmError):
            own.barrier()
        for call in (lambda: own.receive(0, 1), lambda: own.send(np.ones(1), 0)):
            with pytest.raises(CommunicationError, match=f"rank {odd} was cut off by AlarmError"):
                call()
        backend.barrier()
    else:
        error = after(own, COLLECTIVES["barrier"], BUSY_SECONDS)
        assert f"rank {odd} was cut off in a collective" in str(error)
        backend.barrier()
    own.shutdown()


@pytest.mark.mpi
@pytest.mark.parametrize("end", ["__enter__", "__exit__"])
def test_an_exception_at_either_end_of_a_wait_leaves_no_wait_behind(backend, monkeypatch, end):
    """After an interrupted receive the world goes on, so the watchdog must not end the job."""
    if backend.world_size == 1:
        pytest.skip("needs two ranks")
    enter = Wait.__enter__

    def interrupted(wait, *_):
        if end == "__enter__":
            enter(wait)
        raise AlarmError

    if backend.rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(Wait, end, interrupted)
            patch.setattr(Backoff, "pause", interrupted)  # no message comes to end the wait
            with pytest.raises(AlarmError):
                backend.receive(1, 1)
        assert watchdog.waits == []
    backend.barrier()
    if backend.rank == 1:
        backend.send(np.full(1, 5.0), 0)
    elif backend.rank == 0:
        assert backend.receive(1, 1)[0] == 5.0


@pytest.mark.mpi
def test_an_interrupted_rank_that_leaves_notifies_the_others(make_world, change_steps):
    own = make_world()
    if own.rank == 0:
        change_steps(lambda steps: interrupted_steps(steps, 0, KeyboardInterrupt(), inside=False))
        with pytest.raises(KeyboardInterrupt):
            own.all_reduce(np.ones(6))
    else:
        assert "rank 0 was cut off" in str(after(own, COLLECTIVES["all_reduce"], BUSY_SECONDS))
    own.shutdown()


@pytest.mark.mpi
@pytest.mark.skipif(not FULL, reason="strikes at random moments: run with --full")
@pytest.mark.parametrize("name", ["barrier", "allocate_shared", "split", *IN_ROUNDS])
def test_an_alarm_of_the_script_at_any_moment(backend, make_world, name):
    """The alarm comes at any moment; between two calls it has no effect on the world."""
    call = {**COLLECTIVES, **IN_ROUNDS}[name]

    is_over = threading.Event()

    def ring(*_):
        if not is_over.is_set():
            raise AlarmError

    def end_of(own, seconds):
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, seconds)
                while True:
                    call(own)
            except AlarmError:
                seconds = 0.001
            except CommunicationError as error:
                is_over.set()
                return error

    gc.disable()  # Python drops an exception that strikes a callback of the collector
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for number, seconds in enumerate((0.0003, 0.001, 0.003, 0.01)):
            own, odd = make_world(), number % backend.world_size
            own.barrier()
            is_over.clear()
            error = end_of(own, seconds if own.rank == odd else 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert f"rank {odd} was cut off " in str(error)
            own.shutdown()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
