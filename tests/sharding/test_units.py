"""Units and pieces hold each element once, and cut no layer."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpishard.base.layout import ShardLayout
from mpishard.sharding import build_units, owned_pieces

sizes = st.lists(st.integers(0, 50), min_size=1, max_size=30).filter(any)


@given(sizes, st.integers(1, 120))
def test_units_cover_the_vector_and_cut_no_layer(layer_sizes, minimum):
    units = build_units(layer_sizes, minimum)
    assert [u.index for u in units] == list(range(len(units)))
    assert units[0].start == 0
    assert units[-1].stop == sum(layer_sizes)
    assert units[0].first_layer == 0
    assert units[-1].last_layer == len(layer_sizes) - 1
    for before, after in pairwise(units):
        assert before.stop == after.start
        assert before.last_layer + 1 == after.first_layer
    for unit in units:
        assert unit.length == sum(layer_sizes[unit.first_layer : unit.last_layer + 1])
        assert unit.length >= min(minimum, sum(layer_sizes))


@given(sizes, st.integers(1, 120), st.integers(1, 40))
def test_every_element_is_owned_once(layer_sizes, minimum, world_size):
    units = build_units(layer_sizes, minimum)
    owners = [0] * sum(layer_sizes)
    for rank in range(world_size):
        offset = 0
        for unit, piece in zip(units, owned_pieces(units, world_size, rank), strict=True):
            assert piece.unit == unit
            assert piece.offset == offset
            assert piece.length == ShardLayout(unit.length, world_size).size(rank)
            assert unit.start <= piece.start <= piece.stop <= unit.stop
            assert piece.in_shard == slice(offset, offset + piece.length)
            offset += piece.length
            for index in range(piece.start, piece.stop):
                owners[index] += 1
    assert set(owners) == {1}


@given(st.integers(0, 500), st.integers(1, 60))
def test_layout_is_even_and_agrees_with_owner(length, world_size):
    layout = ShardLayout(length, world_size)
    assert layout.sizes == tuple(layout.size(r) for r in range(world_size))
    assert max(layout.sizes) - min(layout.sizes) <= 1
    covered = [i for r in range(world_size) for i in range(length)[layout.slice(r)]]
    assert covered == list(range(length))
    assert all(
        layout.start(layout.owner(i)) <= i < layout.start(layout.owner(i)) + length
        for i in range(length)
    )


def test_layout_of_the_documentation():
    assert [(ShardLayout(10, 3).start(r), ShardLayout(10, 3).size(r)) for r in range(3)] == [
        (0, 4),
        (4, 3),
        (7, 3),
    ]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: build_units([0, 0], 5), ValueError, "no parameters"),
        (lambda: build_units([3], 0), ValueError, "1 or more, got 0"),
        (lambda: ShardLayout(-1, 2), ValueError, "got -1"),
        (lambda: ShardLayout(3, 0), ValueError, "got 0"),
        (lambda: ShardLayout(3, 2).size(2), ValueError, r"rank 2 is outside \[0, 2\)"),
        (lambda: ShardLayout(3, 2).owner(3), IndexError, r"index 3 is outside \[0, 3\)"),
    ],
)
def test_mistakes(make, error, message):
    with pytest.raises(error, match=message):
        make()
