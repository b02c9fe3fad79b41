"""Cases of PyTorch's own tests of fully_shard, for modules that mpishard.torch has sharded."""

from __future__ import annotations

import copy
import functools
import gc
import io
import weakref
from typing import Any

import pytest

from mpishard.errors import ShardingError
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402
from mpishard.torch.sharded import module_of  # noqa: E402

nn = torch.nn
SGD = functools.partial(torch.optim.SGD, lr=0.1)
by_path = pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)


def both(backend: Any, factory: Any, loss_of: Any, strategy: str = "fsdp", steps: int = 2) -> float:
    """The largest difference between parameters trained here and in one process."""
    mst.init()
    x, y = nets.batch("mlp")
    model, alone = mst.shard(nets.make(factory), strategy, minimum_unit_size=1), nets.make(factory)
    for one, optimizer, data in (
        (model, mst.optimizer(SGD.func, model, **SGD.keywords), nets.mine(backend, (x, y))),
        (alone, SGD(alone.parameters()), (x, y)),
    ):
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(one, *data)
            optimizer.step()
    return nets.difference(model, alone.state_dict())


def submodule_alone(model: Any, x: Any, y: Any) -> None:
    nets.squared(model[:3], x, torch.ones(len(x), 6)).backward()


def layer_twice(model: Any, x: Any, y: Any) -> None:
    hidden = model[:2](x)
    nets.squared(model, x, y).backward()
    (model[2](hidden).sum() / len(x) + model[2](hidden.detach() ** 2).mean()).backward()


def unused_output(model: Any, x: Any, y: Any) -> None:
    model(2 * x)  # nothing of it is in the loss
    first, _ = model(x), model(x).sum()
    nn.functional.mse_loss(first, y).backward()


def graph_twice(model: Any, x: Any, y: Any) -> None:
    loss = nets.squared(model, x, y)
    loss.backward(retain_graph=True)
    loss.backward()


def gradient_of_inputs(model: Any, x: Any, y: Any) -> None:
    inputs = x.clone().requires_grad_()
    nets.squared(model, inputs, y).backward()
    assert inputs.grad.abs().sum() > 0


def evaluation_between(model: Any, x: Any, y: Any) -> None:
    with torch.no_grad():
        model.eval()(x)
    nets.squared(model.train(), x, y).backward()


def failed_forward(model: Any, x: Any, y: Any) -> None:
    with pytest.raises(RuntimeError, match="shape"):
        model(x[:, :2])
    nets.squared(model, x, y).backward()


def frozen_for_a_step(model: Any, x: Any, y: Any) -> None:
    model[2].requires_grad_(False)
    nets.squared(model, x, y).backward()
    assert all(p.grad is None for p in model[2].parameters())
    model[2].requires_grad_(True)


def changed_gradients(model: Any, x: Any, y: Any) -> None:
    nets.squared(model, x, y).backward()
    for p in model.parameters():
        p.grad = p.grad.mul_(0.5)
        p.grad.data = 3 * p.grad.data
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    clip = mst.clip_grad_norm_ if hasattr(p, "_stored") else nn.utils.clip_grad_norm_
    clip(model.parameters(), 0.05)
    model[0].bias.grad = None


def data_of_gradients(model: Any, x: Any, y: Any) -> None:
    nets.squared(model, x, y).backward()
    for p in model.parameters():
        p.grad.data = 3 * p.grad.data


def assigned_between_passes(model: Any, x: Any, y: Any) -> None:
    nets.squared(model, x, y).backward()
    for p in model.parameters():
        p.grad = 2 * p.grad
    model(x).abs().mean().backward()
    for p in model.parameters():
        p.grad.data = 2 * p.grad.data
    nets.squared(model, x, y).backward()


def hook_of_a_gradient(model: Any, x: Any, y: Any) -> None:
    handle = model[2].weight.register_hook(lambda gradient: 3 * gradient)
    nets.squared(model, x, y).backward()
    handle.remove()


@by_path
@pytest.mark.parametrize(
    "loss_of",
    [
        submodule_alone, layer_twice, unused_output, graph_twice, gradient_of_inputs,
        evaluation_between, failed_forward, frozen_for_a_step, changed_gradients,
        data_of_gradients, assigned_between_passes, hook_of_a_gradient,
    ],
)  # fmt: skip
@in_worlds(3)
def test_many_losses_train_as_in_one_process(backend, path, loss_of):
    assert both(backend, nets.perceptron, loss_of) < 1e-13


@pytest.mark.parametrize("loss_of", [changed_gradients, data_of_gradients, assigned_between_passes])
@in_worlds(2)
def test_gradients_of_ddp_may_be_changed_too(backend, loss_of):
    assert both(backend, nets.perceptron, loss_of, "ddp", steps=3) < 1e-13


