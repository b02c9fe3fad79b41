"""Each sample is seen once an epoch, for any number of kills and ranks.

Counted is the history that the surviving checkpoints continue: what a killed run did after its last
checkpoint is no part of it.
"""

import os

import numpy as np
import pytest

import mpishard as ms
from mpishard.checkpoint import CheckpointFolder

KILLS = 12 if os.environ.get("MPISHARD_TEST_FULL") else 4
SAMPLES, BATCH, EPOCHS = 43, 10, 3
X = np.random.default_rng(0).standard_normal((SAMPLES, 3))


class KilledError(Exception):
    """The error that ends a run."""


class Recorded(np.memmap):  # the one subclass of ndarray that is not refused
    """Samples that record their reads; the n-th read kills the run."""

    def __new__(cls, samples, reads):
        made = X[samples].view(cls)
        made.samples, made.left, made.reads = samples, reads, []
        return made

    def __getitem__(self, indices):
        if self.left == 0:
            raise KilledError
        self.left -= 1
        self.reads.append(self.samples[indices])
        return np.asarray(self)[indices]


def attempt(world_size, folder, samples_of, killed, reads, **options):
    """Steps of one attempt, by number -> the samples that each rank took; whether it ended."""
    entries = CheckpointFolder(folder).entries()
    first = entries[0].step if entries else 0
    # The first read is that of the check before the run.
    inputs = [
        Recorded(samples_of(rank, world_size), reads + 1 if rank == killed else -1)
        for rank in range(world_size)
    ]

    def train(backend):
        model = ms.as_distributed(ms.nn.MLP([3, 2, 1], seed=0), backend, "fsdp")
        optimizer = ms.as_distributed(ms.optimizers.SGD(1e-2), backend, "fsdp")
        mine = inputs[backend.rank]
        optimizer.optimize(
            ms.OptimizationInputData(
                model=model,
                x_train=mine,
                y_train=np.ones((len(mine), 1)),
                batch_size=BATCH,
                epochs=EPOCHS,
                checkpoint=folder,
                progress=False,
                **options,
            )
        )

    try:
        ms.run_in_threads(world_size, train)
    except KilledError:
        has_ended = False
    else:
        has_ended = True
    steps = {
        first + number: [own.reads[1 + number] for own in inputs]
        for number in range(min(len(own.reads) for own in inputs) - 1)
    }
    return steps, has_ended


def history(generator, folder, world_sizes, samples_of, **options):
    """Return the samples of each step in the order of the checkpoints of all attempts."""
    surviving = {}
    for number in range(100):
        world_size = int(generator.choice(world_sizes))
        reads = int(generator.integers(1, 9)) if number < KILLS else -1
        killed = int(generator.integers(world_size)) if number < KILLS else None
        steps, has_ended = attempt(world_size, folder, samples_of, killed, reads, **options)
        surviving |= steps
        if has_ended:
            return [np.concatenate(surviving[step]) for step in sorted(surviving)]
    raise AssertionError("the run never ended")


@pytest.mark.parametrize("checkpoint_async", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_each_sample_is_seen_once_an_epoch(tmp_path, shuffle, drop_last, checkpoint_async):
    generator = np.random.default_rng(100 * shuffle + 10 * drop_last + checkpoint_async)
    steps = history(
        generator, tmp_path / "run", [1, 2, 3, 4], lambda *_: np.arange(SAMPLES),
        shuffle=shuffle, drop_last=drop_last, checkpoint_async=checkpoint_async,
        checkpoint_every=int(generator.integers(1, 5)),
    )  # fmt: skip
    per_epoch = SAMPLES // BATCH + (not drop_last)
    assert len(steps) == EPOCHS * per_epoch
    for epoch in range(EPOCHS):
        seen = np.concatenate(steps[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert len(seen) == (SAMPLES - SAMPLES % BATCH if drop_last else SAMPLES)
        assert len(set(seen.tolist())) == len(seen)


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_sample_of_each_rank_is_seen_once_an_epoch(tmp_path, world_size):
    bounds = [0, 5, 29, SAMPLES] if world_size == 3 else [0, 29, SAMPLES]

    def samples_of(rank, _):
        return np.arange(bounds[rank], bounds[rank + 1])

    steps = history(
        np.random.default_rng(world_size), tmp_path / "run", [world_size], samples_of,
        local_data=True, checkpoint_every=3,
    )  # fmt: skip
    per_epoch = len(steps) // EPOCHS
    for epoch in range(EPOCHS):
        seen = np.concatenate(steps[epoch * per_epoch : (epoch + 1) * per_epoch])
        assert sorted(seen.tolist()) == list(range(SAMPLES))
