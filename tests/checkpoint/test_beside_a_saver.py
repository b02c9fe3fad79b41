"""Loads while another job saves to the same path: one complete save, or an error on all ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpishard import checkpoint, run_in_threads
from mpishard.checkpoint.format.folder import previous_of
from mpishard.checkpoint.loading.reader import CheckpointReader, find_checkpoint
from mpishard.errors import CheckpointError
from mpishard.testing.worlds import in_worlds

STEPS = {step: np.full(13, float(step)) for step in range(5)}


def save(fakes: Any, path: Path, step: int) -> None:
    optimizer = fakes.Optimizer(None, {"m": STEPS[step % 5]}, step)
    checkpoint.save(path, fakes.Model(None, STEPS[step % 5]), optimizer, metadata={"step": step})


def load(backend: Any, fakes: Any, path: Path) -> int:
    """Load; the step of the save, which all that was loaded belongs to."""
    model = fakes.Model(backend, np.full(13, -1.0))
    optimizer = fakes.Optimizer(backend, {"m": np.full(13, -1.0)})
    step = checkpoint.load(path, model, optimizer)["step"]
    assert model.equals({"parameters": STEPS[step % 5]})
    assert optimizer.equals({"optimizer/m": STEPS[step % 5]})
    assert optimizer.metadata == {"step": step}
    return int(step)


@pytest.fixture
def replaced(monkeypatch: Any, fakes: Any) -> Any:
    """Have a rank save over the checkpoint that it is about to check, so many times."""
    saves: dict[str, int] = {}

    def begin(path: Path, times: int) -> None:
        saves.update(left=times, step=0, thread=threading.get_ident())
        require = CheckpointReader.require

        def save_first(reader: CheckpointReader, *arguments: Any) -> None:
            if saves["left"] > 0 and saves["thread"] == threading.get_ident():
                saves["left"] -= 1
                saves["step"] += 1
                save(fakes, path, saves["step"])
            require(reader, *arguments)

        monkeypatch.setattr(CheckpointReader, "require", save_first)

    return begin


@pytest.mark.parametrize("times", [1, 2])
@in_worlds(1, 2, 3)
def test_a_checkpoint_that_is_replaced_is_read_again(
    backend: Any, times: int, replaced: Any, fakes: Any, shared_path: Path
) -> None:
    path = shared_path / "c"
    if backend.rank == 0:
        save(fakes, path, 0)
        replaced(path, times)
    backend.barrier()
    steps = backend.all_gather(np.array([load(backend, fakes, path)]))
    assert (steps == times).all()


@in_worlds(1, 2)
def test_a_checkpoint_that_is_replaced_at_each_read_is_an_error_on_all_ranks(
    backend: Any, replaced: Any, fakes: Any, shared_path: Path
) -> None:
    path = shared_path / "c"
    if backend.rank == 0:
        save(fakes, path, 0)
        replaced(path, 3)
    backend.barrier()
    model = fakes.Model(backend, STEPS[4])
    with pytest.raises(CheckpointError, match="was replaced while it was read"):
        checkpoint.load(path, model)
    assert model.equals({"parameters": STEPS[4]})
    backend.barrier()
    assert load(backend, fakes, path) == 3


def test_load_arrays_reads_a_replaced_checkpoint_again(
    fakes: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    path = tmp_path / "c"
    save(fakes, path, 0)
    read_whole = CheckpointReader.read_whole
    steps = iter([1, 2])

    def save_first(reader: CheckpointReader, *arguments: Any) -> Any:
        for step in steps:
            save(fakes, path, step)
            break
        return read_whole(reader, *arguments)

    monkeypatch.setattr(CheckpointReader, "read_whole", save_first)
    arrays = checkpoint.load_arrays(path)
    assert {float(value) for array in arrays.values() for value in array.ravel()} == {2.0}


def test_other_damage_is_reported_at_once(fakes: Any, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "c"
    save(fakes, path, 0)
    file = path / "rank00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    looks = []
    require = CheckpointReader.require
    monkeypatch.setattr(
        CheckpointReader, "require", lambda *args: (looks.append(1), require(*args))[1]
    )
    with pytest.raises(CheckpointError, match="somebody, changed them"):
        load(None, fakes, path)
    assert len(looks) == 1


@pytest.mark.parametrize("looks", [1, 2])
def test_a_save_that_ends_during_the_search_is_found(
    fakes: Any, tmp_path: Path, monkeypatch: Any, looks: int
) -> None:
    path, left = tmp_path / "c", [looks]
    save(fakes, path, 0)
    path.rename(previous_of(path))  # as between the two renames of a save
    look = Path.is_file

    def look_and_end(asked: Path) -> bool:
        found = look(asked)
        left[0] -= 1
        if left[0] == 0 and previous_of(path).exists():
            previous_of(path).rename(path)
        return found

    monkeypatch.setattr(Path, "is_file", look_and_end)
    assert find_checkpoint(path) == path


def test_many_loads_beside_a_saver(fakes: Any, tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(fakes, path, 0)
    ends = threading.Event()

    def keep_saving() -> None:
        step = 1
        while not ends.wait(0.05):  # longer than three loads take
            save(fakes, path, step)
            step += 1

    def keep_loading(backend: Any) -> list[int]:
        steps = [0]
        while steps[-1] < 15:
            steps.append(load(backend, fakes, path))
        return steps

    saver = threading.Thread(target=keep_saving)
    saver.start()
    try:
        first, second = run_in_threads(2, keep_loading)
    finally:
        ends.set()
        saver.join()
    assert first == second == sorted(first)
