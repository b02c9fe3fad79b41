"""Errors on ranks of a mesh that call other methods than the others, or have other samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.communication import CommunicationBackend, run_in_threads
from mpishard.errors import NonFiniteLossError, PeerError, ShardingError
from mpishard.models import HybridShardedModel
from mpishard.sharding import ShardingConfiguration

X = np.random.default_rng(0).standard_normal((8, 4))


def model_on(backend: CommunicationBackend, *mesh: int) -> HybridShardedModel:
    return HybridShardedModel(nn.MLP([4, 6, 2]), ShardingConfiguration(backend), *mesh)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (2, 1, 2), (2, 2, 1)])
def test_predict_on_one_rank_only_is_named(mesh: tuple[int, int, int]) -> None:
    def body(backend: CommunicationBackend) -> str:
        model = model_on(backend, *mesh)
        try:
            if backend.rank == 0:
                model.predict(X)
            model.train(X, X[:, :2])
        except (ShardingError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    said = run_in_threads(int(np.prod(mesh)), body, timeout=20)
    assert "rank 0 is in predict" in said[0]
    assert "is in step" in said[0]
    assert all("rank 0 is in predict" in text or text.startswith("PeerError") for text in said)


def test_a_loss_that_is_not_finite_names_the_samples() -> None:
    def body(backend: CommunicationBackend) -> str:
        model = model_on(backend, 2, 2, 2)
        x = np.full_like(X, np.nan) if model.data_rank == 1 else X
        with pytest.raises(NonFiniteLossError) as caught:
            model.train(x, X[:, :2])
        return str(caught.value)

    for text in run_in_threads(8, body):
        assert "the loss of data ranks [1] (1: ranks [1, 3, 5, 7]) is not finite" in text


def test_errors_give_ranks_by_their_numbers_in_the_world() -> None:
    def body(backend: CommunicationBackend) -> Any:
        model = model_on(backend, 2, 1, 2)
        if backend.rank == 3:
            return None
        with pytest.raises(PeerError) as caught:
            backend.barrier() if backend.rank % 2 == 0 else model.predict(X)
        return caught.value.rank, str(caught.value)

    rank, text = run_in_threads(4, body, timeout=20)[1]
    assert rank == 3
    assert "rank 3 left after" in text
    assert "of model group 6 (ranks 1, 3)" in text
