"""Reading samples from arrays, memory maps and files by one rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, require_plain
from mpishard.data.windows import TokenWindows

__all__ = ["check_dataset", "take"]

_WANTED = "an array, or an object with len() that can be indexed by an array of integers"
_NAMED = 5  # arrays of a file that a message lists


def take(dataset: Any, indices: np.ndarray[Any, np.dtype[np.integer[Any]]]) -> Array:
    """The samples of ``dataset`` at ``indices``, as an array of their own.

    Nothing else of the data set is read.

    Parameters
    ----------
    dataset : Array or object
        A NumPy or CuPy array, a memory map, or anything with ``len()`` that can be indexed by an
        array of integers, such as an ``h5py`` data set. Thread-ranks may share it.
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
    require_plain(dataset)
    if isinstance(dataset, np.ndarray | TokenWindows):
        return np.asarray(dataset[indices])
    try:
        xp = array_namespace(dataset)
    except TypeError:
        return _take_sorted(dataset, indices)
    return dataset[xp.asarray(indices)]


def _take_sorted(dataset: Any, indices: np.ndarray[Any, np.dtype[np.integer[Any]]]) -> Array:
    if indices.size == 0:  # h5py has no empty selection by integers
        empty = dataset[np.zeros(1, np.int64)][:0] if len(dataset) else dataset[:0]
        return _as_array(empty)
    unique, places = np.unique(indices, return_inverse=True)
    samples = _as_array(dataset[unique])
    return samples if np.array_equal(unique, indices) else samples[places]


def _as_array(samples: Any) -> Array:
    require_plain(samples)  # netCDF4, for one, returns masked arrays
    try:
        array_namespace(samples)
    except TypeError:
        return np.asarray(samples)
    return samples


def check_dataset(dataset: Any, name: str, *, allow_empty: bool = False) -> int:
    """Refuse what `take` could not read; return the number of samples.

    Parameters
    ----------
    dataset : object
        What the user passed.
    name : str
        The argument's name, for messages.
    allow_empty : bool
        Whether it may hold no samples.

    Raises
    ------
    TypeError
        Where it is None, a sequence without array indexing (a list), something that holds arrays
        by name (a dict, an HDF5 file), a data frame (whose ``[...]`` selects columns), or has no
        ``len()``.
    ValueError
        Where it holds no samples, or its file is closed.
    """
    if dataset is None:
        raise TypeError(f"{name} must be {_WANTED}, got None")
    require_plain(dataset)
    kind = type(dataset).__qualname__
    if type(dataset).__module__.partition(".")[0] == "h5py" and not dataset:
        raise ValueError(
            f"{name} is a {kind} of an HDF5 file that is closed; keep the file open until "
            "training has ended"
        )
    if isinstance(dataset, Mapping):
        names = [str(key) for key in dataset]
        listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        raise TypeError(
            f"{name} must be {_WANTED}, got a {kind}, which holds arrays by name; pass one of "
            f"them: {listed or 'it is empty'}"
        )
    if isinstance(dataset, list | tuple | str | bytes | set | frozenset):
        raise TypeError(f"{name} must be {_WANTED}, got a {kind}; pass numpy.asarray({name})")
    if hasattr(dataset, "iloc"):
        raise TypeError(f"{name} must be {_WANTED}, got a {kind}; pass {name}.to_numpy()")
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{name} must be {_WANTED}, got a {kind}")
    try:
        length = len(dataset)
    except TypeError as error:  # 0-dim arrays and sparse matrices have the method and refuse
        raise TypeError(f"{name} must be {_WANTED}; len() of this {kind} says: {error}") from error
    if length == 0 and not allow_empty:
        raise ValueError(f"{name} holds no samples")
    return length
