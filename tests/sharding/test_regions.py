"""Regions of tensors: their boxes, copies to and from tensors, and those of a placement."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpishard.sharding import LocalParameter, ParameterEntry, Placement, Region
from mpishard.sharding.regions import (
    box_shape,
    box_within,
    boxes_of,
    join_dims,
    put_region,
    shared_box,
    take_region,
    whole_box,
)


@st.composite
def regions(draw):
    """A tensor's shape, and a region of it."""
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    box = tuple(
        tuple(sorted(draw(st.tuples(st.integers(0, size - 1), st.integers(1, size)))))
        for size in shape
    )
    box = tuple((low, high) if low < high else (low, high + 1) for low, high in box)
    size = math.prod(box_shape(box))
    start = draw(st.integers(0, size - 1))
    return tuple(shape), Region("t", box, start, draw(st.integers(start + 1, size)))


def elements(shape, region):
    """Flat indices of a region's elements, in order, from the definition."""
    tensor = np.arange(math.prod(shape)).reshape(shape)
    return tensor[box_within(region.box)].ravel()[region.start : region.stop].copy()


@given(regions())
def test_boxes_of_a_region_hold_its_elements_in_order(case):
    shape, region = case
    tensor = np.arange(math.prod(shape)).reshape(shape)
    boxes = list(boxes_of(region))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    position, found = 0, []
    for box, part in boxes:
        values = tensor[box_within(box)].ravel()
        assert (part.start, part.stop) == (position, position + values.size)
        position = part.stop
        found += values.tolist()
    assert found == elements(shape, region).tolist()


@given(regions())
def test_put_region_and_take_region_are_opposites(case):
    shape, region = case
    expected = elements(shape, region)
    out = np.zeros(region.length, int)
    take_region(np.arange(math.prod(shape)).reshape(shape), region, out)
    assert out.tolist() == expected.tolist()
    tensor = np.full(shape, -1)
    put_region(expected, region, tensor)
    flat = tensor.ravel()
    assert flat[expected].tolist() == expected.tolist()
    assert np.count_nonzero(flat != -1) == region.length


@given(regions(), regions())
def test_dims_that_agree_are_joined(one, other):
    (shape, first), (_, second) = one, other
    boxes = [first.box, whole_box(shape), (second.box + first.box)[: len(shape)]]
    joined = join_dims(boxes)
    sizes = [math.prod(box_shape(box)) for box in boxes]
    assert [math.prod(box_shape(box)) for box in joined] == sizes
    assert len({len(box) for box in joined}) == 1
    for dim, ranges in enumerate(zip(*joined, strict=True)):
        assert dim == 0 or len(set(ranges)) > 1


def test_shared_boxes():
    assert shared_box(((0, 4), (1, 3)), ((2, 6), (0, 9))) == ((2, 4), (1, 3))
    assert shared_box(((0, 4), (1, 3)), ((2, 6), (3, 9))) is None
    assert shared_box((), ()) == ()


def test_a_region_is_printed_as_its_name_and_ranges():
    assert str(Region("w", ((0, 3), (2, 4)), 1, 5)) == "w[0:3, 2:4][1:5]"
    assert Region.whole("w", (3, 4)) == Region("w", ((0, 3), (0, 4)), 0, 12)


def test_arrays_are_cut_into_views():
    # A vector of three row boxes of one parameter, then half the columns of another one.
    held = [
        LocalParameter(
            ParameterEntry("qkv", (3, 2), 0), tuple(((r, r + 1), (0, 2)) for r in (1, 3, 5))
        ),
        LocalParameter(ParameterEntry("norm", (2,), 6), (((0, 2),),), is_counted=False),
        LocalParameter(ParameterEntry("out", (2, 2), 8), (((0, 2), (2, 4)),)),
    ]
    shapes = {"qkv": (6, 2), "norm": (2,), "out": (2, 4)}
    entries, start = [], 0
    for name, shape in shapes.items():
        entries.append(ParameterEntry(name, shape, start))
        start = entries[-1].stop
    placement = Placement(entries, held)
    vector = np.arange(12)
    parts = [(3, vector[3:9]), (9, vector[9:9]), (9, vector[9:12])]
    found = placement.cut(parts)
    assert [(str(region), array.tolist()) for region, array in found] == [
        ("qkv[3:4, 0:2][1:2]", [3]),
        ("qkv[5:6, 0:2][0:2]", [4, 5]),
        ("norm[0:2][0:2]", [6, 7]),
        ("out[0:2, 2:4][0:1]", [8]),
        ("out[0:2, 2:4][1:4]", [9, 10, 11]),
    ]
    assert all(np.shares_memory(array, vector) for _, array in found)
    written = placement.cut(parts, written=True)
    assert [region for region, _ in written] == [r for r, _ in found if r.name != "norm"]
