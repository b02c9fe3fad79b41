"""Gradients of which some hold nothing yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mpishard.arrays import Array
from mpishard.nn.layers.layer import Gradients
from mpishard.sharding import ParameterEntry

__all__ = ["GradientTargets", "unwritten"]


class GradientTargets(Mapping[str, Any]):
    """The gradients that a layer adds into, in memory that nobody has cleared.

    To a layer that adds it is the mapping that `Layer.backward_weight` speaks of: a gradient
    that holds nothing yet is cleared when it is asked for. A layer that can write its part in
    one go asks `unwritten` instead, and spares clearing, a temporary array and an addition:
    three passes over memory.

    Parameters
    ----------
    entries : mapping of str to ParameterEntry
        Dotted name inside the layer -> entry of the parameter table.
    find : callable
        ``find(entry)`` is the 1-D array of the entry's elements.
    unwritten : set of str
        Names of the entries whose gradients hold nothing yet. It is kept up to date, and shared
        with whoever made it and with the targets of other layers: tied weights are one entry.
    """

    def __init__(
        self,
        entries: Mapping[str, ParameterEntry],
        find: Callable[[ParameterEntry], Array],
        unwritten: set[str],
    ) -> None:
        self._entries = entries
        self._find = find
        self._unwritten = unwritten

    def __getitem__(self, name: str) -> Any:
        """The array to add into, or the targets of the inner layer ``name``."""
        if name not in self._entries:
            return self._inner(name)
        array = self.unwritten(name)
        if array is None:
            return self._array(name)
        array.fill(0)
        return array

    def unwritten(self, name: str) -> Array | None:
        """The array to *write*, in full and at once; None where there is something to add to."""
        entry = self._entries[name]
        if entry.name not in self._unwritten:
            return None
        self._unwritten.remove(entry.name)
        return self._array(name)

    def clear_unwritten(self) -> None:
        """Clear what no layer has written or added to, as a layer without samples leaves it."""
        for name, entry in self._entries.items():
            if entry.name in self._unwritten:
                self._unwritten.remove(entry.name)
                self._array(name).fill(0)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name.partition(".")[0] for name in self._entries))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _array(self, name: str) -> Array:
        entry = self._entries[name]
        return self._find(entry).reshape(entry.shape)

    def _inner(self, name: str) -> GradientTargets:
        prefix = f"{name}."
        inner = {
            inner_name.removeprefix(prefix): entry
            for inner_name, entry in self._entries.items()
            if inner_name.startswith(prefix)
        }
        if not inner:
            raise KeyError(name)
        return GradientTargets(inner, self._find, self._unwritten)


def unwritten(g: Gradients, name: str) -> Array | None:
    """The gradient of ``name``, to be written in full, where nothing was added to it yet.

    None where it holds something, or where ``g`` is a mapping that does not tell: then the
    layer adds into ``g[name]``.
    """
    return g.unwritten(name) if isinstance(g, GradientTargets) else None
