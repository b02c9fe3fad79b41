"""Actions of the watchdog at given times; whole jobs are tested in tests/spawned."""

import io
import os
import signal
import sys
import threading
from types import SimpleNamespace

import pytest

from mpishard.communication.contract import status as status_module
from mpishard.communication.contract.backoff import RunningClock
from mpishard.communication.contract.status import RankState
from mpishard.communication.failure import abort as ending_module
from mpishard.communication.failure.abort import (
    COLLECTIVE_LIMIT,
    EXIT_LIMIT,
    Termination,
    TimeLimit,
)
from mpishard.communication.failure.report import short_traceback
from mpishard.communication.failure.watchdog import SignalPipe, Watchdog


class RecordedEnd(Termination):
    """Writes down how the job would have ended."""

    def __init__(self):
        super().__init__(0, 2)
        self.ends = []
        self.warnings = []
        self.dead = None

    def end(self, report, code, *, is_own=True, calls_mpi=True):
        self.ends.append((code, report))
        self.is_own = is_own

    def warn(self, waited, where, limit):
        self.warnings.append((waited, where, limit.seconds()))

    def dead_rank(self):
        return self.dead

    def describe_stall(self):
        return "\nrank 1 sleeps"

    def describe(self):
        return "  rank 0: its last collectives"


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.setenv("MPISHARD_WARN_AFTER", "30")
    monkeypatch.setenv("MPISHARD_TIMEOUT", "300")
    return monkeypatch


@pytest.fixture
def dog(monkeypatch):
    """Return a watchdog without a thread; the test passes it the time."""
    made = Watchdog()
    monkeypatch.setattr(made, "start", lambda: None)
    return made


def test_a_long_wait_is_warned_of_once_and_then_ends_the_job(dog, limits):
    ending = RecordedEnd()
    with dog.wait(lambda: "in collective 7", ending) as wait:
        dog.check(wait.since + 29)
        assert ending.warnings == []
        dog.check(wait.since + 31)
        dog.check(wait.since + 299)
        assert [(w, g) for _, w, g in ending.warnings] == [("in collective 7", 300.0)]
        assert ending.ends == []
        dog.check(wait.since + 301)
    ((code, report),) = ending.ends
    assert code == 124
    assert "rank 0 of 2 has waited 301 s in collective 7; the job ends" in report
    assert report.endswith("\nrank 1 sleeps")


def test_time_in_which_the_process_was_suspended_does_not_count(limits):
    seconds = [1000.0]
    dog = Watchdog(RunningClock(lambda: seconds[0]))
    ending = RecordedEnd()

    def tick(passed):
        seconds[0] += passed
        dog.check(dog.clock.now())

    with dog.wait(lambda: "in collective 7", ending):
        tick(0.5)
        tick(3600)
        for _ in range(57):
            tick(0.5)
        assert ending.warnings == ending.ends == []
        for _ in range(539):
            tick(0.5)
        assert len(ending.warnings) == 1
        tick(7200)
        assert ending.ends == []
        tick(1.0)
    assert len(ending.ends) == 1


def test_a_wait_that_begins_just_after_a_suspension_has_its_whole_limit(limits):
    seconds = [1000.0]
    dog = Watchdog(RunningClock(lambda: seconds[0]))
    seconds[0] += 3600  # the main thread goes on before the watchdog does
    with dog.wait(lambda: "here", RecordedEnd()) as wait:
        seconds[0] += 0.5
        assert dog.clock.now() - wait.since == 0.5


def test_a_limit_is_reached_even_if_every_gap_is_long():
    seconds = [0.0]
    clock = RunningClock(lambda: seconds[0])
    start = clock.now()
    for _ in range(10):
        seconds[0] += 3.0
        clock.now()
    assert clock.now() - start == 5.0


def test_a_wait_that_is_over_is_not_reported(dog, limits):
    ending = RecordedEnd()
    with dog.wait(lambda: "here", ending) as wait:
        pass
    dog.check(wait.since + 1000)
    assert ending.warnings == ending.ends == []


def test_the_slack_of_a_wait_does_not_count(dog, limits):
    ending = RecordedEnd()
    with dog.wait(lambda: "here", ending, slack=10) as wait:
        dog.check(wait.since + 39)
        assert ending.warnings == []
        dog.check(wait.since + 41)
        dog.check(wait.since + 309)
        assert len(ending.warnings) == 1
        assert ending.ends == []
        dog.check(wait.since + 311)
        assert len(ending.ends) == 1


