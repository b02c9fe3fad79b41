"""Reading samples from arrays, memory maps and files by one rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from pathlib import PurePath
from typing import Any, Protocol, overload

import numpy as np
import numpy.typing as npt

from mpishard.base import (
    Array,
    Data,
    Namespace,
    array_namespace,
    as_count,
    as_integer,
    require_plain,
)


class Dataset(Protocol):
    """Samples that a slice or an array of integers selects, in memory or in a file."""

    def __getitem__(self, indices: Any, /) -> Any: ...


class TokenWindows:
    """Every window of ``context_length`` consecutive tokens, without copying the tokens.

    Window i starts at token ``i * stride + offset``. Inputs are the windows of offset 0, and
    targets those of offset 1. Both have the same length: a window counts only if a token follows
    it.

    Parameters
    ----------
    tokens : array of int
        Shape (n,). A memory map stays on disk.
    context_length : int
        Tokens of a window, 1 or more.
    offset : int
        0 for inputs, 1 for the tokens that follow them.
    stride : int
        Distance between windows: 1 for training, ``context_length`` to see each token once.

    Raises
    ------
    TypeError
        If ``tokens`` are not a NumPy array of integers.
    ValueError
        If they are not 1-D or fewer than ``context_length + 1``, or another argument is out
        of range.

    Examples
    --------
    >>> tokens = np.arange(10, 16)
    >>> inputs, targets = TokenWindows(tokens, 3), TokenWindows(tokens, 3, offset=1)
    >>> len(inputs)
    3
    >>> inputs[np.array([2, 0])].tolist()
    [[12, 13, 14], [10, 11, 12]]
    >>> targets[np.array([2, 0])].tolist()
    [[13, 14, 15], [11, 12, 13]]
    """

    def __init__(
        self,
        tokens: Any,
        context_length: int,
        *,
        offset: int = 0,
        stride: int = 1,
    ) -> None:
        require_plain(tokens)
        if not isinstance(tokens, np.ndarray) or tokens.dtype.kind not in "iu":
            kind = tokens.dtype if isinstance(tokens, np.ndarray) else type(tokens).__qualname__
            raise TypeError(f"tokens must be a NumPy array of integers, got {kind}")
        if tokens.ndim != 1:
            raise ValueError(f"tokens must be 1-D, got shape {tokens.shape}")
        as_count("context_length", context_length)
        if as_integer("offset", offset) not in (0, 1):
            raise ValueError(f"offset must be 0 (inputs) or 1 (targets), got {offset}")
        as_count("stride", stride)
        # One token more than a window, because the last target lies behind it.
        if len(tokens) <= context_length:
            raise ValueError(
                f"{len(tokens)} tokens hold no window of context_length {context_length} and the "
                f"token behind it; at least {context_length + 1} are needed"
            )
        self.context_length = context_length
        self.offset = offset
        self.stride = stride
        # Inputs leave out the last token: it is only a target.
        last = len(tokens) - 1 + offset
        # A view: the windows overlap, and would take context_length times the memory.
        view = np.lib.stride_tricks.sliding_window_view(tokens[offset:last], context_length)
        self._windows = view[::stride]

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def shape(self) -> tuple[int, int]:
        """(number of windows, context_length)."""
        return len(self), self.context_length

    def __getitem__(self, indices: Any) -> npt.NDArray[np.int64]:
        """Return windows as a new int64 array, shape (n, context_length), for n indices."""
        # Files hold uint16 or int32; embeddings index by int64.
        windows: np.ndarray[Any, np.dtype[np.int64]] = self._windows[indices].astype(np.int64)
        return windows

    def __repr__(self) -> str:
        return (
            f"TokenWindows({len(self)} windows of {self.context_length} tokens, "
            f"offset={self.offset}, stride={self.stride})"
        )


class Samples:
    """Several arrays of the same samples, as one data set: nested dicts, lists and tuples of them.

    ``samples[rows]`` has these rows of all arrays. A loss in JAX or autograd gets the tree itself;
    a PyTorch module gets the arrays of a dict as keyword arguments, and those of a tuple one by
    one.

    Parameters
    ----------
    tree : dict, list or tuple
        Its leaves are what `take` reads: arrays and data sets of files, of equal lengths.

    Attributes
    ----------
    tree : dict, list or tuple
        As given.

    Raises
    ------
    TypeError
        If a leaf is not a data set, naming it, or if there is no leaf.
    ValueError
        If the lengths differ.

    Examples
    --------
    >>> batch = Samples({"tokens": np.arange(8).reshape(4, 2), "mask": np.arange(4) > 1})[1:3]
    >>> batch
    Samples({'tokens': (2, 2), 'mask': (2,)})
    >>> batch.tree["mask"].tolist()
    [False, True]
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        # All lengths are read before any is refused, so that the message can list them.
        lengths: dict[str, int] = {}

        def measure(name: str, leaf: object) -> None:
            lengths[name or "it"] = check_dataset(leaf, name or "it", allow_empty=True)

        map_tree(measure, tree)
        if not lengths:
            raise TypeError(f"Samples need an array, or several in a dict or a tuple; got {tree!r}")
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the arrays of Samples must have equal lengths, got {lengths}")
        self._length = next(iter(lengths.values()))

    def leaves(self) -> list[Dataset]:
        """Return the arrays, in order."""
        found: list[Dataset] = []
        self.map(found.append)
        return found

    def map(self, function: Callable[[Any], object]) -> Any:
        """Return a tree of the same structure, with ``function(leaf)`` for each leaf."""
        return map_tree(lambda _, leaf: function(leaf), self.tree)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, rows: Any) -> Samples:
        return Samples(
            self.map(lambda leaf: leaf[rows] if isinstance(rows, slice) else take(leaf, rows))
        )

    def __repr__(self) -> str:
        return f"Samples({self.map(lambda leaf: getattr(leaf, 'shape', len(leaf)))})"


