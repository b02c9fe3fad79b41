"""Two models of one size that ranks use in different orders: refused, and never mixed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.communication.agreement import share_text
from mpishard.errors import CollectiveMismatchError
from mpishard.testing.worlds import in_worlds

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]


def wrapped(backend: Any, strategy: str, width: int = 4) -> tuple[Any, Any]:
    """A model of three units, and its optimizer."""
    net = ms.nn.MLP([3, width, width, 1], seed=0)
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    model = ms.as_distributed(net, config, strategy=strategy)
    rule = ms.optimizers.SGD(learning_rate=0.1, momentum=0.9)
    return model, ms.as_distributed(rule, backend, strategy=strategy)


def data(backend: Any, factor: float) -> tuple[Any, Any]:
    x = np.random.default_rng(backend.rank).standard_normal((4, 3))
    return x, factor * x.sum(axis=1, keepdims=True)


def refused(call: Any) -> str:
    with pytest.raises(CollectiveMismatchError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2, 3)
def test_steps_in_another_order_are_refused_and_change_nothing(
    backend: Any, path: str, strategy: str
) -> None:
    models = [wrapped(backend, strategy) for _ in range(2)]
    before = [model.get_parameters() for model, _ in models]
    model, optimizer = models[backend.rank == 1]
    message = refused(lambda: optimizer.step(model, *data(backend, 1.0)))
    assert "do not match in the model or its unit" in message
    assert "every rank must use its models, and the layers of each, in the same order" in (
        message.lower()
    )
    place = re.escape(f"made at {__file__}:{wrapped.__code__.co_firstlineno + 4}")
    # One line makes both models, which have their numbers there.
    assert len(set(re.findall(rf"of MLP(?: number \d+)? \({place}\)", message))) == 2
    for (model, _), values in zip(models, before, strict=True):
        assert (model.get_parameters() == values).all()


@pytest.mark.parametrize("path", ["messages"], indirect=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2, 3)
def test_without_headers_of_large_reductions_another_order_is_refused_before_the_update(
    backend: Any, path: str, strategy: str
) -> None:
    models = [wrapped(backend, strategy, width=40) for _ in range(2)]
    backend.check_collectives = False
    before = [model.get_parameters() for model, _ in models]
    model, optimizer = models[backend.rank == 1]
    assert "do not match in the model or its unit" in refused(
        lambda: optimizer.step(model, *data(backend, 1.0))
    )
    for (model, _), values in zip(models, before, strict=True):
        assert (model.get_parameters() == values).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2, 3)
def test_steps_in_the_same_order_train_both(backend: Any, strategy: str) -> None:
    """Also with a copy of one model; rank 0 alone has made more copies."""
    models = [wrapped(backend, strategy) for _ in range(2)]
    copies = [models[0][0].deep_copy() for _ in range(3 if backend.rank == 0 else 1)]
    models.append((copies[0], wrapped(backend, strategy)[1]))
    before = [model.get_parameters() for model, _ in models]
    for number, (model, optimizer) in enumerate(models):
        optimizer.step(model, *data(backend, number + 1.0))
    for (model, _), values in zip(models, before, strict=True):
        assert (model.get_parameters() != values).any()


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2)
def test_a_copy_is_another_model(backend: Any, strategy: str) -> None:
    model, optimizer = wrapped(backend, strategy)
    other = model.deep_copy()
    used = other if backend.rank == 1 else model
    message = refused(lambda: optimizer.step(used, *data(backend, 1.0)))
    assert re.search(rf"of MLP(?: number \d+)? \(made at {re.escape(__file__)}:", message)


@in_worlds(2)
def test_models_made_without_collectives_have_numbers_of_their_own(backend: Any) -> None:
    """Models of two worlds are copied alternately, after the same collective of each."""
    group = backend.split(0)
    numbers = [world.number_model("copy") for world in (backend, group) * 3]
    assert len(set(numbers)) == 6
    assert (backend.all_gather(np.array([numbers])) == numbers).all()


@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@pytest.mark.parametrize("call", ["evaluate", "train", "gather"])
@in_worlds(2)
def test_other_collectives_of_a_model_are_compared_too(backend: Any, path: str, call: str) -> None:
    strategy = "fsdp" if call == "gather" and path == "messages" else "ddp"
    models = [wrapped(backend, strategy)[0] for _ in range(2)]
    model = models[backend.rank]
    x, y = data(backend, 1.0)
    calls = {
        "evaluate": lambda: model.evaluate(x, y),
        "train": lambda: model.train(x, y),
        "gather": model.get_parameters,
    }
    if call == "gather" and path == "arena":
        pytest.skip("shared parameters are read in place, and nothing is gathered")
    refused(calls[call])


STATE = {
    "save": lambda model, optimizer, place: ms.checkpoint.save(place, model, optimizer),
    "load": lambda model, optimizer, place: ms.checkpoint.load(place, model),
    "check_replicas": lambda model, optimizer, place: model.check_replicas(),
    "serialize": lambda model, optimizer, place: optimizer.serialize(),
    "write": lambda model, optimizer, place: setattr(model, "_local_shard", model._local_shard + 1),
    "set_parameters": lambda model, optimizer, place: model.set_parameters(np.zeros(41)),
}


@pytest.mark.parametrize("call", STATE)
@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(2)
def test_state_of_two_models_is_not_mixed(
    backend: Any, path: str, strategy: str, call: str, tmp_path: Any
) -> None:
    """Rank 1 saves, loads or writes the other model."""
    if call == "check_replicas" and strategy == "fsdp" and path == "arena":
        pytest.skip("the ranks share one copy, and nothing is compared")
    models = [wrapped(backend, strategy) for _ in range(2)]
    for number, (model, optimizer) in enumerate(models):
        optimizer.step(model, *data(backend, number + 1.0))
    folder = Path(share_text(backend, str(tmp_path)))
    ms.checkpoint.save(folder / "first", models[0][0])
    before = [model.get_parameters() for model, _ in models]
    model, optimizer = models[backend.rank]
    message = refused(lambda: STATE[call](model, optimizer, folder / "first"))
    assert "do not match in the model or its unit" in message
    for (model, _), values in zip(models, before, strict=True):
        assert (model.get_parameters() == values).all()
    ms.checkpoint.load(folder / "first", models[1][0])
    assert (models[1][0].get_parameters() == before[0]).all()


@pytest.mark.parametrize("call", ["predict", "evaluate", "get_parameters"])
@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
@in_worlds(2)
def test_models_on_a_mesh_are_not_mixed(backend: Any, strategy: str, call: str) -> None:
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    models = [
        ms.as_distributed(ms.nn.MLP([3, 4, 4, 2], seed=seed), config, strategy=strategy)
        for seed in range(2)
    ]
    x = np.random.default_rng(0).standard_normal((4, 3))
    given = {"predict": (x,), "evaluate": (x, x[:, :2]), "get_parameters": ()}[call]
    refused(lambda: getattr(models[backend.rank], call)(*given))


REPLICAS = {
    "local": lambda rule, config: ms.optimizers.LocalSGDOptimizer(rule, config, 5),
    "compressed": ms.optimizers.GradientCompressionOptimizer,
    "late": lambda rule, config: ms.optimizers.AsyncSGDOptimizer(rule, config, 1),
}


@pytest.mark.parametrize("call", ["local step", "compressed step", "late step", "local settle"])
@in_worlds(2, 3)
def test_replicas_exchange_only_with_those_of_the_same_model(backend: Any, call: str) -> None:
    exchange_in_another_order(backend, *call.split(), size=None)


@in_worlds(4)
def test_replicas_of_two_ranks_average_only_with_those_of_the_same_model(backend: Any) -> None:
    exchange_in_another_order(backend, "local", "settle", size=2)


def exchange_in_another_order(backend: Any, name: str, verb: str, size: int | None) -> None:
    pairs = []
    for seed in (0, 1):
        config = ms.ShardingConfiguration(backend, replica_size=size)
        model = ms.DDPModel(ms.nn.MLP([3, 4, 4, 1], seed=seed), config)
        pairs.append((model, REPLICAS[name](ms.optimizers.SGD(0.1), config)))
    x, y = data(backend, 1.0)
    for model, optimizer in pairs:
        optimizer.step(model, x, y)
    parameters = [model.engine.parameters.owned(model.engine.pieces.updated) for model, _ in pairs]
    before = [[values.copy() for values in own] for own in parameters]
    model, optimizer = pairs[backend.rank == backend.world_size - 1]
    refused(optimizer.settle if verb == "settle" else lambda: optimizer.step(model, x, y))
    for own, kept in zip(parameters, before, strict=True):
        assert all((values == old).all() for values, old in zip(own, kept, strict=True))
