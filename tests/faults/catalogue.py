"""The catalogue of faults on one rank of a job, and of their required reports.

A fault is a function of a backend and of the rank that misbehaves, ``culprit``; the other ranks do
what they would have done. Its expectations are words: ``{culprit}`` and ``{ranks}`` in them are
the misbehaving rank and the size of the world.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

import mpishard

LONG = np.ones(5000)
FOREVER = 120.0


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    ``errors`` are the names of the exceptions that the other ranks raise in memory, and ``own`` of
    those that the culprit does; ``memory`` is what their messages hold; both empty where threads
    cannot fail so. ``code`` is the exit code of an MPI job, and ``mpi`` what its report holds.
    """

    name: str
    body: Callable[..., object]
    errors: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    memory: tuple[str, ...] = ()
    code: int = 1
    mpi: tuple[str, ...] = ()
    needs_run: bool = False  # mpiexec alone does not see who is gone
    stalls: bool = False  # is ended by the time limit
    before_init: bool = False  # the body makes the backend itself
    signal: int = 0  # sent to the launcher once all ranks wait
    ends_well: bool = False
    others_end: bool = False  # they need nothing of the culprit any more
    variables: dict[str, str] = field(default_factory=dict)

    def in_memory(self) -> bool:
        return bool(self.errors or self.own)


FAULTS: dict[str, Fault] = {}
PEER = ("PeerError",)
MISMATCH = ("CollectiveMismatchError",)
ENDED = ("rank {culprit} of {ranks}", "the job ends")


@dataclass
class _Row:
    options: dict[str, object] = field(default_factory=dict)

    def __call__(self, body: Callable[..., object]) -> Callable[..., object]:
        FAULTS[body.__name__] = Fault(body.__name__, body, **self.options)  # type: ignore[arg-type]
        return body


def fault(**options: object) -> _Row:
    return _Row(options)


def raises(words: str = "ValueError: boom", own: str = "ValueError") -> _Row:
    """A fault that every rank reports with the culprit's exception."""
    return fault(
        errors=PEER, own=(own,), memory=("rank {culprit} failed", words), mpi=(*ENDED, words)
    )


def leaves(after: str) -> _Row:
    words = f"rank {{culprit}} left after collective {after}"
    return fault(errors=PEER, memory=(words,), mpi=(words, "the job ends"))


def differs(what: str, *words: str) -> _Row:
    texts = (f"do not match in {what}", "rank {culprit}: collective", "catalogue.py:", *words)
    return fault(errors=MISMATCH, own=MISMATCH, memory=texts, mpi=(*texts, "the job ends"))


def killed(number: int, word: str) -> _Row:
    return fault(code=128 + number, mpi=("rank {culprit}", word), needs_run=True)


def stalls(*words: str, errors: tuple[str, ...] = ("CollectiveTimeoutError", "PeerError")) -> _Row:
    return fault(errors=errors, memory=words, code=124, mpi=(*words, "the job ends"), stalls=True)


# ------------------------------------------------------------------------------------ raises


@raises()
def raise_before_any_collective(backend, culprit):
    if backend.rank == culprit:
        raise ValueError("boom")
    backend.all_reduce(LONG.copy())


