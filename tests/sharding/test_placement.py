"""Placements: a rank's own flat vector, and its elements in the model's."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.base.layout import ShardLayout
from mpishard.sharding import LocalParameter, ParameterEntry, Placement, range_to_write, whole_box

# A table of three parameters, of which the rank holds three row blocks, some columns, and all.
QKV = ParameterEntry("qkv", (6, 3), 0)
PROJECTION = ParameterEntry("projection", (4, 5), 18)
BIAS = ParameterEntry("bias", (4,), 38)
FULL = np.arange(42.0)
OWN = Placement(
    [QKV, PROJECTION, BIAS],
    [
        LocalParameter(
            ParameterEntry("qkv", (3, 3), 0), tuple(((r, r + 1), (0, 3)) for r in (1, 3, 5))
        ),
        LocalParameter(ParameterEntry("projection", (4, 2), 9), (((0, 4), (3, 5)),)),
        LocalParameter(ParameterEntry("bias", (4,), 17), (((0, 4),),), is_counted=False),
    ],
)
QKV_ROWS = FULL[:18].reshape(6, 3)[[1, 3, 5]]
PROJECTION_COLUMNS = FULL[18:38].reshape(4, 5)[:, 3:]
WANTED = np.concatenate([QKV_ROWS.ravel(), PROJECTION_COLUMNS.ravel(), FULL[38:]])


def test_a_placement_takes_rows_columns_and_whole_parameters():
    out = np.empty(21)
    OWN.take(FULL, 0, out)
    np.testing.assert_array_equal(out, WANTED)
    assert OWN.own_length == 21
    assert OWN.length == 42
    assert OWN.counted_ranges == [(0, 9), (9, 17)]
    assert not OWN.is_whole


@given(st.integers(0, 21), st.integers(0, 21))
def test_every_range_can_be_taken_put_and_named(first, last):
    start, stop = sorted((first, last))
    part = OWN.local(FULL, start, stop)
    np.testing.assert_array_equal(part, WANTED[start:stop])
    full = np.zeros(42)
    OWN.put(part, start, full)
    expected = np.zeros(42)
    expected[WANTED[start:stop].astype(int)] = WANTED[start:stop]
    np.testing.assert_array_equal(full, expected)
    ranges = list(OWN.ranges(start, stop))
    named = [element for low, high in ranges for element in range(low, high)]
    np.testing.assert_array_equal(named, WANTED[start:stop])
    regions = list(OWN.regions(start, stop))
    assert sum(region.length for region, _ in regions) == stop - start
    assert [part.start for _, part in regions] == sorted(part.start for _, part in regions)


@st.composite
def grids(draw):
    """A tensor, and one box of a grid of boxes that it is cut into."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    cuts = [draw(st.integers(1, size)) for size in shape]
    ranks = [draw(st.integers(0, count - 1)) for count in cuts]
    box = tuple(
        (layout.start(rank), layout.start(rank) + layout.size(rank))
        for layout, rank in zip(map(ShardLayout, shape, cuts), ranks, strict=True)
    )
    return shape, box


@given(grids(), st.data())
def test_boxes_of_every_number_of_dims_can_be_taken_and_put(grid, data):
    shape, box = grid
    size = math.prod(stop - start for start, stop in box)
    held = ParameterEntry("t", tuple(stop - start for start, stop in box), 0)
    placement = Placement([ParameterEntry("t", shape, 0)], [LocalParameter(held, (box,))])
    full = np.arange(math.prod(shape))
    wanted = full.reshape(shape)[tuple(slice(*bounds) for bounds in box)].ravel()
    start, stop = sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    np.testing.assert_array_equal(placement.local(full, start, stop), wanted[start:stop])
    named = [e for low, high in placement.ranges(start, stop) for e in range(low, high)]
    np.testing.assert_array_equal(named, wanted[start:stop])


def test_a_range_of_a_whole_model_is_a_view():
    placement = Placement.whole([QKV, PROJECTION, BIAS])
    assert placement.is_whole
    assert np.shares_memory(placement.local(FULL, 3, 20), FULL)
    assert list(placement.ranges(2, 40)) == [(2, 18), (18, 38), (38, 40)]


def test_local_parameters_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="no parameter 'other'"):
        Placement([BIAS], [LocalParameter(ParameterEntry("other", (4,), 0), (whole_box((4,)),))])
    with pytest.raises(ValueError, match=r"have 4 elements, its slice of shape \(2,\) has 2"):
        Placement([BIAS], [LocalParameter(ParameterEntry("bias", (2,), 0), (whole_box((4,)),))])


@given(st.integers(0, 200_000), st.integers(0, 40), st.integers(1, 9))
def test_ranks_with_copies_write_each_element_once(size, turn, holder_count):
    parts = [range_to_write(size, turn, holder, holder_count) for holder in range(holder_count)]
    covered = sorted((start, stop) for start, stop in parts if start < stop)
    assert [start for start, _ in covered] == [0, *(stop for _, stop in covered)][: len(covered)]
    assert sum(stop - start for start, stop in covered) == size
    assert len(covered) <= max(1, size // 10_000), "pieces that are hardly worth a record"


def test_small_values_are_written_by_each_rank_in_turn():
    writers = [
        [holder for holder in range(3) if range_to_write(8, turn, holder, 3) == (0, 8)]
        for turn in range(4)
    ]
    assert writers == [[0], [1], [2], [0]]


def test_a_rank_writes_its_range_of_a_parameter_with_copies():
    norm = ParameterEntry("norm", (6,), 3)
    held = [
        LocalParameter(ParameterEntry("w", (3,), 0), (((0, 3),),)),
        LocalParameter(norm, (((0, 6),),), is_counted=True, written=(2, 5)),
    ]
    placement = Placement([ParameterEntry("w", (3,), 0), norm], held)
    assert not placement.is_whole
    assert placement.counted_ranges == [(0, 3), (3, 9)]
    assert placement.written_ranges == [(0, 3), (5, 8)]
    cut = placement.cut([(1, np.arange(1, 6)), (6, np.arange(6, 9))], written=True)
    assert [(str(region), values.tolist()) for region, values in cut] == [
        ("w[0:3][1:3]", [1, 2]),
        ("norm[0:6][2:3]", [5]),
        ("norm[0:6][3:5]", [6, 7]),
    ]