def test_the_pause_ends_when_a_limit_is_due(dog, limits):
    ending = RecordedEnd()
    with dog.wait(lambda: "here", ending, slack=1) as wait:
        assert dog.pause(wait.since) == 0.5
        assert dog.pause(wait.since + 30.75) == pytest.approx(0.25, abs=1e-6)
        assert dog.pause(wait.since + 31.01) == 0  # between the check and the pause
        dog.check(wait.since + 31.01)
        assert dog.pause(wait.since + 31.01) == dog.pause(wait.since + 40) == 0.5
        assert dog.pause(wait.since + 300.875) == pytest.approx(0.125, abs=1e-6)
        assert dog.pause(wait.since + 301.01) == 0
    assert dog.pause(wait.since + 30.75) == 0.5


def test_a_wait_for_the_others_to_end_has_a_limit_of_its_own(dog, limits):
    limits.setenv("MPISHARD_EXIT_TIMEOUT", "1000")
    ending = RecordedEnd()
    with dog.wait(lambda: "for rank 1. Rank 1 sleeps.", ending, limit=EXIT_LIMIT) as wait:
        dog.check(wait.since + 999)
        assert ending.ends == []
        dog.check(wait.since + 1001)
    ((code, report),) = ending.ends
    assert code == 124
    waited = "has finished, and has waited 1001 s for rank 1. Rank 1 sleeps."
    assert report == f"mpishard: rank 0 of 2 {waited} The job ends (MPISHARD_EXIT_TIMEOUT)"


def test_a_limit_of_zero_is_no_limit(dog, limits):
    limits.setenv("MPISHARD_WARN_AFTER", "0")
    limits.setenv("MPISHARD_TIMEOUT", "0")
    ending = RecordedEnd()
    with dog.wait(lambda: "here", ending) as wait:
        dog.check(wait.since + 1e6)
    assert ending.warnings == ending.ends == []


def test_a_dead_rank_is_reported_during_computation(dog, limits):
    ending = RecordedEnd()
    dog.guard(ending)
    dog.check(1.0)
    assert ending.ends == []
    ending.dead = 1
    dog.check(2.0)
    ((code, report),) = ending.ends
    assert code == 1
    assert "rank 1 of 2 is gone (killed, or out of memory?), seen by rank 0 while it" in report
    dog.release(ending)
    dog.check(3.0)
    assert len(ending.ends) == 1


def test_a_launcher_that_is_gone_ends_the_rank(limits, monkeypatch):
    dog, ending = Watchdog(), RecordedEnd()
    dog.guard(ending)
    try:
        dog.check(1.0)
        assert ending.ends == []
        monkeypatch.setattr(os, "getppid", lambda: 1)
        dog.check(2.0)
    finally:
        monkeypatch.undo()
        dog.release(ending)
    code, report = ending.ends[0]
    assert code == 1
    assert f"process {os.getppid()} of the launcher, which started rank 0 of 2, is gone" in report


def test_sigterm_reports_the_activity_of_the_rank(dog, limits, monkeypatch):
    monkeypatch.setattr(ending_module, "_LAUNCHER_SECONDS", 0.0)
    ending = RecordedEnd()
    dog.guard(ending)
    with dog.wait(lambda: "in collective 7", ending):
        dog.receive(signal.SIGTERM, 0.0)
    ((code, report),) = ending.ends
    assert code == 143
    did = "while it waited in collective 7"
    assert report == f"mpishard: rank 0 of 2 was sent SIGTERM {did}; the job ends"


def test_a_main_thread_that_runs_handles_ctrl_c(dog, limits):
    ending = RecordedEnd()
    dog.guard(ending)
    dog.receive(signal.SIGINT, 10.0)
    dog.check(11.0)
    dog.check(13.0)  # another step than that of `receive`
    dog.check(20.0)
    assert ending.ends == []


def test_ctrl_c_ends_the_job_if_the_main_thread_is_stuck(dog, limits):
    ending = RecordedEnd()
    dog.guard(ending)

    def from_another_thread():
        dog.receive(signal.SIGINT, 10.0)
        dog.check(11.0)
        assert ending.ends == []
        dog.check(12.1)

    thread = threading.Thread(target=from_another_thread)
    thread.start()
    thread.join()  # where this thread is stuck
    ((code, report),) = ending.ends
    assert code == 130
    assert report.startswith("mpishard: rank 0 of 2 was interrupted while it")


def test_sigquit_prints_and_goes_on(dog, limits, capsys):
    ending = RecordedEnd()
    dog.guard(ending)
    with dog.wait(lambda: "in collective 7", ending) as wait:
        dog.receive(signal.SIGQUIT, wait.since + 4)
    shown = capsys.readouterr().err
    assert "rank 0 of 2 was sent SIGQUIT, and goes on\n  waits in collective 7, for 4.0 s" in shown
    assert "  rank 0: its last collectives" in shown
    assert "MainThread 0x" in shown
    assert ending.ends == []


