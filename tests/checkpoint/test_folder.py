"""A folder of checkpoints: what stays, which is the newest, and which is gone on from."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpishard import checkpoint, run_in_threads
from mpishard.checkpoint import CheckpointFolder, StagingBuffer, newest_valid
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.saving.save import begin_save
from mpishard.errors import CheckpointError, PeerError
from mpishard.sharding import Region


def save(folder: CheckpointFolder, fakes: Any, *steps: int, backend: Any = None) -> None:
    for step in steps:
        model = fakes.Model(backend, fakes.values(step))
        begin_save(lambda step=step: folder.target(step), model).wait()  # type: ignore[misc]


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_folder_keeps_the_last_checkpoints_and_every_nth(tmp_path: Path, fakes: Any) -> None:
    folder = CheckpointFolder(tmp_path / "run", keep_last=2, keep_every=4)
    for step in range(1, 11):
        run_in_threads(2, lambda b, s=step: save(folder, fakes, s, backend=b))
        assert (tmp_path / "run" / "latest").read_text() == f"step-{step:08d}\n"
    assert names(tmp_path / "run") == [
        "latest",
        "step-00000004",
        "step-00000008",
        "step-00000009",
        "step-00000010",
    ]
    assert [entry.step for entry in folder.entries()] == [10, 9, 8, 4]
    assert newest_valid(tmp_path / "run") == tmp_path / "run" / "step-00000010"


def test_reading_a_folder_reads_its_newest_checkpoint(tmp_path: Path, fakes: Any) -> None:
    save(CheckpointFolder(tmp_path), fakes, 3, 7)
    model = fakes.Model(None, np.zeros(fakes.LENGTH))
    checkpoint.load(tmp_path, model)
    assert model.equals({"parameters": fakes.values(7)})
    assert checkpoint.check(tmp_path).path.name == "step-00000007"


def test_after_going_back_in_steps_the_last_save_is_the_newest(tmp_path: Path, fakes: Any) -> None:
    """A run that goes on from step 2 after one that came to 9: its own are the newest."""
    save(CheckpointFolder(tmp_path, keep_last=3), fakes, 2, 9, 4)
    assert [entry.step for entry in CheckpointFolder(tmp_path).entries()] == [4, 9, 2]
    assert newest_valid(tmp_path) == tmp_path / "step-00000004"


def test_unreadable_checkpoints_are_not_counted_among_those_to_keep(
    tmp_path: Path, fakes: Any
) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=2)
    save(folder, fakes, 1, 2)
    (tmp_path / "step-00000002" / "rank00000.safetensors").write_bytes(b"torn")
    save(folder, fakes, 3)
    assert [entry.step for entry in folder.entries() if not entry.problem] == [3, 1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_newest_valid_skips_damaged_checkpoints_and_warns(
    world_size: int, tmp_path: Path, fakes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save(CheckpointFolder(tmp_path, keep_last=4), fakes, 1, 2, 3, 4)
    flip(tmp_path / "step-00000004" / "rank00000.safetensors")
    (tmp_path / "step-00000003" / "manifest.json").write_text("{")
    with caplog.at_level(logging.WARNING, "mpishard"):
        found = run_in_threads(world_size, lambda b: newest_valid(tmp_path, b))
    assert found == [tmp_path / "step-00000002"] * world_size
    (record,) = caplog.records
    assert "step-00000004: " in record.message
    assert "do not have the checksum" in record.message

    for step in (1, 2):
        flip(tmp_path / f"step-0000000{step}" / "rank00000.safetensors")

    def fail(backend: Any) -> None:
        with pytest.raises(CheckpointError, match=r"none of .*step-00000004: .*step-00000003: "):
            newest_valid(tmp_path, backend)

    run_in_threads(world_size, fail)


def test_newest_valid_names_newer_checkpoints_that_are_torn(
    tmp_path: Path, fakes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if the lengths of the files, or the manifest, show the damage."""
    save(CheckpointFolder(tmp_path, keep_last=9), fakes, 1, 2, 3, 4)
    (tmp_path / "step-00000001" / "manifest.json").unlink()  # older: nobody misses it
    (tmp_path / "step-00000003" / "manifest.json").write_text("{")
    (tmp_path / "step-00000004" / "rank00000.safetensors").write_bytes(b"torn")
    with caplog.at_level(logging.WARNING, "mpishard"):
        assert newest_valid(tmp_path) == tmp_path / "step-00000002"
    (record,) = caplog.records
    assert "step-00000004: rank00000.safetensors has 4 of " in record.message
    assert "step-00000003: manifest.json: it is not JSON" in record.message
    assert "step-00000001" not in record.message


