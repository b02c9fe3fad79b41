"""Edge cases of threads in one process: shared arrays, Ctrl-C, log messages."""

import logging
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from mpishard.communication import run_in_threads
from mpishard.errors import PeerError
from mpishard.testing.worlds import in_worlds


@in_worlds(1, 2, 3, 4, 6, 7)
def test_all_gather_of_an_array_anywhere_in_out(backend):
    for place in range(backend.world_size):
        buffer = np.zeros(2 * backend.world_size)
        mine = buffer[2 * place : 2 * place + 2]
        mine[:] = backend.rank + 1
        gathered = backend.all_gather(mine, out=buffer)
        assert gathered.tolist() == [r + 1 for r in range(backend.world_size) for _ in range(2)]


@in_worlds(2, 3)
def test_read_only_results_are_refused_before_anything_is_sent(backend):
    frozen = np.ones(3)
    frozen.flags.writeable = False
    for attempt in (
        lambda: backend.all_reduce(frozen),
        lambda: backend.all_reduce(np.ones(3), out=frozen),
        lambda: backend.reduce_scatter(np.ones(3 * backend.world_size), out=frozen),
    ):
        with pytest.raises(ValueError, match=r"read-only|writ"):
            attempt()
    assert backend.all_reduce(np.ones(3)).tolist() == [backend.world_size] * 3


@pytest.fixture
def ctrl_c():
    """Let Ctrl-C interrupt, as at a terminal; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("returned", [[], [0], [0, 1]])
def test_ctrl_c_reaches_the_remaining_ranks(returned, ctrl_c):
    ended = threading.Event()
    messages = []

    def body(backend):
        if backend.rank in returned:
            return
        if backend.rank == 2:
            backend.receive(3, 1)  # it has started
            while len(backend._world.left) < len(returned):
                time.sleep(0.001)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            ended.wait(10)
            return
        if backend.rank == 3:
            backend.send(np.ones(1), 2)
        try:
            backend.receive(2, 1)
        except PeerError as error:
            messages.append(str(error))
            ended.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        run_in_threads(4, body, timeout=20)
    assert ended.wait(5)
    assert "KeyboardInterrupt" in messages[0]


def test_a_rank_that_left_and_then_fails():
    def body(backend):
        backend.shutdown()
        raise KeyError("too late")

    with pytest.raises(KeyError, match="too late"):
        run_in_threads(2, body)


def test_an_interrupt_after_rank_0_has_returned_is_not_masked(monkeypatch):
    original = threading.Thread.join

    def join(thread, timeout=None):
        original(thread, timeout)
        if thread.name == "rank-0":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "join", join)
    with pytest.raises(KeyboardInterrupt):
        run_in_threads(2, lambda backend: time.sleep(0.05))  # it is joined while it runs


def test_a_world_without_ranks_is_refused():
    with pytest.raises(ValueError, match="world_size must be 1 or more, got 0"):
        run_in_threads(0, lambda backend: None)


def test_log_level_of_the_environment(monkeypatch, caplog):
    logger = logging.getLogger("mpishard")
    before = logger.level
    try:
        monkeypatch.setenv("MPISHARD_LOG", "info")
        run_in_threads(1, lambda backend: logger.info("logged"))
        assert "logged" in caplog.text
        monkeypatch.setenv("MPISHARD_LOG", "verbose")
        with pytest.raises(ValueError, match="MPISHARD_LOG must be debug, info"):
            run_in_threads(1, lambda backend: None)
    finally:
        logger.setLevel(before)
    monkeypatch.delenv("MPISHARD_LOG")
    monkeypatch.setenv("MPISHARD_TIMEOUT", "abc")
    with pytest.raises(ValueError, match="MPISHARD_TIMEOUT must be a number of seconds"):
        run_in_threads(1, lambda backend: None)


_SUSPENDED = """
import time
import mpishard as ms

def body(backend):
    backend.barrier()
    if backend.rank == 1:
        print("waits", flush=True)
        for _ in range(5):
            time.sleep(0.1)
    backend.barrier()

ms.run_in_threads(2, body, timeout=1.5)
print("done")
"""


@pytest.mark.spawned
@pytest.mark.timeout(60)
def test_time_in_which_the_process_is_suspended_does_not_count():
    command = [sys.executable, "-c", _SUSPENDED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(3)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "done\n"
    assert process.returncode == 0