def test_the_thread_checks_receives_signals_and_ends(limits):
    dog, ending = Watchdog(), RecordedEnd()
    checked, described = threading.Event(), threading.Event()
    ending.dead_rank = checked.set
    ending.describe = lambda: described.set() or ""
    dog.guard(ending)
    dog.guard(ending)
    try:
        assert checked.wait(20)
        assert "mpishard-watchdog" in {thread.name for thread in threading.enumerate()}
        os.kill(os.getpid(), signal.SIGQUIT)
        assert described.wait(20)
    finally:
        dog.release(ending)
        dog.release(ending)
    assert "mpishard-watchdog" not in {thread.name for thread in threading.enumerate()}
    assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# ------------------------------------------------------------------------------------- signals


@pytest.fixture
def pipe():
    made = SignalPipe()
    yield made
    made.restore()


def test_signals_are_received_and_handlers_restored(pipe):
    pipe.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert pipe.wait(20) == {signal.SIGTERM}
    assert pipe.wait(0) == set()
    pipe.wake()
    assert pipe.wait(20) == set()
    pipe.restore()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT, signal.SIGINT])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_user_stays_and_is_called_alone(pipe, number, when):
    received = []
    before = signal.getsignal(number)
    try:
        if when == "after":
            pipe.install()
        signal.signal(number, lambda *_: received.append("theirs"))
        theirs = signal.getsignal(number)
        pipe.install()
        assert signal.getsignal(number) is theirs
        os.kill(os.getpid(), number)
        assert received == ["theirs"]
        assert pipe.wait(0) == set()
        pipe.restore()
        assert signal.getsignal(number) is theirs
    finally:
        signal.signal(number, before)


def test_ctrl_c_without_another_handler_is_received(pipe):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pipe.install()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert pipe.wait(20) == {signal.SIGINT}
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_wakeup_descriptor_stays_and_signals_are_received(pipe, when):
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        if when == "before":
            signal.set_wakeup_fd(write)
        pipe.install()
        if when == "after":
            signal.set_wakeup_fd(write)
        os.kill(os.getpid(), signal.SIGTERM)
        assert os.read(read, 10) == bytes([signal.SIGTERM])
        assert pipe.wait(20) == {signal.SIGTERM}
        pipe.restore()
        assert signal.set_wakeup_fd(-1) == write
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)


