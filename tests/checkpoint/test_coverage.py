"""The check that pieces have each element of a tensor exactly once."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpishard.checkpoint.format.coverage import check_coverage
from mpishard.errors import CheckpointError
from mpishard.sharding import Region, whole_box
from mpishard.sharding.regions import box_within, boxes_of

SHAPES = st.lists(st.integers(1, 6), max_size=4)


def times_held(shape: list[int], regions: list[Region]) -> Any:
    """Number of pieces that have each element, counted one by one."""
    held = np.zeros(shape, int)
    for region in regions:
        for box, _ in boxes_of(region):
            held[box_within(box)] += 1
    return held.ravel()


def check(shape: Any, regions: list[Region]) -> None:
    check_coverage("kind", "t", shape, [(f"f{n}", region) for n, region in enumerate(regions)])


@settings(max_examples=200)
@given(shape=SHAPES, seed=st.integers(0, 2**32))
def test_every_tiling_is_accepted(shape: list[int], seed: int, fakes: Any) -> None:
    rng = np.random.default_rng(seed)
    tiling = fakes.tiling(rng, "t", whole_box(shape))
    rng.shuffle(tiling)
    check(shape, tiling)


@settings(max_examples=300)
@given(
    shape=SHAPES,
    seed=st.integers(0, 2**32),
    change=st.sampled_from(["drop", "double", "grow", "swap"]),
)
def test_the_first_fault_is_the_one_that_counting_finds(
    shape: list[int], seed: int, change: str, fakes: Any
) -> None:
    rng = np.random.default_rng(seed)
    tiling = fakes.tiling(rng, "t", whole_box(shape))
    number = int(rng.integers(len(tiling)))
    region = tiling[number]
    if change == "drop":
        del tiling[number]
    elif change == "double":
        tiling += [region] * int(rng.integers(1, 3))
    elif change == "grow":
        tiling[number] = Region("t", whole_box(shape), 0, math.prod(shape))
    else:  # something of another tiling in its place
        others = fakes.tiling(rng, "t", whole_box(shape))
        tiling[number] = others[int(rng.integers(len(others)))]
    held = times_held(shape, tiling)
    wrong = np.flatnonzero(held != 1)
    if not len(wrong):
        check(shape, tiling)
        return
    with pytest.raises(CheckpointError) as caught:
        check(shape, tiling)
    message = str(caught.value)
    start, stop = map(int, re.search(r"elements (\d+) to (\d+) of t", message).groups())
    assert start == wrong[0]
    assert set(held[start:stop]) == {held[start]}, "all of the run are held as often"
    count = held[start]
    assert message.startswith("kind: nothing holds" if count == 0 else "kind: elements")
    if count > 1:
        assert ("twice" if count == 2 else f"held {count} times") in message
        named = [int(n) for n in re.findall(r"\bf(\d+)", message)]
        assert len(named) == 2
        assert all(times_held(shape, [tiling[n]])[start] for n in named)
        assert message.endswith("and others") == (count > 2)


def test_a_forged_manifest_costs_neither_memory_nor_time() -> None:
    size = 10**9
    with pytest.raises(CheckpointError, match=f"nothing holds elements 1 to {size} of t"):
        check((size, size), [Region("t", ((0, 1), (0, 1)), 0, 1)])
    # Strips of rows beside strips of columns: a grid of all edges would have 10**8 cells.
    count = 10**4
    rows = [Region("t", ((n, n + 1), (0, count)), 0, count) for n in range(count)]
    columns = [
        Region("t", ((0, count), (count + n, count + n + 1)), 0, count) for n in range(count)
    ]
    check((count, 2 * count), rows + columns)
    with pytest.raises(CheckpointError, match=f"nothing holds elements {count} to {count + 1} of"):
        check((count, 2 * count), rows + columns[1:])


@pytest.mark.parametrize(
    "region",
    [
        Region("t", ((0, 3),), 0, 3),
        Region("t", ((0, 3), (0, 3)), 0, 9),
        Region("t", ((-1, 3), (0, 2)), 0, 8),
        Region("t", ((2, 2), (0, 2)), 0, 0),
        Region("t", ((0, 3), (0, 2)), 0, 7),
        Region("t", ((0, 3), (0, 2)), 4, 3),
        Region("t", ((0, 3), (0, 2)), -1, 3),
    ],
)
def test_regions_outside_of_the_tensor_are_refused(region: Region) -> None:
    with pytest.raises(
        CheckpointError, match=r"kind: t.* is not a part of a tensor of shape \(3, 2\)"
    ):
        check((3, 2), [region])


def test_a_tensor_that_is_cut_along_many_dims_is_refused() -> None:
    # Of which the corners of a box would be too many to look at.
    shape = (2,) * 30
    corner = Region("t", ((0, 1),) * 30, 0, 1)
    with pytest.raises(CheckpointError, match="t is cut along 30 dims; 8 are the most"):
        check(shape, [corner])
    check(shape, [Region("t", ((n, n + 1), *whole_box(shape[1:])), 0, 2**29) for n in (0, 1)])


def test_a_tensor_without_elements_needs_no_piece() -> None:
    check((0, 3), [])
    check((), [Region("t", (), 0, 1)])
    with pytest.raises(CheckpointError, match="nothing holds elements 0 to 1 of t"):
        check((), [])
    with pytest.raises(CheckpointError, match="elements 0 to 1 of t are held twice"):
        check((), [Region("t", (), 0, 1)] * 2)
