"""Sharded models continue sequences as the plain model does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.errors import MissingMemberError
from mpishard.models import DDPModel, FSDPModel, HybridShardedModel
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

MESHES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (1, 4)]


def gpt(tied: bool = False) -> nn.GPT:
    return nn.GPT(
        vocabulary_size=12,
        context_length=8,
        width=12,
        heads=4,
        kv_heads=2,
        layers=2,
        dtype="float64",
        tied_embeddings=tied,
        seed=5,
    )


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"schedule": "zb-v"}])
@in_worlds(1, 2, 3, 4, 6)
def test_every_mesh_draws_the_plain_models_tokens(backend: Any, options: Any) -> None:
    expected = gpt(tied=True).generate([3, 1, 4], 7, 0.7, seed=2, top_k=5)
    for pipeline, tensor in MESHES:
        if backend.world_size % (pipeline * tensor):
            continue
        model = HybridShardedModel(
            gpt(tied=True), ShardingConfiguration(backend), pipeline, tensor, micro_batch_count=3,
            data_parallel_strategy="fsdp", **options,
        )  # fmt: skip
        for _ in range(2):
            actual = model.generate([3, 1, 4], 7, 0.7, seed=2, top_k=5)
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("model_class", [DDPModel, FSDPModel])
@in_worlds(1, 3)
def test_data_parallel_models_draw_the_plain_models_tokens(backend: Any, model_class: Any) -> None:
    expected = gpt().generate([3, 1, 4], 9, 0)
    model = model_class(gpt(), ShardingConfiguration(backend))
    np.testing.assert_array_equal(model.generate([3, 1, 4], 9, 0), expected)


@in_worlds(2)
def test_wrong_arguments_of_generate_are_refused(backend: Any) -> None:
    model = HybridShardedModel(gpt(), ShardingConfiguration(backend), 2)
    with pytest.raises(ValueError, match="token 12 is outside the vocabulary"):
        model.generate([12], 1)
    with pytest.raises(ValueError, match="arguments differ between ranks"):
        model.generate([backend.rank], 1)
    other = HybridShardedModel(nn.MLP([2, 3, 1]), ShardingConfiguration(backend), 2)
    with pytest.raises(MissingMemberError, match="MLP has no generate"):
        other.generate([1], 1)
