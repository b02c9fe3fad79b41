"""A rule's settings as JSON knows them, schedules and options too, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from mpishard.optimizers.rules import schedules
from mpishard.optimizers.rules.algorithm_options import (
    AdamOptimizerOptions,
    OptimizationAlgorithmOptions,
)

__all__ = ["decoded", "encoded"]

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        schedules.Constant,
        schedules.Cosine,
        schedules.Exponential,
        schedules.OneCycle,
        schedules.StepDecay,
        schedules.WarmUp,
        OptimizationAlgorithmOptions,
        AdamOptimizerOptions,
    )
}


def encoded(name: str, value: Any) -> Any:
    """A setting as JSON knows it.

    Raises
    ------
    ValueError
        Naming the setting, for a function that is no schedule of `mpishard.optimizers`.
    """
    if isinstance(value, Mapping):
        return {key: encoded(f"{name}[{key!r}]", inner) for key, inner in value.items()}
    kind = type(value).__name__
    if _KINDS.get(kind) is type(value):
        inner = {f.name: encoded(f"{name}.{f.name}", getattr(value, f.name)) for f in fields(value)}
        return [kind, inner]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{name} is {value!r}, which cannot be written; schedules that can are "
        + ", ".join(name for name in _KINDS if not name.endswith("Options"))
    )


def decoded(value: Any) -> Any:
    """What `encoded` was given.

    Raises
    ------
    ValueError
        For a kind of schedule that this release does not have.
    """
    if isinstance(value, Mapping):
        return {key: decoded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        kind, inner = value
        if kind not in _KINDS:
            raise ValueError(f"unknown kind of setting {kind!r}; known are {', '.join(_KINDS)}")
        return _KINDS[kind](**decoded(inner))
    return value
