"""A job whose ranks hang in NCCL: the watchdog aborts NCCL, and then MPI."""

import subprocess
import sys
from pathlib import Path

import pytest
from spawned_jobs import MPIEXEC, ROOT, environment_of_a_job, needs_mpiexec

pytestmark = [pytest.mark.spawned, needs_mpiexec]


def test_ranks_that_hang_in_nccl_end_by_the_time_limit(tmp_path):
    ended = subprocess.run(
        [MPIEXEC, "-n", "2", sys.executable, Path(__file__).with_name("nccl_scenario.py")],
        env=environment_of_a_job(
            MPISHARD_TIMEOUT="2",
            TMPDIR=str(tmp_path),
            MPISHARD_WARN_AFTER="1",
            PYTHONPATH=f"{ROOT}:{ROOT / 'tests' / 'helpers'}",
        ),
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 124, ended
    assert "2 s in collective 1, all_reduce(SUM, float64[20000])," in ended.stderr, ended
    assert "aborts NCCL" in ended.stderr, ended
