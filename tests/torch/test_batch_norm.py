"""Batch normalisation over all ranks: gradients inside of the loss, and bfloat16."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402

nn = torch.nn
STEPS = 5

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)


def potential() -> Any:
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(),
        nn.Linear(8, 6), nn.BatchNorm1d(6, momentum=None), nn.Tanh(), nn.Linear(6, 1),
    )  # fmt: skip


def forces(model: Any, x: Any, y: Any) -> Any:
    """Energies, and their negative gradients, as potentials of molecules learn them."""
    x = x.clone().requires_grad_()
    energies = model(x)
    (gradient,) = torch.autograd.grad(energies.sum(), x, create_graph=True)
    return ((energies - y[:, :1]) ** 2).mean() + ((gradient + x.detach().sin()) ** 2).mean()


def penalty(model: Any, x: Any, y: Any) -> Any:
    """The critic's loss of WGAN-GP."""
    between = (0.3 * x + 0.7 * x.flip(1)).requires_grad_()
    (gradient,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return (model(x) * y[:, :1]).mean() + 10 * ((gradient.norm(dim=1) - 1) ** 2).mean()


def curvature(model: Any, x: Any, y: Any) -> Any:
    """Three passes backward through one graph."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x, create_graph=True)
    return (second**2).mean()


LOSSES = (forces, penalty, curvature)


def train(model: Any, optimizer: Any, loss_of: Any, data: Any) -> Any:
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, *data).backward()
        optimizer.step()
    return model.state_dict()


class Written(nn.BatchNorm1d):
    """Batch normalisation in operations that PyTorch differentiates at every order."""

    def forward(self, x: Any) -> Any:
        super().forward(x.detach())  # for the running statistics
        centered = x - x.mean(0)
        y = centered * torch.rsqrt((centered * centered).mean(0) + self.eps)
        return y * self.weight + self.bias


@functools.cache
def reference(loss_of: Any) -> Any:
    """One process, on all samples."""
    model = nets.make(potential)
    for layer in model if loss_of is curvature else ():
        # The third derivative of PyTorch's own takes mean and variance for constants.
        layer.__class__ = Written if isinstance(layer, nn.BatchNorm1d) else type(layer)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    return train(model, optimizer, loss_of, nets.batch("mlp"))


@pytest.mark.parametrize("loss_of", LOSSES)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp"])
@by_path
@in_worlds(1, 2, 3)
def test_gradients_inside_of_the_loss_are_those_of_one_process(
    backend: Any, loss_of: Any, strategy: str, path: str
) -> None:
    mst.init()
    model = mst.convert_sync_batchnorm(nets.make(potential))
    model = mst.shard(model, strategy, minimum_unit_size=1)
    optimizer = mst.optimizer(torch.optim.SGD, model, lr=0.05, momentum=0.9)
    train(model, optimizer, loss_of, nets.mine(backend, nets.batch("mlp")))
    assert nets.difference(model, reference(loss_of)) < 1e-12


def convolutions() -> Any:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)
    )


@functools.cache
def in_float32() -> Any:
    model = nets.make(convolutions).float()
    data = [values.float() for values in nets.batch("conv")]
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    return train(model, optimizer, nets.squared, data)


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@by_path
@in_worlds(1, 2, 3)
def test_activations_in_bfloat16_have_float32_statistics_of_all_samples(
    backend: Any, precision: str, strategy: str, path: str
) -> None:
    mst.init()
    start = nets.make(convolutions).float().state_dict()
    model = mst.convert_sync_batchnorm(nets.make(convolutions).float())
    model = mst.shard(model, strategy, precision=None if precision == "autocast" else precision)
    seen = []
    model[1].register_forward_hook(lambda module, args, y: seen.append((args[0].dtype, y.dtype)))

    def loss_of(model: Any, x: Any, y: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            output = model(x)
        return nn.functional.mse_loss(output.float(), y)

    optimizer = mst.optimizer(torch.optim.SGD, model, lr=0.02)
    data = [values.float() for values in nets.mine(backend, nets.batch("conv"))]
    found = train(model, optimizer, loss_of, data)
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    for name, expected in in_float32().items():
        values = found[name].float()
        scale = max(float((expected - start[name]).abs().max()), float(expected.abs().max()))
        assert float((values - expected).abs().max()) <= 0.03 * scale, name
    assert found["1.running_var"].dtype == torch.float32
    model.eval()
    assert loss_of(model, *data).isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@in_worlds(1, 2, 3)
def test_counts_and_sums_of_16_bit_activations_are_float32(backend: Any, dtype: Any) -> None:
    """In bfloat16 a count of 3,000 would be 3,008."""
    mst.init()
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=1.0), nn.Linear(3, 1))
    model = mst.shard(mst.convert_sync_batchnorm(model), "ddp")
    generator = torch.Generator().manual_seed(0)
    x = (30 + torch.randn(3000 * backend.world_size, 3, generator=generator)).to(dtype)
    layer, mine = model[0], x[backend.rank :: backend.world_size].clone().requires_grad_()
    y = layer(mine)
    assert y.dtype == dtype
    wide = x.double().requires_grad_()
    expected = nn.functional.batch_norm(wide, None, None, training=True)
    own = expected[backend.rank :: backend.world_size]
    torch.testing.assert_close(y.double(), own.to(dtype).double(), rtol=0.01, atol=1e-3)
    torch.testing.assert_close(layer.running_mean.double(), x.double().mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(layer.running_var.double(), x.double().var(0), rtol=1e-5, atol=0)
    (y.float() ** 3).sum().backward()
    (expected**3).sum().backward()
    theirs = wide.grad[backend.rank :: backend.world_size]
    torch.testing.assert_close(mine.grad.double(), theirs, rtol=0.05, atol=0.1)


@in_worlds(2)
def test_plain_batch_norm_with_rounded_parameters_names_the_fix(backend: Any) -> None:
    mst.init()
    model = mst.shard(nets.make(convolutions).float(), precision="bfloat16")
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(2, 2, 6, 6))
    (note,) = raised.value.__notes__
    assert "no buffers: '1.running_mean' and 1 more may have" in note
    assert "convert_sync_batchnorm(module)" in note


@in_worlds(2)
def test_a_copy_of_a_rounded_module_normalises_its_own_samples(backend: Any) -> None:
    mst.init()
    model = mst.convert_sync_batchnorm(nets.make(convolutions).float())
    copied = copy.deepcopy(mst.shard(model, precision="bfloat16"))
    x = nets.batch("conv")[0].bfloat16()
    if backend.rank == 0:  # alone
        torch.testing.assert_close(
            copied(x).float(), nets.make(convolutions).float()(x.float()), rtol=0.1, atol=0.05
        )
        assert int(copied[1].num_batches_tracked) == 1
        assert copied.eval()(x).dtype == torch.bfloat16
