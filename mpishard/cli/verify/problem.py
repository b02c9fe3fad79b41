"""The user's model, data and options: the factory that makes them, and what it may return."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpishard.base import as_count, nearest
from mpishard.cli.factories import Factory, TargetError
from mpishard.contracts import ILayeredModel, ILossFunction, UserModel
from mpishard.data import check_dataset
from mpishard.distributed import STRATEGY_OPTIONS, DistributedStrategy
from mpishard.models import ShardedModelBase, checked_mesh_options
from mpishard.optimizers import (
    LAMB,
    LBFGS,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    Optimizer,
    RMSprop,
)
from mpishard.sharding import ParameterEntry

RULES = (SGD, Adagrad, RMSprop, Adam, AdamW, Lion, LAMB, LBFGS)
"""Rules that a factory may return; `Textbook` has each of them once more."""

SIZES = ("pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size")
"""Sizes of the mesh, which are flags of the command."""

MESH_OPTIONS = tuple(
    name for name in STRATEGY_OPTIONS[DistributedStrategy.HYBRID] if name not in SIZES
)
"""Options of `as_distributed` that a factory may return."""

OPTIONS = ("optimizer", "batch_size", *MESH_OPTIONS)
"""Names in the mapping that a factory may return."""

RETURNS = "factory(seed) is a function that returns (model, x, y) or (model, x, y, loss)"


@dataclass(frozen=True, slots=True)
class Problem:
    """The result of a factory: a plain model, the same data on every rank, and options.

    Parameters
    ----------
    model, x, y : object
        Model, inputs and targets.
    loss : ILossFunction, optional
        The loss, if the model has none of its own.
    optimizer : Optimizer
        One of `RULES`.
    batch_size : int, optional
        Samples of the global batch; None: 8 for each rank.
    options : mapping
        Of `MESH_OPTIONS`.
    """

    model: UserModel
    x: Any
    y: Any
    loss: ILossFunction | None = None
    # With momentum, so that by default the state of an optimizer is compared, too.
    optimizer: Optimizer = field(default_factory=lambda: SGD(1e-3, momentum=0.9))
    batch_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_layered(self) -> bool:
        """True for a model of layers, False for a black box."""
        return isinstance(self.model, ILayeredModel)

    def entries(self, length: int) -> tuple[ParameterEntry, ...]:
        """Return names, shapes and places of the parameters, if the model knows them."""
        table = getattr(self.model, "parameter_table", None)
        named = getattr(self.model, "parameter_entries", getattr(table, "entries", None))
        # A black box has one vector, and the table one row.
        return tuple(named) if named else (ParameterEntry("parameters", (length,), 0),)


def build_problem(factory: Factory, seed: int, dtype: str | None) -> Problem:
    """Return the result of ``factory(seed)``, or of ``factory(seed, dtype=dtype)`` if it takes one.

    Raises
    ------
    TargetError
        If that is no model with data, or a model of another dtype.
    """
    names, factory_name = inspect.signature(factory), getattr(factory, "__name__", "factory")
    named = {} if dtype is None else {"dtype": dtype}
    try:
        # Bound, and not called: a TypeError from inside the factory is the user's to see.
        names.bind(seed, **named)
    except TypeError:
        text = f"{factory_name}({', '.join(names.parameters)}) must take a seed\n{RETURNS}"
        if dtype is not None:
            fix = f"write def {factory_name}(seed, dtype): and build model and data in that dtype"
            text = f"--precision compares ranks in float32 with float64 alone\n{fix}"
        raise TargetError(text) from None
    given = factory(seed, **named)
    for fault in _faults(given, dtype):
        raise TargetError(fault)
    *plain, last = given
    if not isinstance(last, Mapping):
        return Problem(*given)
    options = {name: value for name, value in last.items() if name in MESH_OPTIONS}
    own = {name: last[name] for name in ("optimizer", "batch_size") if name in last}
    return replace(Problem(*plain), options=options, **own)


def _faults(given: Any, dtype: str | None) -> Iterator[str]:
    """Yield the faults of a factory's result. After the first one the rest may fail, too."""
    last = given[-1] if isinstance(given, tuple) and given else None
    has_options = isinstance(last, Mapping)
    if not isinstance(given, tuple) or len(given) - has_options not in (3, 4):
        kind = f"a tuple of {len(given)}" if isinstance(given, tuple) else type(given).__name__
        form = "(model, x, y) or (model, x, y, loss), and a dict of options after it if needed"
        yield f"factory(seed) must return {form}\nit returned {kind}"
    model, x, y, *losses = given[: len(given) - has_options]
    yield from _faults_of_model(model, dtype)
    try:
        sizes = check_dataset(x, "x"), check_dataset(y, "y")
    except (TypeError, ValueError) as error:
        raise TargetError(f"the data of factory(seed) cannot be trained on\n{error}") from None
    if sizes[0] != sizes[1]:
        text = f"x has {sizes[0]} and y has {sizes[1]}"
        yield f"x and y of factory(seed) must have the same number of samples\n{text}"
    if losses and not isinstance(losses[0], ILossFunction | None):
        text = f"it is a {type(losses[0]).__name__}; a function belongs in the model"
        yield f"the loss of factory(seed) must be a loss of mpishard.nn\n{text}"
    if isinstance(last, Mapping):
        yield from _faults_of_options(last)


