"""Gradients in memory that nobody has cleared yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from mpishard.arrays import Array, address
from mpishard.nn.layers.layer import Gradients
from mpishard.sharding import ParameterEntry

__all__ = ["GradientTargets", "unwritten"]


class GradientTargets(MutableMapping[str, Any]):
    """The gradients that a layer adds into, in memory that nobody has cleared.

    A layer that adds sees the mapping that `Layer.backward_weight` describes: a gradient without
    contents is cleared when the layer asks for it. A layer that can write its whole gradient at
    once asks `unwritten` instead. This saves three passes over memory: clearing, a temporary
    array, and an addition.

    Parameters
    ----------
    entries : mapping of str to ParameterEntry
        Dotted name inside the layer -> entry of the parameter table.
    find : callable
        ``find(entry)`` is the 1-D array of the entry's elements.
    unwritten : set of str
        Names of the entries whose gradients have no contents yet. The set is kept up to date. The
        caller and the targets of other layers share it, because tied weights are one entry.
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

    def __setitem__(self, name: str, value: Any) -> None:
        """Make ``value`` the gradient of ``name``, as ``g[name] += part`` does.

        The memory stays the same: values of another array are copied into it.
        """
        array = self.unwritten(name)
        if array is None:
            array = self._array(name)
            # ``g[name] += part`` has added in place, and assigns the array that it was given.
            if type(value) is type(array) and address(value) == address(array):
                return
        array[...] = value

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"the gradient of {name!r} cannot be deleted")

    def unwritten(self, name: str) -> Array | None:
        """The array to *write*, whole and at once; None if the gradient already has contents."""
        entry = self._entries[name]
        if entry.name not in self._unwritten:
            return None
        self._unwritten.remove(entry.name)
        return self._array(name)

    def clear_unwritten(self) -> None:
        """Clear every gradient that no layer has written or added to."""
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
    """The gradient of ``name``, to be written whole, if nothing was added to it yet.

    None if it has contents, or if ``g`` is a plain mapping: then the layer adds into ``g[name]``.
    """
    return g.unwritten(name) if isinstance(g, GradientTargets) else None
