"""Epochs of a loader are the same on every rank, also if one rank alone reads batches."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpishard.errors import ShardingError
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import numpy as np  # noqa: E402

import mpishard.torch as mst  # noqa: E402

SAMPLES, BATCH = 24, 6
STEPS = SAMPLES // BATCH


def start(strategy: str = "fsdp") -> tuple[Any, Callable[[], None]]:
    """A loader whose samples are their numbers, and a function that makes a step."""
    mst.init()
    loader = mst.DataLoader(list(range(SAMPLES)), BATCH, shuffle=True, seed=3)
    model = mst.shard(torch.nn.Linear(2, 1), strategy)

    def step() -> None:
        model(torch.ones(1, 2)).sum().backward()

    step()  # Looks of an earlier test, which one rank has made alone, end here.
    return loader, step


def order(epoch: int) -> list[int]:
    """The samples of an epoch in one process."""
    alone = torch.utils.data.DistributedSampler(range(SAMPLES), 1, 0, seed=3)
    alone.set_epoch(epoch)
    return list(alone)


def own(backend: Any, epoch: int, batches: slice = slice(None)) -> list[list[int]]:
    """This rank's part of some batches of an epoch."""
    cut = [order(epoch)[start : start + BATCH] for start in range(0, SAMPLES, BATCH)]
    return [batch[backend.rank :: backend.world_size] for batch in cut[batches]]


def train(loader: Any, step: Callable[[], None]) -> Iterator[list[int]]:
    for batch in loader:
        step()
        yield batch.tolist()


# Each look is a generator function of the loader: it is resumed before the first epoch, after each
# step, and after each epoch. Only rank 0 makes it.
def takes_a_batch(loader: Any) -> Iterator[None]:
    while True:
        next(iter(loader))
        yield


def counts_the_batches(loader: Any) -> Iterator[None]:
    while True:
        assert len(list(loader)) == STEPS
        yield


def takes_three_batches(loader: Any) -> Iterator[None]:
    while True:
        for _ in itertools.islice(loader, 3):
            pass
        yield


def keeps_the_iterator(loader: Any) -> Iterator[None]:
    while True:
        kept = iter(loader)
        next(kept)
        yield
        del kept


def goes_on_with_an_iterator(loader: Any) -> Iterator[None]:
    while True:
        for _ in loader:
            yield


LOOKS = [
    takes_a_batch,
    counts_the_batches,
    takes_three_batches,
    keeps_the_iterator,
    goes_on_with_an_iterator,
]


@pytest.mark.parametrize("look", LOOKS)
@in_worlds(2, 3)
def test_looks_of_one_rank_change_no_epoch(backend, look):
    loader, step = start()
    looks = look(loader) if backend.rank == 0 else itertools.repeat(None)
    next(looks)
    for epoch in range(4):
        seen = []
        for batch in train(loader, step):
            seen.append(batch)
            next(looks)
        assert seen == own(backend, epoch)
        assert loader.epoch == epoch + 1
        next(looks)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(1, 2)
def test_a_pass_that_ends_early_was_an_epoch(backend, strategy):
    loader, step = start(strategy)
    for epoch, stop in enumerate([1, 2, 1, STEPS, 1]):
        seen = []
        for batch in train(loader, step):
            seen.append(batch)
            if len(seen) == stop:
                break
        assert seen == own(backend, epoch, slice(stop))


@in_worlds(1, 2)
def test_a_look_before_a_pass_that_ends_early_changes_no_epoch(backend):
    loader, step = start()
    for epoch in range(3):
        for number, batch in enumerate(loader):
            if backend.rank == 0 and number == 2:
                next(iter(loader))
            step()
            assert batch.tolist() == own(backend, epoch)[number]
            if number == 2:
                break


@in_worlds(1, 2, 3)
def test_a_new_pass_for_every_step_gives_another_batch_each_time(backend):
    loader, step = start()
    other = mst.DataLoader(list(range(SAMPLES)), BATCH, shuffle=True)
    for epoch in range(4):
        # Rank 0 looks alone in one of the steps. The ranks then agree to use the batch again.
        for has_looked in [True, False] if epoch == 2 and backend.world_size > 1 else [False]:
            assert next(iter(loader)).tolist() == own(backend, epoch)[0]
            if backend.rank == 0 and has_looked:
                next(iter(other))
            step()


