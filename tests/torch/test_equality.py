"""A PyTorch loop with two more lines: float64 parameters are those of one process to 1e-12."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
from torch_nets import (  # noqa: E402
    MODELS,
    batch,
    convolutions,
    difference,
    make,
    making,
    mine,
    perceptron,
    squared,
)

import mpishard.torch as mst  # noqa: E402

nn = torch.nn
STEPS = 20

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
}


def train(model: Any, optimizer: Any, loss_of: Any, data: Any, clip: Any, steps: int) -> Any:
    """The loop, as it was in one process."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for _ in range(steps):
        loss = loss_of(model, *data)
        optimizer.zero_grad()
        loss.backward()
        clip(model)
        optimizer.step()
        scheduler.step()
    return model


@functools.cache
def reference(name: str, rule: str, steps: int = STEPS) -> dict[str, Any]:
    """One process, on all samples."""
    factory, loss_of = MODELS[name]
    kind, options = OPTIMIZERS[rule]
    model = make(factory)

    def clip(model: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)

    train(model, kind(model.parameters(), **options), loss_of, batch(name), clip, steps)
    return model.state_dict()


def trained(backend: Any, name: str, rule: str, strategy: str, steps: int = STEPS) -> Any:
    mst.init()
    factory, loss_of = MODELS[name]
    kind, options = OPTIMIZERS[rule]
    model = mst.shard(mst.convert_sync_batchnorm(make(factory)), strategy, minimum_unit_size=1)
    optimizer = mst.optimizer(kind, model, **options)
    clip = functools.partial(mst.clip_grad_norm_, max_norm=0.3)
    return train(model, optimizer, loss_of, mine(backend, batch(name)), clip, steps)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rule", OPTIMIZERS)
@by_strategy
@in_worlds(1, 2, 3, 4)
def test_parameters_are_those_of_one_process(backend, name, rule, strategy):
    with making:
        expected = reference(name, rule)
    assert difference(trained(backend, name, rule, strategy), expected) < 1e-12


@by_path
@by_strategy
@in_worlds(3)
def test_ranks_that_share_no_memory_or_are_on_two_nodes(backend, path, strategy):
    with making:
        expected = reference("gpt", "adamw", 3)
    assert difference(trained(backend, "gpt", "adamw", strategy, 3), expected) < 1e-12


@by_strategy
@in_worlds(2, 3)
def test_plain_batch_norm_has_rank_zeros_buffers_everywhere(backend, strategy):
    """As with PyTorch's DDP: every rank normalises with its own samples."""
    mst.init()
    model = mst.shard(make(convolutions), strategy)
    optimizer = mst.optimizer(torch.optim.SGD, model, lr=1e-2)
    alone = make(convolutions)
    x, y = batch("conv")
    for _ in range(3):
        alone.load_state_dict({**model.state_dict(), **dict(alone.named_buffers())})
        alone(x[:: backend.world_size])  # what rank 0 sees
        squared(model, *mine(backend, (x, y))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, buffer in alone.named_buffers():
        assert torch.equal(buffer, dict(model.named_buffers())[name])


@by_strategy
@in_worlds(1, 3)
def test_gradients_are_this_ranks_part(backend, strategy):
    mst.init()
    model = mst.shard(make(perceptron), strategy, minimum_unit_size=1)
    squared(model, *mine(backend, batch("mlp"))).backward()
    alone = make(perceptron)
    squared(alone, *batch("mlp")).backward()
    total = 0
    shared = strategy == "ddp" or backend.world_size == 1
    for p, whole in zip(model.parameters(), alone.parameters(), strict=True):
        own = p.grad if shared else p.grad.to_local()
        total += own.numel()
        assert torch.allclose(p.grad, whole.grad, rtol=0, atol=1e-14)
        assert torch.allclose(
            own.view(-1), whole.grad.view(-1)[p._stored.in_parameter], rtol=0, atol=1e-14
        )
    elements = sum(p.numel() for p in alone.parameters())
    assert (total == elements) == shared
    assert (
        abs(
            float(mst.clip_grad_norm_(model, float("inf")))
            - float(nn.utils.clip_grad_norm_(alone.parameters(), float("inf")))
        )
        < 1e-14
    )
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
