"""Any region out of any set of pieces."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpishard.checkpoint.loading import reader
from mpishard.checkpoint.loading.reader import overlaps
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
    run=st.sampled_from([1, 4, 1 << 14]),
)
def test_what_was_written_in_pieces_is_read_in_others(
    shape: list[int], seed: int, block: int, run: int, fakes: Any
) -> None:
    """Each of about ten regions of each of 300 tensors, from about ten pieces."""
    rng = np.random.default_rng(seed)
    tensor = np.arange(math.prod(shape)).reshape(shape)
    stored = fakes.tiling(rng, "t", whole_box(shape))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "_BLOCK", block)
        patch.setattr(reader, "_RUN", run)
        pieces = [(region, values_of(tensor, region)) for region in stored]
        for wanted in fakes.tiling(rng, "t", whole_box(shape)):
            out = np.full(wanted.length, -1)
            shared = 0
            for region, values in pieces:
                for found in overlaps(region, wanted):
                    found.copy(values, out)
                    shared += math.prod(high - low for low, high in found.shared)
            assert out.tolist() == values_of(tensor, wanted).tolist()
            assert shared == wanted.length, "each element is copied once"


class Counted:
    """Values of which it is known how many were read, and how many at a time."""

    def __init__(self, values: Any) -> None:
        self.values = values
        self.read: list[int] = []

    def __getitem__(self, part: slice) -> Any:
        self.read.append(part.stop - part.start)
        return self.values[part]


def read(shape: tuple[int, int], box: Any) -> list[int]:
    """How many elements are read at a time for ``box`` out of a whole tensor of ``shape``."""
    tensor = np.arange(math.prod(shape)).reshape(shape)
    values = Counted(tensor.ravel())
    wanted = Region("t", box, 0, math.prod(high - low for low, high in box))
    out = np.empty(wanted.length, tensor.dtype)
    (found,) = overlaps(Region.whole("t", shape), wanted)
    found.copy(values, out)
    assert out.tolist() == values_of(tensor, wanted).tolist()
    return values.read


def test_no_more_is_read_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_BLOCK", 100)
    monkeypatch.setattr(reader, "_RUN", 8)
    assert read((30, 10), ((5, 28), (0, 10))) == [100, 100, 30], "rows, a block at a time"
    assert read((30, 10), ((5, 28), (2, 4))) == [100, 100, 30], "short rows whole"
    assert read((30, 50), ((5, 8), (2, 14))) == [12, 12, 12], "of long ones what it takes"
    assert read((3, 1000), ((0, 3), (0, 250))) == [100, 100, 50] * 3
