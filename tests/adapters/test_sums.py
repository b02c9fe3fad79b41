"""Losses that are sums over samples: ranks add gradients, and weigh nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.testing.worlds import in_worlds

KINDS = ["function", "black box", "autograd", "jax", "torch"]
x = np.random.default_rng(0).standard_normal((7, 3))
y = np.sin(x[:, :2])


def fun(theta: Any, x: Any, y: Any) -> tuple[float, Any]:
    error = x @ theta.reshape(3, 2) - y
    return float((error**2).sum()), 2 * (x.T @ error).ravel()


class Own:
    loss_is_sum = True

    def __init__(self) -> None:
        self.theta = np.linspace(-1, 1, 6)

    def get_parameters(self) -> Any:
        return self.theta

    def set_parameters(self, theta: Any) -> None:
        self.theta = theta

    def compute_gradients(self, x: Any, y: Any) -> Any:
        return fun(self.theta, x, y)[1]


def make(kind: str) -> Any:
    theta = np.linspace(-1, 1, 6)
    if kind == "function":
        return ms.FunctionModel(fun, theta, loss_is_sum=True)
    if kind == "black box":
        return Own()
    if kind == "torch":
        torch = pytest.importorskip("torch", reason="PyTorch is not installed here")
        module = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(theta).view(3, 2).T)
        loss = torch.nn.MSELoss(reduction="sum")
        return ms.adapters.TorchModel(module, loss, loss_is_sum=True)
    if kind == "jax":
        jax = pytest.importorskip("jax", reason="JAX is not installed here")
        jax.config.update("jax_enable_x64", True)
        make, array = ms.adapters.JaxModel, jax.numpy.asarray(theta.reshape(3, 2))
    else:
        pytest.importorskip("autograd", reason="autograd is not installed here")
        make, array = ms.adapters.AutogradModel, theta.reshape(3, 2)
    return make(lambda p, x, y: ((x @ p["w"] - y) ** 2).sum(), {"w": array}, loss_is_sum=True)


def expected(steps: int) -> Any:
    theta = np.linspace(-1, 1, 6)
    for _ in range(steps):
        theta = theta - 0.01 * fun(theta, x, y)[1]
    return theta


def vector(kind: str, full: Any) -> Any:
    return np.reshape(full, (2, 3)).T.ravel() if kind == "torch" else full  # Linear transposes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(1, 2, 3)
def test_uneven_batches_give_the_sum_over_all_samples(backend: Any, kind: str, strategy: str):
    model = ms.as_distributed(make(kind), backend, strategy)
    optimizer = ms.as_distributed(ms.optimizers.SGD(0.01), backend, strategy)
    # Of 7 samples rank 0 has 5, and the last of three ranks has none.
    shares = {1: [7], 2: [5, 7], 3: [5, 7, 7]}[backend.world_size]
    mine = slice([0, *shares][backend.rank], shares[backend.rank])
    for step in range(2):
        report = optimizer.step_report(model, x[mine], y[mine])
        loss, gradient = fun(expected(step), x, y)
        assert report.weight == 7
        assert np.isclose(report.gradient_norm, np.linalg.norm(gradient), rtol=1e-12)
        if kind != "black box":
            assert np.isclose(report.loss, loss, rtol=1e-12)
    assert np.abs(vector(kind, model.gather_full_parameters()) - expected(2)).max() < 1e-13
    if kind != "black box":
        loss, gradient = model.loss_and_gradients(x[mine], y[mine])
        right, full = fun(expected(2), x, y)
        assert np.isclose(loss, right, rtol=1e-12)
        assert np.allclose(vector(kind, gradient), full, rtol=1e-12)
        assert np.isclose(model.evaluate(x[mine], y[mine])[0], right, rtol=1e-12)
    with model.accumulate():
        optimizer.step(model, x[mine], y[mine])
    optimizer.step(model, x[mine], y[mine])
    twice = expected(2) - 0.02 * fun(expected(2), x, y)[1]
    assert np.abs(vector(kind, model.gather_full_parameters()) - twice).max() < 1e-13


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_model_returns_the_sum(kind: str) -> None:
    model = make(kind)
    loss, gradient = fun(expected(0), x, y)
    assert np.allclose(vector(kind, model.compute_gradients(x, y)), gradient, rtol=1e-12)
    if kind != "black box":
        assert np.isclose(model.train(x, y, 0.01), loss, rtol=1e-12)


@in_worlds(2)
def test_replicas_that_are_averaged_take_no_sum(backend: Any) -> None:
    config = ms.ShardingConfiguration(backend)
    for wrap in (
        lambda: ms.LocalSGDOptimizer(ms.optimizers.SGD(0.01), config, 2),
        lambda: ms.GradientCompressionOptimizer(ms.optimizers.SGD(0.01), config, method="int8"),
        lambda: ms.AsyncSGDOptimizer(ms.optimizers.SGD(0.01), config, allow_staleness=1),
    ):
        model, optimizer = ms.as_distributed(make("function"), config, "ddp"), wrap()
        with pytest.raises(ValueError, match=r"loss_is_sum=True adds the gradients of all ranks"):
            optimizer.step(model, x, y)
    alone = ms.ShardingConfiguration(backend, auto_sync_gradients=False)
    model = ms.as_distributed(make("function"), alone, "ddp")
    with pytest.raises(ValueError, match=r"loss that is a mean"):
        model.train(x, y)


def test_a_loss_of_mpishard_is_a_mean() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here")
    with pytest.raises(ValueError, match=r"MSE is a mean"):
        ms.adapters.TorchModel(torch.nn.Linear(2, 1), ms.nn.MSE(), loss_is_sum=True)
