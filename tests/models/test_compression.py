"""Gradients travel as bfloat16, and are summed in float32."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpishard import nn
from mpishard.communication import ReductionOperation
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.reductions import tree_reduce
from mpishard.testing.worlds import in_worlds

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
by_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


def build(backend: Any, problems: Any, strategy: str, dtype: str, *, compress: bool) -> Any:
    config = ShardingConfiguration(
        backend, 0.1, enable_gradient_compression=compress, minimum_parameter_group_size=1
    )
    return problems.STRATEGIES[strategy][0](nn.MLP([5, 7, 6, 2], seed=1, dtype=dtype), config)


def rounded(array: Any) -> Any:
    return array.astype(ml_dtypes.bfloat16)


@by_strategy
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@in_worlds(1, 2, 3, 4)
def test_the_result_is_the_float32_sum_of_rounded_gradients(
    backend: Any, problems: Any, strategy: str, dtype: str, path: str
) -> None:
    model = build(backend, problems, strategy, dtype, compress=True)
    local = [problems.part(9, 0, rank, backend.world_size) for rank in range(backend.world_size)]
    x, y = (a.astype(dtype) for a in problems.batch("mlp", 1))
    plain = nn.MLP([5, 7, 6, 2], seed=1, dtype=dtype)
    contributions = []
    for part in local:
        _, mean = plain.compute_loss_and_gradients(x[part], y[part])
        contributions.append(rounded(mean * len(x[part])).astype(np.float32))
    expected = tree_reduce(contributions, ReductionOperation.SUM)
    if strategy == "ddp":
        expected = rounded(expected).astype(np.float32)
    start = model.get_parameters()
    mine = local[backend.rank]
    for _ in range(2):  # the second time in buffers that were used
        model.set_parameters(start)
        model.train(x[mine], y[mine])
        moved = (start - model.get_parameters()) / 0.1 * sum(p.stop - p.start for p in local)
        # What is compared is the sum to some float32 roundings; a bfloat16 has 2**-9.
        scale = np.abs(expected).max()
        np.testing.assert_allclose(moved, expected, rtol=0, atol=2e-5 * scale)


@by_strategy
@in_worlds(2, 3, 4)
def test_same_bits_with_and_without_shared_memory(
    backend: Any, problems: Any, strategy: str, monkeypatch: Any
) -> None:
    results = []
    for arena in ("auto", "off"):
        backend.barrier()
        monkeypatch.setenv("MPISHARD_ARENA", arena)
        backend.barrier()
        model = build(backend, problems, strategy, "float32", compress=True)
        for step in range(3):
            x, y = problems.local_batch(backend, "mlp", step)
            model.train(x.astype("f4"), y.astype("f4"))
        results.append(model.get_parameters())
    backend.barrier()
    np.testing.assert_array_equal(*results)


@by_strategy
@in_worlds(2, 3)
def test_gradients_take_half_the_bytes(
    backend: Any, problems: Any, strategy: str, messages_only: None
) -> None:
    sent = {}
    for compress in (False, True):
        model = build(backend, problems, strategy, "float32", compress=compress)
        x, y = (a.astype("f4") for a in problems.local_batch(backend, "mlp", 0))
        backend.traffic.reset()
        model.train(x, y)
        sent[compress] = int(backend.all_reduce(np.array([backend.traffic.total_bytes]))[0])
    whole = 4 * model.parameter_count
    passes = 2 if strategy == "ddp" else 1  # an all-reduce, or a reduce-scatter
    assert sent[False] - sent[True] == passes * (backend.world_size - 1) * whole // 2


@by_strategy
@in_worlds(2)
def test_it_can_be_switched_between_steps_and_accumulates_unrounded(
    backend: Any, problems: Any, strategy: str
) -> None:
    model = build(backend, problems, strategy, "float32", compress=False)
    x, y = (a.astype("f4") for a in problems.local_batch(backend, "mlp", 0))
    model.train(x, y)
    model.sharding_configuration.enable_gradient_compression = True
    start = model.get_parameters()
    with model.accumulate():
        model.train(x, y)
    model.train(x, y)
    twice = model.get_parameters() - start
    model.sharding_configuration.enable_gradient_compression = False
    model.set_parameters(start)
    model.train(x, y)
    np.testing.assert_allclose(twice, model.get_parameters() - start, rtol=0.02, atol=1e-4)
    assert (twice != model.get_parameters() - start).any()


@in_worlds(2, 3)
def test_a_reduction_of_16_bit_floats_may_end_in_float32(backend: Any) -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16):
        mine = (np.arange(70) / 7 + backend.rank / 3).astype(dtype)
        peers = [(np.arange(70) / 7 + r / 3).astype(dtype) for r in range(backend.world_size)]
        piece = backend.reduce_scatter(mine.copy())
        wide = backend.reduce_scatter(mine, out=np.empty(piece.shape, np.float32))
        start = sum(backend.all_gather(np.array([piece.size]))[: backend.rank])
        expected = tree_reduce([p.astype("f4") for p in peers], ReductionOperation.SUM)
        np.testing.assert_array_equal(wide, expected[start : start + piece.size])
        np.testing.assert_array_equal(piece, wide.astype(dtype))
    with pytest.raises(ValueError, match="float64"):
        backend.reduce_scatter(np.ones(4), out=np.empty(2, np.float32))
