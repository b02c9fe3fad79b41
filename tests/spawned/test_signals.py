"""Jobs that hang outside of Python or receive signals: each ends, or continues.

With the interpreter of an environment that has Open MPI these are tests of Open MPI.
"""

import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from spawned_jobs import MPIEXEC, Job, needs_mpiexec

SCENARIOS = Path(__file__).with_name("signal_scenarios.py")
LIMIT = 30
IS_FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))
REPEATED = (("thread", "end"), ("atexit", "shutdown"), ("finalization", "shutdown"))
"""Ends of a rank that differ from others only in where Python waits."""

pytestmark = [pytest.mark.spawned, needs_mpiexec]


def start(scenario, *, shell="", **variables):
    command = [sys.executable, str(SCENARIOS), *scenario.split()]
    if shell:
        command = ["sh", "-c", shlex.join(command) + shell]
    return Job([MPIEXEC, "-n", "2", *command], **variables)


def run(scenario, **options):
    with start(scenario, **options) as job:
        return job.end(LIMIT)


@pytest.mark.parametrize(
    ("scenario", "words"),
    [("init_on_one_rank", "for MPI to start, which needs all processes of the job"),
     ("init_on_one_rank_where_mpi_runs", "in init() for the other ranks to call it")],
)  # fmt: skip
def test_a_rank_that_waits_inside_mpi_gives_up(scenario, words):
    ended = run(scenario, MPISHARD_TIMEOUT="1", MPISHARD_WARN_AFTER="0.4")
    assert ended.code == 124, ended
    assert f"{words}; the job ends after 1 s (MPISHARD_TIMEOUT)" in ended.err, ended
    assert f"{words}; the job ends (MPISHARD_TIMEOUT)" in ended.err, ended


@pytest.mark.parametrize("others", ["inits", "sleeps"])
def test_an_exception_before_init_ends_the_job(others):
    ended = run(f"raises_before_init {others}")
    assert ended.code == 1, ended
    assert "rank 1 of 2 failed before init() had returned; the job ends" in ended.err, ended
    assert ended.err.count("ValueError: boom before init") == 2, ended  # said, and its traceback


def test_an_exception_in_a_thread_before_init_ends_the_job():
    ended = run("raises_in_a_thread_before_init")
    assert ended.code == 1, ended
    assert "rank 1 of 2 failed before init() had returned; the job ends" in ended.err, ended
    assert "ValueError: cannot reshape" in ended.err, ended


def test_an_exception_after_shutdown_is_reported_by_python_alone():
    ended = run("raises_after_shutdown")
    assert "ValueError: boom after shutdown" in ended.err, ended
    assert "mpishard: rank" not in ended.err, ended


def test_abort_in_another_thread_while_the_main_thread_is_stuck_in_mpi():
    ended = run("aborts_from_a_thread")
    assert ended.code == 1, ended
    assert "rank 1 of 2 failed in or after collective 1, barrier()" in ended.err, ended
    assert "RuntimeError: a reason of its own" in ended.err, ended


def test_sigterm():
    with start("sleeps") as job:
        os.kill(job.ranks()[0], signal.SIGTERM)
        ended = job.end(LIMIT)
    assert ended.code == 143, ended
    assert ended.err.count("was sent SIGTERM") == 1, ended
    assert "Traceback" not in ended.err, ended


def test_sigquit_shows_what_each_rank_does_and_it_goes_on(tmp_path):
    with start(f"goes_on_when_asked {tmp_path / 'go'}") as job:
        for pid in job.ranks():
            os.kill(pid, signal.SIGQUIT)
        job.wait_for("and goes on", 2)
        job.wait_for("1: barrier() at ", 2)
        job.wait_for("in stuck_in_mpi")
        (tmp_path / "go").touch()
        ended = job.end(LIMIT)
    assert ended.code == 0, ended
    assert ended.out.count("went on") == 2, ended
    for rank in range(2):
        assert ended.err.count(f"rank {rank} of 2 was sent SIGQUIT, and goes on") == 1, ended
    assert ended.err.count("1: barrier() at ") == 2, ended
    assert "in stuck_in_mpi" in ended.err, ended  # its stack, though Python makes no step


@pytest.mark.timeout(60)
def test_a_job_that_is_suspended_for_longer_than_the_limit_goes_on(tmp_path):
    with start(f"waits_until_asked {tmp_path / 'go'}", MPISHARD_TIMEOUT="4") as job:
        pids = job.ranks()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(6.0 if number == signal.SIGSTOP else 1.5)
        (tmp_path / "go").touch()
        ended = job.end(LIMIT)
    assert ended.code == 0, ended
    assert ended.out.count("went on") == 2, ended
    assert "MPISHARD_TIMEOUT" not in ended.err, ended


def test_a_world_entered_again_is_watched_again():
    ended = run("enters_again", MPISHARD_TIMEOUT="1")
    assert ended.code == 124, ended
    assert "has waited 1 s in collective 1, barrier()" in ended.err, ended


def test_init_that_was_interrupted_on_one_rank_can_be_called_again():
    ended = run("is_struck_in_init", MPISHARD_TIMEOUT="5")
    assert ended.code == 0, ended
    assert ended.out.count("caught: 10 s") == 1, ended
    assert ended.out.count("went on") == 2, ended


