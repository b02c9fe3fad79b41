"""Any region out of any set of pieces."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpishard.checkpoint.loading import reader
from mpishard.checkpoint.loading.reader import shared_regions
from mpishard.sharding import Region, whole_box
from mpishard.sharding.regions import take_region

SHAPES = st.lists(st.integers(1, 6), max_size=4)


def values_of(tensor: Any, region: Region) -> Any:
    out = np.empty(region.length, tensor.dtype)
    take_region(tensor, region, out)
    return out


@settings(max_examples=300)
@given(
    shape=SHAPES,
    seed=st.integers(0, 2**32),
    block=st.sampled_from([1, 3, 7, 1 << 22]),
)
def test_pieces_are_read_in_other_cuts_than_they_were_written(
    shape: list[int], seed: int, block: int, fakes: Any
) -> None:
    """Each of about ten regions of each of 300 tensors, from about ten pieces."""
    rng = np.random.default_rng(seed)
    tensor = np.arange(math.prod(shape)).reshape(shape)
    stored = fakes.tiling(rng, "t", whole_box(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_BLOCK", block)
        pieces = [(region, values_of(tensor, region)) for region in stored]
        for wanted in fakes.tiling(rng, "t", whole_box(shape)):
            out = np.full(wanted.length, -1)
            shared = 0
            for region, values in pieces:
                for found in shared_regions(region, wanted):
                    found.copy(values, out)
                    shared += math.prod(high - low for low, high in found.shared)
            assert out.tolist() == values_of(tensor, wanted).tolist()
            assert shared == wanted.length, "each element is copied once"
