"""The bytes of optimizers that compress or delay gradients have the content of a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn
from mpishard.errors import ShardingError
from mpishard.optimizers import SGD, Adam
from mpishard.testing.worlds import in_worlds

X = np.random.default_rng(5).standard_normal((29, 6))
Y = np.sin(X[:, :3])
FROZEN = {"linear0.bias": {"frozen": True}}
NESTEROV = {"momentum": 0.9, "nesterov": True}
WRAPPERS = {
    "int8": lambda *given: ms.GradientCompressionOptimizer(*given, method="int8"),
    "top-k": lambda *given: ms.GradientCompressionOptimizer(*given, 0.3, method="top-k"),
    "late": lambda *given: ms.AsyncSGDOptimizer(*given, 2),
    "local": lambda *given: ms.LocalSGDOptimizer(*given, 3, SGD(0.7, **NESTEROV)),
    # The rules have no vectors: only the number of outer steps is saved.
    "local without state": lambda _, config: ms.LocalSGDOptimizer(
        SGD(0.01), config, 3, SGD(lambda step: 1 / (1 + step))
    ),
}


def build(backend, wrapper):
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = ms.DDPModel(nn.MLP([6, 8, 3], activation="tanh", seed=2), config)
    optimizer = WRAPPERS[wrapper](Adam(1e-3, parameter_options=FROZEN), config)
    optimizer.bind(model)
    return model, optimizer


def train(model, optimizer, steps):
    for step in steps:
        rows = np.random.default_rng(step).permutation(29)[model.rank :: model.world_size]
        optimizer.step(model, X[rows], Y[rows])
    optimizer.settle()
    return model.get_parameters()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@in_worlds(1, 2, 3)
def test_training_continues_from_bytes_with_the_same_bits(backend, wrapper):
    model, optimizer = build(backend, wrapper)
    parameters = train(model, optimizer, range(6))
    data = np.frombuffer(optimizer.serialize(), np.uint8)
    assert (backend.all_gather(data[None]) == data).all()
    expected = train(model, optimizer, range(6, 11))
    again, other = build(backend, wrapper)
    train(again, other, range(3))  # of which nothing is left
    again.set_parameters(parameters)
    other.deserialize(data.tobytes())
    assert other.serialize() == data.tobytes()
    assert train(again, other, range(6, 11)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_other_worlds_take_from_bytes_what_they_take_from_a_checkpoint(wrapper, tmp_path):
    def write(backend):
        model, optimizer = build(backend, wrapper)
        train(model, optimizer, range(6))
        ms.checkpoint.save(tmp_path / "run", model, optimizer)
        return optimizer.serialize()

    def read(backend, data):
        _, optimizer = build(backend, wrapper)
        optimizer.deserialize(data)
        ms.checkpoint.load(tmp_path / "run", *(pair := build(backend, wrapper)))
        return optimizer.serialize() == pair[1].serialize()

    data = ms.run_in_threads(3, write)[0]
    for size in (1, 2, 4, 5):
        assert all(ms.run_in_threads(size, read, data))


@pytest.mark.parametrize("wrapper", ["int8", "late", "local"])
@in_worlds(1, 2)
def test_bytes_of_a_wrapper_need_a_model_and_the_same_wrapper(backend, wrapper):
    model, optimizer = build(backend, wrapper)
    train(model, optimizer, range(4))
    data = optimizer.serialize()
    exact = ms.DDPOptimizer(Adam(1e-3, parameter_options=FROZEN), model.sharding_configuration)
    with pytest.raises(ValueError, match=r"call bind\(model\) first"):
        exact.deserialize(data)
    _, known = build(backend, "late" if wrapper == "int8" else "int8")
    kept = known.serialize()
    with pytest.raises(ValueError, match=r"hold the state .*, and this optimizer has "):
        known.deserialize(data)
    assert known.serialize() == kept
    # The rule's own state is enough: a wrapper begins without errors, or late gradients.
    plain = ms.DDPModel(nn.MLP([6, 8, 3], seed=2), model.sharding_configuration)
    train(plain, exact, range(2))
    known.deserialize(exact.serialize())
    assert known.steps == 2


@in_worlds(2, 3)
def test_bytes_of_local_steps_need_equal_replicas(backend, shared_path):
    model, optimizer = build(backend, "local")
    rows = slice(0, 0 if backend.rank else 29)  # other ranks have no sample
    optimizer.step(model, X[rows], Y[rows])
    for save in (optimizer.serialize, lambda: optimizer.save_model(shared_path / "no")):
        with pytest.raises(ShardingError, match=r"call the optimizer's settle\(\)"):
            save()
    optimizer.settle()
    assert optimizer.serialize()
