"""Errors of one rank, under each optimizer that compresses or delays gradients."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.optimizers import SGD

X = np.random.default_rng(5).standard_normal((24, 6))
Y = np.sin(X[:, :3])

WRAPPERS = {
    "local": lambda *given: ms.LocalSGDOptimizer(*given, 3),
    "local codes": lambda *given: ms.LocalSGDOptimizer(
        *given, 4, SGD(0.7, momentum=0.9, nesterov=True), exchange="int8"
    ),
    "late": lambda *given: ms.AsyncSGDOptimizer(*given, 2),
    "elastic": ms.ElasticOptimizer,
    **{
        method: lambda *given, method=method: ms.GradientCompressionOptimizer(*given, method=method)
        for method in ("quantization", "int8", "top-k")
    },
}


def raises(error):
    raise error


FAULTS = {
    "interrupted": (lambda *_: raises(KeyboardInterrupt()), KeyboardInterrupt),
    "raises": (lambda *_: raises(MemoryError()), MemoryError),
    "not finite": (lambda optimizer, x: x.fill(np.nan), NonFiniteLossError),
    "another rate": (
        lambda optimizer, x: setattr(optimizer.wrapped_optimizer, "learning_rate", 0.5),
        ShardingError,
    ),
}


def train(backend, make, fault):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = ms.DDPModel(nn.MLP([6, 8, 3], activation="tanh", seed=2), config)
    optimizer = make(SGD(1e-2), config)
    mine = [slice(0, 15), slice(15, 24), slice(0, 0)][backend.rank]  # the last rank has none
    for step in range(7):
        x = X[mine].copy()
        if step == 5 and backend.rank == 1:
            fault(optimizer, x)
        optimizer.step(model, x, Y[mine])
    optimizer.settle()
    return model.get_parameters()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_rank_without_samples_is_no_fault(wrapper):
    found = ms.run_in_threads(3, train, WRAPPERS[wrapper], lambda *_: None)
    assert np.isfinite(found).all()
    assert (np.array(found) == found[0]).all()


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_fault_of_one_rank_ends_all(wrapper, what):
    fault, error = FAULTS[what]
    with pytest.raises(error):
        ms.run_in_threads(3, train, WRAPPERS[wrapper], fault, timeout=20)
