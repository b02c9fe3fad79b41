"""Preempted jobs: they save, end with code 75, and resume to the same bits."""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from spawned_jobs import MPIEXEC, Job, needs_mpiexec

from mpishard.base import settings

SCENARIOS = Path(__file__).with_name("preemption_scenarios.py")

pytestmark = [pytest.mark.spawned, needs_mpiexec]

BY_MPIEXEC = [MPIEXEC, "-n", "2", sys.executable]
BY_RUN = [sys.executable, "-m", "mpishard", "run", "-n", "2"]


def start(command, *arguments):
    # Without numba, which takes a second to load.
    return Job([*command, SCENARIOS, *arguments], word="training", MPISHARD_NUMBA="off")


def saved_step(ended, folder):
    """Return the step after which a job reports that it was preempted and has saved."""
    assert ended.code == settings.EXIT_PREEMPTED == 75, ended
    found = re.findall(r"mpishard: preempted after step (\d+) of 60; saved in (\S+);", ended.err)
    assert len(found) == 1, ended
    step, place = found[0]
    assert Path(place) == folder / f"step-{int(step):08d}"
    assert (folder / "latest").read_text().split() == [Path(place).name]
    assert "Traceback" not in ended.err, ended
    return int(step)


def test_a_signal_to_one_rank_preempts_all(tmp_path):
    folder = tmp_path / "run"
    with start(BY_MPIEXEC, folder, 0.1, "catches") as job:
        os.kill(job.ranks()[1], signal.SIGTERM)
        ended = job.end()
    step = saved_step(ended, folder)
    assert f"caught after step {step}: code 75" in ended.out, ended


def test_a_signal_before_the_loop_is_kept_for_its_first_step(tmp_path):
    folder = tmp_path / "run"
    with start(BY_RUN, folder, 0, "builds") as job:
        job.ranks()
        os.kill(job.pid, signal.SIGUSR1)
        job.wait_for("the job runs until one is")
        (tmp_path / "run-go").touch()
        ended = job.end()
    assert saved_step(ended, folder) == 1


def test_a_signal_that_no_loop_obeys_is_reported_at_the_end(tmp_path):
    with start(BY_RUN, tmp_path / "run", 0, "builds only") as job:
        os.kill(job.ranks()[1], signal.SIGUSR1)
        (tmp_path / "run-go").touch()
        ended = job.end()
    assert ended.code == 0, ended
    words = r"rank [01] of 2 was preempted by SIGUSR1, and nothing obeyed it"
    assert len(re.findall(words, ended.err)) == 1, ended


@pytest.mark.timeout(60)
def test_a_job_of_mpishard_run_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    # `mpishard run` may choose other BLAS kernels than those that mpiexec's ranks have.
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    folder = tmp_path / "run"
    steps = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        with start(BY_RUN, folder, 0.1) as job:
            job.ranks()
            os.kill(job.pid, number)
            ended = job.end()
        steps.append(saved_step(ended, folder))
        assert "the ranks were ended" not in ended.err, ended
    assert 0 < steps[0] < steps[1] < 60
    with start(BY_MPIEXEC, folder, 0) as job:
        ended = job.end()
    assert ended.code == 0, ended
    assert f"resuming after step {steps[1]} of 60" in ended.err, ended
    assert "same bits: True" in ended.out, ended