def map_tree(function: Callable[[str, Any], object], tree: object, name: str = "") -> Any:
    """Return a tree of the same structure, with ``function(name, leaf)`` for each leaf.

    Inner nodes are dicts, lists, tuples and named tuples. The name of a leaf is the path to it, as
    in ``layers.0.weight``; that of a tree that is one leaf is empty.
    """

    def mapped(key: object, child: object) -> Any:
        return map_tree(function, child, f"{name}.{key}" if name else str(key))

    if isinstance(tree, Mapping):
        return {key: mapped(key, child) for key, child in tree.items()}
    if not isinstance(tree, list | tuple):
        return function(name, tree)
    # A named tuple takes its values one by one, and not as one iterable.
    if hasattr(tree, "_fields"):
        return type(tree)(*map(mapped, tree._fields, tree))
    return type(tree)(map(mapped, range(len(tree)), tree))


def tree_of(samples: Data) -> Data:
    """Return the tree of `Samples`, which user functions take, or an array as it is."""
    return samples.tree if isinstance(samples, Samples) else samples


def map_arrays(function: Callable[[Array], object], samples: Data) -> Data:
    """Return ``function(array)``, or `Samples` of the arrays' results."""
    if isinstance(samples, Samples):
        return Samples(samples.map(function))
    return function(samples)


_WANTED = "an array, or an object with len() that can be indexed by an array of integers"
_RUN = 4  # mean length of runs from which on slices are faster than indices
_NAMED = 5  # most arrays of a file that a message lists


def count_samples(dataset: Any) -> int:
    """Return a data set's number of samples; Zarr arrays and sparse matrices have only a shape."""
    # The length of a sparse matrix is refused by SciPy, as ambiguous.
    if isinstance(dataset, Sized) and not is_sparse(dataset):
        return len(dataset)
    return int(dataset.shape[0])


def is_sparse(dataset: object) -> bool:
    """Return whether a data set is a sparse matrix or array, such as those of SciPy."""
    return hasattr(dataset, "tocsr")


@overload
def take(dataset: Samples, indices: Array) -> Samples: ...
@overload
def take(dataset: Dataset, indices: Array) -> Array: ...
def take(dataset: Dataset, indices: Array) -> Array | Samples:
    """Return the samples of ``dataset`` at ``indices``, as a new array.

    Nothing else of the data set is read.

    Parameters
    ----------
    dataset : Array or object
        A NumPy or CuPy array, a memory map, or anything with ``len()`` or ``shape[0]`` that can
        be indexed by an array of integers, such as an ``h5py`` or Zarr data set. Thread-ranks may
        share it. Samples of a sparse CSR matrix become dense.
    indices : array of int
        Indices of the samples, shape (n,), in any order, repeated or not. May be empty.

    Returns
    -------
    Array
        Shape (n, ...), in the order of ``indices``; in GPU memory if the data set is.

    Notes
    -----
    Objects that are not arrays are asked for each sample once, in rising order: ``h5py`` accepts
    nothing else, and files are read fastest so. Runs of consecutive samples are read as slices if
    the object has a ``shape``, and otherwise by arrays of integers.
    """
    require_plain(dataset)
    # In memory any order is as fast, so that nothing is sorted.
    if isinstance(dataset, np.ndarray | TokenWindows):
        # np.asarray turns a memory map's result into a plain array.
        return np.asarray(dataset[indices])
    if isinstance(dataset, Samples):
        return dataset[indices]
    if (xp := namespace_of(dataset)) is not None:
        # CuPy does not index by an array of the host.
        chosen: Array = dataset[xp.asarray(indices)]
        return chosen
    if is_sparse(dataset):
        # Only the batch becomes dense; the data set itself might not fit into memory.
        return _as_array(dataset[indices].toarray())
    if indices.size == 0:  # h5py has no empty selection by integers
        empty = dataset[np.zeros(1, np.int64)][:0] if count_samples(dataset) else dataset[:0]
        return _as_array(empty)
    # h5py takes only rising indices without repeats.
    unique, places = np.unique(indices, return_inverse=True)
    breaks = np.flatnonzero(np.diff(unique) > 1) + 1
    if hasattr(dataset, "shape") and len(unique) >= _RUN * (len(breaks) + 1):
        # A file finds a slice at once, but searches for each element of an array of integers.
        runs = [
            _as_array(dataset[int(run[0]) : int(run[-1]) + 1]) for run in np.split(unique, breaks)
        ]
        samples = runs[0] if len(runs) == 1 else np.concatenate(runs)
    else:
        samples = _as_array(dataset[unique])
    # A data set of single samples may take the array for one index, and return one row.
    if len(indices) > 1 and len(samples) != len(unique):
        raise ValueError(
            f"asked for {len(unique)} samples, {unique[0]} to {unique[-1]}, the data set returned "
            f"an array of shape {samples.shape}; the first dim must be the samples"
        )
    # No second copy if the order rises, as in an evaluation.
    return samples if np.array_equal(unique, indices) else samples[places]


