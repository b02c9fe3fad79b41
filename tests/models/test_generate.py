"""Sharded models continue sequences as the plain model does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.base import Device, ShardLayout
from mpishard.errors import MissingMemberError
from mpishard.models import DDPModel, FSDPModel, HybridShardedModel
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

MESHES = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (2, 2), (1, 4)]


def gpt(tied: bool = False, dtype: str = "float64") -> nn.GPT:
    return nn.GPT(
        vocabulary_size=12,
        context_length=8,
        width=12,
        heads=4,
        kv_heads=2,
        layers=2,
        dtype=dtype,
        tied_embeddings=tied,
        seed=5,
    )


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}, {"schedule": "zb-v"}])
@in_worlds(1, 2, 4, 6)
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


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@in_worlds(2)
def test_parameters_are_gathered_once_if_they_fit(
    backend: Any, precision: str | None, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setenv("MPISHARD_ARENA", "off")
    dtype = "float64" if precision is None else "float32"
    plain = gpt(dtype=dtype)
    model = FSDPModel(plain, ShardingConfiguration(backend, precision=precision))
    bytes_of = plain.parameter_count * (8 if precision is None else 2)
    found, sent = [], []
    for free in (None, 2 * backend.world_size * bytes_of, 100):
        monkeypatch.setattr(Device, "free_bytes", free)
        backend.barrier()
        backend.traffic.reset()
        found.append(model.generate([3, 1, 4], 9, 0).tolist())
        sent.append(backend.traffic.bytes_sent["all_gather"])
        assert not model.engine.parameters.computed.resident
        model.gather_full_parameters()  # in the pooled buffers, as before
        backend.barrier()  # the ranks are threads, of which all patch one attribute
    assert found[0] == found[1] == found[2]
    # The agreement on arguments is 8 bytes.
    share = ShardLayout(bytes_of, backend.world_size).sizes
    assert all(abs(n - (backend.world_size - 1) * share[0]) < 1000 for n in sent[:2])
    assert sent[2] > 6 * sent[0]
    if backend.rank == 0:
        assert "generate: each of 9 passes gathers the parameters" in caplog.text


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
