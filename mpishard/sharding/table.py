"""The parameter table: the place of each parameter in a model's flat vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mpishard.arrays import Array

__all__ = ["ParameterEntry", "ParameterTable", "check_name", "nested", "nested_views"]

_RESERVED = "__metadata__"  # by safetensors, for a header's own entries


class _Spec(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def tied_to(self) -> str | None: ...

    @property
    def trainable(self) -> bool: ...


def check_name(name: str, kind: str) -> None:
    """Refuse a name under which a safetensors file cannot hold a tensor.

    ``kind`` is the word for it in the error: "parameter" or "tensor".

    Raises
    ------
    ValueError
        For the name that the format reserves, and for one that UTF-8 cannot hold.
    """
    if name == _RESERVED:
        raise ValueError(
            f"{kind} name {name!r} is reserved by the safetensors format; choose another name"
        )
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{kind} name {name!r} cannot be written as UTF-8 ({error.reason}); choose "
                "another name"
            ) from None


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """One parameter: its dotted name, its shape, and the index of its first element.

    A parameter that is not ``trainable`` never changes: its gradient is 0, and it has no optimizer
    state.

    Raises
    ------
    ValueError
        As `check_name`.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    trainable: bool = True

    def __post_init__(self) -> None:
        check_name(self.name, "parameter")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """Index behind the last element."""
        return self.start + self.size


class ParameterTable:
    """The parameters of a model in layer order, end to end without gaps.

    Parameters
    ----------
    parameters : iterable of (str, spec)
        Dotted name and description (``shape``, ``tied_to``) of each parameter, in order. One
        that is tied to another adds no entry: its name stands for the other's.

    Raises
    ------
    ValueError
        If a name stands twice, or a tie leads nowhere or to another shape.

    Attributes
    ----------
    entries : tuple of ParameterEntry
        Each parameter once.
    length : int
        Length of the flat vector.
    """

    def __init__(self, parameters: Iterable[tuple[str, _Spec]]) -> None:
        entries: dict[str, ParameterEntry] = {}
        ties: dict[str, tuple[str, tuple[int, ...]]] = {}
        start = 0
        for name, spec in parameters:
            if name in entries or name in ties:
                raise ValueError(f"parameter {name!r} stands twice in the model")
            if spec.tied_to is None:
                entries[name] = ParameterEntry(name, tuple(spec.shape), start, spec.trainable)
                start = entries[name].stop
            else:
                ties[name] = (spec.tied_to, tuple(spec.shape))
        # After the loop above, because a tie may name a parameter that comes later.
        for name, (target, shape) in ties.items():
            if target not in entries:
                raise ValueError(f"parameter {name!r} is tied to {target!r}, which is not there")
            if entries[target].shape != shape:
                raise ValueError(
                    f"parameter {name!r} of shape {shape} is tied to {target!r} of shape "
                    f"{entries[target].shape}"
                )
        self.entries = tuple(entries.values())
        self.length = start
        self._by_name = entries | {name: entries[target] for name, (target, _) in ties.items()}

    def __getitem__(self, name: str) -> ParameterEntry:
        return self._by_name[name]

    def layer_entries(self, layer: str) -> dict[str, ParameterEntry]:
        """Parameters that the top-level ``layer`` uses: name inside it -> entry, ties resolved."""
        prefix = f"{layer}."
        return {
            name[len(prefix) :]: entry
            for name, entry in self._by_name.items()
            if name.startswith(prefix)
        }

    def overlapping(self, start: int, stop: int) -> list[ParameterEntry]:
        """The entries that share an element with the flat range ``[start, stop)``."""
        return [e for e in self.entries if max(e.start, start) < min(e.stop, stop)]

    def nested_views(self, vector: Array) -> dict[str, Any]:
        """Views of ``vector``, shape (length,), shaped as the parameters and nested by name."""
        return nested_views(self._by_name, lambda e: vector[e.start : e.stop])


def nested_views(
    entries: Mapping[str, ParameterEntry], find: Callable[[ParameterEntry], Array]
) -> dict[str, Any]:
    """Arrays for ``entries``, in their shapes and nested as `nested`.

    ``find`` gives the 1-D array that holds an entry's elements.
    """
    return nested({name: find(entry).reshape(entry.shape) for name, entry in entries.items()})


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted name as nested dicts.

    Examples
    --------
    >>> nested({"linear.weight": 1, "linear.bias": 2, "scale": 3})
    {'linear': {'weight': 1, 'bias': 2}, 'scale': 3}
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        inner = result
        for word in path:
            inner = inner.setdefault(word, {})
        inner[last] = value
    return result
