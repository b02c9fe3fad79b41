"""Replicas that each rank updates alone, until they are synchronised."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.communication import run_in_threads
from mpishard.errors import ShardingError
from mpishard.testing.worlds import in_worlds


def build(backend: Any, problems: Any, kind: str = "mlp", strategy: str = "ddp") -> Any:
    model, optimizer = problems.build(backend, kind, strategy, "adamw")
    model.sharding_configuration.auto_sync_gradients = False
    return model, optimizer


def parts(backend: Any, problems: Any) -> Any:
    """Uneven batches, none of them empty."""
    x, y = problems.batch("mlp", 3)
    mine = slice(2 * backend.rank, 2 * backend.rank + 2)
    if backend.rank == backend.world_size - 1:
        mine = slice(2 * backend.rank, None)
    return (x, y), (x[mine], y[mine])


@pytest.mark.parametrize("kind", ["mlp", "function"])
@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@in_worlds(1, 2, 3)
def test_a_local_step_uses_the_ranks_own_batch_and_sends_nothing(
    backend: Any, problems: Any, kind: str, path: str
) -> None:
    model, _ = build(backend, problems, kind)
    _, (x, y) = parts(backend, problems)
    alone = problems.MODELS[kind](0)
    backend.traffic.reset()
    for _ in range(3):
        loss = model.train(x, y)
        assert loss == pytest.approx(alone.train(x, y), rel=1e-12)
    assert backend.traffic.total_bytes == 0
    np.testing.assert_allclose(model.get_parameters(), alone.get_parameters(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["mlp", "function"])
@in_worlds(1, 2, 3)
def test_one_local_step_and_synchronising_is_one_synchronised_step(
    backend: Any, problems: Any, kind: str
) -> None:
    model, _ = build(backend, problems, kind)
    (all_x, all_y), (x, y) = parts(backend, problems)
    alone = problems.MODELS[kind](0)
    for _ in range(3):
        model.train(x, y)
        model.synchronize_gradients()
        alone.train(all_x, all_y)
        theta = model.get_parameters()
        np.testing.assert_allclose(theta, alone.get_parameters(), rtol=0, atol=1e-12)
        assert (backend.all_gather(theta).reshape(backend.world_size, -1) == theta).all()


@in_worlds(2)
def test_calls_that_need_equal_replicas_are_refused_while_they_differ(
    backend: Any, problems: Any, shared_path: Any
) -> None:
    model, optimizer = build(backend, problems)
    _, (x, y) = parts(backend, problems)
    optimizer.step(model, x, y)
    for call in (model.serialize, lambda: model.save_model(shared_path / "m")):
        with pytest.raises(ShardingError, match="synchronize_gradients"):
            call()
    model.sharding_configuration.auto_sync_gradients = True
    with pytest.raises(ShardingError, match="synchronize_gradients"):
        optimizer.step(model, x, y)
    model.synchronize_gradients()
    optimizer.step(model, x, y)
    model.serialize()


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "fsdp"])
def test_sharded_strategies_refuse_local_steps(problems: Any, strategy: str) -> None:
    def body(backend: Any) -> None:
        model, optimizer = build(backend, problems, strategy=strategy)
        backend.traffic.reset()
        with pytest.raises(ValueError, match=r"accumulate\(\)"):
            optimizer.step(model, *problems.batch("mlp", 0))
        assert backend.traffic.total_bytes == 0

    run_in_threads(2, body)


@in_worlds(2)
def test_local_steps_accumulate_too(backend: Any, problems: Any) -> None:
    model, _ = build(backend, problems)
    _, (x, y) = parts(backend, problems)
    alone = problems.MODELS["mlp"](0)
    with model.accumulate():
        model.train(x[:1], y[:1])
    model.train(x[1:], y[1:])
    alone.train(x, y)
    np.testing.assert_allclose(model.get_parameters(), alone.get_parameters(), rtol=0, atol=1e-12)


def test_a_local_step_without_samples_is_refused(problems: Any) -> None:
    def body(backend: Any) -> None:
        model, _ = build(backend, problems)
        x, y = problems.batch("mlp", 0)
        with pytest.raises(ValueError, match="no sample"):
            model.train(x[:0], y[:0])
        with pytest.raises(ArithmeticError, match="rank 0"):
            model.train(x * np.nan, y)

    run_in_threads(1, body)


@in_worlds(2, 3)
def test_replicas_are_averaged_although_a_gradient_was_computed(backend: Any) -> None:
    config = ms.ShardingConfiguration(backend, auto_sync_gradients=False)
    model = ms.DDPModel(ms.nn.MLP([2, 2]), config)
    x = np.full((2, 2), 1.0 + backend.rank)
    model.train(x, x)
    model.compute_gradients(x, x)
    assert model.synchronize_gradients() is not None
    full = model.get_parameters()
    np.testing.assert_array_equal(backend.broadcast(full.copy()), full)