@fault(
    errors=PEER,
    own=("ValueError",),
    memory=("rank {culprit} failed", "ValueError: boom"),
    mpi=(
        *ENDED,
        "ValueError: boom",
        "--- last collectives of rank {culprit} ---\n  1: barrier() at",
    ),
)
def raise_after_a_collective(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        raise ValueError("boom")
    backend.all_reduce(LONG.copy())


@raises()
def raise_while_others_wait_in_a_group(backend, culprit):
    group = backend.split(0, key=-backend.rank)
    if backend.rank == culprit:
        raise ValueError("boom")
    group.all_gather(LONG)


@raises()
def raise_while_others_receive(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        raise ValueError("boom")
    backend.receive(culprit, 3)


@raises()
def raise_between_issue_and_wait(backend, culprit):
    work = backend.all_reduce_async(LONG.copy())
    if backend.rank == culprit:
        raise ValueError("boom")
    work.wait()
    backend.barrier()


@raises()
def raise_in_a_with_block(backend, culprit):
    with backend:
        if backend.rank == culprit:
            raise ValueError("boom")
        backend.barrier()


@raises(own="PeerError")
def abort_from_a_thread(backend, culprit):
    def fail():
        backend.abort(ValueError("boom"))

    if backend.rank == culprit:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    backend.barrier()


@fault(mpi=(*ENDED, "ValueError: boom"))
def raise_in_a_thread(backend, culprit):
    def fail():
        raise ValueError("boom")

    if backend.rank == culprit:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        time.sleep(FOREVER)
    backend.barrier()


@raises(own="PeerError")
def abort_by_hand(backend, culprit):
    if backend.rank == culprit:
        backend.abort(ValueError("boom"))
    backend.barrier()


@raises("MemoryError", "MemoryError")
def memory_error(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        raise MemoryError("no room")
    backend.all_reduce(LONG.copy())


@raises("RecursionError", "RecursionError")
def recursion_error(backend, culprit):
    def deeper():
        return deeper()

    backend.barrier()
    if backend.rank == culprit:
        deeper()
    backend.all_reduce(LONG.copy())


@fault(
    errors=PEER,
    own=("KeyboardInterrupt",),
    memory=("rank {culprit} failed",),
    code=130,
    mpi=("rank {culprit} of {ranks} was interrupted",),
)
def keyboard_interrupt(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        raise KeyboardInterrupt
    backend.all_reduce(LONG.copy())


def _step_with(backend, culprit, *, backward):
    class Breaks(mpishard.nn.Linear):  # here, because most faults need no layers: a rank loads less
        """A layer that fails in its second forward or backward pass on one rank."""

        passes = 0

        def _pass(self, is_backward):
            self.passes += is_backward == backward
            if backend.rank == culprit and self.passes == 2:
                boom()

        def forward(self, p, x, context):
            self._pass(is_backward=False)
            return super().forward(p, x, context)

        def backward_weight(self, pending, g):
            self._pass(is_backward=True)
            return super().backward_weight(pending, g)

    plain = mpishard.nn.Model(
        mpishard.nn.Sequential(*(Breaks(8, 8) for _ in range(backend.world_size))),
        mpishard.nn.MSE(),
        input_shape=(8,),
        seed=1,
    )
    model = mpishard.HybridShardedModel(
        plain,
        mpishard.ShardingConfiguration(backend),
        backend.world_size,
        1,
        micro_batch_count=4,
        schedule="1f1b",
    )
    for _ in range(3):
        model.train(np.ones((8, 8)), np.ones((8, 8)))


@raises()
def raise_in_a_forward_pass_of_a_pipeline(backend, culprit):
    _step_with(backend, culprit, backward=False)


@raises()
def raise_in_a_backward_pass_of_a_pipeline(backend, culprit):
    _step_with(backend, culprit, backward=True)


def _trained(backend, strategy="fsdp"):
    return mpishard.as_distributed(mpishard.nn.MLP([6, 8, 2], seed=0), backend, strategy)


X, Y = np.ones((4, 6)), np.ones((4, 2))
NAN = "the loss of ranks [{culprit}] is not finite"


@fault(errors=("NonFiniteLossError",), own=("NonFiniteLossError",), memory=(NAN,), mpi=(NAN,))
def nan_loss(backend, culprit):
    model = _trained(backend)
    model.train(X, Y)
    model.train(X * (np.nan if backend.rank == culprit else 1.0), Y)


@raises("ValueError")
def wrong_shape_of_one_ranks_batch(backend, culprit):
    model = _trained(backend)
    model.train(X, Y)
    model.train(X[:, :3] if backend.rank == culprit else X, Y)


def _with_gradients_under_way(backend, happens):
    """Make six steps with delayed gradients; call ``happens`` with three gradients under way."""
    config = mpishard.ShardingConfiguration(backend)
    optimizer = mpishard.AsyncSGDOptimizer(mpishard.optimizers.SGD(0.01), config, 3)
    model = mpishard.DDPModel(mpishard.nn.MLP([6, 8, 2], seed=0), config)
    for number in range(6):
        if number == 5:
            happens()
        optimizer.step(model, X, Y)


@raises()
def raise_with_gradients_under_way(backend, culprit):
    _with_gradients_under_way(backend, lambda: backend.rank == culprit and boom())


@raises("OSError: [Errno 28]", "OSError")
def own_files_fail(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        raise OSError(28, "No space left on device")
    backend.gather(LONG)


@fault(ends_well=True, code=0, mpi=("Exception ignored",))
def exception_in_a_destructor(backend, culprit):
    class Clumsy:
        def __del__(self):
            raise ValueError("boom")

    if backend.rank == culprit:
        Clumsy()
    backend.barrier()


def boom():
    raise ValueError("boom")


@raises()
def survivors_swallow_every_exception(backend, culprit):
    """A loop that catches every exception must end, and so must the job."""
    last = None
    for number in range(50):
        try:
            backend.all_reduce(LONG.copy() if backend.rank != culprit or number < 3 else boom())
        except Exception as error:
            if backend.rank == culprit:
                raise
            last = error
    raise last


# ------------------------------------------------------------------------------------- leaves


@leaves("1")
def leaves_at_its_end(backend, culprit):
    backend.barrier()
    if backend.rank != culprit:
        backend.all_reduce(LONG.copy())


@fault(mpi=("rank {culprit} left after collective 1, while", "the job ends"))
def leaves_by_exit_0(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        sys.exit(0)
    for _ in range(3):
        backend.barrier()


@fault(mpi=("rank {culprit} left after collective 1, while", "the job ends"))
def leaves_by_exit_3(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        sys.exit(3)
    backend.all_reduce(LONG.copy())


@leaves("1")
def leaves_by_shutdown(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        backend.shutdown()
        backend.shutdown()
    else:
        backend.all_reduce(LONG.copy())


@fault(errors=PEER, memory=("rank {culprit} left",), mpi=("rank {culprit} left", "the job ends"))
def leaves_a_receiver(backend, culprit):
    backend.barrier()
    if backend.rank != culprit:
        backend.receive(culprit, 3, tag=2)


@fault(errors=PEER, memory=("rank {culprit}",), mpi=("rank {culprit}", "the job ends"))
def leaves_a_group(backend, culprit):
    """The culprit has different numbers in the group and in the world."""
    group = backend.split(0, key=-backend.rank)
    group.barrier()
    if backend.rank != culprit:
        group.all_reduce(LONG.copy())


@fault(errors=PEER, memory=("rank {culprit} left",), mpi=("rank {culprit} left", "the job ends"))
def one_iteration_less(backend, culprit):
    for _ in range(20 - (backend.rank == culprit)):
        backend.all_reduce(np.ones(3))


@leaves("100")
def leaves_with_headers_open(backend, culprit):
    """It issues more collectives than its ring has slots, waits for none, and leaves."""
    works = [backend.all_reduce_async(np.array([number])) for number in range(100)]
    if backend.rank == culprit:
        return
    for number, work in enumerate(works):
        assert work.wait()[0] == number * backend.world_size
    backend.all_reduce(np.array([1]))


@leaves("1")
def leaves_without_header_checks(backend, culprit):
    backend.check_collectives = False
    backend.barrier()
    if backend.rank != culprit:
        backend.all_reduce(LONG.copy())


# --------------------------------------------------------------------------------- mismatches


@differs("kind or order", "all_reduce", "barrier")
def another_collective(backend, culprit):
    backend.barrier()
    backend.barrier() if backend.rank == culprit else backend.all_reduce(LONG.copy())


@differs("operation", "MAX", "SUM")
def another_operation(backend, culprit):
    operation = mpishard.ReductionOperation
    backend.all_reduce(np.ones(3), operation.MAX if backend.rank == culprit else operation.SUM)


@differs("dtype", "float32", "float64")
def another_dtype(backend, culprit):
    backend.all_gather(LONG.astype(np.float32 if backend.rank == culprit else np.float64))


@differs("shape", "[5000]", "[4999]")
def another_shape(backend, culprit):
    backend.all_reduce(np.ones(4999 if backend.rank == culprit else 5000))


@differs("counts")
def other_counts(backend, culprit):
    world = backend.world_size
    counts = [2, 0] + [1] * (world - 2) if backend.rank == culprit else [1] * world
    backend.reduce_scatter(np.ones(world), counts=counts)


@differs("root", "root=0", "root=1")
def another_root(backend, culprit):
    backend.broadcast(np.ones(4), root=int(backend.rank == culprit))


@fault(
    errors=MISMATCH,
    own=MISMATCH,
    memory=("predict is collective: rank {culprit} called it",),
    mpi=("predict is collective: rank {culprit} called it", "the job ends"),
    variables={"MPISHARD_ARENA": "off"},
)
def predict_on_one_rank(backend, culprit):
    model = _trained(backend)
    model.train(X, Y)
    if backend.rank == culprit:
        model.predict(X)
    model.train(X, Y)


@fault(
    own=PEER,
    memory=("predict", "left after collective"),
    mpi=("predict", "left after collective", "the job ends"),
    variables={"MPISHARD_ARENA": "off"},
    others_end=True,
)
def predict_on_one_rank_at_the_end(backend, culprit):
    model = _trained(backend)
    model.train(X, Y)
    if backend.rank == culprit:
        model.predict(X)


# ------------------------------------------------------------------------------------- stalls


@stalls("rank {culprit}", "all_reduce(SUM, float64[5000])", "catalogue.py:")
def sleeps(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        time.sleep(FOREVER if backend._rank_is_process else 1.5)
    backend.all_reduce(LONG.copy())


@stalls("rank {culprit}", "barrier()", "catalogue.py:")
def computes_for_ever(backend, culprit):
    backend.barrier()
    end = time.monotonic() + (FOREVER if backend._rank_is_process else 1.5)
    while backend.rank == culprit and time.monotonic() < end:
        np.ones(1000).sum()
    backend.barrier()


@stalls("message with tag 4")
def waits_for_a_message_that_nobody_sends(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        backend.receive((culprit + 1) % backend.world_size, 3, tag=4)
    backend.barrier()


@stalls("tag 1")
def all_receive_from_each_other(backend, culprit):
    backend.receive((backend.rank + 1) % backend.world_size, 3, tag=1)


@stalls("rank {culprit}", "barrier()", "all_reduce(")
def groups_in_another_order(backend, culprit):
    first, second = backend.split(0), backend.split(0)
    if backend.rank == culprit:
        second.barrier()
    first.all_reduce(LONG.copy())
    second.barrier()


@fault(
    code=124,
    mpi=("ank {culprit} is stopped (SIGSTOP", "collective ", "kill -CONT", "the job ends"),
    stalls=True,
)
def is_stopped(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        os.kill(os.getpid(), signal.SIGSTOP)
    backend.all_reduce(LONG.copy())


@fault(code=124, mpi=("rank {culprit}", "the job ends"), stalls=True)
def is_stuck_in_mpi_of_its_own(backend, culprit):
    from mpi4py import MPI

    backend.barrier()
    if backend.rank == culprit:
        MPI.COMM_WORLD.Barrier()
    backend.all_reduce(LONG.copy())


@fault(code=124, mpi=("has waited", "the job ends"), stalls=True, before_init=True)
def init_on_all_but_one(rank, culprit):
    if rank == culprit:
        time.sleep(FOREVER)
    mpishard.init().barrier()


# ---------------------------------------------------------------------------- killed, signals


def _end(number):
    os.kill(os.getpid(), number)


@killed(9, "SIGKILL")
def killed_at_rest(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        _end(signal.SIGKILL)
    backend.barrier()


@killed(9, "SIGKILL")
def killed_while_it_waits(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        threading.Timer(0.3, _end, [signal.SIGKILL]).start()
    else:
        time.sleep(1)
    backend.all_reduce(LONG.copy())


@killed(9, "SIGKILL")
def killed_in_a_large_message(backend, culprit):
    backend.barrier()
    data = np.ones(30_000_000, np.float32)
    if backend.rank == culprit:
        threading.Timer(0.02, _end, [signal.SIGKILL]).start()
    for _ in range(100):
        backend.all_reduce(data)


@killed(9, "SIGKILL")
def killed_in_a_step(backend, culprit):
    model = _trained(backend)
    for number in range(10):
        if backend.rank == culprit and number == 5:
            _end(signal.SIGKILL)
        model.train(X, Y)


@killed(9, "SIGKILL")
def killed_with_gradients_under_way(backend, culprit):
    _with_gradients_under_way(backend, lambda: backend.rank == culprit and _end(signal.SIGKILL))


@killed(11, "SIGSEGV")
def segmentation_fault(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(0)
    backend.barrier()


@fault(code=1, mpi=("rank {culprit}",), needs_run=True)
def vanishes_with_code_0(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        os._exit(0)
    backend.barrier()


@fault(code=7, mpi=("rank {culprit}", "7"), needs_run=True)
def vanishes_with_code_7(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        os._exit(7)
    backend.barrier()


@fault(code=143, mpi=("rank {culprit} of {ranks}", "SIGTERM"))
def is_sent_sigterm(backend, culprit):
    backend.barrier()
    if backend.rank == culprit:
        _end(signal.SIGTERM)
        time.sleep(FOREVER)
    backend.barrier()


@fault(code=130, mpi=("interrupted",), signal=signal.SIGINT)
def ctrl_c(backend, culprit):
    backend.barrier()
    backend.print("ready")
    if backend.rank == culprit:
        time.sleep(FOREVER)
    backend.barrier()


@fault(code=143, mpi=("SIGTERM",), signal=signal.SIGTERM)
def launcher_is_sent_sigterm(backend, culprit):
    backend.barrier()
    backend.print("ready")
    if backend.rank == culprit:
        time.sleep(FOREVER)
    backend.barrier()


@fault(code=1, mpi=("rank {culprit}", "ValueError: boom"), before_init=True)
def raise_before_init(rank, culprit):
    if rank == culprit:
        raise ValueError("boom")
    mpishard.init().barrier()


@fault(code=124, mpi=("has waited", "the job ends"), stalls=True, before_init=True)
def exit_before_init(rank, culprit):
    if rank == culprit:
        sys.exit(0)
    mpishard.init().barrier()


@fault(code=137, mpi=("rank {culprit}", "SIGKILL"), needs_run=True, before_init=True)
def killed_in_init(rank, culprit):
    if rank == culprit:
        threading.Timer(0.1, _end, [signal.SIGKILL]).start()
    backend = mpishard.init()
    if rank == culprit:
        time.sleep(FOREVER)
    backend.barrier()
