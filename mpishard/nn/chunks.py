"""Cutting an element-wise chain of operations into pieces that stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator

from mpishard.arrays import Array, chunk_length

__all__ = ["chunks"]


def chunks(array: Array) -> Iterator[slice]:
    """Slices of the first dim, each of about `chunk_length` elements and at least one row.

    Parameters
    ----------
    array : Array
        At least one dim; with none of size 0 beyond the first.

    Yields
    ------
    slice
        In order, disjoint, together the whole first dim; none where it is empty.
    """
    length = int(array.shape[0])
    if length == 0:
        return
    rows = max(1, chunk_length(array) * length // int(array.size))
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length))