def _as_array(samples: Any) -> Array:
    require_plain(samples)  # netCDF4, for one, returns masked arrays
    return np.asarray(samples) if namespace_of(samples) is None else samples


def namespace_of(dataset: Any) -> Namespace | None:
    """Return NumPy or CuPy for their arrays, and None for other data sets."""
    try:
        return array_namespace(dataset)
    except TypeError:
        return None


def check_dataset(dataset: object, name: str, *, allow_empty: bool = False) -> int:
    """Refuse what `take` could not read; return the number of samples.

    Parameters
    ----------
    dataset : object
        The user's argument.
    name : str
        The argument's name, for messages.
    allow_empty : bool
        Whether it may hold no samples.

    Raises
    ------
    TypeError
        If it is None, a sequence without array indexing (a list), something that holds arrays
        by name (a dict, an HDF5 file), a data frame (whose ``[...]`` selects columns), or has
        neither ``len()`` nor ``shape[0]``. If it is a sparse matrix in another format than CSR,
        whose rows can be read by batches.
    ValueError
        If it holds no samples, or its file is closed.
    """
    if dataset is None:
        raise TypeError(f"{name} must be {_WANTED}, got None")
    require_plain(dataset)
    kind = type(dataset).__qualname__
    # h5py itself would raise only at the first batch, after the model was wrapped.
    if type(dataset).__module__.partition(".")[0] == "h5py" and not dataset:
        raise ValueError(
            f"{name} is a {kind} of an HDF5 file that is closed; keep the file open until "
            "training has ended"
        )
    # Only CSR finds a row without a search through the whole matrix.
    if is_sparse(dataset) and getattr(dataset, "format", None) != "csr":
        raise TypeError(
            f"{name} must be {_WANTED}, got a {kind}; pass {name}.tocsr(), whose rows are read "
            "batch by batch"
        )
    if isinstance(dataset, Mapping):
        names = [str(key) for key in dataset]
        listed = ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
        raise TypeError(
            f"{name} must be {_WANTED}, got a {kind}, which holds arrays by name; pass one of "
            f"them: {listed or 'it is empty'}; or all as mpishard.data.Samples({name})"
        )
    # A string has len() and indices, so that without this its letters would count as samples.
    if isinstance(dataset, str | PurePath):
        raise TypeError(
            f"{name} must be {_WANTED}, got the {kind} {str(dataset)!r}; open the file first, as "
            'by h5py.File(path)["x"] or numpy.load(path, mmap_mode="r")'
        )
    # NumPy would copy all of a list in each step.
    if isinstance(dataset, list | tuple | bytes | set | frozenset):
        raise TypeError(
            f"{name} must be {_WANTED}, got a {kind}; pass numpy.asarray({name}), or several "
            f"inputs of each sample as mpishard.data.Samples({name})"
        )
    # Indexing a data frame would select columns, without an error.
    if hasattr(dataset, "iloc"):
        raise TypeError(f"{name} must be {_WANTED}, got a {kind}; pass {name}.to_numpy()")
    if not hasattr(dataset, "__getitem__"):
        raise TypeError(f"{name} must be {_WANTED}, got a {kind}")
    try:
        length = count_samples(dataset)
    except (TypeError, AttributeError, IndexError) as error:
        # 0-dim arrays have __len__, and raise.
        raise TypeError(f"{name} must be {_WANTED}; len() of this {kind} fails: {error}") from error
    if length == 0 and not allow_empty:
        raise ValueError(f"{name} holds no samples")
    return length
