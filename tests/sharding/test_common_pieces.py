"""Common pieces: ranges that no world cuts. Leaves of a batch. The fingerprint of numerics."""

from itertools import pairwise

import numpy as np
import threadpoolctl
from hypothesis import given
from hypothesis import strategies as st

from mpishard.base.layout import LeafLayout, ShardLayout
from mpishard.sharding import (
    Unit,
    common_pieces,
    cut_into_common_pieces,
    numerics_fingerprint,
    owned_pieces,
    pieces_within,
    reproducing_worlds,
)

powers = st.integers(0, 5).map(lambda level: 1 << level)


@given(st.integers(1, 90), st.integers(0, 50), powers)
def test_common_pieces_fill_the_unit_and_one_rank_of_every_world_owns_each(length, start, leaves):
    unit = Unit(0, start, start + length, 0, 0)
    common = common_pieces(unit, leaves)
    assert (common[0][0], common[-1][1]) == (unit.start, unit.stop)
    assert all(one[1] == other[0] for one, other in pairwise(common))
    for world in reproducing_worlds(leaves):
        pieces = [owned_pieces([unit], world, rank)[0] for rank in range(world)]
        for low, high in common:
            assert low < high
            assert sum(p.start <= low and high <= p.stop for p in pieces) == 1
    # No coarser ones would do: at each cut a piece of some world ends.
    bounds = {
        p.stop
        for w in reproducing_worlds(leaves)
        for r in range(w)
        for p in owned_pieces([unit], w, r)
    }
    assert {high for _, high in common} <= bounds


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), powers, st.data())
def test_every_world_cuts_the_trained_ranges_into_the_same_common_pieces(lengths, leaves, data):
    bounds = np.cumsum([0, *lengths]).tolist()
    units = [Unit(i, a, b, i, i) for i, (a, b) in enumerate(pairwise(bounds))]
    low = data.draw(st.integers(0, bounds[-1] - 1))
    trained = [(0, low), (min(low + 3, bounds[-1]), bounds[-1])]
    found = set()
    for world in reproducing_worlds(leaves):
        parts = []
        for rank in range(world):
            own = pieces_within(owned_pieces(units, world, rank), trained)
            cut = cut_into_common_pieces(own, leaves)
            assert sum(p.length for p in cut) == sum(p.length for p in own)
            offset = 0
            for part in cut:
                assert part.offset == offset
                offset += part.length
            parts += [(p.start, p.stop) for p in cut]
        found.add(tuple(sorted(parts)))
    assert len(found) == 1


@given(st.integers(0, 70), powers, st.data())
def test_computing_ranks_take_leaves_cyclically(samples, leaves, data):
    world = data.draw(st.sampled_from(reproducing_worlds(leaves)))
    layout = LeafLayout(samples, leaves, world)
    computing = layout.computing
    assert computing == max(n for n in (1, 2, 4, 8, 16, 32) if n <= world)
    cut = ShardLayout(samples, leaves)
    everyone = [layout.slices(rank) for rank in range(world)]
    for leaf in range(leaves):
        assert everyone[leaf % computing][leaf // computing] == cut.slice(leaf)
    for rank, own in enumerate(everyone):
        sizes = [part.stop - part.start for part in own]
        assert sum(sizes) == layout.sizes[rank]
        # So a rank can cut its own samples without knowing the others'.
        assert tuple(sizes) == ShardLayout(sum(sizes), len(own)).sizes


def test_the_fingerprint_describes_this_process():
    with threadpoolctl.threadpool_limits(1, "blas"):
        one = numerics_fingerprint()
    assert one == {**numerics_fingerprint(), "blas_threads": one["blas_threads"]}
    assert one["numpy"] == np.__version__
    assert all(isinstance(value, str) and value for value in one.values())
    assert one["blas_threads"] in ("1", "unknown")
