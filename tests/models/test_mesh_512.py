"""The documented example, 8 x 8 x 8 = 512 ranks, under --full; 4 x 4 x 4 by default."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.communication import CommunicationBackend, run_in_threads
from mpishard.models import HybridShardedModel
from mpishard.optimizers import SGD, HybridShardedOptimizer
from mpishard.sharding import ShardingConfiguration

RATE = 0.01
SIZE = 8 if os.environ.get("MPISHARD_TEST_FULL") else 4
"""Of each axis. With 8 it takes 20 seconds of processor time."""


def gpt() -> nn.GPT:
    """Eight layers, one for each stage, and eight heads, one for each slice."""
    return nn.GPT(
        vocabulary_size=16, context_length=4, width=8, heads=8, layers=2, seed=3, dtype="float64"
    )


@pytest.mark.timeout(400)
def test_a_cube_of_ranks_makes_the_step_of_one_process() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.integers(0, 16, (2, 2 * SIZE, 4))

    def body(backend: CommunicationBackend) -> tuple[Any, ...]:
        config = ShardingConfiguration(backend)
        sizes = SIZE, SIZE, SIZE
        model = HybridShardedModel(gpt(), config, *sizes, micro_batch_count=2, schedule="1f1b")
        optimizer = HybridShardedOptimizer(SGD(RATE, 0.9), config, *sizes)
        rows = slice(2 * model.data_rank, 2 * model.data_rank + 2)
        loss = optimizer.step(model, x[rows], y[rows])
        held = model.engine.layout.length
        return loss, held, model.gather_full_parameters(), model.mesh.coordinates_of(backend.rank)

    results = run_in_threads(SIZE**3, body, timeout=350)
    plain = gpt()
    expected_loss, gradient = plain.compute_loss_and_gradients(x, y)
    expected = plain.get_parameters() - RATE * gradient
    for rank, (loss, held, full, coordinates) in enumerate(results):
        assert abs(loss - expected_loss) < 1e-12
        np.testing.assert_allclose(full, expected, rtol=0, atol=1e-12)
        assert coordinates == (rank // SIZE**2, rank % SIZE**2 // SIZE, rank % SIZE)
        if SIZE == 8:
            assert held <= 8 * 8 + 4 * 8 + 2 * 8  # of a stage's slice
    assert sum(held for _, held, *_ in results) < SIZE * 2 * plain.parameter_count
