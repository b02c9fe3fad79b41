"""Layers under sharding: masks do not depend on the split of the batch over ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.nn import (
    Conv2D,
    CrossEntropy,
    Dropout,
    Flatten,
    Linear,
    LinearRegression,
    LogisticRegression,
    MaxPool2D,
    Model,
    RMSNorm,
    Sequential,
    SiLU,
)
from mpishard.testing.worlds import in_worlds

STEPS, SAMPLES, RATE = 3, 7, 0.1


def convolutional() -> Model:
    chain = Sequential(
        Conv2D(2, 3, 3, padding=1),
        SiLU(),
        Dropout(0.3),
        MaxPool2D(2),
        Flatten(),
        RMSNorm(3 * 2 * 3),
        Dropout(0.5),
        Linear(3 * 2 * 3, 4),
    )
    loss = CrossEntropy(label_smoothing=0.1, z_loss=0.01)
    return Model(chain, loss, input_shape=(2, 4, 6), seed=3)


def masked() -> Model:
    model = LinearRegression(5, seed=4)
    model.set_active_feature_indices([0, 3])
    return model


PROBLEMS = {
    "convolutional": (convolutional, (2, 4, 6), 4),
    "masked": (masked, (5,), None),
    "logistic": (lambda: LogisticRegression(5, seed=5), (5,), 2),
}


def data(name: str, step: int) -> tuple[Any, Any]:
    _, shape, classes = PROBLEMS[name]
    generator = np.random.default_rng(step)
    x = generator.standard_normal((SAMPLES, *shape))
    if name == "convolutional":
        return x, generator.integers(0, classes, SAMPLES)
    if name == "logistic":
        return x, generator.integers(0, 2, (SAMPLES, 1))
    return x, generator.standard_normal((SAMPLES, 1))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(1, 2, 3)
def test_training_is_that_of_one_process(backend: Any, strategy: str, name: str) -> None:
    make = PROBLEMS[name][0]
    plain, losses = make(), []
    for step in range(STEPS):
        loss, gradients = plain.compute_loss_and_gradients(*data(name, step), step=step)
        plain.apply_gradients(gradients, RATE)
        losses.append(loss)

    configuration = ms.ShardingConfiguration(
        backend, learning_rate=RATE, minimum_parameter_group_size=1
    )
    model = ms.as_distributed(make(), configuration, strategy=strategy)
    # Uneven pieces: the last rank has the rest, and in a world of three the first has but one.
    cuts = [0, *range(1, backend.world_size), SAMPLES]
    mine = slice(cuts[backend.rank], cuts[backend.rank + 1])
    for step in range(STEPS):
        x, y = data(name, step)
        np.testing.assert_allclose(model.train(x[mine], y[mine]), losses[step], rtol=1e-12)
    parameters = model.gather_full_parameters()
    np.testing.assert_allclose(parameters, plain.get_parameters(), rtol=1e-12, atol=1e-13)
    if name == "masked":
        first = make().get_parameters()
        np.testing.assert_array_equal(parameters[[1, 2, 4]], first[[1, 2, 4]])
        assert (parameters[[0, 3]] != first[[0, 3]]).all()
