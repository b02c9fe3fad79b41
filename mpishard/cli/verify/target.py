"""Target of ``mpishard verify``: a factory of a model and data, which the user wrote."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpishard.contracts import ILossFunction, IShardedModel
from mpishard.data import check_dataset
from mpishard.sharding import ParameterEntry

__all__ = ["Problem", "TargetError", "build_problem", "load_factory"]

_MODULE_NAME = "mpishard_verified"

Factory = Callable[..., Any]


class TargetError(ValueError):
    """Raised if the target is no factory of a model and data; says what it should be."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A plain model, the same data on every rank, and a loss if the model has none of its own."""

    model: Any
    x: Any
    y: Any
    loss: ILossFunction | None = None

    def entries(self, length: int) -> tuple[ParameterEntry, ...]:
        """Return names, shapes and places of the parameters, if the model knows them."""
        table = getattr(self.model, "parameter_table", None)
        named = getattr(self.model, "parameter_entries", getattr(table, "entries", None))
        return tuple(named) if named else (ParameterEntry("parameters", (length,), 0),)


def load_factory(target: str) -> Factory:
    """Return the factory that ``package.module:factory`` or ``path/file.py:factory`` names.

    Raises
    ------
    TargetError
        If there is none.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise TargetError(
            f"TARGET must be package.module:factory or file.py:factory, got {target!r}\n"
            "factory(seed) is a function that returns (model, x, y) or (model, x, y, loss)"
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    factory = getattr(module, name, None)
    if factory is None:
        there = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        raise TargetError(
            f"{place} has no {name!r}\n"
            + (f"its functions are {', '.join(there)}" if there else "it has no function at all")
        )
    if not callable(factory):
        raise TargetError(
            f"{name!r} of {place} is a {type(factory).__name__} and no function\n"
            "factory(seed) returns (model, x, y) or (model, x, y, loss)"
        )
    return factory  # type: ignore[no-any-return]


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # as python -m has it
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise TargetError(
            f"there is no module {error.name!r}\n"
            f"looked for it in {Path.cwd()} and on Python's path; a file is given as file.py:NAME"
        ) from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path}\nlooked for it from {Path.cwd()}")
    sys.path.insert(0, str(path.resolve().parent))  # as python FILE has it
    spec = importlib.util.spec_from_file_location(_MODULE_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE_NAME] = module
    spec.loader.exec_module(module)
    return module


def build_problem(factory: Factory, seed: int, dtype: str | None) -> Problem:
    """Return the result of ``factory(seed)``, or of ``factory(seed, dtype=dtype)`` if it takes one.

    Raises
    ------
    TargetError
        If that is no model with data, or a model of another dtype.
    """
    takes_dtype = "dtype" in inspect.signature(factory).parameters
    given = factory(seed, dtype=dtype) if dtype and takes_dtype else factory(seed)
    if not isinstance(given, tuple) or len(given) not in (3, 4):
        what = f"a tuple of {len(given)}" if isinstance(given, tuple) else type(given).__name__
        raise TargetError(f"factory(seed) must return (model, x, y) or (model, x, y, loss)\n"
                          f"it returned {what}")  # fmt: skip
    problem = Problem(*given)
    _check_model(problem.model)
    for name, data in (("x", problem.x), ("y", problem.y)):
        try:
            check_dataset(data, name)
        except (TypeError, ValueError) as error:
            raise TargetError(
                f"what factory(seed) returned cannot be trained on\n{error}"
            ) from None
    if len(problem.x) != len(problem.y):
        raise TargetError(
            "x and y of factory(seed) must have as many samples\n"
            f"x has {len(problem.x)} and y has {len(problem.y)}"
        )
    if problem.loss is not None and not isinstance(problem.loss, ILossFunction):
        raise TargetError(
            "the loss of factory(seed) must be a loss of mpishard.nn\n"
            f"it is a {type(problem.loss).__name__}; a function belongs into the model"
        )
    found = problem.model.get_parameters().dtype.name
    if dtype is not None and found != dtype:
        raise TargetError(
            f"--dtype {dtype}: the model of factory(seed) has {found} parameters\n"
            "write def factory(seed, dtype): and build model and data in that dtype"
        )
    return problem


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if isinstance(model, IShardedModel):
        raise TargetError(
            f"the model of factory(seed) is sharded already, as {name}\n"
            "return the plain model: verify wraps it"
        )
    missing = [m for m in ("get_parameters", "set_parameters") if not hasattr(model, m)]
    if not any(hasattr(model, m) for m in ("compute_gradients", "compute_loss_and_gradients")):
        missing.append("compute_gradients")
    if missing:
        raise TargetError(
            f"the model of factory(seed), a {name}, has no {' and no '.join(missing)}\n"
            "docs/bring-your-own-model.md says what a model needs"
        )
    vector = model.get_parameters()
    if not isinstance(vector, np.ndarray) or vector.ndim != 1 or vector.dtype.kind != "f":
        what = f"{getattr(vector, 'dtype', type(vector).__name__)}"
        raise TargetError(
            f"get_parameters() of {name} must return a 1-D NumPy vector of floats\n"
            f"it returned {what} of shape {getattr(vector, 'shape', '?')}"
        )
