"""Weights that are tied to a later layer, and rounds of accumulation that differ between ranks."""

from __future__ import annotations

import numpy as np
import pytest

from mpishard.errors import ShardingError
from mpishard.models import DDPModel, FSDPModel
from mpishard.nn import MSE, Linear, Model, ReLU, Sequential
from mpishard.optimizers import SGD, DDPOptimizer, FSDPOptimizer
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds

WRAPPERS = {"ddp": (DDPModel, DDPOptimizer), "fsdp": (FSDPModel, FSDPOptimizer)}
both = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])


def tied_forward() -> Model:
    """The first layer's weight is the last one's: it is used before its own unit begins."""
    chain = Sequential(
        {
            "first": Linear(4, 4, tied_to="last.weight"),
            "relu": ReLU(),
            "middle": Linear(4, 4),
            "last": Linear(4, 4),
        }
    )
    return Model(chain, MSE(), input_shape=(4,), seed=3)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(step)
    return generator.standard_normal((7, 4)), generator.standard_normal((7, 4))


@both
@pytest.mark.parametrize("unit_size", [1, 1000])
@in_worlds(1, 2, 3, 4)
def test_a_weight_tied_to_a_later_layer(backend, strategy, unit_size):
    model_class, optimizer_class = WRAPPERS[strategy]
    config = ShardingConfiguration(backend, minimum_parameter_group_size=unit_size)
    sharded, optimizer = model_class(tied_forward(), config), optimizer_class(SGD(0.1), config)
    plain = tied_forward()
    for step in range(4):
        x, y = batch(step)
        optimizer.step(
            sharded, x[backend.rank :: backend.world_size], y[backend.rank :: backend.world_size]
        )
        plain.train(x, y, learning_rate=0.1)
    difference = sharded.gather_full_parameters() - plain.get_parameters()
    assert np.abs(difference).max() < 1e-12


@both
@pytest.mark.parametrize("defer", [False, True])
@in_worlds(2, 3)
def test_a_round_that_one_rank_has_dropped_is_refused_everywhere(backend, strategy, defer):
    model_class, optimizer_class = WRAPPERS[strategy]
    config = ShardingConfiguration(backend)
    model, optimizer = model_class(tied_forward(), config), optimizer_class(SGD(0.1), config)
    before = model.gather_full_parameters()
    try:
        with model.accumulate(defer=defer):
            optimizer.step(model, *batch(0))
            if backend.rank == 1:
                {}["a script's own error, which it catches"]
    except KeyError:
        pass
    with pytest.raises(ShardingError, match="ranks have accumulated different numbers of batches"):
        optimizer.step(model, *batch(1))
    assert (model.gather_full_parameters() == before).all()
    optimizer.step(model, *batch(2))  # the round is dropped, and all goes on
    plain = tied_forward()
    plain.train(*batch(2), learning_rate=0.1)
    difference = model.gather_full_parameters() - plain.get_parameters()
    assert np.abs(difference).max() < 1e-12
