"""Split layers and losses compute the same on the host and on a GPU or its stand-in."""

import numpy as np
import pytest

from mpishard import nn
from mpishard import tensor as parallel
from mpishard.base.arrays import is_device_array, read_numbers, to_host
from mpishard.sharding import ParameterTable
from mpishard.testing.worlds import in_worlds

TIME, WIDTH = 6, 5
LAYERS = {
    "column": lambda b: parallel.ColumnParallelLinear(b, WIDTH, 7, activation=nn.ReLU()),
    "column, gathered": lambda b: parallel.ColumnParallelLinear(b, WIDTH, 12, True, parts=2),
    "column of slices": lambda b: parallel.ColumnParallelLinear(
        b, WIDTH, 7, sequence_parallel=True
    ),
    "row": lambda b: parallel.RowParallelLinear(b, WIDTH * b.world_size, 7, multiple=WIDTH),
    "row to slices": lambda b: parallel.RowParallelLinear(
        b, WIDTH * b.world_size, 7, multiple=WIDTH, sequence_parallel=True
    ),
    "embedding": lambda b: parallel.VocabularyParallelEmbedding(b, 7, WIDTH),
    "embedding to slices": lambda b: parallel.VocabularyParallelEmbedding(
        b, 7, WIDTH, sequence_parallel=True
    ),
    "norm": lambda b: parallel.SequenceParallelNorm(b, nn.LayerNorm(WIDTH)),
    "positions": lambda b: parallel.SequenceParallelPositionalEmbedding(
        b, nn.PositionalEmbedding(TIME * b.world_size, WIDTH)
    ),
    "dropout of slices": lambda b: parallel.SequenceParallelDropout(b, nn.Dropout(0.4)),
    "dropout": lambda b: parallel.TensorParallelDropout(
        b, nn.Dropout(0.4), WIDTH * b.world_size, multiple=WIDTH
    ),
    "stage 3": lambda b: parallel.Stage3ShardedLinear(b, WIDTH, 7, nn.GELU()),
    "f": parallel.CopyToRegion,
    "g": parallel.ReduceFromRegion,
    "output": lambda b: parallel.GatherOutput(b, WIDTH * b.world_size, multiple=WIDTH),
    "scattered sequence": parallel.ScatterSequence,
    "gathered sequence": parallel.GatherSequence,
}
LOSSES = {
    "cross entropy": nn.CrossEntropy(ignore_index=3),
    "all of it": nn.CrossEntropy(label_smoothing=0.1, z_loss=0.01),
    "mse": nn.MSE(),
}


def run(layer, place, samples):
    """Output, input gradient and the parameters' gradients, as host arrays."""
    generator = np.random.default_rng(3)
    table = ParameterTable(layer.walk_parameters())
    vector = place(generator.standard_normal(table.length))
    if layer.takes_integers:
        x = generator.integers(0, 7, (samples, TIME))
    else:
        x = generator.standard_normal((samples, TIME, WIDTH))
    p = table.nested_views(vector)
    y, saved = layer.forward(p, place(x), nn.Context(seed=1, path="layer"))
    flat = place(np.zeros(table.length))
    dy = place(generator.standard_normal(y.shape))
    dx = layer.backward(p, saved, dy, table.nested_views(flat))
    return [None if array is None else to_host(array) for array in (y, dx, flat)]


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("samples", [4, 0])
@in_worlds(2)
def test_layers(backend, name, samples, gpu):
    layer = LAYERS[name](backend)
    for expected, found in zip(
        run(layer, np.asarray, samples), run(layer, gpu.asarray, samples), strict=True
    ):
        if expected is None:
            assert found is None
        else:
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("samples", [4, 0])
@in_worlds(2)
def test_losses(backend, name, samples, gpu):
    loss = parallel.parallel_loss(LOSSES[name], backend, 7)
    generator = np.random.default_rng(5)
    size = parallel.DimSplit(7, 2).local_size(backend.rank)
    prediction = generator.standard_normal((samples, size))
    target = np.arange(samples) % 7 if name != "mse" else np.ones((samples, 7))
    results = []
    for place in (np.asarray, gpu.asarray):
        total, weight, saved = loss.forward(place(prediction), place(target))
        gradient = loss.backward(saved)
        assert is_device_array(gradient) == (place is gpu.asarray)
        results.append((*read_numbers([total, weight]), to_host(gradient)))
    for expected, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)
