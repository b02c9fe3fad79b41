"""Names by which subclasses of the mirrored hierarchy know a model and its shard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.errors import ShardingError
from mpishard.testing.worlds import in_worlds


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp", "tensor", "pipeline"])
@in_worlds(2, 3)
def test_a_shard_can_be_assigned(backend: Any, strategy: str) -> None:
    plain = nn.MLP([4, 6, 4])
    model = ms.as_distributed(plain, backend, strategy)
    assert model._wrapped_model_internal is plain
    assert model._num_ops is np
    before = model.gather_full_parameters()
    model._local_shard = 2 * model._local_shard
    assert model._cached_full_parameters is None
    np.testing.assert_array_equal(model.gather_full_parameters(), 2 * before)
    with pytest.raises(ValueError, match=r"_local_shard: expected a vector of shape \(\d+,\), got"):
        model._local_shard = np.zeros(1)


@in_worlds(2)
def test_a_black_box_computes_with_an_assigned_shard(backend: Any) -> None:
    plain = ms.FunctionModel(lambda theta, x, y: (0.0, theta), np.ones(5))
    model = ms.as_distributed(plain, backend)
    model._local_shard = model._local_shard * 3
    assert plain.get_parameters().tolist() == [3.0] * 5


@in_worlds(3)
def test_start_and_size_of_a_shard_cannot_be_chosen(backend: Any) -> None:
    plain = ms.FunctionModel(lambda theta, x, y: (0.0, theta), np.arange(10.0))
    model = ms.as_distributed(plain, backend)
    model._shard_start_index = model._shard_start_index
    model._shard_size = model._shard_size
    for name in ("_shard_start_index", "_shard_size"):
        with pytest.raises(ShardingError, match=rf"{name} is \d+, as FSDP divides .* be set to 77"):
            setattr(model, name, 77)
    full = model.gather_full_parameters()
    model._cached_full_parameters = None
    assert model._cached_full_parameters is None
    model._cached_full_parameters = full
    assert model._cached_full_parameters is full
