"""Each choice of a user, alone and with others: accepted and right, or refused, and with which words.

A trial trains a tiny model for a few steps on four thread-ranks. Trained parameters are compared with those of
single-process training, which is written anew here. ``scripts/make_combinations.py`` makes tables of trials.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cupy_stand_in import installed

import mpishard as ms
from mpishard import nn
from mpishard.arrays import beside, to_host
from mpishard.devices import Device
from mpishard.errors import ShardingError

RANKS = 4
STEPS = 3
RATE = 0.1
REFUSALS = (TypeError, ValueError, NotImplementedError, ShardingError)

STRATEGIES: dict[str, Mapping[str, int]] = {
    "ddp": {},
    "zero1": {},
    "zero2": {},
    "fsdp": {},
    "tensor": {},
    "pipeline": {},
    "hybrid": {"pipeline_parallel_size": 2, "tensor_parallel_size": 1},
}
"""Strategy -> options. The axes of "hybrid" make up two ranks, a replica in some trials."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Something that a user may choose beside a strategy and a model.

    Attributes
    ----------
    code : str
        The choice as a user writes it.
    kind : str
        Only one choice of a kind can be made.
    config : mapping
        Arguments of `ShardingConfiguration`.
    wraps : callable, optional
        ``wraps(rule, config, strategy)`` makes the optimizer.
    tolerance : float
        Largest difference from single-process training: absolute if 1e-12, and relative to the distance that
        the parameters moved if the choice rounds.
    """

    code: str
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    wraps: Callable[[Any, Any, str], Any] | None = None
    tolerance: float = 1e-12
    delay: int = 0


def _local(rule: Any, config: Any, strategy: str) -> Any:
    return ms.LocalSGDOptimizer(rule, config, 1, strategy=strategy)


def _int8(rule: Any, config: Any, strategy: str) -> Any:
    return ms.GradientCompressionOptimizer(rule, config, method="int8", strategy=strategy)


def _late(rule: Any, config: Any, strategy: str) -> Any:
    return ms.AsyncSGDOptimizer(rule, config, 1, strategy=strategy)


_ALL_OFFLOAD = {f"cpu_offload_{name}": True for name in ("optimizer", "gradients", "parameters")}
_OF_TWO = {"replica_size": 2}
CHOICES: dict[str, Choice] = {
    "bfloat16": Choice(
        code='precision="bfloat16"',
        kind="precision",
        config={"precision": "bfloat16"},
        tolerance=0.05,
    ),
    "accumulate": Choice(code="accumulate()", kind="accumulation"),
    "defer": Choice(code="accumulate(defer=True)", kind="accumulation"),
    "leaves": Choice(code="gradient_leaves", kind="leaves", config={"gradient_leaves": RANKS}),
    "rounded": Choice(
        code="enable_gradient_compression",
        kind="rounding",
        config={"enable_gradient_compression": True},
        tolerance=0.05,
    ),
    "offload": Choice(code="cpu_offload_*", kind="offload", config=_ALL_OFFLOAD),
    "alone": Choice(
        code="auto_sync_gradients=False", kind="alone", config={"auto_sync_gradients": False}
    ),
    "lbfgs": Choice(code="LBFGS", kind="rule"),
    "local": Choice(code="LocalSGDOptimizer", kind="optimizer", wraps=_local),
    "int8": Choice(
        code="GradientCompressionOptimizer", kind="optimizer", wraps=_int8, tolerance=0.05
    ),
    "late": Choice(code="AsyncSGDOptimizer", kind="optimizer", wraps=_late, delay=1),
    "local groups": Choice(
        code="LocalSGDOptimizer, replica_size", kind="optimizer", config=_OF_TWO, wraps=_local
    ),
    "int8 groups": Choice(
        code="GradientCompressionOptimizer, replica_size",
        kind="optimizer",
        config=_OF_TWO,
        wraps=_int8,
        tolerance=0.05,
    ),
    "late groups": Choice(
        code="AsyncSGDOptimizer, replica_size",
        kind="optimizer",
        config=_OF_TWO,
        wraps=_late,
        delay=1,
    ),
    "groups": Choice(code="replica_size", kind="optimizer", config=_OF_TWO),
}


# ----------------------------------------------------------------------------------------- models


def regression(theta: Any, x: Any, y: Any) -> tuple[float, Any]:
    """Mean squared error of a linear model, and its gradient."""
    x, y = beside(x, theta), beside(y, theta)
    error = x @ theta.reshape(3, 2) - y
    return float((error**2).mean()), (x.T @ error).ravel() / len(x)


class LeastSquares:
    """A black box with three members, and no loss."""

    def __init__(self, theta: Any) -> None:
        self.theta = theta

    def get_parameters(self) -> Any:
        return self.theta

    def set_parameters(self, parameters: Any) -> None:
        self.theta = parameters

    def compute_gradients(self, x: Any, y: Any) -> Any:
        return regression(self.theta, x, y)[1]


def _vector(rank: int, device: str) -> Any:
    return Device.parse(device).put(np.random.default_rng(rank).standard_normal(6))


def _layers(rank: int, device: str, dtype: str) -> Any:
    return nn.MLP([3, 8, 8, 8, 2], "tanh", seed=rank, dtype=dtype, device=device)


def _module(rank: int, device: str, dtype: str) -> Any:
    import torch

    chain = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(rank)
    for parameter in chain.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return ms.adapters.TorchModel(chain.to(getattr(torch, dtype)), torch.nn.functional.mse_loss)


def _jax_loss(parameters: Any, x: Any, y: Any) -> Any:
    import jax.numpy as jnp

    return jnp.mean((x @ parameters["weight"] - y) ** 2)


def _of_jax(rank: int, device: str, dtype: str) -> Any:
    import jax

    jax.config.update("jax_enable_x64", True)
    return ms.adapters.JaxModel(
        _jax_loss, {"weight": _vector(rank, "cpu").reshape(3, 2).astype(dtype)}
    )


MODELS: dict[str, Callable[[int, str, str], Any]] = {
    "layers": _layers,
    "torch": _module,
    "jax": _of_jax,
    "function": lambda rank, device, dtype: ms.FunctionModel(regression, _vector(rank, device)),
    "black box": lambda rank, device, dtype: LeastSquares(_vector(rank, device)),
}
ON_HOST_ALONE = ("torch", "jax")


# ------------------------------------------------------------------------------- what should come out


def batch(step: int, part: int) -> tuple[Any, Any]:
    """Seven samples, which four ranks cannot divide evenly."""
    x = np.random.default_rng([step, part]).standard_normal((7, 3))
    return x, np.sin(x[:, :2])


@functools.cache
def expected(model: str, parts: int, delay: int) -> tuple[Any, Any]:
    """Parameters before and after plain descent in one process, ``delay`` steps late."""
    plain = MODELS[model](0, "cpu", "float64")
    theta = first = np.array(plain.get_parameters())
    gradients: list[Any] = []
    for step in range(STEPS):
        batches = [batch(step, part) for part in range(parts)]
        x, y = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        plain.set_parameters(theta.copy())
        gradients.append(np.array(plain.compute_gradients(x, y)))
        if len(gradients) > delay:
            theta = theta - RATE * gradients.pop(0)
    return first, theta


@functools.cache
def found_by_lbfgs(model: str) -> Any:
    return ms.run_in_threads(1, train, "ddp", model, ("lbfgs",))[0]


# ------------------------------------------------------------------------------------ what comes out


@dataclass
class Outcome:
    """The end of a trial.

    ``reason`` is None if the choices combine, and otherwise why they do not, or have no effect. ``site`` is the
    place in the source that says so.
    """

    reason: str | None = None
    site: str = ""
    has_sent: bool = False


def train(backend: Any, strategy: str, model: str, choices: Sequence[str]) -> Any:
    """Return the trained parameters, or the refusal and whether its call had communicated."""
    made = [CHOICES[name] for name in choices]
    flags = {name: value for choice in made for name, value in choice.config.items()}
    device = "cuda" if "offload" in choices and model not in ON_HOST_ALONE else "cpu"
    dtype = "float32" if "bfloat16" in choices else "float64"
    options = STRATEGIES[strategy]
    sent: dict[str, int] = {}
    try:
        config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=8, **flags)
        sharded = ms.as_distributed(
            MODELS[model](backend.rank, device, dtype), config, strategy, **options
        )
        sent = dict(backend.traffic.calls)
        rule = ms.optimizers.LBFGS() if "lbfgs" in choices else ms.optimizers.SGD(RATE)
        wraps = next((choice.wraps for choice in made if choice.wraps), None)
        if wraps is None:
            optimizer = ms.as_distributed(rule, config, strategy, **options)
        else:
            optimizer = wraps(rule, config, strategy)
        parts = 1 + bool({"accumulate", "defer"} & set(choices))
        for step in range(STEPS):
            sent = dict(backend.traffic.calls)
            for part in range(parts):
                x, y = batch(step, part)
                mine = sharded.batch_indices(len(x))
                adds = part < parts - 1
                with sharded.accumulate(defer="defer" in choices) if adds else nullcontext():
                    optimizer.step(sharded, x[mine], y[mine])
            if "alone" in choices:
                sharded.synchronize_gradients()
        return to_host(sharded.gather_full_parameters())
    except REFUSALS as error:
        has_sent = dict(backend.traffic.calls) != sent
        frame = traceback.extract_tb(error.__traceback__)[-1]
        site = f"{Path(frame.filename).relative_to(Path(ms.__file__).parent)}:{frame.lineno}"
        return Outcome(f"{type(error).__name__}: {error}", site, has_sent)


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def attempt(strategy: str, model: str, *choices: str) -> Outcome:
    """Train with these choices; check the parameters, or that all ranks refuse alike.

    Raises
    ------
    AssertionError
        If ranks disagree, or trained parameters are wrong.
    """
    messages, logger = _Messages(), logging.getLogger("mpishard")
    level = logger.level
    logger.addHandler(messages)
    logger.setLevel(logging.INFO)
    try:
        with installed() if "offload" in choices else nullcontext():
            results = ms.run_in_threads(RANKS, train, strategy, model, choices, timeout=20)
    finally:
        logger.removeHandler(messages)
        logger.setLevel(level)
    if isinstance(results[0], Outcome):
        assert all(each == results[0] for each in results), results
        return results[0]
    made = [CHOICES[name] for name in choices]
    parts = 1 + bool({"accumulate", "defer"} & set(choices))
    first, wanted = expected(model, parts, max([0, *(choice.delay for choice in made)]))
    if "lbfgs" in choices:
        wanted = found_by_lbfgs(model)
    tolerance = max([1e-12, *(choice.tolerance for choice in made)])
    limit = tolerance if tolerance == 1e-12 else tolerance * np.linalg.norm(wanted - first)
    for theta in results:
        difference = float(np.abs(theta - wanted).max())
        assert difference <= limit, f"{strategy}, {model}, {choices}: {difference} > {limit}"
    ignored = [text for text in messages.found if "has no effect" in text]
    return Outcome(ignored[0]) if ignored else Outcome()