class Named(nn.Module):
    """Its work is done by a method of another name, which returns no tensor but an object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nets.perceptron()

    def features(self, x: Any) -> Any:
        return {"of": [self.inner(x), "text"]}

    def forward(self, x: Any) -> Any:
        raise NotImplementedError


@by_path
@in_worlds(2)
def test_another_method_than_forward(backend, path):
    def loss_of(model: Any, x: Any, y: Any) -> None:
        nn.functional.mse_loss(model.features(x)["of"][0], y).backward()

    assert both(backend, Named, loss_of) < 1e-13


@by_path
@in_worlds(2)
def test_parameters_stay_registered(backend, path):
    mst.init()
    model = nets.make(nets.perceptron)
    before = {name: (id(p), p.shape, p.dtype) for name, p in model.named_parameters()}
    mst.shard(model, "fsdp", minimum_unit_size=1)
    optimizer = mst.optimizer(torch.optim.AdamW, model, fused=True)
    for _ in range(2):
        nets.squared(model, *nets.mine(backend, nets.batch("mlp"))).backward()
        optimizer.step()
        found = {name: (id(p), p.shape, p.dtype) for name, p in model.named_parameters()}
        assert found == before
        assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in model.parameters())


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, "inf"])
@in_worlds(1, 3)
def test_norms_of_every_order(backend, order):
    mst.init()
    model, alone = mst.shard(nets.make(nets.perceptron), "fsdp"), nets.make(nets.perceptron)
    nets.squared(model, *nets.mine(backend, nets.batch("mlp"))).backward()
    nets.squared(alone, *nets.batch("mlp")).backward()
    theirs = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, order)
    assert torch.allclose(mst.clip_grad_norm_(model, 0.1, order), theirs, rtol=1e-13)
    again = mst.clip_grad_norm_(model, float("inf"), order)
    assert torch.allclose(
        again, nn.utils.get_total_norm([p.grad for p in alone.parameters()], order), rtol=1e-13
    )


@by_path
@in_worlds(2)
def test_memory_is_freed_with_the_model(backend, path):
    mst.init()
    model = mst.shard(nets.make(nets.perceptron), "fsdp")
    optimizer = mst.optimizer(torch.optim.Adam, model)
    nets.squared(model, *nets.mine(backend, nets.batch("mlp"))).backward()
    optimizer.step()
    owner = weakref.ref(module_of(model))
    ledger = module_of(model).ledger
    assert ledger.total
    del model, optimizer
    backend.barrier()  # they read each other's memory
    with nets.making:  # while another thread collects, a call does nothing
        gc.collect()
    assert owner() is None
    assert ledger.total == 0
    backend.barrier()


@by_path
@in_worlds(2)
def test_what_complex_parameters_have_not_is_refused_by_name(backend, path):
    mst.init()
    model = nets.make(nets.fourier)
    with pytest.raises(
        ValueError, match=r"rounds float32 .* '2\.weight' .*complex128: leave it out"
    ):
        mst.shard(model, precision="bfloat16")
    model[0].float()
    mixed = (
        r"float32 \(complex64\).*'0.weight' and 1 more are float32, .*p\.data\.to\(torch.complex64"
    )
    with pytest.raises(ValueError, match=mixed):
        mst.shard(model)
    model = mst.shard(nets.make(nets.fourier), "zero1", minimum_unit_size=1)
    optimizer = mst.optimizer(torch.optim.Adam, model)
    nets.squared(model, *nets.mine(backend, nets.batch("mlp"))).backward()
    with pytest.raises(ValueError, match=r"norm_type must be 2 .*'2\.weight', .* got inf"):
        mst.clip_grad_norm_(model, 1.0, float("inf"))
    with pytest.raises(ShardingError, match=r"'0\.bias' has shape \(9,\); got a complex tensor"):
        model[0].bias.grad = torch.ones(9, dtype=torch.complex128)
    own = model[2].weight.grad.to_local()
    assert not own.is_complex()
    assert own.dim() == 1
    with torch.no_grad():
        torch.view_as_real(model[2].weight).mul_(2.0)
    if path == "arena":  # Each rank has made the change in the memory that they share.
        with pytest.raises(
            ShardingError, match=r"'2\.weight' was changed in place by an operation"
        ):
            optimizer.step()


@by_path
@in_worlds(1, 2, 3)
def test_copies_and_files_of_complex_parameters(backend, path, shared_path):
    mst.init()
    module = nets.make(nets.fourier)
    module[4].weight = nn.Parameter(module[4].weight.detach().conj())  # a view with a mark
    first = mst.shard(module, "fsdp", minimum_unit_size=1)
    optimizer = mst.optimizer(torch.optim.Adam, first)
    nets.squared(first, *nets.mine(backend, nets.batch("mlp"))).backward()
    optimizer.step()
    mst.save(shared_path / "run", first, optimizer)
    expected = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    file = io.BytesIO()
    torch.save(first, file)
    file.seek(0)
    copies = [torch.load(file, weights_only=False), copy.deepcopy(first)]
    for strategy in ("ddp", "zero2", "fsdp"):
        model = mst.shard(nets.make(nets.fourier), strategy, minimum_unit_size=100)
        other = mst.optimizer(torch.optim.Adam, model)
        mst.load(shared_path / "run", model, other)
        found, saved = (o.state_dict()["state"][1]["exp_avg_sq"] for o in (other, optimizer))
        assert torch.equal(found, saved)
        copies.append(model)
    for one in copies:
        assert nets.difference(one, expected) == 0
        assert all(p.is_complex() == expected[n].is_complex() for n, p in one.named_parameters())


@in_worlds(1)
def test_modules_without_memory_are_refused_with_the_way_out(backend):
    mst.init()
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'weight on meta' .*to_empty\(device='cpu'\)"):
        mst.shard(model)
    with pytest.raises(TypeError, match="no shape yet"):
        mst.shard(nn.LazyLinear(2))
    shared = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mst.shard(shared[0])
    with pytest.raises(ShardingError, match=r"'0.weight' is sharded already"):
        mst.shard(shared)
