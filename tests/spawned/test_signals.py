"""Jobs that are stuck where polling sees nothing, or that are sent signals: each ends, or goes on.

With the interpreter of an environment that has Open MPI these are tests of Open MPI.
"""

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

SCENARIOS = Path(__file__).with_name("signal_scenarios.py")
MPIEXEC = Path(sys.executable).with_name("mpiexec")
LIMIT = 30

pytestmark = [
    pytest.mark.spawned,
    pytest.mark.skipif(
        not MPIEXEC.exists() or importlib.util.find_spec("mpi4py") is None,
        reason="needs mpi4py and mpiexec",
    ),
]


def environment(variables):
    """The environment of a job: not that of a launcher this test may run under."""
    launchers = ("PMI", "OMPI_", "PMIX", "SLURM_", "HYDI", "MPICH_", "MPISHARD_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return kept | {
        "PYTHONPATH": str(SCENARIOS.parents[2]),
        "OMP_NUM_THREADS": "1",
        "MPISHARD_NUMBA": "off",  # which takes each rank a second to load
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        **variables,
    }


class Job:
    """Two ranks, from their start to their end."""

    def __init__(self, scenario, *, shell="", **variables):
        command = [sys.executable, str(SCENARIOS), *scenario.split()]
        if shell:
            command = ["sh", "-c", shlex.join(command) + shell]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(
            [MPIEXEC, "-n", "2", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            errors="replace",
            env=environment(variables),
            start_new_session=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._stderr.close()

    def ranks(self):
        """The processes of both ranks, when both are ready."""
        pids = []
        while len(pids) < 2:
            line = self._process.stdout.readline()
            assert line, self.end()
            if line.startswith("ready"):
                pids.append(int(line.split()[1]))
        time.sleep(0.1)  # from the word to the deed
        return pids

    def end(self):
        """Wait for it, and not for as long as its ranks would sleep."""
        self.out, _ = self._process.communicate(timeout=LIMIT)
        self.err = self._errors_so_far()
        self.code = self._process.returncode
        return self

    def _errors_so_far(self):
        size = os.fstat(self._stderr.fileno()).st_size
        return os.pread(self._stderr.fileno(), size, 0).decode(errors="replace")

    def wait_for(self, *words):
        """Wait until the job has said on stderr each of ``words``, given with its count."""
        deadline = time.monotonic() + LIMIT
        while any((text := self._errors_so_far()).count(word) < count for word, count in words):
            assert time.monotonic() < deadline, text
            time.sleep(0.02)

    def __repr__(self):
        return f"code {self.code}\n{self.out}\n{self.err}"


def run(scenario, **options):
    with Job(scenario, **options) as job:
        return job.end()


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


def test_after_shutdown_an_exception_is_the_rank_s_own():
    ended = run("raises_after_shutdown")
    assert "ValueError: boom after shutdown" in ended.err, ended
    assert "mpishard: rank" not in ended.err, ended


def test_abort_in_another_thread_while_the_main_thread_is_stuck_in_mpi():
    ended = run("aborts_from_a_thread")
    assert ended.code == 1, ended
    assert "rank 1 of 2 failed in or after collective 1, barrier()" in ended.err, ended
    assert "RuntimeError: a reason of its own" in ended.err, ended


def test_sigterm():
    with Job("sleeps") as job:
        os.kill(job.ranks()[0], signal.SIGTERM)
        ended = job.end()
    assert ended.code == 143, ended
    assert ended.err.count("was sent SIGTERM") == 1, ended
    assert "Traceback" not in ended.err, ended


def test_sigquit_shows_what_each_rank_does_and_it_goes_on(tmp_path):
    with Job(f"goes_on_when_asked {tmp_path / 'go'}") as job:
        for pid in job.ranks():
            os.kill(pid, signal.SIGQUIT)
        job.wait_for(("and goes on", 2), ("1: barrier() at ", 2), ("in stuck_in_mpi", 1))
        (tmp_path / "go").touch()
        ended = job.end()
    assert ended.code == 0, ended
    assert ended.out.count("went on") == 2, ended
    for rank in range(2):
        assert ended.err.count(f"rank {rank} of 2 was sent SIGQUIT, and goes on") == 1, ended
    assert ended.err.count("1: barrier() at ") == 2, ended
    assert "in stuck_in_mpi" in ended.err, ended  # its stack, though Python makes no step


def test_a_world_entered_again_is_watched_again():
    ended = run("enters_again", MPISHARD_TIMEOUT="1")
    assert ended.code == 124, ended
    assert "has waited 1 s in collective 1, barrier()" in ended.err, ended


def test_what_a_rank_starts_fails_for_itself():
    ended = run("starts_a_helper")
    assert ended.code == 0, ended
    assert ended.out.count("went on") == 2, ended
    assert "the job ends" not in ended.err, ended
    assert "helper 1" in ended.out, ended


def test_a_rank_that_has_finished_says_once_whom_it_waits_for():
    ended = run("finishes_later_on_rank_1", MPISHARD_WARN_AFTER="0.3", MPISHARD_TIMEOUT="1")
    assert ended.code == 0, ended
    assert ended.err.count("has finished") == 1, ended
    said = (
        r"rank 0 of 2 has finished, and has waited \d s for rank 1\. Rank 1: in no collective since"
    )
    assert re.search(said, ended.err), ended


def test_a_forked_child_that_ends_leaves_no_world():
    ended = run("forks", MPISHARD_TIMEOUT="10")
    assert ended.code == 0, ended
    assert ended.out.count("went on") == 2, ended
    assert ended.out.count("refused: a forked process is no rank: this one") == 4, ended
    for line in ("ends 3", "raises 1", "calls 3"):
        assert line in ended.out, ended
    assert "ValueError: a child's own" in ended.err, ended
    assert "the job ends" not in ended.err, ended


def test_ctrl_c_while_all_ranks_are_stuck_in_c():
    with Job("all_are_stuck") as job:
        for pid in job.ranks():
            os.kill(pid, signal.SIGINT)
        ended = job.end()
    assert ended.code == 130, ended
    assert ended.err.count("was interrupted") == 1, ended
    assert "Traceback" not in ended.err, ended


def test_a_rank_that_computes_sees_that_another_is_gone():
    with Job("sleeps", shell="; sleep 60") as job:
        pids = job.ranks()
        commands = [Path(f"/proc/{pid}/stat").read_text().split() for pid in pids]
        assert len(commands) == 2
        os.kill(pids[1], signal.SIGKILL)
        ended = job.end()
    assert ended.code != 0, ended
    assert "is gone (killed, or out of memory?), seen by rank" in ended.err, ended


def test_a_loss_that_is_not_finite_is_raised_on_all_ranks():
    ended = run("loss_of_nan")
    assert ended.code == 1, ended
    for rank in range(2):
        assert f"raised on rank {rank}" in ended.out, ended
    assert "the loss of ranks [1] is not finite" in ended.err, ended
    assert ended.err.count("the job ends") == 1, ended
