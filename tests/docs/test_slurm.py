"""The batch script, with stand-ins for SLURM's programs; docs/slurm.md says what was tried."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def submit(tmp_path):
    """Run the script as job 7, submitted from ``tmp_path``; what it asked of SLURM."""
    programs = tmp_path / "programs"
    programs.mkdir()
    calls = tmp_path / "calls"
    for name in ("srun", "scontrol"):
        program = programs / name
        program.write_text(
            f'#!/bin/bash\necho "{name} ${{OMP_NUM_THREADS-unset}} $@" >>"{calls}"\n'
            + ('eval "${DURING_SRUN-}"\n' if name == "srun" else "")
        )
        program.chmod(0o755)
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text("")

    def run(*arguments, **variables):
        calls.write_text("")
        ended = subprocess.run(
            ["bash", str(SCRIPT), *arguments],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
            env={
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                "SLURM_SUBMIT_DIR": str(tmp_path),
                "SLURM_JOB_ID": "7",
                "SLURM_CPUS_PER_TASK": "3",
                "OMP_NUM_THREADS": "1",
            }
            | variables,
        )
        return ended, calls.read_text().splitlines()

    return run


STEP = "srun unset --wait=20 --mpi=pmi2 --cpus-per-task=3 python -u examples/train_gpt.py"


def test_a_job_and_the_same_requeued_are_one_run(submit):
    for _ in range(2):
        ended, calls = submit("--steps", "9")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert calls == [f"{STEP} --name gpt-7 --steps 9"]


def test_a_job_that_was_preempted_goes_back_into_the_queue(submit):
    ended, calls = submit(DURING_SRUN="exit 75")
    assert ended.returncode == 75
    assert [call.split(" ", 2)[2] for call in calls[1:]] == ["requeue 7"]


def test_of_an_array_only_the_element_goes_back_into_the_queue(submit):
    # "scontrol requeue 7" would requeue all elements if 7 is the number of the array, too.
    array = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    _, calls = submit(DURING_SRUN="exit 75", **array)
    assert [call.split(" ", 2)[2] for call in calls[1:]] == ["requeue 7_3"]


@pytest.mark.parametrize(("most", "count"), [("", "100"), ("2", "2"), ("0", "")])
def test_a_job_is_not_requeued_for_ever(submit, most, count):
    limits = {"MAX_REQUEUES": most, "SLURM_RESTART_COUNT": count}
    ended, calls = submit(DURING_SRUN="exit 75", **limits)
    assert (ended.returncode, len(calls)) == (75, 1)
    assert f"requeued {count or 0} times already" in ended.stderr
    limits["SLURM_RESTART_COUNT"] = str(int(count or 0) - 1) if count else "0"
    if most != "0":
        assert len(submit(DURING_SRUN="exit 75", **limits)[1]) == 2


def test_the_script_outlives_sigterm_at_the_time_limit(submit):
    ended, calls = submit(DURING_SRUN="kill -TERM $PPID; sleep 0.2; exit 75")
    assert ended.returncode == 75
    assert calls[1].split(" ", 2)[2] == "requeue 7"


def test_a_failed_step_fails_the_job(submit):
    ended, calls = submit(DURING_SRUN="exit 137")
    assert ended.returncode == 137
    assert len(calls) == 1


def test_it_is_only_run_by_sbatch(submit):
    ended, calls = submit(SLURM_SUBMIT_DIR="")
    assert ended.returncode != 0
    assert "submit this script with sbatch" in ended.stderr
    assert calls == []
