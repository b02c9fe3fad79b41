"""Removal of the files that a job leaves in shared memory, and of no others."""

import mmap
import os
from pathlib import Path

import pytest

from mpishard.cli.run.shared_memory import remove_shared_memory
from mpishard.communication.contract.status import StatusPage

FOLDER = Path("/dev/shm")

pytestmark = pytest.mark.skipif(not os.access(FOLDER, os.W_OK), reason="no /dev/shm")


@pytest.fixture
def shared():
    made = []

    def make(name):
        path = FOLDER / f"mpich_shm_test_{os.getpid()}_{name}"
        path.write_bytes(bytes(4096))
        made.append(path)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def test_only_what_the_ranks_had_and_nobody_has(shared, tmp_path):
    left, used, others = shared("left"), shared("used"), shared("others")
    elsewhere = tmp_path / "file"
    elsewhere.write_text("")
    link = FOLDER / f"{left.name}.link"
    link.symlink_to(elsewhere)
    first, second = StatusPage(0, 2), StatusPage(1, 2)
    gone = FOLDER / "mpich_shm_that_is_gone"
    first.note_shared_memory([str(path) for path in (left, used, elsewhere, link, gone)])
    second.note_shared_memory([str(left)])
    try:
        with used.open("r+b") as handle, mmap.mmap(handle.fileno(), 0):
            assert remove_shared_memory([first.read(), second.read()]) == [left]
        assert not left.exists()
        assert all(path.exists() for path in (used, others, elsewhere))
        assert link.is_symlink()
        assert remove_shared_memory([first.read()]) == [used]
    finally:
        link.unlink()


def test_files_of_others_stay(shared, monkeypatch):
    path, page = shared("theirs"), StatusPage(0, 1)
    page.note_shared_memory([str(path)])
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert remove_shared_memory([page.read()]) == []
    assert path.exists()