def test_newest_valid_is_none_without_a_checkpoint(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "nothing") is None
    assert newest_valid(tmp_path) is None


def test_a_save_that_was_killed_between_its_renames(tmp_path: Path, fakes: Any) -> None:
    save(CheckpointFolder(tmp_path), fakes, 5)
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.previous")
    assert newest_valid(tmp_path) == tmp_path / "step-00000005.previous"
    checkpoint.check(tmp_path)
    save(CheckpointFolder(tmp_path), fakes, 5)
    assert names(tmp_path) == ["latest", "step-00000005"]


def test_a_save_renames_the_checkpoint_that_a_killed_save_moved_aside(
    tmp_path: Path, fakes: Any
) -> None:
    save(CheckpointFolder(tmp_path), fakes, 5)
    (tmp_path / "step-00000005").rename(tmp_path / "step-00000005.previous")
    save(CheckpointFolder(tmp_path), fakes, 6)
    assert names(tmp_path) == ["latest", "step-00000005", "step-00000006"]
    assert [entry.step for entry in CheckpointFolder(tmp_path).entries()] == [6, 5]


def test_files_of_killed_saves_are_removed(tmp_path: Path, fakes: Any) -> None:
    shutil.copytree(Path(__file__).parent, tmp_path / ".step-00000003.0123456789abcdef.tmp")
    (tmp_path / "mine").mkdir()
    save(CheckpointFolder(tmp_path), fakes, 5)
    assert names(tmp_path) == ["latest", "mine", "step-00000005"]


def test_wrong_arguments(tmp_path: Path, fakes: Any) -> None:
    with pytest.raises(ValueError, match="keep_last must be 1 or more, got 0"):
        CheckpointFolder(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match="keep_every must be 1 or more, got -2"):
        CheckpointFolder(tmp_path, keep_every=-2)
    with pytest.raises(ValueError, match="blank"):
        CheckpointFolder(" ")
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        CheckpointFolder(tmp_path).target(-1)
    checkpoint.save(tmp_path / "one", fakes.Model(None, fakes.values(1)))
    with pytest.raises(CheckpointError, match="one is a single checkpoint"):
        CheckpointFolder(tmp_path / "one").target(1)


