"""Programs of processes that hang or receive signals: ``python signal_scenarios.py NAME``.

A rank that prints "ready" also prints its process id, and is then in the tested state.
"""

import atexit
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import mpishard
from mpishard.base import settings
from mpishard.communication.mpi import library

LONG = 60
RANK = settings.launched_rank()


def say_ready():
    sys.stdout.write(f"ready {os.getpid()}\n")  # in one piece, whatever the other rank prints
    sys.stdout.flush()


def say_ready_when_stuck():
    """Print "ready" from another thread when this one is in `stuck_in_mpi`."""
    me = threading.get_ident()

    def watch():
        while True:
            frame = sys._current_frames()[me]
            if frame.f_code is stuck_in_mpi.__code__ and "MPI" in frame.f_locals:
                break
            time.sleep(0.005)
        say_ready()

    threading.Thread(target=watch, daemon=True).start()


def stuck_in_mpi():
    """Wait in one call of C until another rank sends to this one."""
    from mpi4py import MPI

    MPI.COMM_WORLD.recv(tag=1)


def init_on_one_rank():
    library.START_SECONDS = 0.0
    if RANK == 1:
        time.sleep(LONG)
    mpishard.init()


def init_on_one_rank_where_mpi_runs():
    from mpi4py import MPI

    assert MPI.Is_initialized()
    if RANK == 1:
        time.sleep(LONG)
    mpishard.init()


def raises_before_init():
    if RANK == 1:
        raise ValueError("boom before init")
    if sys.argv[2] == "inits":
        mpishard.init()
    time.sleep(LONG)


def raises_in_a_thread_before_init():
    if RANK == 1:
        thread = threading.Thread(target=np.ones(3).reshape, args=(2,))
        thread.start()
        time.sleep(LONG)
    mpishard.init()


def raises_after_shutdown():
    with mpishard.init() as backend:
        rank = backend.rank
    if rank == 1:
        raise ValueError("boom after shutdown")
    time.sleep(1)
    print("saved", flush=True)


def aborts_from_a_thread():
    backend = mpishard.init()
    backend.barrier()
    if RANK == 1:
        error = RuntimeError("a reason of its own")
        threading.Thread(target=backend.abort, args=(error,)).start()
        stuck_in_mpi()
    backend.barrier()


def sleeps():
    backend = mpishard.init()
    backend.barrier()
    say_ready()
    if RANK == 0:
        time.sleep(LONG)
    backend.barrier()


def goes_on_when_asked():
    """Rank 1 hangs until the file appears. A pool that ends its own processes ends no rank."""
    from mpi4py import MPI

    backend = mpishard.init()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]
    backend.barrier()
    if RANK == 1:
        say_ready_when_stuck()
        stuck_in_mpi()
    else:
        say_ready()
        while not Path(sys.argv[2]).exists():
            time.sleep(0.02)
        MPI.COMM_WORLD.send(None, 1, tag=1)
    backend.barrier()
    print("went on", flush=True)


def settings_differ():
    """Each argument is for rank 1 alone: a variable and its value."""
    if RANK == 1:
        os.environ.update(argument.split("=") for argument in sys.argv[2:])
    try:
        mpishard.init()
    except mpishard.errors.CollectiveMismatchError as error:
        print(f"rank {RANK}: {error}", flush=True)


def waits_until_asked():
    """Rank 1 waits in a collective until the file appears."""
    backend = mpishard.init()
    backend.barrier()
    say_ready()
    while RANK == 0 and not Path(sys.argv[2]).exists():
        time.sleep(0.02)
    backend.barrier()
    print("went on", flush=True)


def is_struck_in_init():
    """A signal handler raises on rank 1 while the ranks exchange where they run."""
    from mpishard.communication.mpi import job

    def ring(*_):
        raise TimeoutError("10 s")

    def struck(*arguments, original=job.number_nodes):
        signal.raise_signal(signal.SIGALRM)
        return original(*arguments)

    signal.signal(signal.SIGALRM, ring)
    if RANK == 1:
        job.number_nodes = struck
        try:
            mpishard.init()
        except TimeoutError as error:
            print(f"caught: {error}")
    backend = mpishard.init()
    assert backend.all_reduce(np.ones(1))[0] == 2
    print("went on")


def enters_again():
    backend = mpishard.init()
    backend.shutdown()
    backend.initialize()
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    if RANK == 1:
        time.sleep(LONG)
    backend.barrier()


def starts_a_helper():
    """Start a process with the rank's variables and its connection to the launcher; it fails."""
    backend = mpishard.init()
    if RANK == 0:
        fails = [sys.executable, "-c", "import mpishard; raise ValueError('a helper')"]
        print("helper", os.waitstatus_to_exitcode(os.system(shlex.join(fails))), flush=True)
    backend.barrier()
    print("went on", flush=True)


def finishes_later_on_rank_1():
    backend = mpishard.init()
    backend.barrier()
    if RANK == 1:
        time.sleep(1.5)


def does_not_end():
    """Keep the process of rank 1 from ending: ``where`` it hangs, after or before it leaves."""
    where, leaves = sys.argv[2:]
    backend = mpishard.init()
    backend.barrier()
    if leaves == "shutdown":
        backend.shutdown()
    if RANK == 1:
        if where == "script":
            time.sleep(LONG)
        elif where == "thread":
            threading.Thread(target=time.sleep, args=(LONG,)).start()
        elif where == "atexit":
            atexit.register(time.sleep, LONG)
        elif where == "finalization":
            kept.append(NeverDeleted())


class NeverDeleted:
    """An object whose finalizer waits for ever, as for a lock of a thread that has ended."""

    def __del__(self):
        time.sleep(LONG)


kept = []


def works_on_after_mpi():
    """The script has initialised MPI, and mpi4py finalizes it after Python has ended."""
    from mpi4py import MPI

    assert MPI.Is_initialized()
    mpishard.init().shutdown()
    if RANK == 1:
        time.sleep(LONG)


def forks():
    """Fork three children of rank 0: one ends, one raises, and one tries to be a rank."""
    backend = mpishard.init()
    half = backend.split(0)
    backend.barrier()
    if RANK == 0:
        pending = backend.receive_async(1, 3, dtype=np.float64)
        for child in ("ends", "raises", "calls"):
            pid = os.fork()
            if pid == 0:
                if child == "raises":
                    raise ValueError("a child's own")
                if child == "calls":
                    calls = [backend.barrier, half.barrier, backend.initialize, pending.wait]
                    for call in calls:
                        try:
                            call()
                        except mpishard.errors.CommunicationError as error:
                            print("refused:", error, flush=True)
                sys.exit(3)
            print(child, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        backend.send(np.ones(3), 1)
        pending.wait()
    else:
        backend.send(backend.receive(0, 3), 0)
    backend.barrier()
    print("went on", flush=True)


def all_are_stuck():
    backend = mpishard.init()
    backend.barrier()
    say_ready_when_stuck()
    stuck_in_mpi()


def loss_of_nan():
    backend = mpishard.init()
    model = mpishard.as_distributed(mpishard.nn.MLP([4, 2], seed=0), backend)
    x = np.full((2, 4), np.nan if RANK == 1 else 1.0)
    try:
        model.train(x, np.ones((2, 2)))
    except mpishard.errors.NonFiniteLossError:
        print(f"raised on rank {RANK}", flush=True)
        backend.barrier()  # the other has said so, too, when the job ends
        raise


if __name__ == "__main__":
    globals()[sys.argv[1]]()
