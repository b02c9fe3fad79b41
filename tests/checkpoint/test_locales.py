"""Paths that are not ASCII, on ranks with different locales."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from spawned_jobs import MPIEXEC, environment_of_a_job, needs_mpiexec

from mpishard import checkpoint, run_in_threads
from mpishard.communication.agreement import same_outcome, share_path, share_text
from mpishard.communication.contract.call import Call, CollectiveKind
from mpishard.errors import CheckpointError

JOB = Path(__file__).with_name("locale_job.py")
NOT_UTF8 = os.fsdecode(b"/tmp/f\xc3\xb6/\xff\xfe")
ASCII = ["LC_ALL=POSIX", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0"]
UTF8 = ["LC_ALL=POSIX", "PYTHONUTF8=1"]


@pytest.mark.spawned
@needs_mpiexec
@pytest.mark.parametrize(
    "locales", [(ASCII, ASCII), (UTF8, ASCII), (ASCII, UTF8)], ids=["ASCII", "UTF-8 first", "last"]
)
def test_a_path_that_is_not_ascii(locales: Any, tmp_path: Path) -> None:
    script = tmp_path / "scr\u00efpt.py"
    script.write_bytes(JOB.read_bytes())
    ranks = [
        [*(":" if rank else ()), "-n", "1", "env", *variables, sys.executable, script, tmp_path]
        for rank, variables in enumerate(locales)
    ]
    command = [MPIEXEC, *itertools.chain(*ranks)]
    job = subprocess.run(
        command, env=environment_of_a_job(), capture_output=True, timeout=60, check=False
    )
    assert job.returncode == 0, (job.stdout + job.stderr).decode(errors="replace")
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/f\xc3\xb6lder"))
    for rank, variables in enumerate(locales):
        encoding = "utf-8" if variables is UTF8 else "ascii"
        assert (folder / f"encoding-{rank}").read_text() == encoding
    assert {"metrics.jsonl", "other", "run", "single"} <= {each.name for each in folder.iterdir()}


def test_paths_and_messages_travel_unchanged() -> None:
    path = Path(NOT_UTF8)
    message = f"{path} \ud800 \udcc3\udcb6 \u00f6"

    def fail(rank: int) -> None:
        if rank == 0:
            raise CheckpointError(message)

    def main(backend: Any) -> None:
        assert share_path(backend, path if backend.rank == 0 else None) == path
        assert share_path(backend, None) is None
        assert share_text(backend, message if backend.rank == 0 else "") == message
        with pytest.raises(CheckpointError) as caught, same_outcome(backend):
            fail(backend.rank)
        assert message in str(caught.value)

    run_in_threads(2, main)
    assert share_path(None, path) == path


def test_the_path_of_a_script_travels_with_its_calls() -> None:
    call = Call.describe(CollectiveKind.BARRIER, None, sequence=3)
    call.line, call.method, call.filename = 7, "main", NOT_UTF8
    found = Call.from_bytes(call.to_bytes())
    assert (found.line, found.method, found.filename) == (7, "main", NOT_UTF8)


def test_a_path_that_the_locale_cannot_hold_is_refused(fakes: Any) -> None:
    message = r"the path of a checkpoint 'a/\\ud800' cannot be encoded .* in utf-8.*PYTHONUTF8=1"
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(ValueError, match=message):
            call("a/\ud800", fakes.Model(None, fakes.values(1)))
