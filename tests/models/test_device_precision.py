"""On a GPU ``precision`` rounds the operands of products; all arrays stay float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.base.arrays import to_host
from mpishard.testing.worlds import in_worlds


def trained(backend: Any, strategy: str, precision: str | None) -> Any:
    """Losses of three steps, and the parameters after them."""
    model = ms.nn.GPT(
        vocabulary_size=11, context_length=8, width=16, heads=2, layers=2, seed=2, device="cuda"
    )
    model = ms.as_distributed(model, backend, strategy, precision=precision)
    optimizer = ms.as_distributed(ms.optimizers.AdamW(3e-3), backend, strategy)
    x = np.random.default_rng(backend.rank).integers(0, 11, (4, 8))
    losses = [optimizer.step(model, x, (x + 1) % 11) for _ in range(3)]
    parameters = to_host(model.gather_full_parameters())
    assert parameters.dtype == np.float32
    return losses, parameters


@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "tf32"), ("fsdp", "bfloat16")])
@in_worlds(2)
def test_training_is_near_that_in_float32(
    backend: Any, strategy: str, precision: str, gpu: Any
) -> None:
    losses, parameters = trained(backend, strategy, precision)
    exact, wanted = trained(backend, strategy, None)
    np.testing.assert_allclose(losses, exact, rtol=0.01)
    np.testing.assert_allclose(parameters, wanted, atol=0.01)
    assert precision == "tf32" or not np.array_equal(parameters, wanted)  # which may round


@in_worlds(2)
def test_a_pipeline_has_the_products_of_one_rank(backend: Any, gpu: Any) -> None:
    x = np.arange(32).reshape(4, 8) % 11
    found = []
    for strategy in ("ddp", "pipeline"):
        model = ms.nn.GPT(
            vocabulary_size=11, context_length=8, width=16, heads=2, layers=2, seed=2, device="cuda"
        )
        model = ms.as_distributed(model, backend, strategy, precision="bfloat16")
        found.append(to_host(model.predict(x)))
    np.testing.assert_array_equal(*found)


@in_worlds(1)
def test_models_and_devices_without_the_precision_are_refused(backend: Any, gpu: Any) -> None:
    with pytest.raises(ValueError, match="on the host: only GPUs have TF32"):
        ms.as_distributed(ms.nn.MLP([2, 2], dtype="float32"), backend, precision="tf32")
    for precision in ("tf32", "bfloat16"):
        with pytest.raises(ValueError, match="has float64 parameters"):
            ms.as_distributed(
                ms.nn.MLP([2, 2], dtype="float64", device="cuda"), backend, precision=precision
            )
    with pytest.raises(ValueError, match='must be "bfloat16", "tf32", or None'):
        ms.ShardingConfiguration(backend, precision="fp8")
