"""What the watchdog does at which moment, told the time; the jobs are in tests/spawned."""

import io
import os
import signal
import sys
import threading

import pytest

from mpishard.communication.contract.backoff import RunningClock
from mpishard.communication.failure import abort as ending_module
from mpishard.communication.failure.abort import (
    COLLECTIVE_LIMIT,
    EXIT_LIMIT,
    JobEnd,
    TimeLimit,
)
from mpishard.communication.failure.report import short_traceback
from mpishard.communication.failure.watchdog import SignalPipe, Watchdog


class Heard(JobEnd):
    """Writes down how the job would have ended."""

    def __init__(self):
        super().__init__(0, 2)
        self.ends = []
        self.warnings = []
        self.dead = None

    def end(self, report, code, *, is_own=True):
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
    """A watchdog whose thread does not run: the test says what time it is."""
    made = Watchdog()
    monkeypatch.setattr(made, "start", lambda: None)
    return made


def test_a_long_wait_is_said_once_and_given_up(dog, limits):
    heard = Heard()
    with dog.wait(lambda: "in collective 7", heard) as wait:
        dog.check(wait.since + 29)
        assert heard.warnings == []
        dog.check(wait.since + 31)
        dog.check(wait.since + 299)
        assert [(w, g) for _, w, g in heard.warnings] == [("in collective 7", 300.0)]
        assert heard.ends == []
        dog.check(wait.since + 301)
    ((code, report),) = heard.ends
    assert code == 124
    assert "rank 0 of 2 has waited 301 s in collective 7; the job ends" in report
    assert report.endswith("\nrank 1 sleeps")


def test_time_in_which_the_process_was_suspended_does_not_count(limits):
    seconds = [1000.0]
    dog = Watchdog(RunningClock(lambda: seconds[0]))
    heard = Heard()

    def tick(passed):
        seconds[0] += passed
        dog.check(dog.clock.now())

    with dog.wait(lambda: "in collective 7", heard):
        tick(0.5)
        tick(3600)
        for _ in range(57):
            tick(0.5)
        assert heard.warnings == heard.ends == []
        for _ in range(539):
            tick(0.5)
        assert len(heard.warnings) == 1
        tick(7200)
        assert heard.ends == []
        tick(1.0)
    assert len(heard.ends) == 1


def test_a_wait_that_begins_just_after_a_suspension_has_its_whole_limit(limits):
    seconds = [1000.0]
    dog = Watchdog(RunningClock(lambda: seconds[0]))
    seconds[0] += 3600  # the main thread goes on before the watchdog does
    with dog.wait(lambda: "here", Heard()) as wait:
        seconds[0] += 0.5
        assert dog.clock.now() - wait.since == 0.5


def test_where_every_gap_is_long_the_limit_comes_all_the_same():
    seconds = [0.0]
    clock = RunningClock(lambda: seconds[0])
    start = clock.now()
    for _ in range(10):
        seconds[0] += 3.0
        clock.now()
    assert clock.now() - start == 5.0


def test_a_wait_that_is_over_counts_no_more(dog, limits):
    heard = Heard()
    with dog.wait(lambda: "here", heard) as wait:
        pass
    dog.check(wait.since + 1000)
    assert heard.warnings == heard.ends == []


def test_what_takes_time_by_itself_may_take_it(dog, limits):
    heard = Heard()
    with dog.wait(lambda: "here", heard, slack=10) as wait:
        dog.check(wait.since + 39)
        assert heard.warnings == []
        dog.check(wait.since + 41)
        dog.check(wait.since + 309)
        assert len(heard.warnings) == 1
        assert heard.ends == []
        dog.check(wait.since + 311)
        assert len(heard.ends) == 1


def test_it_wakes_when_there_may_be_something_to_say(dog, limits):
    heard = Heard()
    with dog.wait(lambda: "here", heard, slack=1) as wait:
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
    heard = Heard()
    with dog.wait(lambda: "for rank 1. Rank 1 sleeps.", heard, limit=EXIT_LIMIT) as wait:
        dog.check(wait.since + 999)
        assert heard.ends == []
        dog.check(wait.since + 1001)
    ((code, report),) = heard.ends
    assert code == 124
    waited = "has finished, and has waited 1001 s for rank 1. Rank 1 sleeps."
    assert report == f"mpishard: rank 0 of 2 {waited} The job ends (MPISHARD_EXIT_TIMEOUT)"


def test_zero_is_never(dog, limits):
    limits.setenv("MPISHARD_WARN_AFTER", "0")
    limits.setenv("MPISHARD_TIMEOUT", "0")
    heard = Heard()
    with dog.wait(lambda: "here", heard) as wait:
        dog.check(wait.since + 1e6)
    assert heard.warnings == heard.ends == []


