"""Thread-ranks that still run after a failure, threads that are no ranks, and Ctrl-C."""

import _thread
import threading

import numpy as np
import pytest

from mpishard import run_in_threads
from mpishard.communication.threads import run as threads
from mpishard.errors import PeerError


def test_a_rank_that_still_runs_is_named_and_raises_later(monkeypatch):
    monkeypatch.setattr(threads, "_GRACE_SECONDS", 0.1)
    go, errors = threading.Event(), []
    done = threading.Event()

    def body(backend):
        backend.barrier()
        if backend.rank == 1:
            raise ValueError("boom")
        if backend.rank == 2:
            assert go.wait(20)
            try:
                backend.barrier()
            except PeerError as error:
                errors.append(error.rank)
            done.set()
        backend.barrier()

    with pytest.raises(ValueError, match="boom") as caught:
        run_in_threads(3, body)
    assert caught.value.__notes__[0] == "raised on rank 1 of 3"
    assert "rank 2 still runs, at " in caught.value.__notes__[1]
    assert len(caught.value.__notes__) == 2
    go.set()
    assert done.wait(20)
    assert errors == [1]


@pytest.mark.parametrize("waits_in", ["collective", "receive"])
def test_an_exception_in_another_thread_ends_the_ranks(monkeypatch, waits_in):
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    errors = []

    def body(backend):
        if backend.rank == 1:
            threading.Thread(target=np.ones(3).reshape, args=(2,), name="helper").start()
            try:
                backend.receive(0, 1)
            except PeerError as error:
                errors.append(error)
                raise
        try:
            if waits_in == "collective":
                backend.barrier()
            else:
                backend.receive(1, 1)
        except PeerError as error:
            errors.append(error)
            raise

    with pytest.raises(ValueError, match="cannot reshape") as caught:
        run_in_threads(3, body)
    assert caught.value.__notes__ == ["raised in thread 'helper', which is no rank"]
    assert [error.rank for error in errors] == [-1, -1, -1]
    for error in errors:
        assert "thread 'helper', which is no rank, failed with ValueError" in str(error)
    assert threading.excepthook is threading.__excepthook__


def test_an_exception_hook_of_the_user_is_called_too(monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    theirs = threading.excepthook

    def body(backend):
        thread = threading.Thread(target=np.ones(3).reshape, args=(2,))
        thread.start()
        thread.join()
        # A world that begins and ends meanwhile takes nothing away.
        assert run_in_threads(1, lambda inner: inner.rank) == [0]

    with pytest.raises(ValueError, match="cannot reshape"):
        run_in_threads(1, body)
    assert seen == [ValueError]
    assert threading.excepthook is theirs


def test_ctrl_c_reaches_all_ranks_and_names_those_that_still_run(monkeypatch):
    monkeypatch.setattr(threads, "_INTERRUPT_SECONDS", 0.1)
    go = threading.Event()
    ends = [None] * 3

    def body(backend):
        backend.barrier()
        if backend.rank == 0:
            _thread.interrupt_main()
        if backend.rank == 2:
            assert go.wait(20)
        try:
            backend.barrier()
        except PeerError as error:
            ends[backend.rank] = str(error)
            raise

    with pytest.raises(KeyboardInterrupt) as caught:
        run_in_threads(3, body)
    go.set()
    assert len(caught.value.__notes__) == 1
    assert caught.value.__notes__[0].startswith("rank 2 still runs, at ")
    for text in ends[:2]:
        assert "KeyboardInterrupt" in text


def test_the_earlier_hook_works_after_worlds_end_in_any_order(monkeypatch):
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    ranks = threads._ThreadRanks(1, 1.0, survives=False)
    first, second = (threads._failures_of_other_threads(ranks) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    args = threading.ExceptHookArgs((ValueError, ValueError("late"), None, None))
    threading.excepthook(args)
    assert errors == [args]
    assert ranks.failures == []
