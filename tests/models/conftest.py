"""Problems with known answers: models, uneven data, and sequential training written anew.

The reference knows nothing of engines, stores or rules: it takes the gradient of a plain model on
the union of the ranks' batches, and updates as the textbook says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mpishard import nn
from mpishard.adapters import FunctionModel
from mpishard.arrays import beside, to_host
from mpishard.communication import CommunicationBackend
from mpishard.devices import Device
from mpishard.models import DDPModel, FSDPModel, ZeRO1Model, ZeRO2Model
from mpishard.optimizers import (
    SGD,
    AdamW,
    DDPOptimizer,
    FSDPOptimizer,
    Optimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
)
from mpishard.sharding import ShardingConfiguration

Vector = np.ndarray[Any, np.dtype[np.float64]]

RATE = 1e-3
STRATEGIES = {
    "ddp": (DDPModel, DDPOptimizer),
    "zero1": (ZeRO1Model, ZeRO1Optimizer),
    "zero2": (ZeRO2Model, ZeRO2Optimizer),
    "fsdp": (FSDPModel, FSDPOptimizer),
}
# Small units: every layer its own, so that units outnumber buffers. Large: one or two in all.
UNIT_SIZES = (1, 60)


def regression(theta: Vector, x: Vector, y: Vector) -> tuple[float, Vector]:
    """Mean squared error of a linear model, and its gradient."""
    x, y = beside(x, theta), beside(y, theta)
    error = x @ theta[:-2].reshape(-1, 2) + theta[-2:] - y
    gradient = np.concatenate([(x.T @ error).ravel(), error.sum(axis=0)])
    return float(np.square(error).mean()), gradient / len(x)


def one_number(theta: Vector, x: Vector, y: Vector) -> tuple[float, Vector]:
    """The only parameter is the mean of the targets."""
    error = theta[0] - beside(y[:, 0], theta)
    return float(np.square(error).mean()), (2 * error.mean()).reshape(1)


MODELS: dict[str, Callable[..., Any]] = {
    "mlp": lambda seed, device="cpu": nn.MLP([5, 7, 6, 2], "tanh", seed=seed, device=device),
    "gpt": lambda seed, device="cpu": _gpt(seed, tied_embeddings=False, device=device),
    "tied": lambda seed, device="cpu": _gpt(seed, tied_embeddings=True, device=device),
    "function": lambda seed, device="cpu": FunctionModel(regression, _normal(12, seed, device)),
    "tiny": lambda seed, device="cpu": nn.MLP([5, 1, 1, 2], "tanh", seed=seed, device=device),
    "one_number": lambda seed, device="cpu": FunctionModel(one_number, _normal(1, seed, device)),
}


def _gpt(seed: int, **options: Any) -> nn.GPT:
    return nn.GPT(
        vocabulary_size=11, context_length=6, width=8, heads=2, layers=2, seed=seed,
        dtype="float64", **options,
    )  # fmt: skip


def _normal(length: int, seed: int, device: str = "cpu") -> Vector:
    return Device.parse(device).put(np.random.default_rng(seed).standard_normal(length))


def batch(kind: str, step: int) -> tuple[Any, Any]:
    """The global batch of a step; its size changes from step to step."""
    generator = np.random.default_rng(step)
    samples = 7 + 2 * step
    if kind in ("gpt", "tied"):  # of the targets, some are ignored: weights are no sample counts
        shape = samples, 6
        return generator.integers(0, 11, shape), generator.integers(-1, 11, shape)
    x = generator.standard_normal((samples, 5))
    return x, np.sin(x[:, :2])


def part(samples: int, step: int, rank: int, world_size: int) -> slice:
    """A rank's samples: uneven, and none for one rank, another one at each step."""
    if world_size == 1:
        return slice(0, samples)
    generator = np.random.default_rng([step, world_size])
    shares = generator.dirichlet(np.ones(world_size))
    shares[step % world_size] = 0
    counts = generator.multinomial(samples, shares / shares.sum())
    stop = int(counts[: rank + 1].sum())
    return slice(stop - int(counts[rank]), stop)


# --------------------------------------------------------------------------- what should come out


