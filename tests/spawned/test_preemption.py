"""Jobs that are told to make room: they save, leave with 75, and go on as if nothing had been."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpishard import settings

SCENARIOS = Path(__file__).with_name("preemption_scenarios.py")
MPIEXEC = Path(sys.executable).with_name("mpiexec")
LIMIT = 60

pytestmark = [
    pytest.mark.spawned,
    pytest.mark.skipif(
        not MPIEXEC.exists() or importlib.util.find_spec("mpi4py") is None,
        reason="needs mpi4py and mpiexec",
    ),
]

BY_MPIEXEC = [MPIEXEC, "-n", "2", sys.executable]
BY_RUN = [sys.executable, "-m", "mpishard", "run", "-n", "2"]


def environment():
    """The environment of a job: not that of a launcher this test may run under."""
    launchers = ("PMI", "OMPI_", "PMIX", "SLURM_", "HYDI", "MPICH_", "MPISHARD_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return kept | {
        "PYTHONPATH": str(SCENARIOS.parents[2]),
        "OMP_NUM_THREADS": "1",
        "MPISHARD_NUMBA": "off",  # the same bits, without a second to load it
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }


class Job:
    """A run of the scenario, from its start to its end."""

    def __init__(self, command, *arguments):
        self._process = subprocess.Popen(
            [*command, SCENARIOS, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment(),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.ranks = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            for pid in self.ranks:
                os.kill(pid, signal.SIGKILL)
            os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()

    def wait_until_it_trains(self):
        while len(self.ranks) < 2:
            line = self._process.stdout.readline()
            assert line, self.end()
            if line.startswith("training"):
                self.ranks.append(int(line.split()[1]))

    def wait_for(self, words):
        while words not in (line := self._process.stderr.readline()):
            assert line, self.end()

    def end(self):
        self.out, self.err = self._process.communicate(timeout=LIMIT)
        self.code = self._process.returncode
        return self

    def __repr__(self):
        return f"code {self.code}\n{self.out}\n{self.err}"


def saved_step(ended, folder):
    """After which step a job says that it was preempted; it has saved then."""
    assert ended.code == settings.EXIT_PREEMPTED == 75, ended
    found = re.findall(r"mpishard: preempted after step (\d+) of 60; saved in (\S+),", ended.err)
    assert len(found) == 1, ended
    step, place = found[0]
    assert Path(place) == folder / f"step-{int(step):08d}"
    assert (folder / "latest").read_text().split() == [Path(place).name]
    assert "Traceback" not in ended.err, ended
    return int(step)


def test_a_signal_to_one_rank_is_heard_by_all(tmp_path):
    folder = tmp_path / "run"
    with Job(BY_MPIEXEC, folder, 0.1, "catches") as job:
        job.wait_until_it_trains()
        os.kill(job.ranks[1], signal.SIGTERM)
        ended = job.end()
    step = saved_step(ended, folder)
    assert f"caught after step {step}: code 75" in ended.out, ended


def test_an_order_before_the_loop_is_kept_for_its_first_step(tmp_path):
    folder = tmp_path / "run"
    with Job(BY_RUN, folder, 0, "builds") as job:
        job.wait_until_it_trains()
        os.kill(job.pid, signal.SIGUSR1)
        job.wait_for("the job goes on until one is")
        (tmp_path / "run-go").touch()
        ended = job.end()
    assert saved_step(ended, folder) == 1


def test_an_order_that_no_loop_heeds_is_told_of_at_the_end(tmp_path):
    with Job(BY_RUN, tmp_path / "run", 0, "builds only") as job:
        job.wait_until_it_trains()
        os.kill(job.ranks[1], signal.SIGUSR1)
        (tmp_path / "run-go").touch()
        ended = job.end()
    assert ended.code == 0, ended
    words = r"rank [01] of 2 was told to make room by SIGUSR1, and nobody heeded it"
    assert len(re.findall(words, ended.err)) == 1, ended


def test_a_job_of_mpishard_run_goes_on_to_the_same_bits(tmp_path):
    folder = tmp_path / "run"
    steps = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        with Job(BY_RUN, folder, 0.1) as job:
            job.wait_until_it_trains()
            os.kill(job.pid, number)
            ended = job.end()
        steps.append(saved_step(ended, folder))
        assert "the ranks were ended" not in ended.err, ended
    assert 0 < steps[0] < steps[1] < 60
    with Job(BY_MPIEXEC, folder, 0) as job:
        ended = job.end()
    assert ended.code == 0, ended
    assert f"going on after step {steps[1]} of 60" in ended.err, ended
    assert "same bits: True" in ended.out, ended
