"""Reading samples from arrays, memory maps and files by one rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.data.windows import TokenWindows

__all__ = ["check_dataset", "take"]


def take(dataset: Any, indices: np.ndarray[Any, np.dtype[np.integer[Any]]]) -> Array:
    """The samples of ``dataset`` at ``indices``, as an array of their own.

    Parameters
    ----------
    dataset : Array or object
        A NumPy or CuPy array, a memory map, or anything with ``len()`` that can be indexed by an
        array of integers, such as an ``h5py`` data set.
    indices : array of int
        Shape (n,): which samples, in any order, repeated or not. May be empty.

    Returns
    -------
    Array
        Shape (n, ...), in the order of ``indices``; in GPU memory where the data set is.

    Notes
    -----
    Of objects that are not arrays, each sample is asked once and in rising order: ``h5py`` takes
    nothing else, and files are read fastest so.
    """
    if isinstance(dataset, np.ndarray | TokenWindows):
        return np.asarray(dataset[indices])
    try:
        xp = array_namespace(dataset)
    except TypeError:
        return _take_sorted(dataset, indices)
    return dataset[xp.asarray(indices)]


def _take_sorted(dataset: Any, indices: np.ndarray[Any, np.dtype[np.integer[Any]]]) -> Array:
    if indices.size == 0:  # h5py has no empty selection by integers
        return dataset[np.zeros(1, np.int64)][:0]
    unique, places = np.unique(indices, return_inverse=True)
    samples = dataset[unique]
    return samples if np.array_equal(unique, indices) else samples[places]


def check_dataset(dataset: Any, name: str) -> int:
    """Refuse what `take` could not read; return the number of samples.

    Parameters
    ----------
    dataset : object
        What the user passed.
    name : str
        The argument's name, for messages.

    Raises
    ------
    TypeError
        Where it is None, a sequence without array indexing (a list), a data frame (whose
        ``[...]`` selects columns), or has no ``len()``.
    ValueError
        Where it holds no samples.
    """
    wanted = "an array, or an object with len() that can be indexed by an array of integers"
    if dataset is None:
        raise TypeError(f"{name} must be {wanted}, got None")
    kind = type(dataset).__qualname__
    if isinstance(dataset, list | tuple | str | bytes | Mapping | set | frozenset):
        raise TypeError(f"{name} must be {wanted}, got a {kind}; pass numpy.asarray({name})")
    if hasattr(dataset, "iloc"):
        raise TypeError(f"{name} must be {wanted}, got a {kind}; pass {name}.to_numpy()")
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{name} must be {wanted}, got a {kind}")
    try:
        length = len(dataset)
    except TypeError as error:  # 0-dim arrays and sparse matrices have the method and refuse
        raise TypeError(f"{name} must be {wanted}; len() of this {kind} says: {error}") from error
    if length == 0:
        raise ValueError(f"{name} holds no samples")
    return length
