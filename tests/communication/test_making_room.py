"""An order to make room: who hears it, and what becomes of it."""

import atexit
import os
import signal

import pytest

from mpishard.callbacks.preemption import Preemption
from mpishard.communication.contract import status
from mpishard.communication.contract.status import records_in
from mpishard.communication.failure import watchdog as making_room
from mpishard.communication.failure.watchdog import PreemptionNotice, is_free
from mpishard.communication.threads.backend import InMemoryCommunicationBackend


@pytest.fixture(autouse=True)
def no_handler(monkeypatch):
    """As in a process that nobody has told anything."""
    monkeypatch.delenv("MPISHARD_JOB_FOLDER", raising=False)
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def order(monkeypatch):
    monkeypatch.setattr(
        "mpishard.callbacks.preemption.preemption_notice", made := PreemptionNotice()
    )
    yield made
    atexit.unregister(made.report_if_ignored)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MPISHARD_JOB_FOLDER", str(tmp_path))
    monkeypatch.setattr(status, "_own", [])
    return tmp_path


def test_an_order_is_kept_until_a_run_heeds_it(order, capsys):
    order.listen()
    assert is_free(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    with InMemoryCommunicationBackend(0, 1, "order") as world:
        with Preemption(world) as run:
            assert run.is_asked()
        with Preemption(world) as run:  # of a script that goes on all the same
            assert not run.is_asked()
    order.report_if_ignored()
    assert capsys.readouterr().err == ""


def test_an_order_that_comes_too_late_for_a_run_is_kept(order):
    order.listen()
    with InMemoryCommunicationBackend(0, 1, "order") as world, Preemption(world) as run:
        assert not run.is_asked()
        signal.raise_signal(signal.SIGUSR1)
        assert not order.is_given
    assert order.is_given


@pytest.mark.parametrize("theirs", [signal.SIG_IGN, lambda *_: None])
def test_another_s_handler_stays(order, theirs):
    signal.signal(signal.SIGUSR1, theirs)
    order.listen()
    assert signal.getsignal(signal.SIGUSR1) is theirs
    signal.raise_signal(signal.SIGUSR1)
    assert not order.is_given


@pytest.mark.usefixtures("folder")
def test_an_order_to_the_job_before_the_rank_listens(order):
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1,))  # as `mpishard run` starts it
    signal.raise_signal(signal.SIGUSR1)
    order.listen()
    assert order.is_given


def test_one_rank_says_that_nobody_heeded_it(order, folder, capsys):
    order.report_if_ignored()
    assert capsys.readouterr().err == ""
    for rank in (PreemptionNotice(), PreemptionNotice()):
        rank._process, rank.is_given = os.getpid(), True
        rank.report_if_ignored()
    assert capsys.readouterr().err.count("was preempted by SIGUSR1, and nothing obeyed it") == 1


def test_a_run_that_saves_says_so_while_it_does(order, folder):
    with InMemoryCommunicationBackend(0, 1, "order") as world, Preemption(world):
        (record,) = records_in(folder)
        assert (record.pid, record.is_saving) == (os.getpid(), True)
    (record,) = records_in(folder)
    assert not record.is_saving


def test_a_forked_process_is_ended_as_ever(order, monkeypatch):
    order.listen()
    monkeypatch.setattr(order, "_process", os.getpid() + 1)
    sent = []
    monkeypatch.setattr(making_room.os, "kill", lambda pid, number: sent.append((pid, number)))
    signal.raise_signal(signal.SIGUSR1)
    assert sent == [(os.getpid(), signal.SIGUSR1)]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert not order.is_given
