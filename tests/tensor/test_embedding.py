"""An embedding whose rows are split over the ranks equals the whole embedding."""

import numpy as np
import pytest

from mpishard import nn
from mpishard.tensor import VocabularyParallelEmbedding
from mpishard.testing import check_parallel_layer
from mpishard.testing.worlds import in_worlds


def tokens(shape, dtype=np.int64):
    """Each token of 7 several times; all of them where there are enough."""
    return np.random.default_rng(3).integers(0, 7, shape).astype(dtype)


@pytest.mark.parametrize("shape", [(3,), (2, 12), (0, 4)])
@pytest.mark.parametrize("dtype", [np.int64, np.uint8])
@in_worlds(1, 2, 3, 4)
def test_embedding(backend, shape, dtype):
    layer = VocabularyParallelEmbedding(backend, 7, 5)
    check_parallel_layer(layer, nn.Embedding(7, 5), tokens(shape, dtype))


@pytest.mark.parametrize("batch", [1, 3, 0])
@in_worlds(1, 2, 3, 4)
def test_slices_of_the_sequence(backend, batch, time_slice):
    layer = VocabularyParallelEmbedding(backend, 7, 5, sequence_parallel=True)
    check_parallel_layer(
        layer, nn.Embedding(7, 5), tokens((batch, 12)), take_output=time_slice(backend)
    )


@in_worlds(1, 2, 3, 4)
def test_a_token_of_one_rank_alone(backend):
    """Ranks without any of the tokens add nothing."""
    layer = VocabularyParallelEmbedding(backend, 7, 5)
    check_parallel_layer(layer, nn.Embedding(7, 5), np.full((2, 3), 6))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@in_worlds(1, 2, 3, 4)
def test_bytes(backend, sequence_parallel, sent_by_all):
    layer = VocabularyParallelEmbedding(backend, 7, 5, sequence_parallel=sequence_parallel)
    table = np.zeros(layer.parameters["weight"].shape)
    output, others = 2 * 12 * 5 * 8, backend.world_size - 1
    with sent_by_all(backend) as forward:
        y, saved = layer.forward({"weight": table}, tokens((2, 12)), nn.Context())
    assert forward.nbytes == (1 if sequence_parallel else 2) * others * output
    with sent_by_all(backend) as backward:
        layer.backward({"weight": table}, saved, y, {"weight": np.zeros_like(table)})
    assert backward.nbytes == (others * output if sequence_parallel else 0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@in_worlds(2)
def test_a_missing_reduction_is_detected(backend, sequence_parallel, forgetting, time_slice):
    layer = VocabularyParallelEmbedding(backend, 7, 5, sequence_parallel=sequence_parallel)
    take = time_slice(backend) if sequence_parallel else np.copy
    with forgetting(backend), pytest.raises(AssertionError, match="output is off"):
        check_parallel_layer(layer, nn.Embedding(7, 5), tokens((2, 12)), take_output=take)


@in_worlds(2)
def test_refusals(backend):
    layer = VocabularyParallelEmbedding(backend, 7, 5, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"token 7 is outside the vocabulary \[0, 7\)"):
        layer.check_input(np.array([[0, 7]]))
    with pytest.raises(TypeError, match="float64"):
        layer.check_input(np.zeros((1, 2)))
    with pytest.raises(ValueError, match=r"T = 5 positions into 2 equal slices"):
        layer.output_shape((5,))
    with pytest.raises(ValueError, match="1 runs of 1 elements cannot be divided among 2 ranks"):
        VocabularyParallelEmbedding(backend, 1, 5)
    with pytest.raises(TypeError, match="NoneType"):
        VocabularyParallelEmbedding(None, 7, 5)