def test_a_failure_of_a_helper_process_does_not_end_the_job():
    ended = run("starts_a_helper")
    assert ended.code == 0, ended
    assert ended.out.count("went on") == 2, ended
    assert "the job ends" not in ended.err, ended
    assert "helper 1" in ended.out, ended


@pytest.mark.timeout(60)
def test_a_finished_rank_reports_once_for_whom_it_waits():
    ended = run("finishes_later_on_rank_1", MPISHARD_WARN_AFTER="0.3", MPISHARD_TIMEOUT="1")
    assert ended.code == 0, ended
    assert ended.err.count("has finished") == 1, ended
    said = (
        r"rank 0 of 2 has finished, and has waited \d s for rank 1\. Rank 1: in no collective since"
    )
    assert re.search(said, ended.err), ended


def test_each_setting_that_differs_between_ranks_is_named_on_all():
    given = "MPISHARD_ARENA=off MPISHARD_TRACE=/tmp/mpishard-no-traces MPISHARD_VIRTUAL_NODES=2"
    ended = run(f"settings_differ {given}", MPISHARD_TIMEOUT="10")
    assert ended.code == 0, ended  # each rank has caught it
    words = (
        "MPISHARD_ARENA is auto on rank 0, off on rank 1; "
        "MPISHARD_TRACE is not set on rank 0, set on rank 1; "
        "MPISHARD_VIRTUAL_NODES is 1 on rank 0, 2 on rank 1. "
    )
    for rank in range(2):
        assert f"rank {rank}: init(): {words}" in ended.out, ended


def test_equal_settings_do_not_differ():
    ended = run("settings_differ MPISHARD_ARENA=AUTO MPISHARD_NUMBA=auto", MPISHARD_TIMEOUT="10")
    assert ended.code == 0, ended
    assert "differ" not in ended.out + ended.err, ended
    assert "init()" not in ended.out, ended


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("where", "leaves"),
    [
        (where, leaves)
        for where in ("script", "thread", "atexit", "finalization")
        for leaves in ("end", "shutdown")
        if IS_FULL or (where, leaves) not in REPEATED
    ],
)
def test_the_wait_for_a_rank_that_does_not_end_is_limited(where, leaves):
    limits = {"MPISHARD_TIMEOUT": "1", "MPISHARD_WARN_AFTER": "1", "MPISHARD_EXIT_TIMEOUT": "2"}
    ended = run(f"does_not_end {where} {leaves}", **limits)
    if where == "finalization":  # of Python, whose threads have ended
        assert ended.code == 1, ended
        assert "in __del__" in ended.err, ended
        return
    assert ended.code == 124, ended
    has_finished = "rank 0 of 2 has finished, and has waited"
    if leaves == "end":
        waits = "for rank 1. Rank 1: in no collective since collective 1, barrier(), at"
    else:
        waits = "in MPI_Finalize, which every rank of the job must call (rank 1 does not); the job"
    for seconds in (1, 2):
        assert f"{has_finished} {seconds} s {waits}" in ended.err, ended
    assert "he job ends after 2 s (MPISHARD_EXIT_TIMEOUT)" in ended.err, ended
    assert ended.err.count("he job ends (MPISHARD_EXIT_TIMEOUT)") == 1, ended


@pytest.mark.timeout(60)
def test_the_wait_for_an_mpi_that_ends_after_python_is_limited():
    ended = run("works_on_after_mpi", MPISHARD_EXIT_TIMEOUT="1")
    assert ended.code not in (0, None), ended


def test_a_forked_child_that_ends_leaves_no_world():
    ended = run("forks", MPISHARD_TIMEOUT="10")
    assert ended.code == 0, ended
    assert ended.out.count("went on") == 2, ended
    assert ended.out.count("refused: a forked process is no rank: this one") == 4, ended
    for line in ("ends 3", "raises 1", "calls 3"):
        assert line in ended.out, ended
    assert "ValueError: a child's own" in ended.err, ended
    assert "the job ends" not in ended.err, ended


@pytest.mark.timeout(60)
def test_ctrl_c_while_all_ranks_are_stuck_in_c():
    with start("all_are_stuck") as job:
        for pid in job.ranks():
            os.kill(pid, signal.SIGINT)
        ended = job.end(LIMIT)
    assert ended.code == 130, ended
    assert ended.err.count("was interrupted") == 1, ended
    assert "Traceback" not in ended.err, ended


def test_a_rank_that_computes_sees_that_another_is_gone():
    with start("sleeps", shell="; sleep 60") as job:
        pids = job.ranks()
        commands = [Path(f"/proc/{pid}/stat").read_text().split() for pid in pids]
        assert len(commands) == 2
        os.kill(pids[1], signal.SIGKILL)
        ended = job.end(LIMIT)
    assert ended.code != 0, ended
    assert "is gone (killed, or out of memory?), seen by rank" in ended.err, ended


def test_ranks_whose_launcher_is_killed_end():
    with start("sleeps") as job:
        pids = job.ranks()
        parent = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(is_running(pid) for pid in pids):
            assert time.monotonic() < deadline, pids
            time.sleep(0.1)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_loss_that_is_not_finite_is_raised_on_all_ranks():
    ended = run("loss_of_nan")
    assert ended.code == 1, ended
    for rank in range(2):
        assert f"raised on rank {rank}" in ended.out, ended
    assert "the loss of ranks [1] is not finite" in ended.err, ended
    assert ended.err.count("the job ends") == 1, ended
