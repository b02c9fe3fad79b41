"""Conversion of nested dicts, lists and tuples of arrays to a flat vector, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard.base import Array, DType, require_plain
from mpishard.data import map_tree
from mpishard.sharding import ParameterEntry


class ParameterTree:
    """Structure of a pytree of floating-point arrays.

    Leaves are NumPy arrays and Python floats. Inner nodes are dicts, lists, tuples and named
    tuples. A leaf's name is the path to it, as in ``layers.0.weight``. If the tree is a single
    array, its name is ``parameters``.

    Parameters
    ----------
    tree : pytree
        Structure and initial values, which are copied.

    Attributes
    ----------
    entries : tuple of ParameterEntry
        Name, shape and start of each leaf, in the order in which the tree has them.
    dtype : numpy.dtype
        Dtype of all arrays, which Python floats take; float64 if there are only Python floats.
    first_values : Array
        Flat vector of the tree's values, shape (sum of sizes,).

    Raises
    ------
    TypeError
        If a leaf is not a float or an array of float32 or float64. The message names it.
    ValueError
        If arrays have different dtypes, an array is empty, the tree has no leaves, or two leaves
        have the same name.
    """

    def __init__(self, tree: Any) -> None:
        found: list[tuple[str, Any]] = []

        # Leaves are numbered in the order of `map_tree`, in which `build` puts them back.
        def note(name: str, leaf: object) -> int:
            found.append((name or "parameters", leaf))
            return len(found) - 1

        self._template = map_tree(note, tree)
        # Not isinstance: np.float64 is a subclass of float, and stays an array.
        self._is_number = [type(leaf) is float for _, leaf in found]
        if not found:
            raise ValueError(f"there is no array in the parameters: {tree!r}")
        self.entries, self.dtype, self.first_values = flat_leaves(found)

    def build(self, leaves: Sequence[object]) -> Any:
        """Return a new tree of this structure with ``leaves``, one per entry."""
        return map_tree(lambda _, index: leaves[index], self._template)

    def values(self, vector: Array) -> Any:
        """Return the tree of a flat vector's values, shape (sum of sizes,), as copies."""

        def value(_: str, index: int) -> Any:
            part = self.entries[index].view(vector).copy()
            return float(part) if self._is_number[index] else part

        return map_tree(value, self._template)


def flat_leaves(
    found: Sequence[tuple[str, Any]],
) -> tuple[tuple[ParameterEntry, ...], DType, Array]:
    """Return entries, dtype and flat vector of the named leaves of a tree.

    The errors raised are those of `ParameterTree`.

    Parameters
    ----------
    found : sequence of (str, leaf)
        Name and value of each leaf, a NumPy array or a Python float, in flat order.
    """
    for name, leaf in found:
        _check_leaf(name, leaf)
    names = [name for name, _ in found]
    # Options, checkpoints and reports know a parameter by its name.
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if twice:
        raise ValueError(
            f"two parameters have the name {twice[0]!r}: a key with a dot looks like a path; "
            "use keys without dots"
        )
    dtypes: dict[DType, list[str]] = {}
    for name, leaf in found:
        # Python floats have no dtype of their own: 0.0 may be beside arrays of float32.
        if isinstance(leaf, np.ndarray | np.generic):
            dtypes.setdefault(leaf.dtype, []).append(name)
    if len(dtypes) > 1:
        raise ValueError(
            "all parameters must have one dtype: "
            + ", ".join(
                f"{', '.join(names[:4])}{' ...' if len(names) > 4 else ''} "
                f"{'is' if len(names) == 1 else 'are'} {dtype}"
                for dtype, names in dtypes.items()
            )
        )
    dtype = next(iter(dtypes), np.dtype(np.float64))
    entries: list[ParameterEntry] = []
    for name, leaf in found:
        start = entries[-1].stop if entries else 0
        entries.append(ParameterEntry(name, np.shape(leaf), start))
    values = [np.ravel(leaf).astype(dtype, copy=False) for _, leaf in found]
    # np.concatenate copies, so that training never changes the user's arrays.
    return tuple(entries), dtype, np.concatenate(values)


def _check_leaf(name: str, leaf: object) -> None:
    require_plain(leaf)
    if not isinstance(leaf, float | np.ndarray | np.generic):
        hint = (
            f"; write {float(leaf)}"
            if isinstance(leaf, int)
            else "; give arrays that are not trained to the loss, by functools.partial or a closure"
        )
        raise TypeError(
            f"parameter {name!r} must be a NumPy array or a float, got {type(leaf).__name__}{hint}"
        )
    if np.result_type(leaf) not in (np.float32, np.float64):
        raise TypeError(
            f"parameter {name!r} must be float32 or float64, got {np.result_type(leaf).name}; "
            "use .astype(float)"
        )
    if np.size(leaf) == 0:
        raise ValueError(f"parameter {name!r} of shape {np.shape(leaf)} has no elements")
