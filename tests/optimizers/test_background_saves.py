"""Saves in the background: their errors, and the end of a run during a save."""

import errno
import threading
import time

import numpy as np
import pytest

import mpishard as ms
from mpishard.checkpoint import CheckpointFolder, newest_valid
from mpishard.checkpoint.format import disk
from mpishard.checkpoint.saving import staging as module
from mpishard.errors import CheckpointError, NonFiniteLossError

SAMPLES = 40
X = np.random.default_rng(0).standard_normal((SAMPLES, 3))


class Inputs:
    """Inputs that call a function at a chosen read."""

    def __init__(self, at, then):
        self.at, self.then = at, then
        self.reads = -1  # one for the check of the first sample

    def __len__(self):
        return SAMPLES

    def __getitem__(self, indices):
        self.reads += 1
        return self.then(X[indices]) if self.reads == self.at else X[indices]


def train(backend, folder, steps=None, strategy="fsdp", **options):
    """Return the result; ``steps`` receives each rank's number of updates, also after an error."""
    model = ms.as_distributed(ms.nn.MLP([3, 4, 1], seed=0), backend, strategy)
    optimizer = ms.as_distributed(ms.optimizers.Adam(1e-3), backend, strategy)
    choices = {"x_train": X, "checkpoint_every": 2, "checkpoint_async": True}
    if isinstance(options.get("x_train"), Inputs):  # a read happens in its own step
        choices["user_state"] = {"none": np.random.default_rng(0)}
    try:
        return optimizer.optimize(
            ms.OptimizationInputData(
                model=model,
                y_train=np.ones((SAMPLES, 1)),
                batch_size=8,
                epochs=4,
                progress=False,
                checkpoint=folder,
                **(choices | options),
            )
        )
    finally:
        if steps is not None:
            steps[backend.rank] = optimizer.steps


@pytest.fixture
def slow_disk(monkeypatch):
    """A slow disk, which records each write that it begins."""
    begun = []
    write = disk.write_file

    def slow(file, parts):
        if file.suffix == ".safetensors":
            begun.append(file)
            parts = list_slowly(parts)
        write(file, parts)

    def list_slowly(parts):
        for part in parts:
            time.sleep(0.01)
            yield part

    monkeypatch.setattr(disk, "write_file", slow)
    return begun


def writers():
    return [t for t in threading.enumerate() if t.name == "mpishard-checkpoint"]


def test_a_rank_that_cannot_write_ends_all_at_the_same_step(tmp_path, monkeypatch):
    write = disk.write_file
    saves = []

    def fails(file, parts):
        if file.name == "rank00001.safetensors":
            saves.append(file)
            if len(saves) == 3:
                raise OSError(errno.EIO, "Input/output error")
        write(file, parts)

    monkeypatch.setattr(disk, "write_file", fails)
    steps, errors = {}, {}

    def main(backend):
        try:
            train(backend, tmp_path / "run", steps)
        except CheckpointError as error:
            errors[backend.rank] = str(error)

    ms.run_in_threads(3, main)
    assert sorted(errors) == [0, 1, 2]
    assert all("rank 1: OSError: [Errno 5] Input/output error" in e for e in errors.values())
    assert len(set(steps.values())) == 1
    assert 6 <= steps[0] <= 8  # the ranks learn of the third save, after step 6, before the next
    assert [entry.step for entry in CheckpointFolder(tmp_path / "run").entries()] == [4, 2]
    assert not writers()


def test_the_run_waits_for_its_last_save(tmp_path, slow_disk):
    ms.run_in_threads(2, train, tmp_path / "run")
    assert newest_valid(tmp_path / "run").name == "step-00000020"
    assert not writers()


def test_early_stopping_waits_for_the_last_save(tmp_path, slow_disk):
    data = {"x_validation": X[:5], "y_validation": -np.ones((5, 1)), "validate_every": 3}
    result = ms.run_in_threads(2, train, tmp_path / "run", patience=1, **data)[0]
    assert result.stopped_early
    assert newest_valid(tmp_path / "run").name == f"step-{result.iterations:08d}"
    assert not writers()


def test_an_error_on_all_ranks_completes_the_save_under_way(tmp_path, slow_disk):
    def main(backend):
        bad = Inputs(3, lambda x: x * np.nan)  # the third step, while what the second left is saved
        with pytest.raises(NonFiniteLossError):
            train(backend, tmp_path / "run", x_train=bad)

    ms.run_in_threads(2, main)
    assert len(slow_disk) == 2
    assert newest_valid(tmp_path / "run").name == "step-00000002"
    assert not writers()


def test_a_save_that_fails_before_a_step_ends_is_raised_in_that_step(tmp_path, monkeypatch):
    def fails(file, parts):
        raise OSError(errno.EIO, "Input/output error")

    def wait_for_writers(x):
        for writer in writers():
            if writer.is_alive():  # the other rank's may not have been started quite
                writer.join(20)
        return x

    monkeypatch.setattr(disk, "write_file", fails)
    steps = {}

    def main(backend):
        inputs = Inputs(4, wait_for_writers)  # of the step after the first save
        with pytest.raises(CheckpointError, match=r"rank 0: .* rank 1: "):
            train(backend, tmp_path / "run", steps, x_train=inputs, checkpoint_every=3)

    ms.run_in_threads(2, main)
    assert steps == {0: 4, 1: 4}


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_the_memory_for_copies_is_taken_once_before_training(tmp_path, monkeypatch, strategy):
    """The run also saves the best parameters, of which there are none at first."""
    events = []
    touched = module._touched_memory

    def take(nbytes):
        events.append(nbytes)
        return touched(nbytes)

    def step(x):
        events.append("step")
        return x

    monkeypatch.setattr(module, "_touched_memory", take)
    data = {"x_validation": X[:5], "y_validation": np.ones((5, 1)), "patience": 20}
    inputs = [Inputs(1, step) for _ in range(2)]
    ms.run_in_threads(
        2, lambda b: train(b, tmp_path / "run", strategy=strategy, x_train=inputs[b.rank], **data)
    )
    assert events[2:] == ["step", "step"]
    # Parameters, two moments and the best parameters: 21 numbers of 8 bytes, and what aligns them.
    assert 4 * 21 * 8 <= sum(events[:2]) < 4 * 21 * 8 + 2 * 4 * 4 * 64


class OneRankError(Exception):
    pass


def test_an_error_on_one_rank_abandons_the_save_under_way(tmp_path, slow_disk):
    def fail(_):
        raise OneRankError

    def main(backend):
        train(backend, tmp_path / "run", x_train=Inputs(4 if backend.rank == 1 else -1, fail))

    with pytest.raises(OneRankError):
        ms.run_in_threads(2, main)
    assert not writers()
    entries = CheckpointFolder(tmp_path / "run").entries()
    assert [(entry.step, entry.problem) for entry in entries] in ([], [(2, "")])
    result = ms.run_in_threads(2, train, tmp_path / "run")[0]
    assert result.iterations == 20
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"latest", "step-00000018", "step-00000020"}  # nothing is left of the other