def sgd_momentum(theta: Vector, g: Vector, state: dict[str, Vector], step: int) -> Vector:
    state["v"] = 0.9 * state.get("v", 0) + g
    return theta - RATE * state["v"]


def adamw(
    theta: Vector, g: Vector, state: dict[str, Vector], step: int, decay: Any = 0.1
) -> Vector:
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
    m, v = state["m"] / (1 - 0.9**step), state["v"] / (1 - 0.999**step)
    return theta - RATE * m / (np.sqrt(v) + 1e-8) - RATE * decay * theta


TEXTBOOK: dict[str, Callable[..., Vector]] = {"sgd": sgd_momentum, "adamw": adamw}
RULES: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda **options: SGD(RATE, 0.9, **options),
    "adamw": lambda **options: AdamW(RATE, weight_decay=0.1, **options),
}


@dataclass
class Reference:
    """Losses before each step, and parameters after it."""

    losses: list[float]
    parameters: list[Vector]


@functools.cache  # every rank asks for it, and nobody changes it
def train_sequentially(
    kind: str,
    update: Callable[..., Vector],
    steps: int = 5,
    transform: Callable[[Vector], Vector] = np.asarray,
) -> Reference:
    model = MODELS[kind](0)
    theta = model.get_parameters()
    state: dict[str, Vector] = {}
    reference = Reference([], [])
    for step in range(steps):
        x, y = batch(kind, step)
        model.set_parameters(theta)
        loss, gradient = model.compute_loss_and_gradients(x, y)
        theta = update(theta, transform(gradient), state, step + 1)
        reference.losses.append(loss)
        reference.parameters.append(theta)
    return reference


# ------------------------------------------------------------------------------- what comes out


def build(
    backend: CommunicationBackend,
    kind: str,
    strategy: str,
    rule: str = "sgd",
    unit_size: int = 1,
    rule_options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    offload: Sequence[str] = (),
) -> tuple[Any, Any]:
    """Model and optimizer. Each rank's plain model has values of its own: rank 0's count."""
    model_class, optimizer_class = STRATEGIES[strategy]
    flags = {f"cpu_offload_{name}": True for name in offload}
    config = ShardingConfiguration(backend, minimum_parameter_group_size=unit_size, **flags)
    model = model_class(MODELS[kind](backend.rank, device), config)
    return model, optimizer_class(RULES[rule](**(rule_options or {})), config)


def local_batch(backend: CommunicationBackend, kind: str, step: int) -> tuple[Any, Any]:
    x, y = batch(kind, step)
    mine = part(len(x), step, backend.rank, backend.world_size)
    return x[mine], y[mine]


def train_sharded(
    backend: CommunicationBackend,
    kind: str,
    strategy: str,
    rule: str,
    unit_size: int,
    steps: int = 5,
    rule_options: Mapping[str, Any] | None = None,
    watch: bool = True,
    device: str = "cpu",
    offload: Sequence[str] = (),
) -> Reference:
    """Train with sharding; gather after each step, or only at the end."""
    model, optimizer = build(
        backend, kind, strategy, rule, unit_size, rule_options, device, offload
    )
    result = Reference([], [])
    for step in range(steps):
        result.losses.append(optimizer.step(model, *local_batch(backend, kind, step)))
        if watch or step == steps - 1:
            result.parameters.append(to_host(model.gather_full_parameters()))
    return result


def assert_equal(actual: Reference, expected: Reference, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=0, atol=tolerance)
    wanted = expected.parameters[-len(actual.parameters) :]
    np.testing.assert_allclose(actual.parameters, wanted, rtol=0, atol=tolerance)


class Problems:
    """What the tests of this folder share."""

    RATE = RATE
    MODELS = MODELS
    STRATEGIES = STRATEGIES
    TEXTBOOK = TEXTBOOK
    RULES = RULES
    UNIT_SIZES = UNIT_SIZES
    batch = staticmethod(batch)
    part = staticmethod(part)
    regression = staticmethod(regression)
    adamw = staticmethod(adamw)
    build = staticmethod(build)
    local_batch = staticmethod(local_batch)
    train_sequentially = staticmethod(train_sequentially)
    train_sharded = staticmethod(train_sharded)
    assert_equal = staticmethod(assert_equal)


@pytest.fixture(scope="session")
def problems() -> type[Problems]:
    return Problems
