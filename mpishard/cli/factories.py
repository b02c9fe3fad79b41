"""A factory that a command line names, as ``package.module:factory`` or ``file.py:factory``."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_MODULE_NAME = "mpishard_target"

Factory = Callable[..., Any]


class TargetError(ValueError):
    """Raised if the target is no factory, or returns what the command cannot use."""


def load_factory(target: str, returns: str) -> Factory:
    """Return the factory that ``package.module:factory`` or ``path/file.py:factory`` names.

    ``returns`` says in errors what a factory takes and returns.

    Raises
    ------
    TargetError
        If there is none.
    """
    # The last colon, because a path may have one.
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        places = "package.module:factory or file.py:factory"
        raise TargetError(f"FACTORY must be {places}, got {target!r}\n{returns}")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    factory = getattr(module, name, None)
    if factory is None:
        # Also functions that the module has imported: the factory may be one of them.
        there = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[0] != "_"]
        text = f"its functions are {', '.join(there)}" if there else "it has no function at all"
        raise TargetError(f"{place} has no {name!r}\n{text}")
    if not callable(factory):
        kind = type(factory).__name__
        raise TargetError(f"{name!r} of {place} is of type {kind}, not a function\n{returns}")
    return factory  # type: ignore[no-any-return]


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))  # as python -m has it
    try:
        return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - the code of the user
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        # It may be something that the module itself imports.
        if absent is None or not f"{name}.".startswith(f"{absent}."):
            raise TargetError(_failure(name, error)) from None
        text = f"{Path.cwd()} and on Python's path; a file is given as file.py:NAME"
        raise TargetError(f"there is no module {absent!r}\nlooked for it in {text}") from None


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {path}\nlooked for it from {Path.cwd()}")
    sys.path.insert(0, str(path.resolve().parent))  # as python FILE has it
    module = ModuleType(_MODULE_NAME)
    module.__file__ = str(path)
    # As an import does: dataclasses and pickle look up the module of a class by its name.
    sys.modules[_MODULE_NAME] = module
    try:
        SourceFileLoader(_MODULE_NAME, str(path)).exec_module(module)
    except Exception as error:  # noqa: BLE001 - the code of the user
        raise TargetError(_failure(path, error)) from None
    return module


def _failure(place: object, error: Exception) -> str:
    """Return why a module cannot be imported: the traceback of the user's own lines."""
    trace = error.__traceback__
    while trace is not None and (
        (file := trace.tb_frame.f_code.co_filename) in (__file__, importlib.__file__)
        or file.startswith("<frozen importlib")
    ):
        trace = trace.tb_next
    lines = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    return f"{place} cannot be imported\n{lines}"
