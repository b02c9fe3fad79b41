"""A rank's part of a whole array, written anew: what split layers take and give."""

import numpy as np
import pytest


@pytest.fixture
def time_slice():
    """``time_slice(backend)(array)``: this rank's slice of dim 1."""

    def of(backend):
        return lambda array: np.split(array, backend.world_size, axis=1)[backend.rank]

    return of


@pytest.fixture
def columns():
    """``columns(split, backend)(array)``: this rank's elements of the last dim."""

    def of(split, backend):
        def take(array):
            ranges = split.ranges(backend.rank)
            return np.concatenate([array[..., low:high] for low, high in ranges], axis=-1)

        return take

    return of
