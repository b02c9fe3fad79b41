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
            cwd="/", capture_output=True, text=True, timeout=20, check=False,
            env={
                "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                "SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7",
                "SLURM_CPUS_PER_TASK": "3", "OMP_NUM_THREADS": "1",
            } | variables,
        )  # fmt: skip
        return ended, calls.read_text().splitlines()

    return run


STEP = (
    "srun unset --mpi=pmi2 --cpus-per-task=3 --kill-on-bad-exit=1 python -u examples/train_gpt.py"
)


def test_a_new_job_begins_and_a_requeued_one_goes_on(tmp_path, submit):
    ended, calls = submit("--steps", "9")
    assert (ended.returncode, ended.stderr, calls) == (0, "", [f"{STEP} --name gpt-7 --steps 9"])
    begun = tmp_path / "runs" / "gpt-7"
    (begun / "checkpoint.partial").mkdir(parents=True)
    assert submit()[1] == [f"{STEP} --name gpt-7"]
    assert not begun.exists()  # the example would refuse a folder that is there
    # Between the two renames of a save the checkpoint waits under its second name.
    for name in ("checkpoint.previous", "checkpoint"):
        (begun / name).mkdir(parents=True)
        (begun / name / "manifest.json").write_text("{}")
        assert submit("--steps", "9")[1] == [f"{STEP} --resume runs/gpt-7"]
        shutil.rmtree(begun)


def test_the_signal_before_the_end_puts_the_job_back_into_the_queue(submit):
    _, calls = submit(DURING_SRUN="kill -USR1 $PPID; sleep 0.2")
    assert [call.split(" ", 2)[2] for call in calls[1:]] == ["requeue 7"]


def test_a_failed_step_fails_the_job(submit):
    assert submit(DURING_SRUN="exit 137")[0].returncode == 137


def test_it_is_only_run_by_sbatch(submit):
    ended, calls = submit(SLURM_SUBMIT_DIR="")
    assert ended.returncode != 0
    assert "submit this script with sbatch" in ended.stderr
    assert calls == []
