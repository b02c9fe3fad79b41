"""The operators around a tensor-parallel region, against their definitions."""

import numpy as np
import pytest

from mpishard.nn import Context
from mpishard.tensor import (
    CopyToRegion,
    DimSplit,
    GatherOutput,
    GatherSequence,
    ReduceFromRegion,
    ScatterSequence,
)
from mpishard.tensor.regions import gather_time, reduce_scatter_time
from mpishard.testing.worlds import in_worlds

SHAPES = [(2, 12), (0, 12), (3, 12, 5), (1, 12, 2, 2)]


def of_rank(rank, shape):
    return np.random.default_rng(rank).standard_normal(shape)


def sum_of_ranks(backend, shape):
    return sum(of_rank(rank, shape) for rank in range(backend.world_size))


def both_ways(layer, x, dy):
    """Output and input gradient; the input must stay as it is."""
    x.flags.writeable = False
    y, saved = layer.forward({}, x, Context())
    assert y.shape == (len(x), *layer.output_shape(x.shape[1:]))
    assert not layer.parameters
    dx, pending = layer.backward_input({}, saved, dy)
    assert pending is None
    return y, dx


@pytest.mark.parametrize("shape", SHAPES)
@in_worlds(1, 2, 3, 4)
def test_f_and_g(backend, shape):
    own, total = of_rank(backend.rank, shape), sum_of_ranks(backend, shape)
    y, dx = both_ways(CopyToRegion(backend), own.copy(), own.copy())
    np.testing.assert_array_equal(y, own)
    np.testing.assert_allclose(dx, total, rtol=1e-12, atol=1e-14)
    y, dx = both_ways(ReduceFromRegion(backend), own.copy(), own.copy())
    np.testing.assert_allclose(y, total, rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(dx, own)


@pytest.mark.parametrize("leading", [(3,), (2, 4), (0, 2)])
@pytest.mark.parametrize(("size", "parts", "multiple"), [(7, 1, 1), (15, 1, 3), (24, 3, 2)])
@in_worlds(1, 2, 3, 4)
def test_outputs(backend, leading, size, parts, multiple, columns):
    layer = GatherOutput(backend, size, parts=parts, multiple=multiple)
    take = columns(layer.split, backend)
    whole, dy = of_rank(0, (*leading, size)), of_rank(1, (*leading, size))
    y, dx = both_ways(layer, take(whole), dy.copy())
    np.testing.assert_array_equal(y, whole)
    np.testing.assert_array_equal(dx, take(dy))


@pytest.mark.parametrize("shape", SHAPES)
@in_worlds(1, 2, 3, 4)
def test_sequences(backend, shape, time_slice):
    take, whole, dy = time_slice(backend), of_rank(0, shape), of_rank(1, shape)
    y, dx = both_ways(GatherSequence(backend), take(whole).copy(), dy.copy())
    np.testing.assert_array_equal(y, whole)
    np.testing.assert_array_equal(dx, take(dy))
    y, dx = both_ways(ScatterSequence(backend), whole.copy(), take(dy).copy())
    np.testing.assert_array_equal(y, take(whole))
    np.testing.assert_array_equal(dx, dy)


@pytest.mark.parametrize("shape", SHAPES)
@in_worlds(1, 2, 3, 4)
def test_along_time(backend, shape, time_slice):
    """Of arrays in any memory order."""
    take, whole = time_slice(backend), of_rank(0, shape)
    np.testing.assert_array_equal(gather_time(backend, take(whole)), whole)
    own = np.asfortranarray(of_rank(backend.rank, shape))
    found = reduce_scatter_time(backend, own)
    np.testing.assert_allclose(found, take(sum_of_ranks(backend, shape)), rtol=1e-12, atol=1e-14)


@in_worlds(1, 2, 3, 4)
def test_bytes(backend, sent_by_all, columns, time_slice):
    others, nbytes = backend.world_size - 1, 2 * 12 * 7 * 8
    x = of_rank(0, (2, 12, 7))
    split = DimSplit(7, backend.world_size)
    for layer, own, factors in (
        (CopyToRegion(backend), x, (0, 2)),
        (ReduceFromRegion(backend), x, (2, 0)),
        (GatherOutput(backend, 7), columns(split, backend)(x), (1, 0)),
        (GatherSequence(backend), time_slice(backend)(x), (1, 0)),
        (ScatterSequence(backend), x, (0, 1)),
    ):
        with sent_by_all(backend) as forward:
            y, saved = layer.forward({}, own, Context())
        with sent_by_all(backend) as backward:
            layer.backward_input({}, saved, y.copy())
        assert (forward.nbytes, backward.nbytes) == tuple(f * others * nbytes for f in factors)


@in_worlds(3)
def test_refusals(backend):
    with pytest.raises(ValueError, match="T = 7 positions into 3 equal slices, and 1 are left"):
        ScatterSequence(backend).output_shape((7, 2))
    with pytest.raises(ValueError, match=r"GatherSequence needs samples of shape \(time"):
        GatherSequence(backend).output_shape(())
    with pytest.raises(ValueError, match=f"last dim is .* on rank {backend.rank} of 3"):
        GatherOutput(backend, 7).output_shape((7,))
    with pytest.raises(ValueError, match="2 runs of 1 elements cannot be divided among 3 ranks"):
        GatherOutput(backend, 2)
    with pytest.raises(TypeError, match="NoneType"):
        CopyToRegion(None)
    with pytest.raises(ValueError, match="parts and multiple must be 1 or more, got 0 and 1"):
        DimSplit(4, 2, parts=0)
