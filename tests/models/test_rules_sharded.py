"""Every update rule, sharded, is the textbook's in one process, to 1e-12."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpishard.models import ShardedModelBase
from mpishard.optimizers import LAMB, Adagrad, Adam, Lion, Optimizer, RMSprop
from mpishard.testing.worlds import in_worlds

by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])

RATE = 1e-3


def adagrad(theta: Any, g: Any, state: dict[str, Any], step: int) -> Any:
    state["sum"] = state.get("sum", 0) + g**2
    return theta - RATE * g / (np.sqrt(state["sum"]) + 1e-10)


def rmsprop(theta: Any, g: Any, state: dict[str, Any], step: int) -> Any:
    g = np.clip(g, -0.1, 0.1)
    state["square"] = 0.9 * state.get("square", 0) + 0.1 * g**2
    state["mean"] = 0.9 * state.get("mean", 0) + 0.1 * g
    spread = np.sqrt(np.maximum(state["square"] - state["mean"] ** 2, 0))
    state["velocity"] = 0.5 * state.get("velocity", 0) + g / (spread + 1e-3)
    return theta - RATE * state["velocity"]


def lion(theta: Any, g: Any, state: dict[str, Any], step: int) -> Any:
    m = state.get("m", np.zeros_like(theta))
    c = 0.9 * m + 0.1 * g
    state["m"] = 0.99 * m + 0.01 * g
    return theta - RATE * (np.sign(c) + 0.1 * theta)


RULES: dict[str, tuple[Any, Optimizer]] = {
    "adagrad": (adagrad, Adagrad(RATE)),
    "rmsprop": (rmsprop, RMSprop(RATE, 0.9, 1e-3, 0.5, centered=True, clip_value=0.1)),
    "lion": (lion, Lion(RATE, weight_decay=0.1)),
}


def check(
    backend: Any, problems: Any, kind: str, strategy: str, rule: Optimizer, update: Any
) -> ShardedModelBase:
    expected = problems.train_sequentially(kind, update)
    for unit_size in problems.UNIT_SIZES:
        model, _ = problems.build(backend, kind, strategy, unit_size=unit_size)
        optimizer = problems.STRATEGIES[strategy][1](rule, model.sharding_configuration)
        for parameters in expected.parameters:
            optimizer.step(model, *problems.local_batch(backend, kind, optimizer.steps))
            np.testing.assert_allclose(
                model.gather_full_parameters(), parameters, rtol=0, atol=1e-12
            )
    return model


@pytest.mark.parametrize("name", RULES)
@by_strategy
@in_worlds(1, 3)
def test_elementwise_rules(backend: Any, problems: Any, name: str, strategy: str) -> None:
    update, rule = RULES[name]
    check(backend, problems, "mlp", strategy, rule, update)


@by_strategy
@in_worlds(1, 3, 4)
def test_lamb_with_options(backend: Any, problems: Any, strategy: str) -> None:
    """A frozen layer, and biases without decay; some ranks own no trained parameter."""
    model, _ = problems.build(backend, "mlp", strategy)
    before = model.gather_full_parameters()
    rule = LAMB(
        RATE,
        weight_decay=0.1,
        clip_global_norm=0.05,
        parameter_options={
            "linear1.*": {"frozen": True},
            "*.bias": {"weight_decay": 0},
        },
    )
    update = problems.lamb(model.parameter_entries, 0.05, "linear1.", "bias")
    trained = check(backend, problems, "mlp", strategy, rule, update)
    after = trained.gather_full_parameters()
    is_frozen = np.zeros(len(before), bool)
    for entry in model.parameter_entries:
        is_frozen[entry.start : entry.stop] = entry.name.startswith("linear1.")
    assert (after[is_frozen] == before[is_frozen]).all()
    assert (after[~is_frozen] != before[~is_frozen]).all()


@by_strategy
@in_worlds(3)
def test_lamb_norms_travel_once_per_update(backend: Any, problems: Any, strategy: str) -> None:
    model, _ = problems.build(backend, "mlp", strategy)
    vectors = []

    class Watched(LAMB):
        def update_all(self, ranges: Any, context: Any) -> None:
            def sum_over_owners(vector: Any) -> Any:
                vectors.append(vector.shape)
                return context.sum_over_owners(vector)

            super().update_all(
                ranges,
                type(context)(
                    context.step,
                    context.learning_rate,
                    context.gradient_scale,
                    sum_over_owners,
                    context.parameter_names,
                ),
            )

    optimizer = problems.STRATEGIES[strategy][1](Watched(), model.sharding_configuration)
    optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
    assert vectors == [(len(model.parameter_entries), 2)]


@by_strategy
@in_worlds(2)
def test_everything_frozen_is_refused(backend: Any, problems: Any, strategy: str) -> None:
    model, _ = problems.build(backend, "mlp", strategy)
    rule = Adam(parameter_options={"*": {"frozen": True}})
    optimizer = problems.STRATEGIES[strategy][1](rule, model.sharding_configuration)
    with pytest.raises(ValueError, match="freeze all 6 parameters, so nothing can be trained"):
        optimizer.step(model, *problems.local_batch(backend, "mlp", 0))