def test_a_full_disk_is_reported_before_anything_is_written(
    tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(CheckpointFolder(tmp_path), fakes, 1)
    monkeypatch.setattr(disk, "free_bytes", lambda _: 100)

    def fail(backend: Any) -> None:
        with pytest.raises(CheckpointError, match=r"[\d,]+ bytes are needed and 100 are free"):
            save(CheckpointFolder(tmp_path), fakes, 2, backend=backend)

    run_in_threads(2, fail)
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_a_save_in_the_background_writes_the_state_at_its_start(
    tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training changes the arrays while they are written, and the checkpoint has the old values."""

    def train(backend: Any) -> None:
        model = fakes.Model(backend, fakes.values(1))
        staging = StagingBuffer()
        for seed in (2, 3):
            pending = checkpoint.save_async(
                tmp_path / "c", model, metadata={"seed": seed - 1}, staging=staging
            )
            other = fakes.Model(backend, fakes.values(seed))
            for own, new in zip(
                model.pieces["parameters"], other.pieces["parameters"], strict=True
            ):
                own[1][...] = new[1]
            while not pending.poll():
                backend.barrier()
            assert pending.done
            assert pending.poll()
        assert staging.nbytes

    run_in_threads(3, train)
    loaded = fakes.Model(None, np.zeros(fakes.LENGTH))
    assert checkpoint.load(tmp_path / "c", loaded) == {"seed": 2}
    assert loaded.equals({"parameters": fakes.values(2)})


def test_a_poll_waits_for_no_rank_that_has_not_come_to_it(tmp_path: Path, fakes: Any) -> None:
    """Rank 1 comes to each poll when rank 0 has left it."""
    has_left, has_followed = threading.Semaphore(0), threading.Semaphore(0)

    def train(backend: Any) -> int:
        pending = checkpoint.save_async(tmp_path / "c", fakes.Model(backend, fakes.values(1)))
        polls = 0
        while not pending.done:
            if backend.rank == 1:
                assert has_left.acquire(timeout=20), f"rank 0 waits in poll {polls}"
            pending.poll()
            polls += 1
            if backend.rank == 0:
                has_left.release()
                assert has_followed.acquire(timeout=20)
            else:
                has_followed.release()
        return polls

    assert len(set(run_in_threads(2, train))) == 1
    loaded = fakes.Model(None, np.zeros(fakes.LENGTH))
    checkpoint.load(tmp_path / "c", loaded)
    assert loaded.equals({"parameters": fakes.values(1)})


def test_a_save_that_lost_a_rank_raises_the_same_error_at_each_call(
    tmp_path: Path, fakes: Any
) -> None:
    told: list[str] = []
    has_polled = threading.Event()

    def train(backend: Any) -> None:
        pending = checkpoint.save_async(tmp_path / "c", fakes.Model(backend, fakes.values(1)))
        pending.poll()
        if backend.rank == 1:
            assert has_polled.wait(20)
            raise ValueError("boom")
        has_polled.set()
        for ask in (pending.wait, pending.poll, pending.wait):
            with pytest.raises(PeerError) as caught:
                ask()
            told.append(str(caught.value))

    with pytest.raises(ValueError, match="boom"):
        run_in_threads(2, train)
    assert len(told) == 3
    assert all("rank 1 failed" in words for words in told)


def test_all_ranks_raise_an_error_in_the_background_at_the_same_poll(
    tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk.write_file

    def full_disk(file: Path, parts: Any) -> None:
        if "rank00001" in file.name or "rank00002" in file.name:
            raise OSError(5, "Input/output error")
        real(file, parts)

    monkeypatch.setattr(disk, "write_file", full_disk)

    def train(backend: Any) -> int:
        pending = checkpoint.save_async(tmp_path / "c", fakes.Model(backend, fakes.values(1)))
        for poll in range(10_000):
            try:
                assert not pending.poll()
            except CheckpointError as error:
                assert "rank 1: OSError: [Errno 5]" in str(error)  # noqa: PT017
                assert "rank 2: OSError: [Errno 5]" in str(error)  # noqa: PT017
                return poll
            backend.barrier()
        raise AssertionError("nobody heard of it")

    assert len(set(run_in_threads(3, train))) == 1
    assert names(tmp_path) == []


def test_damaged_checkpoints_are_not_counted_among_those_to_keep(
    tmp_path: Path, fakes: Any
) -> None:
    """A run that goes on from the one before a damaged one keeps that, and not the damaged one."""
    folder = CheckpointFolder(tmp_path, keep_last=2)
    save(folder, fakes, 4, 6)
    flip(tmp_path / "step-00000006" / "rank00000.safetensors")
    assert newest_valid(folder) == tmp_path / "step-00000004"
    save(folder, fakes, 5)
    assert [entry.step for entry in folder.entries() if not entry.problem] == [5, 4]
    assert newest_valid(tmp_path) == tmp_path / "step-00000005"


def test_directories_with_files_of_other_programs_are_not_removed(
    tmp_path: Path, fakes: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = CheckpointFolder(tmp_path, keep_last=1)
    save(folder, fakes, 1)
    (tmp_path / "step-00000001" / "notes.txt").write_text("precious")
    with caplog.at_level(logging.WARNING, "mpishard"):
        save(folder, fakes, 2)
    assert (tmp_path / "step-00000001" / "notes.txt").read_text() == "precious"
    assert "is not removed, because it holds notes.txt" in caplog.text


def test_a_staging_buffer_holds_one_save(tmp_path: Path, fakes: Any) -> None:
    model, staging = fakes.Model(None, fakes.values(1)), StagingBuffer()
    pending = checkpoint.save_async(tmp_path / "a", model, staging=staging)
    pending._task.join(60.0)
    staging.copies([])
    with pytest.raises(ValueError, match="still being written"):
        checkpoint.save_async(tmp_path / "b", model, staging=staging)
    staging.give_back()
    pending.wait()
    checkpoint.save_async(tmp_path / "b", model, staging=staging).wait()
    checkpoint.check(tmp_path / "a")
    checkpoint.check(tmp_path / "b")


def test_a_second_save_to_the_same_place_ends_the_first_and_says_so(
    tmp_path: Path, fakes: Any
) -> None:
    def body(backend: Any) -> None:
        model = fakes.Model(backend, fakes.values(1))
        first, second = (checkpoint.save_async(tmp_path / "c", model) for _ in range(2))
        with pytest.raises(CheckpointError, match="another save"):
            first.wait()
        second.wait()

    run_in_threads(2, body)
    checkpoint.check(tmp_path / "c")


@pytest.mark.parametrize("world_size", [1, 2])
def test_loading_a_folder_takes_the_newest_that_verifies(
    world_size: int, tmp_path: Path, fakes: Any
) -> None:
    save(CheckpointFolder(tmp_path), fakes, 1, 2)
    flip(tmp_path / "step-00000002" / "rank00000.safetensors")

    def load(backend: Any) -> None:
        model = fakes.Model(backend, np.zeros(fakes.LENGTH))
        checkpoint.load(tmp_path, model)
        assert model.equals({"parameters": fakes.values(1)})

    run_in_threads(world_size, load)


def test_ranks_load_what_rank_0_names(tmp_path: Path, fakes: Any) -> None:
    for seed in (0, 1):
        checkpoint.save(tmp_path / str(seed), fakes.Model(None, fakes.values(seed)))

    def load(backend: Any) -> None:
        model = fakes.Model(backend, np.zeros(fakes.LENGTH))
        checkpoint.load(tmp_path / str(backend.rank), model)
        assert model.equals({"parameters": fakes.values(0)})

    run_in_threads(2, load)


def test_a_damaged_one_changes_nothing(
    tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the damage is behind the blocks that are read first, and only one rank reads it."""
    run_in_threads(2, lambda b: checkpoint.save(tmp_path / "c", fakes.Model(b, fakes.values(1))))
    flip(tmp_path / "c" / "rank00001.safetensors")

    def load(backend: Any) -> None:
        model = fakes.Model(backend, fakes.values(7))
        with pytest.raises(CheckpointError, match="rank00001"):
            checkpoint.load(tmp_path / "c", model)
        assert model.equals({"parameters": fakes.values(7)})

    run_in_threads(2, load)


def test_a_manifest_that_nobody_could_read_is_not_written(
    tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = CheckpointFolder(tmp_path)
    save(folder, fakes, 1)
    monkeypatch.setattr("mpishard.checkpoint.format.manifest._LONGEST", 3000)
    model = fakes.Model(None, fakes.values(2))
    with pytest.raises(CheckpointError, match=r"manifest takes \d+ bytes, and 3000 are the most"):
        begin_save(lambda: folder.target(2), model, metadata={"long": "x" * 3000}).wait()
    assert newest_valid(tmp_path) == tmp_path / "step-00000001"


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, fakes: Any) -> None:
    """An error, and no SIGBUS, which a look at its map would be."""
    checkpoint.save(tmp_path / "c", fakes.Model(None, fakes.values(1)))
    reader = checkpoint.CheckpointReader(tmp_path / "c")
    reader._open("rank00000.safetensors")
    (tmp_path / "c" / "rank00000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="it ends at byte 0"):
        reader.read("parameters", Region.whole("a.weight", (3, 2)), np.empty(6))
    reader.close()


def test_a_parent_that_is_a_file(tmp_path: Path, fakes: Any) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(CheckpointError, match=r"f is a file, and .*f/c cannot be in it"):
        checkpoint.save(tmp_path / "f" / "c", fakes.Model(None, fakes.values(1)))


def test_another_save_to_the_same_place(
    tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk.write_file

    def lose(file: Path, parts: Any) -> None:
        shutil.rmtree(file.parent)
        real(file, parts)

    monkeypatch.setattr(disk, "write_file", lose)
    with pytest.raises(CheckpointError, match="does another job, or another save, write to the"):
        checkpoint.save(tmp_path / "c", fakes.Model(None, fakes.values(1)))


def test_a_staging_buffer_is_given_back_if_a_save_fails(
    tmp_path: Path, fakes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = StagingBuffer()
    with monkeypatch.context() as patch:
        lost = "mpishard.checkpoint.saving.free_space.path_from"
        patch.setattr(lost, lambda text: Path(text) / "nowhere")
        pending = checkpoint.save_async(
            tmp_path / "a", fakes.Model(None, fakes.values(1)), staging=staging
        )
        with pytest.raises(CheckpointError, match="is not there"):
            pending.wait()
    checkpoint.save_async(
        tmp_path / "b", fakes.Model(None, fakes.values(2)), staging=staging
    ).wait()
    checkpoint.check(tmp_path / "b")


def test_staging_copies_arrays_that_are_end_to_end_and_others():
    wide, narrow = np.arange(100.0), np.arange(50, dtype=np.float32)
    arrays = [wide[3:10], wide[10:33], wide[40:41], narrow[:7], narrow[7:20], wide[41:60]]
    arrays.append(wide.view(np.int64)[60:70])  # behind the one before, and of another dtype
    wanted = [array.tobytes() for array in arrays]
    copies = StagingBuffer().copies(arrays)
    wide[...], narrow[...] = -1, -1
    assert [copy.tobytes() for copy in copies] == wanted
    assert [copy.dtype for copy in copies] == [array.dtype for array in arrays]
