"""Layers on slices of the sequence, and dropout of slices, are the whole layers' parts."""

import numpy as np
import pytest

from mpishard import nn
from mpishard.tensor import (
    SequenceParallelDropout,
    SequenceParallelNorm,
    SequenceParallelPositionalEmbedding,
    TensorParallelDropout,
)
from mpishard.testing import check_parallel_layer
from mpishard.testing.worlds import in_worlds


def draw(*shape):
    return np.random.default_rng(7).standard_normal(shape)


@pytest.mark.parametrize("norm", [nn.LayerNorm(5), nn.RMSNorm(5)])
@pytest.mark.parametrize("batch", [1, 3, 0])
@in_worlds(1, 2, 3, 4)
def test_norm(backend, norm, batch, time_slice):
    take = time_slice(backend)
    layer = SequenceParallelNorm(backend, norm)
    check_parallel_layer(layer, norm, draw(batch, 12, 5), take_input=take, take_output=take)


@pytest.mark.parametrize("length", [12, 24])
@pytest.mark.parametrize("batch", [1, 3, 0])
@in_worlds(1, 2, 3, 4)
def test_positions(backend, length, batch, time_slice):
    take, whole = time_slice(backend), nn.PositionalEmbedding(24, 5)
    layer = SequenceParallelPositionalEmbedding(backend, whole)
    check_parallel_layer(layer, whole, draw(batch, length, 5), take_input=take, take_output=take)


@pytest.mark.parametrize("batch", [1, 5, 0])
@pytest.mark.parametrize("width", [1, 5, 8])
@in_worlds(1, 2, 3, 4)
def test_dropout_of_slices(backend, batch, width, time_slice, monkeypatch):
    """Widths that leave a slice in the middle of what Philox makes at a time; masks of few rows."""
    monkeypatch.setattr("mpishard.base.arrays.chunk_length", lambda array: 2 * 12 * width)
    take, whole = time_slice(backend), nn.Dropout(0.4)
    layer = SequenceParallelDropout(backend, whole)
    check_same_bits(layer, whole, draw(batch, 12, width), take)


@pytest.mark.parametrize("batch", [1, 5, 0])
@pytest.mark.parametrize(("size", "multiple"), [(7, 1), (24, 2)])
@in_worlds(1, 2, 3, 4)
def test_dropout_of_columns(backend, batch, size, multiple, columns, monkeypatch):
    monkeypatch.setattr("mpishard.base.arrays.chunk_length", lambda array: 2 * 3 * size)
    whole = nn.Dropout(0.4)
    layer = TensorParallelDropout(backend, whole, size, multiple=multiple)
    take = columns(layer.split, backend)
    for shape in [(batch, 3, size), (batch, size)]:
        check_same_bits(layer, whole, draw(*shape), take)
    assert layer.output_shape((layer.split.local_size(backend.rank),))
    if backend.world_size > 1:
        with pytest.raises(ValueError, match=f"last dim is .* of {size} on rank {backend.rank}"):
            layer.output_shape((size,))


def check_same_bits(layer, whole, x, take):
    context = nn.Context(seed=3, step=4, sample_start=17, path="block.dropout")
    assert layer.is_random
    assert not type(layer)(layer.backend, nn.Dropout(0.0), *sizes_of(layer)).is_random
    y, saved = whole.forward({}, x, context)
    own_y, own_saved = layer.forward({}, take(x).copy(), context)
    np.testing.assert_array_equal(own_y, take(y))
    r = np.random.default_rng(5).standard_normal(y.shape)
    dx, _ = whole.backward_input({}, saved, r.copy())
    own_dx, pending = layer.backward_input({}, own_saved, take(r).copy())
    assert pending is None
    np.testing.assert_array_equal(own_dx, take(dx))
    quiet, nothing = layer.forward({}, take(x), nn.Context(training=False))
    np.testing.assert_array_equal(quiet, take(x))
    assert nothing is None


def sizes_of(layer):
    return [layer.split.size] if isinstance(layer, TensorParallelDropout) else []


@pytest.mark.parametrize("norm", [nn.LayerNorm(5), nn.RMSNorm(5)])
@in_worlds(1, 2, 3, 4)
def test_bytes_of_a_norm(backend, norm, sent_by_all):
    layer = SequenceParallelNorm(backend, norm)
    with sent_by_all(backend) as sent:
        elements = pass_through(layer)
    assert sent.nbytes == 2 * (backend.world_size - 1) * elements * 8
    assert sent.calls == {"reduce_scatter": 1, "all_gather": 1}  # one all-reduce


@in_worlds(1, 2, 3, 4)
def test_bytes_of_positions(backend, sent_by_all):
    layer = SequenceParallelPositionalEmbedding(backend, nn.PositionalEmbedding(24, 5))
    with sent_by_all(backend) as sent:
        pass_through(layer)
    assert sent.nbytes == (backend.world_size - 1) * 12 * 5 * 8
    assert sent.calls == {"all_gather": 1}


def pass_through(layer):
    """Forward and backward of two samples of 12 positions; the number of parameters."""
    p = {name: np.ones(spec.shape) for name, spec in layer.parameters.items()}
    y, saved = layer.forward(p, draw(2, 12 // layer.backend.world_size, 5), nn.Context())
    layer.backward(p, saved, y, {name: np.zeros_like(value) for name, value in p.items()})
    return sum(value.size for value in p.values())


@in_worlds(2)
def test_a_missing_reduction_is_detected(backend, forgetting, time_slice):
    take, norm = time_slice(backend), nn.LayerNorm(5)
    layer = SequenceParallelNorm(backend, norm)
    with forgetting(backend), pytest.raises(AssertionError, match="gradient of weight is off"):
        check_parallel_layer(layer, norm, draw(2, 12, 5), take_input=take, take_output=take)


@in_worlds(2)
def test_refusals(backend):
    with pytest.raises(TypeError, match="norm must be a LayerNorm or RMSNorm, got Linear"):
        SequenceParallelNorm(backend, nn.Linear(2, 2))
    with pytest.raises(TypeError, match="positional must be a PositionalEmbedding, got Embedding"):
        SequenceParallelPositionalEmbedding(backend, nn.Embedding(2, 2))
    with pytest.raises(TypeError, match="dropout must be a Dropout, got float"):
        SequenceParallelDropout(backend, 0.5)
    positions = SequenceParallelPositionalEmbedding(backend, nn.PositionalEmbedding(24, 5))
    assert positions.output_shape((12, 5)) == (12, 5)
    with pytest.raises(ValueError, match=r"\(T <= 24, 5\), got \(26, 5\)"):
        positions.output_shape((13, 5))
    with pytest.raises(ValueError, match="last dim is 5"):
        SequenceParallelNorm(backend, nn.LayerNorm(5)).output_shape((3, 4))
