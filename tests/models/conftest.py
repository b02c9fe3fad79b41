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
from computed_once import computed_once

from mpishard import nn
from mpishard.adapters import AutogradModel, FunctionModel
from mpishard.base.arrays import beside, to_host
from mpishard.base.devices import Device
from mpishard.communication import CommunicationBackend
from mpishard.models import DDPModel, FSDPModel, ZeRO1Model, ZeRO2Model, ZeRO3Model
from mpishard.optimizers import (
    LAMB,
    SGD,
    Adam,
    AdamW,
    DDPOptimizer,
    FSDPOptimizer,
    Optimizer,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpishard.sharding import ParameterEntry, ShardingConfiguration

Vector = np.ndarray[Any, np.dtype[np.float64]]

RATE = 1e-3
LIMIT = 0.01  # of the gradient's norm under LAMB: so low that every step is clipped
STRATEGIES = {
    "ddp": (DDPModel, DDPOptimizer),
    "zero1": (ZeRO1Model, ZeRO1Optimizer),
    "zero2": (ZeRO2Model, ZeRO2Optimizer),
    "zero3": (ZeRO3Model, ZeRO3Optimizer),
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


class LeastSquares:
    """The smallest black box: three members, and no loss."""

    def __init__(self, theta: Vector) -> None:
        self.theta = theta

    def get_parameters(self) -> Vector:
        return self.theta

    def set_parameters(self, parameters: Vector) -> None:
        self.theta = parameters

    def compute_gradients(self, x: Vector, y: Vector) -> Vector:
        x, y = beside(x, self.theta), beside(y, self.theta)
        return (2 / len(x) * x.T @ (x @ self.theta.reshape(5, 2) - y)).ravel()


def _conv(seed: int, device: str = "cpu") -> nn.Model:
    chain = nn.Sequential(
        nn.Conv2D(1, 3, 3), nn.Tanh(), nn.MaxPool2D(2), nn.Flatten(), nn.Linear(12, 4)
    )
    return nn.Model(chain, nn.CrossEntropy(), input_shape=(1, 6, 6), seed=seed, device=device)


def _dropout(seed: int, device: str = "cpu") -> nn.Model:
    chain = nn.Sequential(
        nn.Dropout(0.2), nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.4), nn.Linear(8, 2)
    )
    return nn.Model(chain, nn.MSE(), input_shape=(5,), seed=seed, device=device)


def _autograd(seed: int) -> AutogradModel:
    import autograd.numpy as anp

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        for layer in parameters["layers"]:
            x = anp.tanh(x @ layer["weight"] + layer["bias"])
        return anp.mean((parameters["gain"] * x - y) ** 2)

    layers = [
        {"weight": _normal(a * b, seed).reshape(a, b), "bias": _normal(b, seed + 1)}
        for a, b in ((5, 6), (6, 2))
    ]
    return AutogradModel(loss, {"layers": layers, "gain": 1.5 + seed})


MODELS: dict[str, Callable[..., Any]] = {
    "mlp": lambda seed, device="cpu": nn.MLP([5, 7, 6, 2], "tanh", seed=seed, device=device),
    "gpt": lambda seed, device="cpu": _gpt(seed, heads=4, kv_heads=2, device=device),
    "tied": lambda seed, device="cpu": _gpt(seed, tied_embeddings=True, device=device),
    "conv": _conv,
    "dropout": _dropout,
    "function": lambda seed, device="cpu": FunctionModel(regression, _normal(12, seed, device)),
    "black_box": lambda seed, device="cpu": LeastSquares(_normal(10, seed, device)),
    "autograd": lambda seed, device="cpu": _autograd(seed),  # on the host, whatever is asked
    # With more ranks than parameters in a unit, and in all.
    "tiny": lambda seed, device="cpu": nn.MLP([5, 1, 1, 2], "tanh", seed=seed, device=device),
    "one_number": lambda seed, device="cpu": FunctionModel(
        one_number, 2 + _normal(1, seed, device)
    ),
}


def _gpt(seed: int, **options: Any) -> nn.GPT:
    return nn.GPT(
        vocabulary_size=11,
        context_length=6,
        width=8,
        layers=2,
        seed=seed,
        dtype="float64",
        **({"heads": 2} | options),
    )


def _normal(length: int, seed: int, device: str = "cpu") -> Vector:
    return Device.parse(device).put(np.random.default_rng(seed).standard_normal(length))


def batch(kind: str, step: int) -> tuple[Any, Any]:
    """The global batch of a step; its size changes from step to step."""
    generator = np.random.default_rng(step)
    samples = 7 + 2 * step
    if kind in ("gpt", "tied"):  # of the targets, some are ignored: weights are no sample counts
        shape = samples, 6
        return generator.integers(0, 11, shape), generator.integers(-1, 11, shape)
    if kind == "conv":
        return generator.standard_normal((samples, 1, 6, 6)), generator.integers(0, 4, samples)
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


def moments(g: Vector, state: dict[str, Vector], step: int) -> tuple[Vector, Vector]:
    """Adam's moments, corrected for their bias."""
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * g**2
    return state["m"] / (1 - 0.9**step), state["v"] / (1 - 0.999**step)


def adamw(
    theta: Vector, g: Vector, state: dict[str, Vector], step: int, decay: Any = 0.1
) -> Vector:
    m, v = moments(g, state, step)
    return theta - RATE * m / (np.sqrt(v) + 1e-8) - RATE * decay * theta


def adam(theta: Vector, g: Vector, state: dict[str, Vector], step: int) -> Vector:
    g = g + 0.1 * theta  # the gradient of a penalty
    m, v = moments(g, state, step)
    return theta - RATE * m / (np.sqrt(v) + 1e-8)


@functools.cache  # the reference is remembered by it
def lamb(
    entries: tuple[ParameterEntry, ...],
    limit: float = np.inf,
    frozen: str = "-",
    no_decay: str = "-",
) -> Callable[..., Vector]:
    """You et al., 2020, algorithm 2, with the gradient of what is trained clipped by its norm."""

    def update(theta: Vector, g: Vector, state: dict[str, Vector], step: int) -> Vector:
        trained = [e for e in entries if not e.name.startswith(frozen)]
        norm = np.linalg.norm(np.concatenate([g[e.start : e.stop] for e in trained]))
        assert norm > limit or limit == np.inf  # else nothing is clipped
        m, v = moments(g * min(1.0, limit / norm), state, step)
        theta = theta.copy()
        for entry in trained:
            own = slice(entry.start, entry.stop)
            x = theta[own]
            decay = 0 if entry.name.endswith(no_decay) else 0.1
            u = m[own] / (np.sqrt(v[own]) + 1e-6) + decay * x
            x_norm, u_norm = np.linalg.norm(x), np.linalg.norm(u)
            x -= RATE * (x_norm / u_norm if x_norm > 0 and u_norm > 0 else 1.0) * u
        return theta

    return update


TEXTBOOK: dict[str, Callable[..., Vector]] = {"sgd": sgd_momentum, "adam": adam, "adamw": adamw}
RULES: dict[str, Callable[..., Optimizer]] = {
    "sgd": lambda **options: SGD(RATE, 0.9, **options),
    "adam": lambda **options: Adam(RATE, weight_decay=0.1, **options),
    "adamw": lambda **options: AdamW(RATE, weight_decay=0.1, **options),
    "lamb": lambda **options: LAMB(
        RATE, weight_decay=0.1, **{"clip_global_norm": LIMIT, **options}
    ),
}


def textbook(kind: str, rule: str) -> Callable[..., Vector]:
    """The textbook's rule; LAMB uses norms of the model's parameters, and is clipped."""
    return lamb(_entries(kind), LIMIT) if rule == "lamb" else TEXTBOOK[rule]


@functools.cache
def _entries(kind: str) -> tuple[ParameterEntry, ...]:
    model = MODELS[kind](0)
    if hasattr(model, "parameter_table"):
        return tuple(model.parameter_table.entries)
    whole = ParameterEntry("parameters", model.get_parameters().shape, 0)
    return tuple(getattr(model, "parameter_entries", (whole,)))


@dataclass
class Reference:
    """Losses before each step, and parameters after it."""

    losses: list[float]
    parameters: list[Vector]


@computed_once
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
        loss, gradient = _loss_and_gradient(kind, model, x, y, step)
        theta = update(theta, transform(gradient), state, step + 1)
        reference.losses.append(loss)
        reference.parameters.append(theta)
    return reference


def _loss_and_gradient(kind: str, model: Any, x: Any, y: Any, step: int) -> tuple[float, Vector]:
    if kind == "black_box":
        return np.nan, model.compute_gradients(x, y)
    options = {"step": step, "sample_start": 0} if kind == "dropout" else {}
    return model.compute_loss_and_gradients(x, y, **options)


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
    """Model and optimizer. Each rank's plain model has other values, and rank 0's are used."""
    model_class, optimizer_class = STRATEGIES[strategy]
    flags = {f"cpu_offload_{name}": True for name in offload}
    config = ShardingConfiguration(backend, minimum_parameter_group_size=unit_size, **flags)
    model = model_class(MODELS[kind](backend.rank, device), config)
    return model, optimizer_class(RULES[rule](**(rule_options or {})), config)


def local_batch(
    backend: CommunicationBackend, kind: str, step: int, micro_batch: int = 0, of: int = 1
) -> tuple[Any, Any]:
    """A rank's part of the global batch, or of one of the micro-batches that it is cut into."""
    x, y = batch(kind, step)
    start, stop = (len(x) * index // of for index in (micro_batch, micro_batch + 1))
    x, y = x[start:stop], y[start:stop]
    mine = part(len(x), of * step + micro_batch, backend.rank, backend.world_size)
    return x[mine], y[mine]


def update_once(
    backend: CommunicationBackend,
    kind: str,
    model: Any,
    optimizer: Any,
    step: int,
    accumulation: str,
) -> float:
    """One update from one batch, or from three that add up; the mean loss before it."""
    if accumulation == "off":
        return float(optimizer.step(model, *local_batch(backend, kind, step)))
    with model.accumulate(defer=accumulation == "deferred"):
        for micro_batch in (0, 1):
            optimizer.step(model, *local_batch(backend, kind, step, micro_batch, 3))
    return float(optimizer.step(model, *local_batch(backend, kind, step, 2, 3)))


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
    accumulation: str = "off",
) -> Reference:
    """Train with sharding; gather after each step, or only at the end."""
    model, optimizer = build(
        backend, kind, strategy, rule, unit_size, rule_options, device, offload
    )
    result = Reference([], [])
    for step in range(steps):
        result.losses.append(update_once(backend, kind, model, optimizer, step, accumulation))
        if watch or step == steps - 1:
            result.parameters.append(to_host(model.gather_full_parameters()))
    return result


def assert_equal(actual: Reference, expected: Reference, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=0, atol=tolerance)
    wanted = expected.parameters[-len(actual.parameters) :]
    np.testing.assert_allclose(actual.parameters, wanted, rtol=0, atol=tolerance)


class Problems:
    """Fixtures of the tests of this folder."""

    Reference = Reference
    RATE = RATE
    MODELS = MODELS
    STRATEGIES = STRATEGIES
    TEXTBOOK = TEXTBOOK
    RULES = RULES
    UNIT_SIZES = UNIT_SIZES
    batch = staticmethod(batch)
    part = staticmethod(part)
    regression = staticmethod(regression)
    adam = staticmethod(adam)
    adamw = staticmethod(adamw)
    lamb = staticmethod(lamb)
    textbook = staticmethod(textbook)
    build = staticmethod(build)
    local_batch = staticmethod(local_batch)
    train_sequentially = staticmethod(train_sequentially)
    train_sharded = staticmethod(train_sharded)
    assert_equal = staticmethod(assert_equal)


@pytest.fixture(scope="session")
def problems() -> type[Problems]:
    return Problems
