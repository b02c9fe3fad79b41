"""Preemption: delivery of SIGUSR1, and the reaction of a run."""

import atexit
import os
import signal

import pytest

from mpishard.callbacks.preemption import Preemption
from mpishard.communication.contract import status
from mpishard.communication.contract.status import records_in
from mpishard.communication.failure import watchdog
from mpishard.communication.failure.watchdog import PreemptionNotice, is_free
from mpishard.communication.threads.backend import InMemoryCommunicationBackend


@pytest.fixture(autouse=True)
def no_handler(monkeypatch):
    """Run the test without a handler of SIGUSR1 and without a job's folder."""
    monkeypatch.delenv("MPISHARD_JOB_FOLDER", raising=False)
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def notice(monkeypatch):
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


def test_a_notice_is_kept_until_a_run_obeys_it(notice, capsys):
    notice.listen()
    assert is_free(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    with InMemoryCommunicationBackend(0, 1, "notice") as world:
        with Preemption(world) as run:
            assert run.is_asked()
        with Preemption(world) as run:  # the script goes on after the first run
            assert not run.is_asked()
    notice.report_if_ignored()
    assert capsys.readouterr().err == ""


def test_a_notice_during_the_last_step_of_a_run_is_kept(notice):
    notice.listen()
    with InMemoryCommunicationBackend(0, 1, "notice") as world, Preemption(world) as run:
        assert not run.is_asked()
        signal.raise_signal(signal.SIGUSR1)
        assert not notice.is_given
    assert notice.is_given


@pytest.mark.parametrize("theirs", [signal.SIG_IGN, lambda *_: None])
def test_a_handler_of_the_user_is_not_replaced(notice, theirs):
    signal.signal(signal.SIGUSR1, theirs)
    notice.listen()
    assert signal.getsignal(signal.SIGUSR1) is theirs
    signal.raise_signal(signal.SIGUSR1)
    assert not notice.is_given


@pytest.mark.usefixtures("folder")
def test_a_notice_before_the_import_is_delivered(notice):
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1,))  # as `mpishard run` starts it
    signal.raise_signal(signal.SIGUSR1)
    notice.listen()
    assert notice.is_given


def test_one_rank_reports_a_notice_that_no_run_obeyed(notice, folder, capsys):
    notice.report_if_ignored()
    assert capsys.readouterr().err == ""
    for rank in (PreemptionNotice(), PreemptionNotice()):
        rank._process, rank.is_given = os.getpid(), True
        rank.report_if_ignored()
    assert capsys.readouterr().err.count("was preempted by SIGUSR1, and nothing obeyed it") == 1


def test_a_run_that_would_save_is_marked_in_the_status_page(notice, folder):
    with InMemoryCommunicationBackend(0, 1, "notice") as world, Preemption(world):
        (record,) = records_in(folder)
        assert (record.pid, record.is_saving) == (os.getpid(), True)
    (record,) = records_in(folder)
    assert not record.is_saving


def test_the_signal_ends_a_forked_process(notice, monkeypatch):
    notice.listen()
    monkeypatch.setattr(notice, "_process", os.getpid() + 1)
    sent = []
    monkeypatch.setattr(watchdog.os, "kill", lambda pid, number: sent.append((pid, number)))
    signal.raise_signal(signal.SIGUSR1)
    assert sent == [(os.getpid(), signal.SIGUSR1)]
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    assert not notice.is_given
