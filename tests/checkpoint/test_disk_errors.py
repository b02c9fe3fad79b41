"""Errors of the disk in any operation of any rank: all ranks raise, and no checkpoint is lost."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from places import Place

from mpishard import run_in_threads
from mpishard.checkpoint import CheckpointFolder, newest_valid
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.format.folder import Target
from mpishard.checkpoint.saving.save import begin_save
from mpishard.errors import CheckpointError

ERRORS = {"ENOSPC": errno.ENOSPC, "EACCES": errno.EACCES, "EIO": errno.EIO}
CALLS = ("open", "close", "write", "fsync", "mkdir", "rename", "unlink")


class FailingDisk:
    """Fails at one of the system calls that change ``root``, and at every later one if asked to.

    Parameters
    ----------
    root : Path
        What calls elsewhere do concerns nobody.
    fails_at : int
        Number of the call, from 1; 0 for none.
    number : int
        The error.
    for_good : bool
        Whether the calls after it fail, too.
    """

    def __init__(
        self, root: Path, fails_at: int = 0, number: int = 0, *, for_good: bool = False
    ) -> None:
        self.root, self.fails_at, self.number, self.for_good = root, fails_at, number, for_good
        self.calls: list[str] = []
        self.failed: list[str] = []
        self._descriptors: dict[int, Path] = {}
        self._lock = threading.Lock()

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            path = self._descriptors.get(first) if isinstance(first, int) else Path(first)
            if name == "close":
                self._descriptors.pop(first, None)
            elif path is not None and path.is_relative_to(self.root):
                self._count(f"{name} {path.name}", path)
            result = real(first, *rest, **options)
            if name == "open" and path is not None:
                self._descriptors[result] = path
            return result

        return call

    def _count(self, what: str, path: Path) -> None:
        with self._lock:
            self.calls.append(what)
            count = len(self.calls)
            if count == self.fails_at or (self.for_good and 0 < self.fails_at < count):
                self.failed.append(what)
                raise OSError(self.number, os.strerror(self.number), str(path))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in CALLS:
                stub = self._wrap(name, getattr(os, name))
                stack.enter_context(mock.patch.object(os, name, stub))
            yield


def attempt(place: Place, broken: FailingDisk, step: int, seed: int, world_size: int) -> list[str]:
    """Save while the disk fails; what each rank raised."""
    raised: list[str] = [""] * world_size

    def work(backend: Any) -> None:
        try:
            place.save_on(backend, step, seed)
        except OSError as error:
            raised[backend.rank] = str(error)
        backend.barrier()  # the world is in order

    with broken.at_work():
        run_in_threads(world_size, work)
    return raised


def test_ranks_agree_if_any_disk_operation_fails(tmp_path: Path, fakes: Any, torture: Any) -> None:
    lengths: dict[Any, int] = {}
    tried = said = for_good = 0
    for number in range(torture.count(15, 100)):
        dice = torture.dice(number)
        is_folder, world_size = dice.random() < 0.5, dice.choice([1, 2, 3])
        is_first, again = dice.random() < 0.2, dice.random() < 0.3
        case = is_folder, world_size, is_first, again
        step = 2 if again else 3

        def start(name: str, case: Any = case) -> Place:
            (tmp_path / name).mkdir()
            place = Place(tmp_path / name, fakes, is_folder=case[0])
            for seed in () if case[2] else (1, 2):
                place.save(seed, seed, case[1])
            return place

        if case not in lengths:
            whole = FailingDisk(tmp_path / f"{number}-whole")
            assert not any(attempt(start(whole.root.name), whole, step, 3, world_size))
            lengths[case] = len(whole.calls)
            assert len(whole.calls) > 4 * world_size + 8
        place, root = start(str(number)), tmp_path / str(number)
        word = dice.choice(sorted(ERRORS))
        broken = FailingDisk(
            root, 1 + dice.randrange(lengths[case]), ERRORS[word], for_good=dice.random() < 0.3
        )
        raised = attempt(place, broken, step, 3, world_size)
        what = f"trial {number}: {case}, {word} at {broken.failed}: {raised}"
        tried += bool(broken.failed)
        for_good += broken.for_good
        found = place.seed()
        if any(raised):
            said += 1
            assert len(set(raised)) == 1 or "what was there" not in raised[0], what
            culprit = re.search(r"rank(\d{5})", broken.failed[0])
            named = f"rank {int(culprit[1]) if culprit else 0}: "
            assert all(named in text for text in raised[1:]), what
            assert all(os.strerror(ERRORS[word]) in text for text in raised), what
            if word == "ENOSPC":
                assert all(
                    re.search(r"[\d,]+ bytes are needed and [\d,]+ are free", t) for t in raised
                ), what
            is_put = "is whole and in its place" in raised[0]
            allowed = {3} if is_put else {None} if is_first else {2}
            if broken.for_good:  # what is to be undone can fail as well
                allowed = allowed | {3}
            assert found in allowed, what
        else:
            assert found == 3, what
        place.save(step + 1, 4, world_size)
        assert place.seed() == 4, what
        place.check_is_tidy()
    assert tried > 0.8 * number
    assert said > 0.5 * tried, "what fails tidying up alone is left for the next save"
    torture.saw(
        f"{tried} failing calls ({for_good} times every later one, too), of which {said} were "
        "errors of all ranks; nothing lost"
    )


def names(place: Place) -> list[str]:
    return sorted(
        str(entry.relative_to(place.path.parent)) for entry in place.path.parent.rglob("*")
    )


@pytest.mark.parametrize("is_folder", [False, True])
def test_an_error_in_any_disk_operation_leaves_the_old_checkpoint(
    is_folder: bool, tmp_path: Path, fakes: Any
) -> None:
    """Also between renames: the directory then has the same names as before."""
    told = 0
    for fails_at in itertools.count(1):
        root = tmp_path / str(fails_at)
        root.mkdir()
        place = Place(root, fakes, is_folder=is_folder)
        place.save(1, 1, 1)
        before = names(place)
        broken = FailingDisk(root, fails_at, errno.EIO)
        (said,) = attempt(place, broken, 1, 2, 1)
        if not broken.failed:
            break
        if "is whole and in its place" in said:
            assert place.seed() == 2, broken.failed
        elif said:
            told += 1
            assert (place.seed(), names(place)) == (1, before), broken.failed
        else:
            assert place.seed() == 2, broken.failed
    assert fails_at > 15
    assert told > 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "none", place],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount here")
@pytest.mark.parametrize("is_known_before", [True, False])
def test_a_disk_that_is_full(
    is_known_before: bool, small_disk: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"w": (12_000,)}
    first, second = (fakes.values(seed, length=12_000) for seed in (1, 2))
    folder = CheckpointFolder(small_disk / "run", keep_last=9)

    def save(backend: Any, step: int, values: Any) -> None:
        begin_save(lambda: folder.target(step), fakes.Model(backend, values, shapes)).wait()

    def fail(backend: Any) -> None:
        with pytest.raises(CheckpointError, match=r"[\d,]+ bytes are needed and [\d,]+ are free"):
            save(backend, 3, second)

    save(None, 1, first)
    save(None, 2, first)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(disk.free_bytes(small_disk) - 20_000))
    if not is_known_before:
        monkeypatch.setattr(disk, "free_bytes", lambda _: 1 << 30)
    run_in_threads(2, fail)
    names = sorted(entry.name for entry in folder.path.iterdir())
    assert names == ["latest", "step-00000001", "step-00000002"]
    assert newest_valid(folder.path) == folder.path / "step-00000002"
    ballast.unlink()
    save(None, 3, second)
    assert newest_valid(folder.path) == folder.path / "step-00000003"


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        ("run", r"FileNotFoundError.*No such file or directory: '\S*run'"),
        (".run.*.tmp", r"\.run\.\w+\.tmp was removed while this was written"),
    ],
)
def test_files_that_another_program_removed_are_named(
    removed: str, message: str, tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes the earlier checkpoint or the new one, before both are renamed."""
    model = fakes.Model(None, fakes.values(1, length=12), {"w": (12,)})
    rename = disk.rename

    def late(source: Path, target: Path) -> None:
        for directory in tmp_path.glob(removed):
            shutil.rmtree(directory)
        rename(source, target)

    begin_save(lambda: Target(tmp_path / "run"), model).wait()
    monkeypatch.setattr(disk, "rename", late)
    with pytest.raises(CheckpointError, match=message):
        begin_save(lambda: Target(tmp_path / "run"), model).wait()