@in_worlds(1, 2)
def test_one_step_for_all_batches_of_a_pass_is_an_epoch(backend):
    loader, step = start()
    for epoch in range(3):
        seen = [batch.tolist() for batch in loader]
        step()
        assert seen == own(backend, epoch)


@in_worlds(2)
def test_a_look_at_one_loader_before_training_with_another(backend):
    loader, step = start()
    other = mst.DataLoader(list(range(SAMPLES)), BATCH, shuffle=True)
    if backend.rank == 0:
        next(iter(loader))
    list(train(other, step))
    assert list(train(loader, step)) == own(backend, 0)


@in_worlds(1, 2)
def test_a_run_goes_on_in_the_middle_of_an_epoch(backend):
    loader, step = start()
    expected = [batch for _ in range(3) for batch in train(loader, step)]
    done = 6
    loader, step = start()
    loader.epoch, skipped = divmod(done, len(loader))
    found = list(train(itertools.islice(loader, skipped, None), step))
    found += train(loader, step)
    assert found == expected[done:]


@in_worlds(2)
def test_the_epoch_is_that_of_the_sampler(backend):
    loader, step = start()
    for epoch in (4, 0, 0):
        loader.sampler.set_epoch(epoch)
        assert loader.epoch == epoch
        assert list(train(loader, step)) == own(backend, epoch)
    for batch in train(loader, step):
        loader.epoch = 7  # kept, although the pass ends later
        assert batch
    assert list(train(loader, step)) == own(backend, 7)
    with pytest.raises(ValueError, match="epoch must be 0 or more, got -1"):
        loader.epoch = -1


@pytest.mark.parametrize("samples", [10, 12, 3])
@in_worlds(1, 2, 3, 4)
def test_an_evaluation_counts_each_sample_once(backend, samples):
    mst.init()
    world_size = backend.world_size
    loader = mst.DataLoader(list(range(samples)), 2 * world_size)
    rows = torch.cat(list(loader))
    assert len(rows) == -(-samples // world_size)  # on every rank
    rows = rows[: loader.own_samples]
    found = backend.all_reduce(np.bincount(rows.numpy(), minlength=samples))
    assert found.tolist() == [1] * samples


def sets_another_epoch(backend: Any, loader: Any, step: Callable[[], None]) -> Any:
    loader.epoch = backend.rank
    return loader


def has_another_seed(backend: Any, loader: Any, step: Callable[[], None]) -> Any:
    return mst.DataLoader(list(range(SAMPLES)), BATCH, shuffle=True, seed=backend.rank)


def trains_beside_a_look(backend: Any, loader: Any, step: Callable[[], None]) -> Any:
    """Rank 0 keeps an iterator that it has begun while the ranks trained with another loader."""
    kept = iter(loader)
    if backend.rank == 0:
        next(kept)
    list(train(mst.DataLoader(list(range(10)), BATCH), step))
    return loader


@pytest.mark.parametrize("habit", [sets_another_epoch, has_another_seed, trains_beside_a_look])
@in_worlds(2, 3)
def test_ranks_that_train_with_different_orders_are_refused(backend, habit):
    loader, step = start()
    loader = habit(backend, loader, step)
    batches = iter(loader)
    next(batches)
    with pytest.raises(ShardingError, match="different orders of mst"):
        step()
    loader.epoch = 5
    if habit is not has_another_seed:
        assert list(train(loader, step)) == own(backend, 5)


@in_worlds(2, 3)
def test_orders_are_not_compared_of_looks_threads_and_loaders_in_sequence(backend):
    loader, step = start()
    other = mst.DataLoader(list(range(SAMPLES)), BATCH, shuffle=True, seed=8)
    in_sequence = mst.DataLoader(list(range(10)), BATCH)
    in_sequence.epoch = backend.rank
    for _ in train(loader, step):
        if backend.rank == 0:
            next(iter(other))
    list(train(in_sequence, step))
    # Threads have loaded ahead, and that of rank 0 is in the next epoch.
    loader.epoch = int(backend.rank == 0)
    thread = threading.Thread(target=lambda: next(iter(loader)))
    thread.start()
    thread.join()
    step()
