"""Arguments of users as the code needs them, or an error that says what was given."""

from __future__ import annotations

import os
from numbers import Integral, Real
from typing import Any

__all__ = ["as_integer", "as_number", "check_path"]


def as_number(name: str, value: Any) -> float:
    """``value`` as a float.

    Raises
    ------
    TypeError
        Naming the argument, where it is no number.
    """
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    return float(value)


def as_integer(name: str, value: Any) -> int:
    """``value`` as an int.

    Raises
    ------
    TypeError
        Naming the argument, where it is no integer; a bool is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    return int(value)


def check_path(name: str, path: Any) -> None:
    """Refuse what names no place in the file system.

    Raises
    ------
    TypeError
        For what is neither a string nor a path.
    ValueError
        For a blank string.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be a string or a path, got {path!r}")
    if not str(path).strip():
        raise ValueError(f"{name} must not be blank, got {str(path)!r}")
