"""A tensor-parallel transformer block trains like one on one rank."""

import numpy as np
import pytest

from mpishard.nn import (
    GELU,
    MSE,
    Attention,
    CausalAttention,
    Context,
    LayerNorm,
    Linear,
    Model,
    ReLU,
    Residual,
    Sequential,
)
from mpishard.tensor import TensorParallelTransformerBlock
from mpishard.testing.worlds import in_worlds


def whole_block(heads, activation, causal):
    core = CausalAttention(heads) if causal else Attention(heads)
    attention = {"norm": LayerNorm(12), "qkv": Linear(12, 36, bias=False), "core": core}
    mlp = {"norm": LayerNorm(12), "expansion": Linear(12, 19), "activation": activation()}
    return Sequential(
        {
            "attention": Residual({**attention, "projection": Linear(12, 12)}),
            "mlp": Residual({**mlp, "projection": Linear(19, 12)}),
        }
    )


def model_of(block):
    return Model(Sequential({"block": block}), MSE(), input_shape=(5, 12), seed=2)


@pytest.mark.parametrize(("activation", "causal"), [(ReLU, False), (GELU, True)])
@in_worlds(1, 2, 3, 4)
def test_it_trains_like_a_block_on_one_rank(backend, activation, causal):
    heads = 6 if backend.world_size == 3 else 4
    block = TensorParallelTransformerBlock(backend, 12, heads, 19, activation, causal)
    whole, own = model_of(whole_block(heads, activation, causal)), model_of(block)
    x, y = np.random.default_rng(3).standard_normal((2, 3, 5, 12))
    np.testing.assert_allclose(own.predict(x), whole.predict(x), rtol=0, atol=1e-12)
    for _ in range(3):
        expected = whole.train(x, y, 0.05)
        assert own.train(x, y, 0.05) == pytest.approx(expected, rel=0, abs=1e-12)
    np.testing.assert_allclose(own.predict(x), whole.predict(x), rtol=0, atol=1e-12)
    if backend.world_size > 1:
        assert own.parameter_count < 0.7 * whole.parameter_count


@in_worlds(2)
def test_invalid_arguments_of_a_block_are_refused(backend):
    with pytest.raises(TypeError, match=r"activation\(\) must be a layer, .* got int"):
        TensorParallelTransformerBlock(backend, 8, 2, 16, int)
    with pytest.raises(ValueError, match="TensorParallelTransformerBlock splits its heads evenly"):
        TensorParallelTransformerBlock(backend, 9, 3, 16)
    with pytest.raises(ValueError, match="ffn_dim=0"):
        TensorParallelTransformerBlock(backend, 8, 2, 0)
    with pytest.raises(ValueError, match="cannot be divided among 2 ranks"):
        TensorParallelTransformerBlock(backend, 8, 2, 1)
    block = TensorParallelTransformerBlock(backend, 8, 2, 16)
    with pytest.raises(ValueError, match=r"shape \(batch, time, 8\), got samples of shape \(8,\)"):
        block.forward({}, np.ones((2, 8)), Context())