def _faults_of_model(model: UserModel, dtype: str | None) -> Iterator[str]:
    name = type(model).__name__
    # It would also make the reference train on ranks.
    if isinstance(model, ShardedModelBase):
        text = "return the plain model: verify wraps it"
        yield f"the model of factory(seed) is sharded already, as {name}\n{text}"
    missing = [m for m in ("get_parameters", "set_parameters") if not hasattr(model, m)]
    if not any(hasattr(model, m) for m in ("compute_gradients", "compute_loss_and_gradients")):
        missing.append("compute_gradients")
    if missing:
        text = "docs/bring-your-own-model.md describes the members of a model"
        yield f"the model of factory(seed), a {name}, has no {' and no '.join(missing)}\n{text}"
    # Called here, because the reference would fail on it with an error of NumPy.
    vector = model.get_parameters()
    found = getattr(vector, "dtype", type(vector).__name__)
    if not isinstance(vector, np.ndarray) or vector.ndim != 1 or vector.dtype.kind != "f":
        text = f"it returned {found} of shape {getattr(vector, 'shape', '?')}"
        yield f"get_parameters() of {name} must return a 1-D NumPy vector of floats\n{text}"
    if dtype is not None and found != dtype:
        text = "write def factory(seed, dtype): and build model and data in that dtype"
        text = f"got {found} parameters from factory(seed, dtype={dtype!r})\n{text}"
        yield f"--precision compares ranks in float32 with float64 alone: {text}"


def _faults_of_options(options: Mapping[str, object]) -> Iterator[str]:
    where = "the dict of factory(seed)"
    for name in options:
        # The command needs the mesh before it calls the factory, to start its ranks.
        if name in SIZES:
            flag = "--" + name.replace("_", "-")
            yield f"{where} has {name!r}, a size of the mesh\ngive {flag} to the command"
        if name not in OPTIONS:
            text = f"known are {', '.join(OPTIONS)}{nearest(str(name), OPTIONS)}"
            yield f"{where} has {name!r}\n{text}"
    rule = options.get("optimizer", SGD())
    # Not isinstance: a subclass may update otherwise than the textbook does.
    if type(rule) not in RULES:
        found = f"an object of {type(rule).__name__}"
        if isinstance(rule, type):
            found = f"the class {rule.__name__}: return an object of it"
        names = ", ".join(each.__name__ for each in RULES)
        text = f"it is {found}; verify has the textbook's form of {names}"
        yield f"the optimizer of factory(seed) must be a rule of mpishard.optimizers\n{text}"
    try:
        if "batch_size" in options:
            as_count("batch_size", options["batch_size"])
        checked_mesh_options({n: v for n, v in options.items() if n in MESH_OPTIONS})
    except (TypeError, ValueError) as error:
        raise TargetError(f"{where} has an option that cannot be used\n{error}") from None
