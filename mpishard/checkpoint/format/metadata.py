"""What is saved beside arrays, as JSON knows it; numbers that JSON does not know, spelled out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

__all__ = ["as_json", "as_metadata", "check_keys", "spelled", "unspelled"]

_SPELLING = "$float"  # the only key of what stands for a number that JSON does not know
_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_CONTAINERS = (dict, list, tuple)


def as_metadata(given: Any) -> dict[str, Any]:
    """A user's metadata, of which nothing is looked at yet; {} for None.

    Raises
    ------
    TypeError
        For what is no mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"metadata must map names to what JSON can hold, as {{'note': 'first'}}; got {given!r}"
        )
    return dict(given)


def as_json(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What JSON makes of metadata, NumPy scalars and arrays included: a copy.

    Infinities and NaN stay what they are.

    Raises
    ------
    TypeError
        For what JSON does not know, and for a key that is no string: JSON would make one of it,
        and of 1 and "1" the same.
    ValueError
        For the key that stands for a number which JSON does not know.
    """
    found = as_metadata(metadata)
    text = json.dumps(found, default=_plain)  # refuses what holds itself
    check_keys("metadata", found)
    return dict(json.loads(text))


def spelled(value: Any) -> Any:
    """``value`` of JSON with infinities and NaN as objects, so that every reader of JSON takes it.

    RFC 8259, section 6, has no such numbers; they become ``{"$float": "NaN"}``, ``"Infinity"``
    or ``"-Infinity"``.
    """
    if isinstance(value, float) and not isfinite(value):
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return {_SPELLING: name}
    if isinstance(value, Mapping):
        return {key: spelled(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        # Loss histories are long.
        return [item if type(item) is float and isfinite(item) else spelled(item) for item in value]
    return value


def unspelled(value: Any) -> Any:
    """What `spelled` was given."""
    if isinstance(value, dict):
        if value.keys() == {_SPELLING} and str(value[_SPELLING]) in _NUMBERS:
            return _NUMBERS[value[_SPELLING]]
        return {key: unspelled(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unspelled(item) if isinstance(item, _CONTAINERS) else item for item in value]
    return value


def check_keys(name: str, value: Any, place: str = "") -> None:
    """Refuse keys that JSON would change, at any depth.

    Raises
    ------
    TypeError, ValueError
        As `as_json`, naming the argument and the key.
    """
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.tolist()
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                where = f" in {place}" if place else ""
                raise TypeError(
                    f"{name} must have strings for keys, as JSON has; got the key {key!r}{where}"
                )
            if key == _SPELLING:
                raise ValueError(
                    f"{name} must not have the key {key!r}, which stands for NaN and infinities "
                    "in manifest.json; choose another"
                )
            check_keys(name, item, f"{place}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if isinstance(item, (*_CONTAINERS, np.ndarray)):
                check_keys(name, item, f"{place}[{index}]")


def _plain(value: Any) -> Any:
    """NumPy scalars and arrays as JSON knows them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"metadata must be JSON; it holds a {type(value).__qualname__}: {value!r}")