def test_a_rank_that_is_gone_is_seen_while_this_one_computes(dog, limits):
    heard = Heard()
    dog.guard(heard)
    dog.check(1.0)
    assert heard.ends == []
    heard.dead = 1
    dog.check(2.0)
    ((code, report),) = heard.ends
    assert code == 1
    assert "rank 1 of 2 is gone (killed, or out of memory?), seen by rank 0 while it" in report
    dog.release(heard)
    dog.check(3.0)
    assert len(heard.ends) == 1


def test_a_launcher_that_is_gone_ends_the_rank(limits, monkeypatch):
    dog, heard = Watchdog(), Heard()
    dog.guard(heard)
    try:
        dog.check(1.0)
        assert heard.ends == []
        monkeypatch.setattr(os, "getppid", lambda: 1)
        dog.check(2.0)
    finally:
        monkeypatch.undo()
        dog.release(heard)
    code, report = heard.ends[0]
    assert code == 1
    assert f"process {os.getppid()} of the launcher, which started rank 0 of 2, is gone" in report


def test_sigterm_says_what_the_rank_did(dog, limits, monkeypatch):
    monkeypatch.setattr(ending_module, "_LAUNCHER_SECONDS", 0.0)
    heard = Heard()
    dog.guard(heard)
    with dog.wait(lambda: "in collective 7", heard):
        dog.receive(signal.SIGTERM, 0.0)
    ((code, report),) = heard.ends
    assert code == 143
    did = "while it waited in collective 7"
    assert report == f"mpishard: rank 0 of 2 was sent SIGTERM {did}; the job ends"


def test_ctrl_c_is_left_to_a_main_thread_that_makes_steps(dog, limits):
    heard = Heard()
    dog.guard(heard)
    dog.receive(signal.SIGINT, 10.0)
    dog.check(11.0)
    dog.check(13.0)  # another step than that of `receive`
    dog.check(20.0)
    assert heard.ends == []


def test_ctrl_c_ends_the_job_where_the_main_thread_makes_none(dog, limits):
    heard = Heard()
    dog.guard(heard)

    def from_another_thread():
        dog.receive(signal.SIGINT, 10.0)
        dog.check(11.0)
        assert heard.ends == []
        dog.check(12.1)

    thread = threading.Thread(target=from_another_thread)
    thread.start()
    thread.join()  # where this thread is stuck
    ((code, report),) = heard.ends
    assert code == 130
    assert report.startswith("mpishard: rank 0 of 2 was interrupted while it")


def test_sigquit_prints_and_goes_on(dog, limits, capsys):
    heard = Heard()
    dog.guard(heard)
    with dog.wait(lambda: "in collective 7", heard) as wait:
        dog.receive(signal.SIGQUIT, wait.since + 4)
    shown = capsys.readouterr().err
    assert "rank 0 of 2 was sent SIGQUIT, and goes on\n  waits in collective 7, for 4.0 s" in shown
    assert "  rank 0: its last collectives" in shown
    assert "MainThread 0x" in shown
    assert heard.ends == []


def test_the_thread_looks_hears_and_ends(limits):
    dog, heard = Watchdog(), Heard()
    looked, described = threading.Event(), threading.Event()
    heard.dead_rank = looked.set
    heard.describe = lambda: described.set() or ""
    dog.guard(heard)
    dog.guard(heard)
    try:
        assert looked.wait(20)
        assert "mpishard-watchdog" in {thread.name for thread in threading.enumerate()}
        os.kill(os.getpid(), signal.SIGQUIT)
        assert described.wait(20)
    finally:
        dog.release(heard)
        dog.release(heard)
    assert "mpishard-watchdog" not in {thread.name for thread in threading.enumerate()}
    assert signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# ------------------------------------------------------------------------------------- signals


@pytest.fixture
def pipe():
    made = SignalPipe()
    yield made
    made.restore()


def test_signals_of_ours_are_heard_and_given_back(pipe):
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
def test_a_handler_of_the_user_s_stays_and_alone_is_called(pipe, number, when):
    heard = []
    before = signal.getsignal(number)
    try:
        if when == "after":
            pipe.install()
        signal.signal(number, lambda *_: heard.append("theirs"))
        theirs = signal.getsignal(number)
        pipe.install()
        assert signal.getsignal(number) is theirs
        os.kill(os.getpid(), number)
        assert heard == ["theirs"]
        assert pipe.wait(0) == set()
        pipe.restore()
        assert signal.getsignal(number) is theirs
    finally:
        signal.signal(number, before)


def test_ctrl_c_that_nobody_else_handles_is_heard(pipe):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        pipe.install()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert pipe.wait(20) == {signal.SIGINT}
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_wakeup_descriptor_of_another_s_stays_and_signals_are_heard(pipe, when):
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


