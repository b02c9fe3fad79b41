"""Processes that save repeatedly, for tests that kill them.

``run_saves.py forks FOLDER COUNT SEED`` kills that many forked processes, whose ranks are threads,
and prints what was found. ``run_saves.py rank FOLDER PLACE ASYNC`` is one rank of an MPI job, and
so is ``run_saves.py fault FOLDER PLACE OPERATION ACTION AT CULPRIT``, which one rank interrupts.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from interruptions import Interruption, operate
from places import Place
from vectors import Fakes

import mpishard
from mpishard.checkpoint import StagingBuffer

LENGTH = 50_000  # elements: a save takes a while, most of it inside
SAVES_AT_MOST = 500
FOREVER = 120.0


class Job:
    """A place, and notes of the saves that began and ended, which outlive who wrote them."""

    def __init__(self, folder: Path, *, is_folder: bool, is_async: bool) -> None:
        self.place = Place(folder, Fakes, is_folder=is_folder, length=LENGTH)
        self.is_async = is_async
        self._notes = folder / "notes"

    def begun_and_ended(self) -> tuple[int, int]:
        """The last save of which each is known; 0 for none."""
        begun, ended, _ = self._read()
        return begun, ended

    def usual_seconds(self) -> float:
        """Arguments of a save."""
        seconds = self._read()[2]
        return statistics.median(seconds) if seconds else 0.05

    def _read(self) -> tuple[int, int, list[float]]:
        begun, ended, seconds, since = 0, 0, [], 0.0
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        for what, number, moment in map(str.split, lines):
            if what == "begin":
                begun, since = max(begun, int(number)), float(moment)
            else:
                ended = max(ended, int(number))
                seconds.append(float(moment) - since)
        return begun, ended, seconds

    def save_again_and_again(self, backend: Any) -> None:
        """One rank's part, until somebody ends it."""
        first = 1 + (self.place.seed() or 0) if backend.rank == 0 else 0
        first = int(backend.all_reduce(np.array([first]))[0])
        staging = StagingBuffer() if self.is_async else None
        with self._notes.open("a") as notes:

            def note(what: str, step: int) -> None:
                if backend.rank == 0:
                    print(what, step, time.monotonic(), file=notes, flush=True)

            for step in range(first, first + SAVES_AT_MOST):
                note("begin", step)
                pending = self.place.begin(backend, step, step, staging)
                while self.is_async and not pending.poll():
                    time.sleep(0.0005)
                pending.wait()
                note("end", step)

    def look(self) -> str:
        """Check the disk after a kill, and return the moment of the save at which it came."""
        begun, ended = self.begun_and_ended()
        found = self.place.seed() or 0
        assert ended <= found <= begun, (ended, found, begun)
        if begun == ended:
            return "between saves"
        return "inside, new" if found == begun else "inside, old"

    def finish(self) -> None:
        """A save that nobody kills removes what those that were killed have left."""
        step = 1 + self.begun_and_ended()[0]
        self.place.save(step, step, 2)
        assert self.place.seed() == step
        self.place.check_is_tidy()


def kill_forks(folder: Path, count: int, seed: int) -> Counter[str]:
    """Fork, kill and look, so many times."""
    outcomes: Counter[str] = Counter()
    jobs = {}
    for is_folder, is_async in itertools.product((False, True), repeat=2):
        own = folder / f"{'folder' if is_folder else 'path'}-{'async' if is_async else 'sync'}"
        own.mkdir()
        jobs[is_folder, is_async] = Job(own, is_folder=is_folder, is_async=is_async)
    for number in range(count):
        dice = Random(f"{seed} {number}")
        job = jobs[dice.random() < 0.5, number % 2 == 0]
        ranks = dice.choice([1, 2, 3])
        before = job.begun_and_ended()[0]
        child = os.fork()
        if child == 0:
            try:
                mpishard.run_in_threads(ranks, job.save_again_and_again)
            finally:
                os._exit(1)
        started = time.monotonic()
        while job.begun_and_ended()[0] == before and time.monotonic() - started < 20:
            time.sleep(0.0005)
        assert job.begun_and_ended()[0] > before, "it never began to save"
        time.sleep(1.5 * job.usual_seconds() * dice.random())
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status), f"it ended by itself: {status}"
        outcomes[f"{'async' if job.is_async else 'sync'}, {job.look()}"] += 1
    for job in jobs.values():
        job.finish()
    return outcomes


def main() -> None:
    what, folder, *rest = sys.argv[1:]
    if what == "forks":
        print(json.dumps(kill_forks(Path(folder), int(rest[0]), int(rest[1]))))
        return
    if what == "fault":
        place = Place(Path(folder), Fakes, is_folder=rest[0] == "folder")
        backend = mpishard.init("mpi")
        operation, action, at, culprit = rest[1:]
        if backend.rank == int(culprit):
            Interruption(backend, int(at), action, FOREVER)
        operate(backend, place, operation, 3)
        return
    job = Job(Path(folder), is_folder=rest[0] == "folder", is_async=rest[1] == "async")
    backend = mpishard.init("mpi")
    (Path(folder) / f"{backend.rank}.pid").write_text(str(os.getpid()))
    job.save_again_and_again(backend)


if __name__ == "__main__":
    main()
