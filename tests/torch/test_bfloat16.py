"""Modules that compute in bfloat16, while the owners of parameters keep float32."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from mpishard.errors import PeerError, ShardingError
from mpishard.models.stores.vector import ModelVector
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402
from mpishard.torch.sharded import module_of  # noqa: E402

nn = torch.nn
STEPS = 4
MODELS = {"mlp": nets.MODELS["mlp"], "gpt": nets.MODELS["gpt"]}

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)


def loss_of(name: str, model: Any, data: Any) -> Any:
    output = model(data[0]).float()
    if name == "mlp":
        return ((output - data[1].float()) ** 2).mean()
    return nn.functional.cross_entropy(output.flatten(0, 1), data[1].flatten())


def unique(model: Any) -> list[Any]:
    """Each parameter once, as a copy of its own."""
    seen = {id(p): name for name, p in reversed([*model.named_parameters()])}
    state = model.state_dict()
    return [state[name] for name in reversed(seen.values())]


def optimizer_of(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 1e-2, momentum=0.9)


def inputs(name: str) -> Any:
    data = nets.batch(name)
    return data if name == "mlp" else (data[0][:, :-1], data[0][:, 1:])


@functools.cache
def reference(name: str, world_size: int) -> Any:
    """PyTorch alone: by the rank: a bfloat16 module, float32 gradients and parameters."""
    master, rounded = (nets.make(MODELS[name][0]).float() for _ in range(2))
    rounded.bfloat16()
    optimizer = optimizer_of(master.parameters())
    pairs = list(zip(master.parameters(), rounded.parameters(), strict=True))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            rounded.zero_grad()
            data = [values[rank::world_size] for values in inputs(name)]
            data[0] = data[0].bfloat16() if name == "mlp" else data[0]
            loss_of(name, rounded, data).backward()
            for own, copy in pairs:
                own.grad = torch.zeros_like(own) if own.grad is None else own.grad
                own.grad += copy.grad.float() / world_size
        optimizer.step()
        with torch.no_grad():
            for own, copy in pairs:
                copy.copy_(own)
    return torch.cat([p.detach().flatten() for p in master.parameters()]).numpy()


@pytest.mark.parametrize("name", MODELS)
@by_path
@in_worlds(1, 2, 3)
def test_computes_with_rounded_copies_and_updates_float32(
    backend: Any, name: str, path: str, shared_path: Any
) -> None:
    mst.init()
    found = {}
    data = nets.mine(backend, inputs(name))
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        module = nets.make(MODELS[name][0]).float()
        model = mst.shard(module, strategy, minimum_unit_size=1, precision="bfloat16")
        optimizer = mst.optimizer(torch.optim.SGD, model, lr=1e-2, momentum=0.9)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(name, model, data).backward()
            optimizer.step()
        owner = module_of(model)
        owner.free_gathered()
        found[strategy] = ModelVector(owner.placement).gather(owner.parameters)
        assert all(part.tensor.dtype == torch.float32 for part in owner.parts)
        copies = torch.cat([p.flatten() for p in unique(model)])
        assert torch.equal(copies, torch.from_numpy(found[strategy]).bfloat16())
        assert mst.check_replicas(model) == 0 or strategy == "ddp" or path != "arena"
    start = torch.cat([p.flatten() for p in nets.make(MODELS[name][0]).float().parameters()])
    expected = reference(name, backend.world_size)
    learned = np.abs(expected - start.detach().numpy()).max()
    for strategy, values in found.items():
        np.testing.assert_array_equal(values, found["ddp"], err_msg=strategy)
    np.testing.assert_allclose(found["fsdp"], expected, rtol=0, atol=0.02 * learned)


@by_path
@in_worlds(2)
def test_checkpoints_keep_float32(backend: Any, path: str, shared_path: Any) -> None:
    mst.init()
    values = nets.make(nets.perceptron).float().state_dict()
    model = mst.shard(nets.make(nets.perceptron).float(), "fsdp", precision="bfloat16")
    mst.save(shared_path / "run", model)
    plain = mst.shard(nets.perceptron(), "zero1")
    mst.load(shared_path / "run", plain)
    state = plain.state_dict()
    assert all(torch.equal(state[name], values[name]) for name in values)
    mst.load(shared_path / "run", model)
    state = model.state_dict()
    assert all(torch.equal(state[name], values[name].bfloat16()) for name in values)


@in_worlds(2)
def test_precisions_and_changes_that_bfloat16_refuses(backend: Any) -> None:
    mst.init()
    with pytest.raises(ValueError, match=r"'0.weight' of this Sequential is torch.float64: use"):
        mst.shard(nets.make(nets.perceptron), precision="bfloat16")
    with pytest.raises(ValueError, match="None or \"bfloat16\", got 'half'"):
        mst.shard(nets.make(nets.perceptron), precision="half")
    model = mst.shard(nets.make(nets.perceptron).float(), precision="bfloat16")
    state = {name: values.clone() for name, values in model.state_dict().items()}
    with pytest.raises((ShardingError, PeerError), match=r"call it before shard\(\)"):
        model.load_state_dict(state)