def test_on_another_thread_signals_are_left_alone(pipe):
    thread = threading.Thread(target=pipe.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_signals_that_another_thread_could_not_give_back_do_what_they_did(pipe, monkeypatch):
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
    """With which exit codes the job, and then the process, was ended."""
    codes = []

    def leave(code):
        codes.append(("process", code))
        raise ProcessEnded

    monkeypatch.setattr(ending_module, "_one_thread", threading.Lock())
    monkeypatch.setattr(ending_module, "_set_deadline", lambda code: None)
    monkeypatch.setattr(ending_module, "_ignore_further_interrupts", lambda: None)
    monkeypatch.setattr(ending_module, "_OUTPUT_SECONDS", 0.0)
    monkeypatch.setattr(ending_module, "_abort", lambda code: codes.append(("job", code)))
    monkeypatch.setattr(JobEnd, "claim_report", lambda self, code: True)
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
def test_a_broken_stream_holds_up_no_end_and_no_warning(make, ended, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stdout", make())
    monkeypatch.setattr(sys, "stderr", make())
    JobEnd(0, 2).warn(31.0, "in collective 7", TimeLimit("NONE", lambda: 0.0))
    with pytest.raises(ProcessEnded):
        JobEnd(0, 2).fail(ValueError("boom"), "in collective 8")
    monkeypatch.undo()
    assert ended == [("job", 1), ("process", 1)]
    shown = capfd.readouterr().err
    assert "rank 0 of 2 has waited 31 s in collective 7\n" in shown
    assert "rank 0 of 2 failed in collective 8; the job ends\nValueError: boom" in shown


@pytest.mark.parametrize("fails", ["_set_deadline", "_abort"])
def test_the_job_and_the_process_end_whatever_fails_on_the_way(fails, ended, monkeypatch):
    def fail(code):
        raise OSError("too many open files")

    monkeypatch.setattr(ending_module, fails, fail)
    with pytest.raises(ProcessEnded):
        JobEnd(0, 2).interrupt("here")
    assert ended[-1] == ("process", 130)
    assert (("job", 130) in ended) == (fails != "_abort")


@pytest.mark.parametrize("fails", [False, True])
def test_work_on_a_gpu_is_stopped_before_the_job_ends(ended, fails):
    def stop():
        ended.append("stopped")
        if fails:
            raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT")

    ending = JobEnd(0, 2)
    ending.stop = stop
    with pytest.raises(ProcessEnded):
        ending.give_up(300.0, "in collective 7", COLLECTIVE_LIMIT)
    assert ended == ["stopped", ("job", 124), ("process", 124)]


def test_an_exception_without_a_text_is_reported(ended, capfd):
    class NoTextError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    with pytest.raises(ProcessEnded):
        JobEnd(0, 2).fail(NoTextError(), "here")
    assert "NoTextError: (its text cannot be shown: RuntimeError)" in capfd.readouterr().err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names of Linux sockets")
def test_one_process_of_a_launcher_reports(monkeypatch):
    monkeypatch.setattr(ending_module, "_kept", [])
    monkeypatch.setattr(os, "getppid", lambda: 10**9)  # not that of a real job
    assert JobEnd(0, 2).claim_report(1)
    assert not JobEnd(1, 2).claim_report(1)
    for claim in ending_module._kept:
        claim.close()
    assert JobEnd(1, 2).claim_report(1)
    for claim in ending_module._kept:
        claim.close()


def test_a_descriptor_that_is_not_the_launcher_s_is_not_written_to(monkeypatch, tmp_path):
    monkeypatch.setattr(ending_module, "_DEADLINE_SECONDS", 0.0)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    with (tmp_path / "theirs").open("wb+") as file:
        monkeypatch.setenv("PMI_FD", str(file.fileno()))
        ending_module._abort(1)
        file.seek(0)
        assert file.read() == b""


def test_the_launcher_is_told_in_its_words(monkeypatch):
    import socket

    monkeypatch.setattr(ending_module, "_DEADLINE_SECONDS", 0.0)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    launcher, rank = socket.socketpair()
    with launcher, rank:
        monkeypatch.setenv("PMI_FD", str(rank.fileno()))
        ending_module._abort(124)
        assert launcher.recv(100) == b"cmd=abort exitcode=124\n"


# ---------------------------------------------------------------------------------- tracebacks


def failing():
    import numpy as np

    import mpishard

    try:
        mpishard.run_in_threads(1, lambda backend: backend.all_reduce([1]))
    except TypeError as error:
        raise KeyError("theirs") from error
    return np


def test_of_this_package_the_last_frame_is_shown(monkeypatch):
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


def test_the_call_log_tells_a_failure_from_the_report_of_another_that_is_gone(ended, monkeypatch):
    claims = []
    monkeypatch.setattr(JobEnd, "claim_report", lambda self, code: claims.append(code) or True)
    monkeypatch.setattr(ending_module, "_one_thread", threading.Semaphore(2))
    for end in (
        lambda: JobEnd(0, 2).report_dead_rank(1, "while it waited"),
        lambda: JobEnd(0, 2).fail(ValueError("boom"), "in collective 8"),
    ):
        with pytest.raises(ProcessEnded):
            end()
    assert claims == [0, 1]
    assert ended == [("job", 1), ("process", 1)] * 2
