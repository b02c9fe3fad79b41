"""Global batches: every sample once, in an order that depends on seed and epoch alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.data import Batches, GlobalBatchSampler

PINNED_ORDER = [[8, 4, 1, 7], [5, 3, 9, 2], [0, 6]]


def test_shuffled_order_is_pinned() -> None:
    """A resumed run must continue in its first order under every version."""
    sampler = GlobalBatchSampler(10, 4, seed=3)
    assert [sampler.batch(0, i).tolist() for i in range(3)] == PINNED_ORDER


@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 70),
    world_size=st.integers(1, 9),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_the_ranks_parts_of_all_batches_are_every_sample_once(
    length: int, batch_size: int, world_size: int, epoch: int, shuffle: bool
) -> None:
    sampler = GlobalBatchSampler(length, batch_size, seed=1, shuffle=shuffle)
    seen = []
    for index in range(sampler.batches_per_epoch):
        batch = sampler.batch(epoch, index)
        parts = [sampler.local(epoch, index, rank, world_size) for rank in range(world_size)]
        assert np.concatenate([indices for indices, _ in parts]).tolist() == batch.tolist()
        for indices, start in parts:
            assert batch[start : start + len(indices)].tolist() == indices.tolist()
        seen.extend(batch.tolist())
    assert sorted(seen) == list(range(length))
    if not shuffle:
        assert seen == list(range(length))


@given(length=st.integers(1, 60), batch_size=st.integers(1, 60))
def test_drop_last_leaves_whole_batches_only(length: int, batch_size: int) -> None:
    if length < batch_size:
        with pytest.raises(ValueError, match=f"{length} samples .* batch_size {batch_size}"):
            GlobalBatchSampler(length, batch_size, drop_last=True)
        return
    sampler = GlobalBatchSampler(length, batch_size, drop_last=True)
    assert sampler.batches_per_epoch == length // batch_size
    assert len(sampler.batch(0, sampler.batches_per_epoch - 1)) == batch_size


def test_order_is_a_function_of_seed_and_epoch_alone() -> None:
    one, other = GlobalBatchSampler(50, 50, seed=7), GlobalBatchSampler(50, 8, seed=7)
    other.batch(3, 0)
    other.batch(1, 2)
    whole = [other.batch(2, i) for i in range(other.batches_per_epoch)]
    assert np.concatenate(whole).tolist() == one.batch(2, 0).tolist()


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {
        tuple(GlobalBatchSampler(30, 30, seed=seed).batch(epoch, 0).tolist())
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_batches_are_read_only_int64() -> None:
    batch = GlobalBatchSampler(5, 2).batch(0, 0)
    assert batch.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        batch[0] = 1


@pytest.mark.parametrize(
    ("length", "batch_size", "message"),
    [(0, 1, "length 0"), (-1, 1, "length -1"), (3, 0, "got 0"), (3, -2, "got -2")],
)
def test_sizes_below_one_are_refused(length: int, batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlobalBatchSampler(length, batch_size)


def test_positions_outside_the_epoch_are_refused() -> None:
    sampler = GlobalBatchSampler(10, 4)
    with pytest.raises(IndexError, match="batch 3 is outside the epoch's 3"):
        sampler.batch(0, 3)
    with pytest.raises(IndexError, match="batch -1"):
        sampler.batch(0, -1)
    with pytest.raises(ValueError, match="epoch must be 0 or more, got -1"):
        sampler.batch(-1, 0)


def test_frozen_and_equal_by_value() -> None:
    sampler = GlobalBatchSampler(10, 4, seed=2)
    sampler.batch(0, 0)
    assert sampler == GlobalBatchSampler(10, 4, seed=2)
    assert "_last=[" not in repr(sampler)
    with pytest.raises(AttributeError):
        sampler.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_leaves_are_the_same_in_every_world(world_size: int) -> None:
    sampler = GlobalBatchSampler(23, 10, seed=3, leaves=4)
    for index, size in enumerate((10, 10, 3)):
        batch = sampler.batch(0, index)
        bounds = np.cumsum([0, *((3, 3, 2, 2) if size == 10 else (1, 1, 1, 0))])
        for rank in range(world_size):
            mine = range(rank, 4, world_size)
            found, start = sampler.local(0, index, rank, world_size)
            expected = [batch[bounds[leaf] : bounds[leaf + 1]] for leaf in mine]
            assert found.tolist() == np.concatenate(expected).tolist()
            assert start == bounds[rank]


def test_leaves_that_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="4 leaves cannot be divided evenly among 8 ranks"):
        GlobalBatchSampler(23, 10, leaves=4).local(0, 0, 0, 8)


@pytest.mark.parametrize(
    ("length", "seed", "message"),
    [
        (2.5, 0, r"length must be an integer, got 2\.5"),
        (float("nan"), 0, "length must be an integer, got nan"),
        ("x", 0, "length must be an integer, got 'x'"),
        (9, 1.5, r"seed must be an integer, got 1\.5"),
        (9, None, "seed must be an integer, got None"),
    ],
)
def test_an_order_needs_integers(length, seed, message) -> None:
    with pytest.raises(TypeError, match=message):
        GlobalBatchSampler(length, 2, seed=seed)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *[
            ({name: flag}, TypeError, f"{name} must be True or False")
            for name in ("shuffle", "drop_last")
            for flag in ("no", 1, None, np.ones(2))
        ],
        ({"batch_size": 2.0}, TypeError, "batch_size must be an integer"),
        ({"leaves": "x"}, TypeError, "leaves must be an integer, got 'x'"),
        ({"leaves": 0}, ValueError, "leaves must be 1 or more, got 0"),
        ({"leaves": -1}, ValueError, "leaves must be 1 or more, got -1"),
    ],
)
def test_settings_that_make_no_order_are_refused(options, error, message) -> None:
    with pytest.raises(error, match=message):
        GlobalBatchSampler(**({"length": 9, "batch_size": 2} | options))


@pytest.mark.parametrize(
    ("place", "error", "message"),
    [
        ((0, 1.5, 0, 2), TypeError, r"index must be an integer, got 1\.5"),
        ((0, 0, 2, 2), ValueError, r"rank 2 is outside \[0, 2\)"),
        ((0, 0, -1, 2), ValueError, r"rank -1 is outside \[0, 2\)"),
        ((0, 0, 0.0, 2), TypeError, r"rank must be an integer, got 0\.0"),
        ((0, 0, 0, 0), ValueError, "world_size must be 1 or more, got 0"),
    ],
)
def test_places_outside_the_epoch_or_the_ranks_are_refused(place, error, message) -> None:
    with pytest.raises(error, match=message):
        GlobalBatchSampler(9, 2).local(*place)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampler": 5}, TypeError, "sampler must be a GlobalBatchSampler or LocalBatchSampler"),
        ({"steps": 5}, TypeError, "steps must be a range, got int"),
        ({"rank": 2}, ValueError, r"rank 2 is outside \[0, 2\)"),
        ({"rank": "x"}, TypeError, "rank must be an integer, got 'x'"),
        ({"world_size": 0}, ValueError, "world_size must be 1 or more, got 0"),
        ({"ahead": "no"}, TypeError, "ahead must be True or False, got 'no'"),
    ],
)
def test_batches_of_other_types_and_ranks_are_refused(options, error, message) -> None:
    usual = {"sampler": GlobalBatchSampler(9, 2), "rank": 0, "world_size": 2, "steps": range(2)}
    with pytest.raises(error, match=message):
        Batches(np.ones((9, 2)), None, **(usual | options))
