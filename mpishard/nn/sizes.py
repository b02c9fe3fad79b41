"""What counts as a size."""

from __future__ import annotations

from numbers import Integral
from typing import Any

__all__ = ["check_sizes", "is_size"]


def is_size(value: Any, least: int = 1) -> bool:
    """Whether ``value`` is an integer, of Python or of NumPy, of at least ``least``."""
    return isinstance(value, Integral) and int(value) >= least


def check_sizes(owner: str, **sizes: Any) -> None:
    """Refuse sizes, given by name, that are no integers >= 1.

    Raises
    ------
    ValueError
        Naming ``owner`` and all of its sizes.
    """
    if not all(is_size(size) for size in sizes.values()):
        got = ", ".join(f"{name}={size!r}" for name, size in sizes.items())
        raise ValueError(f"{owner} needs integer sizes >= 1, got {got}")
