"""Optimizers that are saved and loaded before a step, and state that is made equal again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.errors import CheckpointError, ShardingError
from mpishard.optimizers import Adam, AsyncSGDOptimizer, GradientCompressionOptimizer
from mpishard.testing.worlds import in_worlds

X, Y = np.random.default_rng(0).standard_normal((2, 6, 4))


def pair(backend: Any, strategy: str, rule: Any = ms.optimizers.Adam) -> tuple[Any, Any]:
    model = ms.as_distributed(nn.MLP([4, 6, 4]), backend, strategy)
    return model, ms.as_distributed(rule(0.01), backend, strategy)


def step(model: Any, optimizer: Any, times: int = 1) -> None:
    mine = model.batch_indices(len(X))
    for _ in range(times):
        optimizer.step(model, X[mine], Y[mine])


@in_worlds(2, 3)
def test_replicated_state_of_tensor_ranks_becomes_equal_again(backend: Any) -> None:
    model, optimizer = pair(backend, "tensor")
    optimizer.synchronize_optimizer_state()  # before there is any
    step(model, optimizer, 2)
    expected = {name: vector.copy() for name, vector in optimizer.state.items()}
    saved = optimizer.serialize()
    held = model.engine.placement.local_parameters
    shared = [each.entry for each in held if each.entry.name == "linear1.bias"]
    assert shared  # of a layer split by columns every rank has the whole bias
    if backend.rank == 1:
        for vector in optimizer.state.values():
            vector[shared[0].start : shared[0].stop] += 1
        optimizer._state.steps = 77
    optimizer.synchronize_optimizer_state()
    assert optimizer.steps == 2
    assert optimizer.serialize() == saved
    for name, vector in optimizer.state.items():
        np.testing.assert_array_equal(vector, expected[name])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor", "pipeline"])
@in_worlds(2)
def test_an_optimizer_is_saved_and_loaded_before_a_step(
    backend: Any, shared_path: Any, strategy: str
) -> None:
    fresh = pair(backend, strategy)[1]
    fresh.save_model(shared_path / "fresh")
    model, optimizer = pair(backend, strategy)
    step(model, optimizer, 2)
    optimizer.save_model(shared_path / "two")
    kept = optimizer.serialize()
    other, waiting = pair(backend, strategy)
    other.set_parameters(model.get_parameters())
    waiting.load_model(shared_path / "two")  # before it knows a model
    assert waiting.serialize() == kept
    with pytest.raises(ShardingError, match=r"has no model yet: call bind\(model\)"):
        waiting.save_model(shared_path / "waiting")
    step(model, optimizer)
    step(other, waiting)
    assert waiting.steps == 3
    np.testing.assert_array_equal(other.get_parameters(), model.get_parameters())
    waiting.deserialize(fresh.serialize())
    assert waiting.steps == 0
    assert not any(vector.any() for vector in waiting.state.values())
    again = pair(backend, strategy)[1]
    again.load_model(shared_path / "fresh")
    step(pair(backend, strategy)[0], again)
    assert again.steps == 1
    with pytest.raises(CheckpointError, match="Adam"):
        pair(backend, strategy, ms.optimizers.Lion)[1].load_model(shared_path / "two")


def test_a_saved_state_fits_compression_or_delay() -> None:
    def main(backend: Any) -> None:
        config = ms.ShardingConfiguration(backend)
        whole = GradientCompressionOptimizer(Adam(), config, 0.1, use_quantization=False)
        GradientCompressionOptimizer(Adam(), config, 0.2, seed=1).deserialize(whole.serialize())
        prompt = AsyncSGDOptimizer(Adam(), config)
        AsyncSGDOptimizer(Adam(), config, 2).deserialize(prompt.serialize())

    ms.run_in_threads(2, main)
