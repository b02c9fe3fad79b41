"""Tensor-parallel predictions in one process."""

import numpy as np
import pytest

from mpishard.nn import GELU, Model, Sequential
from mpishard.tensor import TensorParallelInference, TensorParallelTransformerBlock

X = np.random.default_rng(0).standard_normal((3, 5, 12))


def build_rank(backend):
    block = TensorParallelTransformerBlock(backend, 12, 12, 20, GELU, causal=True)
    return Model(Sequential({"block": block}), None, input_shape=(5, 12)).predict


def test_worlds_predict_what_one_rank_does():
    alone = TensorParallelInference.forward_in_process(1, X, build_rank)
    for world_size in (2, 3, 4):
        split = TensorParallelInference.forward_in_process(world_size, X, build_rank)
        np.testing.assert_allclose(split, alone, rtol=0, atol=1e-12)


def test_the_output_is_that_of_rank_0():
    def rank_itself(backend):
        return lambda x: backend.rank + x

    y = TensorParallelInference.forward_in_process(3, np.array(10.0), rank_itself)
    assert y == 10.0


def test_a_failing_rank_is_named():
    def build(backend):
        if backend.rank == 1:
            raise KeyError("no weights")
        return build_rank(backend)

    with pytest.raises(RuntimeError, match="rank 1 of 3 failed: KeyError: 'no weights'") as caught:
        TensorParallelInference.forward_in_process(3, X, build)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("world_size", [0, -2])
def test_a_world_without_ranks_is_refused(world_size):
    with pytest.raises(ValueError, match=f"world_size must be 1 or more, got {world_size}"):
        TensorParallelInference.forward_in_process(world_size, X, build_rank)
