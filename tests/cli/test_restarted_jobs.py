"""``mpishard run --max-restarts``: real jobs that fail and are restarted."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpishard.cli.run.launcher import MPIFamily, launcher_family

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.spawned

MPIEXEC = Path(sys.executable).with_name("mpiexec")
LIMIT = 50

# What happens in a start is the word of its number. What the first start has left behind is
# looked for in the later ones.
JOB = """
import os, sys
from pathlib import Path
import mpishard
from mpishard.base import settings
from mpishard.communication.mpi.job import library_files
left, *words = sys.argv[1:]
backend = mpishard.init()
start, rank = settings.restart_count(), backend.rank
os.write(1, f"start {start}, rank {rank} of {backend.world_size}\\n".encode())
if start == 0 and rank == 0:
    Path(left).write_text("\\n".join([str(settings.job_folder()), *library_files()]))
backend.barrier()
if start == 1 and rank == 0:
    found = Path(left).read_text().splitlines()
    os.write(1, f"{len(found)} left, of which {sum(map(os.path.exists, found))} stay\\n".encode())
if words[start] == "killed" and rank == backend.world_size - 1:
    os.kill(os.getpid(), 9)
backend.barrier()
if words[start].isdecimal():
    backend.shutdown()
    sys.exit(int(words[start]))
"""

FAILS = """
import os
if os.environ["MPISHARD_RESTART"] == "0":
    os.kill(os.getpid(), 9)
os._exit(7)
"""

# Of a host that is lost together with its rank.
LOSES = """
import os, sys, time
from pathlib import Path
start, rank = os.environ["MPISHARD_RESTART"], os.environ["PMI_RANK"]
if start == "0":
    if rank == "2":
        Path(sys.argv[1]).touch()
        os.kill(os.getpid(), 9)
    time.sleep(60)
os.write(1, f"start {start}, rank {rank} of {os.environ['PMI_SIZE']}\\n".encode())
"""

WAITS = """
import os, time
os.write(1, b"ready\\n")
time.sleep(60)
"""

# Runs its command on this machine, unless the host, its first argument without a dash, is away.
SSH = """#!/bin/sh
while :; do case "$1" in -o) shift 2 ;; -*) shift ;; *) break ;; esac; done
[ -e "{away}/$1" ] && exit 255
shift
exec sh -c "$*"
"""


@pytest.fixture
def start(tmp_path):
    """Starts ``mpishard run`` of a script; no job outlives the test."""
    started = []

    def run(script, *arguments, options=(), **variables):
        path = tmp_path / "script.py"
        path.write_text(script)
        job = subprocess.Popen(
            [sys.executable, "-m", "mpishard", "run", *options, str(path), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            start_new_session=True,
        )
        started.append(job)
        return job

    yield run
    for job in started:
        if job.poll() is None:
            job.terminate()
            try:
                job.communicate(timeout=10)
            finally:
                job.kill()


@pytest.fixture
def finish(start):
    def run(*arguments, **options):
        job = start(*arguments, **options)
        out, error = job.communicate(timeout=LIMIT)
        return job.returncode, out, re.findall(r"^mpishard run: (.*)", error, re.MULTILINE)

    return run


def test_a_job_goes_on_after_a_rank_was_killed(finish, tmp_path):
    """Each start has logs of its own, and a preempted job is not restarted."""
    logs = tmp_path / "logs"
    options = ["-n", "2", "--max-restarts", "5", "--log-dir", str(logs)]
    code, out, lines = finish(JOB, str(tmp_path / "left"), "killed", "75", options=options)
    assert code == 75, lines
    restart = [line for line in lines if "restart" in line]
    assert len(restart) == 1
    words = r"rank 1 \(process \d+ on .*\) was killed by signal 9 \(SIGKILL.* after collective \d, "
    assert re.match(words, restart[0])
    assert restart[0].endswith("; restart 1 of 5 with 2 ranks in 1 s")
    left, stay = map(int, re.search(r"(\d+) left, of which (\d+) stay", out).groups())
    assert (left > 1, stay) == (True, 0)
    for rank in range(2):
        name = f"rank-{rank}.log"
        assert (logs / name).read_text().startswith(f"start 0, rank {rank} of 2\n")
        assert (logs / "restart-1" / name).read_text().startswith(f"start 1, rank {rank} of 2\n")
        assert "collective 1, barrier()" in (logs / f"rank-{rank}.calls.txt").read_text()
        assert (logs / "restart-1" / f"rank-{rank}.calls.txt").exists()
    assert not list(logs.glob("**/calls"))


def test_the_last_code_and_the_first_cause(finish):
    code, _, lines = finish(FAILS, options=["-n", "1", "--max-restarts", "1"])
    assert code == 7, lines
    cause = r"rank 0 \(process \d+\) was killed by signal 9 \(SIGKILL; out of memory\?\)"
    assert re.fullmatch(rf"{cause}; restart 1 of 1 with 1 rank in 1 s", lines[1])
    words = "the job failed for good, after 1 restart; root cause, in the first start: "
    assert re.fullmatch(words + cause, lines[-1])


def test_ctrl_c_is_no_failure(start):
    job = start(WAITS, options=["-n", "1", "--max-restarts", "3"])
    assert job.stdout.readline() == "ready\n"
    job.send_signal(signal.SIGINT)
    _, error = job.communicate(timeout=LIMIT)
    assert job.returncode == 130
    assert "restart" not in error


def test_ctrl_c_between_two_starts(start):
    job = start(FAILS, options=["-n", "1", "--max-restarts", "3"])
    while "restart 1 of 3 with 1 rank in 1 s" not in (line := job.stderr.readline()):
        assert line
    job.send_signal(signal.SIGINT)
    _, error = job.communicate(timeout=LIMIT)
    assert job.returncode == 130
    assert "restart 2" not in error


@pytest.mark.skipif(
    launcher_family(MPIEXEC) is not MPIFamily.MPICH, reason="one machine under two names"
)
def test_a_job_goes_on_without_a_lost_host(finish, tmp_path):
    ssh, away = tmp_path / "bin" / "ssh", tmp_path / "away"
    ssh.parent.mkdir()
    away.mkdir()
    ssh.write_text(SSH.format(away=away))
    ssh.chmod(0o755)
    hosts = ["--hosts", "a.test:2,b.test:1", "--max-restarts", "1", "--min-ranks", "2"]
    code, out, lines = finish(
        LOSES,
        str(away / "b.test"),
        options=["-n", "3", *hosts],
        PATH=f"{ssh.parent}:{os.environ['PATH']}",
    )
    assert code == 0, lines
    starts = sorted(re.findall(r"start \d, rank \d of \d", out))
    assert starts == ["start 1, rank 0 of 2", "start 1, rank 1 of 2"]
    assert any("1 of 1 with 2 ranks on a.test without b.test in 1 s" in line for line in lines)
