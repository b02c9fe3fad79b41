"""Copies of a sharded model share no parameters with it, and continue at its step."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.errors import ShardingError
from mpishard.testing.worlds import in_worlds

by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
KINDS = ("mlp", "function")


def build(backend: Any, strategy: str, problems: Any, kind: str = "mlp") -> Any:
    return ms.as_distributed(problems.MODELS[kind](0), backend, strategy)


@pytest.mark.parametrize("kind", KINDS)
@by_strategy
@in_worlds(1, 3)
def test_freezing_a_copy_leaves_the_original_trained(
    backend: Any, problems: Any, strategy: str, kind: str
) -> None:
    model, other = (build(backend, strategy, problems, kind) for _ in range(2))
    first = model.parameter_entries[0].name
    batch = problems.local_batch(backend, kind, 0)
    for sharded in (model, other):
        sharded.train(*batch)
    copied = model.deep_copy()
    if len(model.parameter_entries) > 1:
        copied.engine.freeze(frozenset({first}))
        before = copied.get_parameters()[: model.parameter_entries[0].size]
        copied.train(*batch)
        np.testing.assert_array_equal(copied.get_parameters()[: before.size], before)
        again = copied.deep_copy()
        again.train(*batch)
        np.testing.assert_array_equal(again.get_parameters()[: before.size], before)
    for _ in range(2):
        for sharded in (model, other):
            sharded.train(*batch)
    np.testing.assert_array_equal(model.get_parameters(), other.get_parameters())


@in_worlds(2)
def test_a_copy_of_a_frozen_model_stays_frozen(backend: Any) -> None:
    def loss(parameters: Any, x: Any, y: Any) -> Any:
        return ((x @ parameters["w"] + parameters["b"] - y) ** 2).mean()

    plain = ms.adapters.AutogradModel(loss, {"b": np.ones(2), "w": np.ones((5, 2))})
    model = ms.as_distributed(plain, backend, "zero2")
    model.engine.freeze(frozenset({"b"}))
    copied = model.deep_copy()
    x = np.arange(20.0).reshape(4, 5) / 20
    copied.train(x, np.zeros((4, 2)))
    moved = copied.get_parameters() != 1
    assert moved.tolist() == [False] * 2 + [True] * 10


class Box:
    """A black box that returns its loss only together with the gradient."""

    def __init__(self) -> None:
        self.theta = np.ones(3)
        self.default_loss_function = nn.MSE()

    def get_parameters(self) -> Any:
        return self.theta.copy()

    def set_parameters(self, theta: Any) -> None:
        self.theta = theta

    def compute_loss_and_gradients(self, x: Any, y: Any) -> Any:
        error = x @ self.theta - y
        return float((error**2).mean()), 2 * x.T @ error / len(x)


@by_strategy
@in_worlds(1, 2)
def test_a_copied_black_box_trains_with_its_own_loss(backend: Any, strategy: str) -> None:
    model = ms.as_distributed(Box(), backend, strategy)
    copied = model.deep_copy()
    x, y = np.eye(3), np.zeros(3)
    assert copied.train(x, y) == model.train(x, y)
    np.testing.assert_array_equal(copied.get_parameters(), model.get_parameters())


@in_worlds(1, 2)
def test_a_copy_draws_the_masks_of_the_original(backend: Any) -> None:
    chain = nn.Sequential({"a": nn.Linear(5, 9), "drop": nn.Dropout(0.5), "b": nn.Linear(9, 2)})
    plain = nn.Model(chain, nn.MSE(), input_shape=(5,), seed=3)
    model = ms.as_distributed(plain, backend, "fsdp")
    x, y = np.ones((4, 5)), np.ones((4, 2))
    for _ in range(3):
        model.train(x, y)
    copied = model.deep_copy()
    model.train(x, y)
    copied.train(x, y)
    np.testing.assert_array_equal(copied.get_parameters(), model.get_parameters())


@in_worlds(1, 3)
def test_a_loaded_model_continues_at_the_saved_step(backend: Any, shared_path: Any) -> None:
    chain = nn.Sequential({"a": nn.Linear(5, 9), "drop": nn.Dropout(0.5), "b": nn.Linear(9, 2)})

    def wrapped() -> Any:
        return ms.as_distributed(nn.Model(chain, nn.MSE(), input_shape=(5,), seed=3), backend)

    model, x, y = wrapped(), np.ones((4, 5)), np.ones((4, 2))
    for _ in range(3):
        model.train(x, y)
    model.save_model(shared_path / "model")
    model.train(x, y)
    other = wrapped()
    other.load_model(shared_path / "model")
    other.train(x, y)
    np.testing.assert_array_equal(other.get_parameters(), model.get_parameters())


@in_worlds(2)
def test_a_copy_of_drifted_replicas_has_drifted(backend: Any, problems: Any) -> None:
    model = build(backend, "ddp", problems)
    model.sharding_configuration.auto_sync_gradients = False
    x, y = problems.batch("mlp", backend.rank)
    model.train(x, y)
    copied = model.deep_copy()
    with pytest.raises(ShardingError, match="synchronize_gradients"):
        copied.serialize()
    with pytest.raises(ShardingError, match="synchronize_gradients"):
        model.apply_gradients(np.zeros(model.parameter_count), 0.1)
    model.set_parameters(problems.MODELS["mlp"](0).get_parameters())
    model.serialize()  # all ranks have taken the same
    copied.synchronize_gradients()
    copied.serialize()


@by_strategy
@in_worlds(1, 2)
def test_parameters_cannot_change_while_gradients_wait_for_an_update(
    backend: Any, problems: Any, strategy: str, shared_path: Any
) -> None:
    model, optimizer = problems.build(backend, "mlp", strategy)
    model.save_model(shared_path / "before")
    for defer in (False, True):
        with model.accumulate(defer=defer):
            optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
        vector = np.zeros(model.parameter_count)
        for call in (
            lambda v=vector: model.apply_gradients(v, 0.1),
            lambda v=vector: optimizer.apply_gradients(v, model),
            lambda v=vector: model.set_parameters(v),
            lambda: model.load_model(shared_path / "before"),
        ):
            with pytest.raises(ShardingError, match=r"not allowed during accumulation"):
                call()
        optimizer.step(model, *problems.local_batch(backend, "mlp", 1))


@by_strategy
@in_worlds(2, 3)
def test_updates_that_differ_between_ranks_are_refused(
    backend: Any, problems: Any, strategy: str
) -> None:
    model, _ = problems.build(backend, "mlp", strategy)
    batch = problems.local_batch(backend, "mlp", 0)
    before = model.get_parameters()
    model.sharding_configuration.learning_rate = 0.1 + 0.1 * (backend.rank == 1)
    with pytest.raises(ShardingError, match="the settings of the update differ between ranks"):
        model.train(*batch)

    def rate(step: int) -> float:  # no comparison beforehand sees every step of a function
        return 0.2 if step == 2 and backend.rank == 1 else 0.1

    optimizer = problems.STRATEGIES[strategy][1](
        ms.optimizers.SGD(rate), model.sharding_configuration
    )
    with pytest.raises(ValueError, match="learning rates differ"):
        model.apply_gradients(np.ones(model.parameter_count), 0.1 * (1 + backend.rank))
    np.testing.assert_array_equal(model.get_parameters(), before)
    for _ in range(2):
        optimizer.step(model, *batch)
    after = model.get_parameters()
    with pytest.raises(ShardingError, match="the settings of the update differ between ranks"):
        optimizer.step(model, *batch)
    np.testing.assert_array_equal(model.get_parameters(), after)


@in_worlds(1, 2)
def test_closing_a_clone_leaves_the_original_s_round(backend: Any, problems: Any) -> None:
    model, other = (build(backend, "fsdp", problems) for _ in range(2))
    batch = problems.local_batch(backend, "mlp", 0)
    for sharded in (model, other):
        with sharded.accumulate():
            sharded.train(*batch)
    model.clone().close()
    for sharded in (model, other):
        sharded.train(*batch)
    np.testing.assert_array_equal(model.get_parameters(), other.get_parameters())


@by_strategy
@in_worlds(1, 2)
def test_pickling_is_refused_with_the_alternatives(
    backend: Any, problems: Any, strategy: str
) -> None:
    model, optimizer = problems.build(backend, "mlp", strategy)
    optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
    for made in (backend, model, optimizer, model.sharding_configuration):
        for make in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cannot be pickled.*model\.unsharded\(\)"):
                make(made)
    expected = model.gather_full_parameters()
    with model.unsharded() as plain:
        again = pickle.loads(pickle.dumps(plain))
    np.testing.assert_array_equal(again.get_parameters(), expected)
