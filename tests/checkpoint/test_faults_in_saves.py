"""Ranks that raise, sleep or are killed in a save or a load: all raise, and no file is torn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from interruptions import ACTIONS, OPERATIONS, Interruption, operate
from places import Place

from mpishard import run_in_threads
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.saving import pending
from mpishard.errors import CollectiveTimeoutError, PeerError

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from jobs import LIMIT, environment_of_a_job, wheels

SCRIPT = Path(__file__).with_name("run_saves.py")
CODES = {"raise": 1, "sleep": 124, "kill": 137}
WAITS = 0.25  # seconds that thread-ranks wait for one that sleeps


def collectives_of(place: Place, operation: str, ranks: int) -> int:
    """Number of collectives that a rank calls without an interruption."""

    def work(backend: Any) -> int:
        counted = Interruption(backend)
        operate(backend, place, operation, 2)
        return counted.count

    return min(run_in_threads(ranks, work))


def wait_for_writers() -> None:
    """A job that fails ends its threads with its processes; thread-ranks leave theirs."""
    for thread in threading.enumerate():
        if thread.name == "mpishard-checkpoint":
            thread.join(20)


def interrupt(
    place: Place, operation: str, ranks: int, culprit: int, at: int, action: str
) -> tuple[bool, dict[int, BaseException]]:
    """Return True if the collective was reached, and the error of each rank."""
    raised: dict[int, BaseException] = {}
    interruptions: list[Interruption] = []

    def work(backend: Any) -> None:
        if backend.rank == culprit:
            interruptions.append(Interruption(backend, at, action, 2 * WAITS))
        try:
            operate(backend, place, operation, 3)
        except BaseException as failure:
            raised[backend.rank] = failure
            raise

    with suppress(ValueError, PeerError, CollectiveTimeoutError):
        run_in_threads(ranks, work, timeout=WAITS if action == "sleep" else 20.0)
    wait_for_writers()
    return interruptions[0].count >= at, raised


def test_thread_ranks_that_raise_or_sleep_in_a_collective(
    tmp_path: Path, fakes: Any, torture: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    count, happened, told = torture.count(18, 450), 0, 0
    for number in range(count):
        dice = torture.dice(number)
        operation, ranks = OPERATIONS[number % 3], dice.choice([2, 3])
        action, culprit = dice.choice(ACTIONS[:2]), dice.randrange(ranks)
        root = tmp_path / str(number)
        root.mkdir()
        place = Place(root, fakes, is_folder=dice.random() < 0.5)
        place.save(1, 1, ranks)
        at = 1 + dice.randrange(collectives_of(place, operation, ranks))
        old = place.seed()
        what = f"trial {number}: {action} at {at} of {operation}, rank {culprit} of {ranks}"
        is_interrupted, raised = interrupt(place, operation, ranks, culprit, at, action)
        happened += is_interrupted
        told += len(raised)
        found = place.seed()
        assert is_interrupted or action == "sleep" or not raised, what
        if not raised:  # how often the ranks meet depends on the disk
            assert not is_interrupted, what
            assert found == (old if operation == "load" else 3), what
            continue
        assert raised.keys() >= set(range(ranks)) - {culprit}, what
        for rank, error in raised.items():
            if rank == culprit and action == "raise":
                assert isinstance(error, ValueError), what
            else:
                assert isinstance(error, PeerError | CollectiveTimeoutError), (what, error)
            if rank != culprit and action == "raise":
                assert f"rank {culprit} failed" in str(error), what
        assert found in ({old} if operation == "load" else {old, 3}), what
        place.save(4, 4, ranks)
        assert place.seed() == 4, what
        place.check_is_tidy()
    assert happened > 0.6 * count
    torture.saw(f"{happened} ranks that raise or sleep in a collective: {told} errors, no hang")


def test_a_save_that_has_failed_is_never_committed(
    tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk, a rank that fails meanwhile, and ranks that go on without it."""
    place = Place(tmp_path, fakes, is_folder=False)
    commits, released = threading.Event(), threading.Event()
    place.save(1, 1, 2)
    real = disk.write_file

    def slow(file: Path, parts: Any) -> None:
        if file.name == "manifest.json":
            commits.set()
            released.wait(20)
        real(file, parts)

    def work(backend: Any) -> None:
        held = place.begin(backend, 2, 2)
        while backend.rank == 1 and not commits.is_set():
            held.poll()
        if backend.rank == 1:
            raise ValueError("boom")
        held.wait()

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_file", slow)
        patch.setattr(pending, "_ABANDON_SECONDS", 0.01)
        with pytest.raises(ValueError, match="boom"):
            run_in_threads(2, work)
        released.set()
        wait_for_writers()
    assert place.seed() == 1
    place.save(3, 3, 1)
    assert place.seed() == 3
    place.check_is_tidy()


@pytest.mark.spawned
@pytest.mark.timeout(200)
def test_mpi_ranks_that_raise_sleep_or_are_killed(tmp_path: Path, fakes: Any, torture: Any) -> None:
    if not wheels():
        pytest.skip("there is no mpiexec beside this Python")
    count, happened = torture.count(3, 50), 0
    for number in range(count):
        dice = torture.dice(number)
        names = sorted(wheels()) if torture.is_nightly else sorted(wheels())[:1]
        python = wheels()[names[number % len(names)]]
        operation, action = dice.choice(OPERATIONS), ACTIONS[number % 3]
        ranks, is_folder = dice.choice([2, 3]), dice.random() < 0.5
        culprit, root = dice.randrange(ranks), tmp_path / str(number)
        root.mkdir()
        place = Place(root, fakes, is_folder=is_folder)
        place.save(2, 2, ranks)
        at = 1 + dice.randrange(collectives_of(place, operation, ranks))
        kind = "folder" if is_folder else "path"
        words = ["fault", root, kind, operation, action, str(at), str(culprit)]
        what = f"trial {number}: {words} of {ranks}, {python}"
        with subprocess.Popen(
            [python, "-m", "mpishard", "run", "-n", str(ranks), SCRIPT, *words],
            env=environment_of_a_job() | {"MPISHARD_TIMEOUT": "3"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                _, said = process.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                pytest.fail(f"it hung: {what}")
        found = place.seed()
        if process.returncode == 0:  # how often the ranks meet depends on the disk
            assert found == (2 if operation == "load" else 3), f"{what}\n{said}"
            continue
        happened += 1
        assert process.returncode == CODES[action], f"{what}: {process.returncode}\n{said}"
        assert f"rank {culprit}" in said, f"{what}\n{said}"
        assert found in ({2} if operation == "load" else {2, 3}), what
        place.save(4, 4, 1)
        assert place.seed() == 4, what
        place.check_is_tidy()
    torture.saw(
        f"{count} jobs in which a rank raises, sleeps or is killed in a collective: no hang"
    )
