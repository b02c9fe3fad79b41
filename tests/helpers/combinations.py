"""Trials of a user's choices together: accepted and right, or refused, and with which words.

A trial trains a tiny model for two steps on four thread-ranks. If the choices are accepted, the
parameters are compared with those of training in one process, which is written anew here; if they
are refused, all ranks must raise the same error before the refused call has communicated.
``scripts/make_combinations.py`` makes the tables of docs/combinations.md from trials.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
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
from mpishard.base.arrays import beside, to_host
from mpishard.base.devices import Device
from mpishard.pipeline import ActivationCheckpointConfig

RANKS = 4
STEPS = 2
RATE = 0.1
EXACT = 1e-12
ROUNDED = 0.05  # of the way that the parameters went
OF_ONE_ARGUMENT = {"distributed.checked_options", "strategies.data_model_class"}
"""Functions besides those of `mpishard.sharding.refusals` that refuse: they list known values."""

STRATEGIES: dict[str, Mapping[str, int]] = {
    "ddp": {}, "zero1": {}, "zero2": {}, "fsdp": {}, "tensor": {}, "pipeline": {},
    "hybrid": {"pipeline_parallel_size": 2},
}  # fmt: skip
"""Strategy -> its options. The pipeline of "hybrid" fits into a replica of two ranks."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A choice beside the strategy and the model.

    Attributes
    ----------
    code : str
        The choice as a user writes it.
    kind : str
        Of each kind one choice can be made.
    config, options : mapping
        Arguments of `ShardingConfiguration`, and of the strategy.
    wraps : callable, optional
        ``wraps(rule, config, strategy)`` makes the optimizer.
    tolerance : float
        Largest difference from training in one process.
    delay : int
        Steps by which gradients are late.
    """

    code: str
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    wraps: Callable[[Any, Any, str], Any] | None = None
    tolerance: float = EXACT
    delay: int = 0


def _local_steps(rule: Any, config: Any, strategy: str) -> Any:
    return ms.LocalSGDOptimizer(rule, config, 1, strategy=strategy)


def _int8(rule: Any, config: Any, strategy: str) -> Any:
    return ms.GradientCompressionOptimizer(rule, config, method="int8", strategy=strategy)


def _late(rule: Any, config: Any, strategy: str) -> Any:
    return ms.AsyncSGDOptimizer(rule, config, 1, strategy=strategy)


def _wrapper(name: str, wraps: Any, size: int | None = None, **others: Any) -> Choice:
    code = f"{name}`, `replica_size" if size else name
    return Choice(code=code, kind="optimizer", config={"replica_size": size}, wraps=wraps, **others)


CHOICES: dict[str, Choice] = {
    "bfloat16": Choice(
        code='precision="bfloat16"', kind="precision", config={"precision": "bfloat16"},
        tolerance=ROUNDED,
    ),
    "accumulate": Choice(code="accumulate()", kind="accumulation"),
    "defer": Choice(code="accumulate(defer=True)", kind="accumulation"),
    "leaves": Choice(code="gradient_leaves", kind="leaves", config={"gradient_leaves": RANKS}),
    "compression": Choice(
        code="enable_gradient_compression", kind="compression",
        config={"enable_gradient_compression": True}, tolerance=ROUNDED,
    ),
    "offload": Choice(
        code="cpu_offload_...", kind="offload",
        config={f"cpu_offload_{n}": True for n in ("optimizer", "gradients", "parameters")},
    ),
    "alone": Choice(
        code="auto_sync_gradients=False", kind="alone", config={"auto_sync_gradients": False}
    ),
    "micro": Choice(code="micro_batch_count", kind="micro", options={"micro_batch_count": 2}),
    "recompute": Choice(
        code="checkpoint_config", kind="recompute",
        options={"checkpoint_config": ActivationCheckpointConfig(True)},
    ),
    "lbfgs": Choice(code="LBFGS", kind="rule"),
    "local": _wrapper("LocalSGDOptimizer", _local_steps),
    "int8": _wrapper("GradientCompressionOptimizer", _int8, tolerance=ROUNDED),
    "late": _wrapper("AsyncSGDOptimizer", _late, delay=1),
    "local groups": _wrapper("LocalSGDOptimizer", _local_steps, 2),
    "int8 groups": _wrapper("GradientCompressionOptimizer", _int8, 2, tolerance=ROUNDED),
    "late groups": _wrapper("AsyncSGDOptimizer", _late, 2, delay=1),
    "groups": Choice(code="replica_size", kind="optimizer", config={"replica_size": 2}),
}  # fmt: skip


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


def _vector(rank: int, device: str = "cpu") -> Any:
    return Device.parse(device).put(np.random.default_rng(rank).standard_normal(6))


def _torch_model(rank: int, dtype: str) -> Any:
    import torch

    chain = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    generator = torch.Generator().manual_seed(rank)
    for parameter in chain.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return ms.adapters.TorchModel(chain.to(getattr(torch, dtype)), torch.nn.functional.mse_loss)


def _jax_model(rank: int, dtype: str) -> Any:
    import jax

    def loss(parameters: Any, x: Any, y: Any) -> Any:
        return jax.numpy.mean((x @ parameters["weight"] - y) ** 2)

    jax.config.update("jax_enable_x64", True)
    return ms.adapters.JaxModel(loss, {"weight": _vector(rank).reshape(3, 2).astype(dtype)})


MODELS = {
    "layers": "layers of `mpishard.nn`",
    "torch": "`TorchModel`",
    "jax": "`JaxModel`",
    "function": "`FunctionModel`",
    "black box": "other object",
}
"""Kind of model -> its name in tables."""
ON_HOST_ALONE = ("torch", "jax")


def can_make(model: str) -> bool:
    """Whether the package that a kind of model needs is installed."""
    return model not in ON_HOST_ALONE or importlib.util.find_spec(model) is not None


def make(model: str, rank: int, device: str = "cpu", dtype: str = "float64") -> Any:
    """Return a plain model; of the values of several ranks, those of rank 0 count."""
    match model:
        case "layers":
            return nn.MLP([3, 8, 8, 8, 2], "tanh", seed=rank, dtype=dtype, device=device)
        case "torch":
            return _torch_model(rank, dtype)
        case "jax":
            return _jax_model(rank, dtype)
        case "function":
            return ms.FunctionModel(regression, _vector(rank, device))
    return LeastSquares(_vector(rank, device))


# ---------------------------------------------------------------------------- what should come out


def batch(step: int, part: int) -> tuple[Any, Any]:
    """Seven samples, which four ranks cannot divide evenly."""
    x = np.random.default_rng([step, part]).standard_normal((7, 3))
    return x, np.sin(x[:, :2])


@functools.cache
def expected(model: str, parts: int, delay: int) -> tuple[Any, Any]:
    """Parameters before and after plain descent in one process, by gradients ``delay`` steps old.

    The batch of a step has ``parts`` parts.
    """
    plain = make(model, 0)
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
def expected_of_lbfgs(model: str) -> Any:
    """Parameters after steps of L-BFGS on one rank: the rule has tests of its own."""
    return ms.run_in_threads(1, train, "ddp", model, ("lbfgs",))[0]


# --------------------------------------------------------------------------------- what comes out


@dataclass(frozen=True)
class Outcome:
    """The end of a trial.

    Attributes
    ----------
    reason : str, optional
        Why the choices do not combine, or have no effect.
    rule : str
        The function that says so.
    is_accepted : bool
        Whether the choices are accepted.
    """

    reason: str | None = None
    rule: str = ""
    is_accepted: bool = True


def train(backend: Any, strategy: str, model: str, choices: Sequence[str]) -> Any:
    """Return the trained parameters, or an `Outcome` if the choices are refused."""
    made = [CHOICES[name] for name in choices]
    flags = {name: value for choice in made for name, value in choice.config.items()}
    options = dict(STRATEGIES[strategy])
    for choice in made:
        options |= choice.options
    device = "cuda" if "offload" in choices and model not in ON_HOST_ALONE else "cpu"
    dtype = "float32" if "bfloat16" in choices else "float64"
    parts = 1 + bool({"accumulate", "defer"} & set(choices))
    wraps = next((choice.wraps for choice in made if choice.wraps), None)
    sent: Mapping[str, int] = {}
    try:
        config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=8, **flags)
        plain = make(model, backend.rank, device, dtype)
        sharded = ms.as_distributed(plain, config, strategy, **options)
        sent = dict(backend.traffic.calls)
        rule = ms.optimizers.LBFGS() if "lbfgs" in choices else ms.optimizers.SGD(RATE)
        if wraps is None:
            optimizer = ms.as_distributed(rule, config, strategy, **options)
        else:
            optimizer = wraps(rule, config, strategy)
        for step in range(STEPS):
            for part in range(parts):
                x, y = batch(step, part)
                mine = sharded.batch_indices(len(x))
                adds = part < parts - 1
                with sharded.accumulate(defer="defer" in choices) if adds else nullcontext():
                    optimizer.step(sharded, x[mine], y[mine])
            if "alone" in choices:
                sharded.synchronize_gradients()
        return to_host(sharded.gather_full_parameters())
    except (TypeError, ValueError) as error:
        if dict(backend.traffic.calls) != sent:
            raise AssertionError("refused after it had communicated") from error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(str(error), f"{Path(frame.filename).stem}.{frame.name}", is_accepted=False)


class _Messages(logging.Handler):
    """Messages of the ranks of this trial, which are threads that it starts."""

    def __init__(self) -> None:
        super().__init__()
        self._others = set(threading.enumerate())
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if threading.current_thread() not in self._others:
            self.found.append(record.getMessage())


def attempt(strategy: str, model: str, *choices: str) -> Outcome:
    """Train with these choices; check the parameters, or that all ranks refuse alike.

    Raises
    ------
    AssertionError
        If trained parameters are wrong, or ranks refuse differently, too late, or by a raw error.
    """
    what = f"{strategy}, {model}, {', '.join(choices)}"
    messages, logger = _Messages(), logging.getLogger("mpishard")
    level, propagates, handlers = logger.level, logger.propagate, logger.handlers[:]
    logger.handlers[:], logger.propagate = [messages], False
    logger.setLevel(logging.INFO)
    try:
        with installed() if "offload" in choices else nullcontext():
            results = ms.run_in_threads(RANKS, train, strategy, model, choices, timeout=20)
    finally:
        logger.handlers[:], logger.propagate = handlers, propagates
        logger.setLevel(level)
    if isinstance(results[0], Outcome):
        assert all(each == results[0] for each in results), f"{what}: {results}"
        is_known = results[0].rule.startswith("refusals.") or results[0].rule in OF_ONE_ARGUMENT
        assert is_known, f"{what}: a raw error, {results[0]}"
        return results[0]
    parts = 1 + bool({"accumulate", "defer"} & set(choices))
    delay = max((CHOICES[name].delay for name in choices), default=0)
    first, wanted = expected(model, parts, delay)
    if "lbfgs" in choices:
        wanted = expected_of_lbfgs(model)
    tolerance = max([EXACT, *(CHOICES[name].tolerance for name in choices)])
    limit = tolerance if tolerance == EXACT else tolerance * np.linalg.norm(wanted - first)
    for theta in results:
        difference = float(np.abs(theta - wanted).max())
        assert difference <= limit, f"{what}: parameters differ by {difference:.1e} > {limit:.1e}"
    ignored = [text for text in messages.found if "has no effect" in text]
    return Outcome(*ignored[:1], rule="no effect" if ignored else "")
