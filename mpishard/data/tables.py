"""Columns of Parquet files and of tables with named columns, as data sets."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mpishard.base import Array, DType, optional_package
from mpishard.contracts import PathLike

Rows = npt.NDArray[np.integer[Any]]


class _Table(Protocol):
    """A table whose rows are indexed, and whose columns have names."""

    def __len__(self) -> int: ...
    def __getitem__(self, indices: Any, /) -> Mapping[str, Any]: ...


class Column:
    """One column of a data set whose rows are dicts, such as a Hugging Face `datasets.Dataset`.

    Parameters
    ----------
    rows : object
        It has ``len()``, and ``rows[indices]`` is a dict of a column's values for each name.
        Of a Hugging Face data set pass ``dataset.with_format("numpy")``.
    name : str
        The column.

    Raises
    ------
    KeyError
        If there is no such column.

    Examples
    --------
    >>> class Rows(dict):
    ...     def __len__(self):
    ...         return 3
    ...     def __getitem__(self, indices):
    ...         return {"pixels": np.eye(3)[indices]}
    >>> Column(Rows(), "pixels")[np.array([2])].tolist()
    [[0.0, 0.0, 1.0]]
    """

    def __init__(self, rows: _Table, name: str) -> None:
        if len(rows) and name not in rows[:1]:
            raise KeyError(f"there is no column {name!r}; there are {', '.join(rows[:1])}")
        self.rows = rows
        self.name = name
        # One row has the shape of all; others are read when they are indexed.
        sample = np.shape(rows[:1][name])[1:] if len(rows) else ()
        self.shape: tuple[int, ...] = (len(rows), *sample)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: slice | Array) -> Array:
        """Return the values of a slice or an array of integers, shape (n, ...)."""
        return np.asarray(self.rows[indices][self.name])

    def __repr__(self) -> str:
        return f"Column({self.name!r}, {self.shape[0]} rows)"


class ParquetColumns:
    """Columns of Parquet files as a data set, read row group by row group.

    Rows are numbered through all files, in their order. Only the row groups of the wanted rows are
    read, and only these columns of them; the last one is kept. Thread-ranks may share it.

    Parameters
    ----------
    path : path or sequence of paths
        A file, files, or a folder whose ``*.parquet`` files are taken in the order of their names.
    columns : str or sequence of str
        One name: samples have the column's shape; a column of lists of one length gives vectors.
        Several names: their values side by side, shape (n, number of columns), in one dtype.
        Files without rows may have other types.

    Attributes
    ----------
    shape : tuple of int
        Number of rows, and the shape of a sample.
    dtype : numpy.dtype
        Dtype of the samples, that of the first rows.
    row_group_size : int
        Rows of the largest row group: a good ``shuffle_block_size``.

    Raises
    ------
    ImportError
        Without pyarrow: ``pip install "mpishard[data]"``.
    FileNotFoundError
        If there is no such file, or none in the folder or the sequence.
    KeyError
        If a file has no such column, naming those that it has.
    ValueError
        If no column is named, or a file is not a Parquet file. For columns with samples of
        different shapes, and files with values that the dtype of the first rows cannot hold. If a
        column has missing values, lists of different lengths, or values that are not numbers.
    """

    def __init__(self, path: PathLike | Sequence[PathLike], columns: str | Sequence[str]) -> None:
        parquet = optional_package("pyarrow.parquet", "ParquetColumns", "data")
        files = _files(path)
        self.filename = path if isinstance(path, str | Path) else ", ".join(map(str, files))
        self._columns = [columns] if isinstance(columns, str) else list(columns)
        self._is_single = isinstance(columns, str)
        if not self._columns:
            raise ValueError("columns must name a column or more, got none")
        # Row groups are numbered through all files, as if they were in one.
        starts: list[int] = [0]
        self._groups: list[tuple[Any, int]] = []
        types: list[Any] = []
        for place in files:
            try:
                file = parquet.ParquetFile(place)
            except ValueError as error:  # pyarrow's does not name the file
                raise ValueError(f"{place} is no Parquet file: {error}") from error
            names = file.schema_arrow.names
            missing = [name for name in self._columns if name not in names]
            if missing:
                raise KeyError(f"{self.filename} has no column {missing[0]!r}, but {names}")
            if not file.metadata.num_rows:  # its schema may be any: pandas writes columns of null
                continue
            own = [file.schema_arrow.field(name).type for name in self._columns]
            # The first file with rows decides, and not the first file.
            types = types or own
            # Columns of one data set have one dtype: the first file's, if that can hold the
            # others'.
            if own != types and not np.can_cast(_dtype_of(own), _dtype_of(types)):
                raise ValueError(
                    f"columns {self._columns} of {place} are {', '.join(map(str, own))}, which "
                    f"{', '.join(map(str, types))} of the files before it cannot hold: write all "
                    "files in one dtype"
                )
            for group in range(file.metadata.num_row_groups):
                # An empty row group has no row that would lead to it.
                if rows := file.metadata.row_group(group).num_rows:
                    starts.append(starts[-1] + rows)
                    self._groups.append((file, group))
        self._starts = np.array(starts)
        self.row_group_size = int(np.diff(self._starts).max(initial=0))
        self._kept: tuple[int, Array] | None = None
        # A ParquetFile has a position in the file, so that only one thread at a time may read.
        self._lock = threading.Lock()
        # Read now, because only the values give shape and dtype of a sample.
        first = self._group(0) if self._groups else np.zeros(0)
        self.shape: tuple[int, ...] = (int(self._starts[-1]), *first.shape[1:])
        self.dtype = first.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, indices: slice | Array) -> Array:
        """Return the samples of a slice or an array of integers, shape (n, ...)."""
        if isinstance(indices, slice):
            indices = np.arange(*indices.indices(len(self)))
        wanted = np.asarray(indices)
        if wanted.size and wanted.dtype.kind not in "iu":
            raise TypeError(f"rows are chosen by integers, got an array of {wanted.dtype}")
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of {len(self)}")
        groups = np.searchsorted(self._starts, wanted, side="right") - 1
        # Filled group by group, so that only one group is in memory besides the samples.
        found = np.empty((wanted.size, *self.shape[1:]), self.dtype)
        with self._lock:
            # Each row group is read once, whatever the order of the rows: that takes milliseconds.
            for group in np.unique(groups):
                is_here = groups == group
                values = self._group(group)
                if values.shape[1:] != self.shape[1:]:
                    raise ValueError(
                        f"columns {self._columns} of {self.filename} have lists of different "
                        f"lengths: samples of shapes {self.shape[1:]} and {values.shape[1:]}"
                    )
                found[is_here] = values[wanted[is_here] - self._starts[group]]
        return found

    def _group(self, number: int) -> Array:
        if self._kept is None or self._kept[0] != number:
            self._kept = None  # before the next group is read, so that only one is in memory
            file, group = self._groups[number]
            table = file.read_row_group(group, columns=self._columns)
            values = [self._values(table.column(name), name) for name in self._columns]
            if len(shapes := {value.shape[1:] for value in values}) > 1:
                raise ValueError(
                    f"columns {self._columns} of {self.filename} have samples of different shapes: "
                    f"{sorted(shapes)}"
                )
            self._kept = number, values[0] if self._is_single else np.stack(values, axis=1)
        return self._kept[1]

    def _values(self, column: Any, name: str) -> Array:
        values = column.combine_chunks()
        # By the type's name, because pyarrow has three types of lists and is not imported here.
        is_list = str(values.type).startswith(("list", "large_list", "fixed_size_list"))
        flat = values.flatten() if is_list else values
        # Floats would become NaN, and integers floats: nothing is guessed.
        if values.null_count or flat.null_count:
            raise ValueError(f"column {name!r} of {self.filename} has missing values")
        numbers: Array = flat.to_numpy(zero_copy_only=False)
        if numbers.dtype.kind not in "biuf":
            raise ValueError(
                f"column {name!r} of {self.filename} holds {values.type}, not numbers or lists of "
                "numbers"
            )
        if not is_list:
            return numbers
        lengths = np.unique(values.value_lengths().to_numpy(zero_copy_only=False))
        if len(lengths) != 1:
            raise ValueError(f"column {name!r} of {self.filename} has lists of different lengths")
        return numbers.reshape(len(values), int(lengths[0]))

    def __repr__(self) -> str:
        return f"ParquetColumns({self.filename}, {self._columns}, shape={self.shape})"


def _dtype_of(types: Sequence[Any]) -> DType:
    """Return NumPy's dtype for values of Arrow types, or of lists of them, side by side."""
    elements = (getattr(each, "value_type", each) for each in types)
    # np.stack of the columns uses the same promotion.
    return np.result_type(*(each.to_pandas_dtype() for each in elements))


def _files(path: PathLike | Sequence[PathLike]) -> list[Path]:
    if not isinstance(path, str | Path):
        found = [Path(each) for each in path]
    else:
        # Sorted, so that all ranks number the rows alike.
        found = sorted(Path(path).glob("*.parquet")) if Path(path).is_dir() else [Path(path)]
    if not found:
        raise FileNotFoundError(f"there is no *.parquet file in {path}")
    return found
