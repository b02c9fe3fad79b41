"""Batches of each rank's own data: every sample once, in an order of (seed, rank, epoch)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.base.layout import ShardLayout
from mpishard.data import LocalBatchSampler


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any),
    extra=st.integers(0, 20),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_every_sample_of_every_rank_once_an_epoch(
    lengths: list[int], extra: int, epoch: int, shuffle: bool
) -> None:
    world_size = len(lengths)
    sampler = LocalBatchSampler(lengths, world_size + extra, seed=1, shuffle=shuffle)
    shares = ShardLayout(world_size + extra, world_size).sizes
    seen: list[list[int]] = [[] for _ in lengths]
    for index in range(sampler.batches_per_epoch):
        position = 0
        for rank in range(world_size):
            indices, start = sampler.local(epoch, index, rank, world_size)
            assert start == position
            assert len(indices) <= shares[rank]
            position += len(indices)
            seen[rank] += indices.tolist()
        assert position > 0
    for rank, length in enumerate(lengths):
        assert sorted(seen[rank]) == list(range(length))
        if not shuffle:
            assert seen[rank] == list(range(length))


def test_each_rank_and_epoch_has_an_order_of_its_own() -> None:
    sampler = LocalBatchSampler([20, 20], 40, seed=7)
    orders = {tuple(sampler.local(e, 0, r, 2)[0].tolist()) for e in range(3) for r in range(2)}
    assert len(orders) == 6
    again = LocalBatchSampler([20, 5], 40, seed=7)
    assert again.local(1, 0, 0, 2)[0].tolist() == sampler.local(1, 0, 0, 2)[0].tolist()


def test_pinned_order() -> None:
    """A resumed run must continue in its first order under every version."""
    sampler = LocalBatchSampler([3, 6], 12, seed=3)
    assert sampler.local(0, 0, 1, 2)[0].tolist() == PINNED


PINNED = [5, 1, 2, 3, 4, 0]


def test_drop_last_leaves_whole_batches_only() -> None:
    sampler = LocalBatchSampler([9, 5], 5, drop_last=True)  # shares 3 and 2
    assert sampler.batches_per_epoch == 2
    with pytest.raises(ValueError, match=r"shares are \(3, 2\), and they have \[9, 1\] samples"):
        LocalBatchSampler([9, 1], 5, drop_last=True)


@pytest.mark.parametrize(
    ("lengths", "batch_size", "message"),
    [
        ([], 4, "some rank needs a sample"),
        ([0, 0], 4, r"are \[0, 0\]"),
        ([3, -1], 4, r"are \[3, -1\]"),
        ([3, 3, 3], 2, "batch_size 2 is smaller than the number of ranks, 3"),
    ],
)
def test_bad_arguments(lengths: list[int], batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalBatchSampler(lengths, batch_size)


def test_positions_outside_the_epoch_are_refused() -> None:
    sampler = LocalBatchSampler([4, 4], 4)
    with pytest.raises(IndexError, match="batch 2 is outside the epoch's 2"):
        sampler.local(0, 2, 0, 2)
    with pytest.raises(ValueError, match="epoch must be 0 or more, got -1"):
        sampler.local(-1, 0, 0, 2)
    with pytest.raises(ValueError, match="of 2 ranks, not of 3"):
        sampler.local(0, 0, 0, 3)
    assert not sampler.local(0, 0, 0, 2)[0].flags.writeable
    assert sampler.local(0, 0, 0, 2)[0].dtype == np.int64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": 5}, "lengths must be a sequence of integers, got 5"),
        ({"lengths": [1.5, 2]}, r"a rank's number of samples must be an integer, got 1\.5"),
        ({"lengths": [True, 2]}, "a rank's number of samples must be an integer, got True"),
        ({"batch_size": 2.0}, r"batch_size must be an integer, got 2\.0"),
        ({"seed": 1.5}, r"seed must be an integer, got 1\.5"),
        ({"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
        ({"drop_last": 1}, "drop_last must be True or False, got 1"),
    ],
)
def test_settings_of_another_type_are_refused(options, message) -> None:
    with pytest.raises(TypeError, match=message):
        LocalBatchSampler(**({"lengths": [5, 2], "batch_size": 4} | options))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} is outside \[0, 2\)"):
        LocalBatchSampler([5, 2], 4).local(0, 0, rank, 2)


def test_numpy_lengths_are_lengths() -> None:
    assert LocalBatchSampler(np.array([5, 2]), np.int64(4)).batches_per_epoch == 3
