"""A rank that is killed on another host, and a host that is lost: named, and soon."""

import os
import re
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from test_jobs import MPICH, by_mpi
from time_limits import load_per_core

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(120)]

STEPS = Path(__file__).with_name("steps.py")


def allowed(seconds):
    """Seconds on this machine for what takes ``seconds`` on an idle one."""
    return seconds * max(1.0, load_per_core())


class Job:
    """``mpishard run`` on two hosts, which takes steps until it ends."""

    def __init__(self, process):
        self._process, self.out = process, ""

    def wait_for_steps(self):
        while not self.out.endswith("ready\n"):
            line = self._process.stdout.readline()
            assert line, self.out
            self.out += line
        time.sleep(0.2)

    def end(self, seconds):
        """Wait for the end, which must come within ``seconds`` on an idle machine."""
        limit = allowed(seconds)
        try:
            rest, _ = self._process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as late:
            out = self.out + (late.output or b"").decode(errors="replace")
            raise AssertionError(f"still running after {limit:.1f} s:\n{out}") from None
        self.out += rest
        return self._process.returncode


@contextmanager
def running(hosts, python, *options, **variables):
    command = (python, "-m", "mpishard", "run", *options, "--hosts", "node1,node2", STEPS)
    process = hosts.popen(1, *command, MPISHARD_TIMEOUT="60", **variables)
    job = Job(process)
    try:
        job.wait_for_steps()
        yield job
    finally:
        hosts.mend()  # all processes of the hosts
        process.communicate()


def blamed(out):
    """Return the ranks that the lines of `mpishard run` name as lost or failed."""
    return set(re.findall(r"rank (\d+)\b[^;\n]* (?:was )?(?:killed|failed)", out))


@by_mpi
def test_a_killed_rank_of_the_other_host_is_named(hosts, python):
    with running(hosts, python, "-n", 4) as job:
        victims = hosts.ranks(2)
        assert sorted(victims) == [2, 3]
        os.kill(victims[3], signal.SIGKILL)
        code = job.end(3)
        assert code == 137, job.out
        assert blamed(job.out) == {"3"}, job.out
        assert "node2" in job.out
        assert [hosts.left(host, allowed(3)) for host in (1, 2)] == [[], []]


@by_mpi
def test_a_host_whose_processes_are_all_killed_is_named(hosts, python):
    """Their ends may come before that of the connection, or not, and launchers then end at once."""
    with running(hosts, python, "-n", 2) as job:
        hosts.call("kill", 2)
        code = job.end(3)
        assert code not in (0, None), job.out
        own = [line for line in job.out.splitlines() if line.startswith("mpishard run: ")]
        assert "node2" in own[-1], job.out
        assert blamed(job.out) <= {"1"}, job.out


def test_a_lost_host_is_named(hosts):
    with running(hosts, MPICH, "-n", 2, MPISHARD_HOST_TIMEOUT="5") as job:
        hosts.call("cable", 2, "down")
        code = job.end(15)
        assert code not in (0, None), job.out
        assert re.search(r"host node2 \(rank 1\) has not been heard of for \d+ s", job.out)
        assert blamed(job.out) <= {"1"}, job.out
        assert hosts.left(1, allowed(3)) == []