def test_another_thread_installs_no_handlers(pipe):
    thread = threading.Thread(target=pipe.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_left_by_another_thread_act_as_the_earlier_ones(pipe, monkeypatch):
    pipe.install()
    thread = threading.Thread(target=pipe.restore)
    thread.start()
    thread.join()
    send, sent = os.kill, []
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", lambda *args: sent.append(args))
        send(os.getpid(), signal.SIGTERM)
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# -------------------------------------------------------------------------------------- ending


class ProcessEnded(BaseException):
    """In place of the end of the process of the test."""


@pytest.fixture
def ended(monkeypatch):
    """Return the exit codes with which the job, and then the process, was ended."""
    codes = []

    def leave(code):
        codes.append(("process", code))
        raise ProcessEnded

    monkeypatch.setattr(ending_module, "_one_thread", threading.Lock())
    monkeypatch.setattr(ending_module, "_set_deadline", lambda code: None)
    monkeypatch.setattr(ending_module, "_ignore_further_interrupts", lambda: None)
    monkeypatch.setattr(ending_module, "_OUTPUT_SECONDS", 0.0)
    monkeypatch.setattr(ending_module, "_abort", lambda code, **_: codes.append(("job", code)))
    monkeypatch.setattr(Termination, "claim_report", lambda self, code: True)
    monkeypatch.setattr(os, "_exit", leave)
    return codes


class Broken(io.StringIO):
    def flush(self):
        raise BrokenPipeError


def closed_stream():
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("make", [closed_stream, object, Broken, lambda: None])
def test_a_broken_stream_stops_neither_a_warning_nor_the_end(make, ended, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", make())
    monkeypatch.setattr(sys, "stderr", make())
    Termination(0, 2).warn(31.0, "in collective 7", TimeLimit("NONE", lambda: 0.0))
    with pytest.raises(ProcessEnded):
        Termination(0, 2).fail(ValueError("boom"), "in collective 8")
    monkeypatch.undo()
    assert ended == [("job", 1), ("process", 1)]
    shown = capfd.readouterr().err
    assert "rank 0 of 2 has waited 31 s in collective 7\n" in shown
    assert "rank 0 of 2 failed in collective 8; the job ends\nValueError: boom" in shown


@pytest.mark.parametrize("fails", ["_set_deadline", "_abort"])
def test_the_job_and_the_process_end_whatever_fails_on_the_way(fails, ended, monkeypatch):
    def fail(code, **_):
        raise OSError("too many open files")

    monkeypatch.setattr(ending_module, fails, fail)
    with pytest.raises(ProcessEnded):
        Termination(0, 2).interrupt("here")
    assert ended[-1] == ("process", 130)
    assert (("job", 130) in ended) == (fails != "_abort")


@pytest.mark.parametrize("fails", [False, True])
def test_work_on_a_gpu_is_stopped_before_the_job_ends(ended, fails):
    def stop():
        ended.append("stopped")
        if fails:
            raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT")

    ending = Termination(0, 2)
    ending.stop = stop
    with pytest.raises(ProcessEnded):
        ending.give_up(300.0, "in collective 7", COLLECTIVE_LIMIT)
    assert ended == ["stopped", ("job", 124), ("process", 124)]


def test_an_exception_without_a_text_is_reported(ended, capfd):
    class NoTextError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    with pytest.raises(ProcessEnded):
        Termination(0, 2).fail(NoTextError(), "here")
    assert "NoTextError: (its text cannot be shown: RuntimeError)" in capfd.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of Linux sockets")
def test_one_process_of_a_launcher_claims_the_report(monkeypatch):
    monkeypatch.setattr(ending_module, "_kept", [])
    monkeypatch.setattr(os, "getppid", lambda: 10**9)  # not that of a real job
    assert Termination(0, 2).claim_report(1)
    assert not Termination(1, 2).claim_report(1)
    for claim in ending_module._kept:
        claim.close()
    assert Termination(1, 2).claim_report(1)
    for claim in ending_module._kept:
        claim.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of Linux sockets")
def test_the_page_shows_a_report_while_mpi_starts(monkeypatch, tmp_path):
    """Otherwise `mpishard run` would blame the rank that has reported."""
    monkeypatch.setattr(ending_module, "_kept", kept := [])
    monkeypatch.setattr(status_module, "_own", [])
    monkeypatch.setenv("MPISHARD_JOB_FOLDER", str(tmp_path))
    status_module.own_page().end(RankState.STARTED)
    assert Termination(0, 2).claim_report(124)
    (record,) = status_module.records_in(tmp_path)
    assert (record.state, record.code) == (RankState.REPORTED, 124)
    kept[0].close()


def test_a_descriptor_that_is_not_the_launcher_s_is_not_written_to(monkeypatch, tmp_path):
    monkeypatch.setattr(ending_module, "_DEADLINE_SECONDS", 0.0)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with (tmp_path / "theirs").open("wb+") as file:
        monkeypatch.setenv("PMI_FD", str(file.fileno()))
        ending_module._abort(1)
        file.seek(0)
        assert file.read() == b""


def test_the_launcher_gets_its_own_abort_command(monkeypatch):
    import socket

    monkeypatch.setattr(ending_module, "_DEADLINE_SECONDS", 0.0)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    launcher, rank = socket.socketpair()
    with launcher, rank:
        monkeypatch.setenv("PMI_FD", str(rank.fileno()))
        ending_module._abort(124)
        assert launcher.recv(100) == b"cmd=abort exitcode=124\n"
        # In another thread, also where MPI runs: the main thread may be in MPI.
        running = SimpleNamespace(Is_initialized=lambda: True, Is_finalized=lambda: False)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", running)
        thread = threading.Thread(target=ending_module._abort, args=(1,))
        thread.start()
        thread.join()
        assert launcher.recv(100) == b"cmd=abort exitcode=1\n"


# ---------------------------------------------------------------------------------- tracebacks


def failing():
    import numpy as np

    import mpishard

    try:
        mpishard.run_in_threads(1, lambda backend: backend.all_reduce([1]))
    except TypeError as error:
        raise KeyError("theirs") from error
    return np


def test_a_traceback_has_the_last_frame_of_this_package(monkeypatch):
    monkeypatch.setenv("MPISHARD_LOG", "debug")  # run_in_threads keeps all frames
    with pytest.raises(KeyError) as caught:
        failing()
    monkeypatch.delenv("MPISHARD_LOG")
    text = short_traceback(caught.value)
    assert "in failing" in text
    assert "in <lambda>" in text
    assert "The above exception was the direct cause" in text
    assert text.count("frames inside mpishard\n") == 2
    assert "arrays.py" in text
    assert text.count("threads.py") == 0
    assert "raised on" not in text
    monkeypatch.setenv("MPISHARD_LOG", "debug")
    assert "run.py" in short_traceback(caught.value)


def test_a_status_page_has_the_exit_code_of_a_failure_only(ended, monkeypatch):
    claims = []
    monkeypatch.setattr(Termination, "claim_report", lambda self, code: claims.append(code) or True)
    monkeypatch.setattr(ending_module, "_one_thread", threading.Semaphore(2))
    for end in (
        lambda: Termination(0, 2).report_dead_rank(1, "while it waited"),
        lambda: Termination(0, 2).fail(ValueError("boom"), "in collective 8"),
    ):
        with pytest.raises(ProcessEnded):
            end()
    assert claims == [0, 1]
    assert ended == [("job", 1), ("process", 1)] * 2
