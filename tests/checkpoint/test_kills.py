"""SIGKILL at a random moment of a save always leaves a complete checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from run_saves import Job

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from jobs import LIMIT, environment_of_a_job, wheels

SCRIPT = Path(__file__).with_name("run_saves.py")


def _show(outcomes: Counter[str]) -> str:
    return ", ".join(f"{number} {what}" for what, number in sorted(outcomes.items()))


@pytest.mark.spawned
@pytest.mark.timeout(300)
def test_killed_processes_of_thread_ranks(tmp_path: Path, torture: Any) -> None:
    count = torture.count(12, 950)
    done = subprocess.run(
        [sys.executable, SCRIPT, "forks", tmp_path, str(count), str(torture.seed)],
        env=environment_of_a_job(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60 + 3 * count,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = Counter(json.loads(done.stdout))
    assert sum(outcomes.values()) == count
    inside = sum(number for what, number in outcomes.items() if "inside" in what)
    assert inside > 0.5 * count, f"too few kills inside a save: {outcomes}"
    torture.saw(f"{count} processes killed: {_show(outcomes)}")


@pytest.mark.spawned
@pytest.mark.timeout(300)
def test_a_killed_rank_of_an_mpi_job(tmp_path: Path, torture: Any) -> None:
    if not wheels():
        pytest.skip("there is no mpiexec beside this Python")
    outcomes: Counter[str] = Counter()
    count = torture.count(2, 50)
    for number in range(count):
        dice = torture.dice(number)
        folder = tmp_path / str(number)
        folder.mkdir()
        is_folder, is_async, ranks = dice.random() < 0.5, number % 2 == 0, 2 + number // 2 % 2
        job = Job(folder, is_folder=is_folder, is_async=is_async)
        words = ["folder" if is_folder else "path", "async" if is_async else "sync"]
        victim, delay = dice.randrange(ranks), dice.random()
        names = sorted(wheels()) if torture.is_nightly else sorted(wheels())[:1]
        command = [wheels()[names[number % len(names)]], "-m", "mpishard", "run"]
        with subprocess.Popen(
            [*command, "-n", str(ranks), SCRIPT, "rank", folder, *words],
            env=environment_of_a_job(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                started = time.monotonic()
                while job.begun_and_ended()[1] < 2 and time.monotonic() - started < LIMIT:
                    time.sleep(0.01)
                time.sleep(1.5 * job.usual_seconds() * delay)
                os.kill(int((folder / f"{victim}.pid").read_text()), signal.SIGKILL)
                process.communicate(timeout=LIMIT)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 128 + signal.SIGKILL
        assert job.begun_and_ended()[1] >= 2
        outcomes[f"{words[1]}, {job.look()}"] += 1
        job.finish()
    torture.saw(f"{count} MPI jobs, one rank killed: {_show(outcomes)}")
