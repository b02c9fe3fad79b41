"""What collectives and messages may be given: what can be refused before a word is said.

Each rank looks at its own arguments alone, and raises alone; what differs between ranks is found
by `mpishard.communication.contract.matching`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.arguments import as_integer
from mpishard.arrays import Array, array_namespace
from mpishard.communication.contract.call import DTYPES
from mpishard.layout import ShardLayout

__all__ = [
    "check_array",
    "check_out",
    "check_peer",
    "check_root",
    "check_writeable",
    "piece_sizes",
]


def check_array(array: Any, name: str, *, needs_dim: bool = False) -> None:
    """Refuse what does not travel, or with ``needs_dim`` cannot be cut along dim 0.

    Raises
    ------
    TypeError
        For what is no array.
    ValueError
        For an array of another dtype, of too many dims, or with gaps between its elements.
    """
    if array is None:
        raise TypeError(f"{name} needs an array, got None")
    array_namespace(array)
    if array.dtype not in DTYPES:
        known = ", ".join(dtype.name for dtype in DTYPES)
        raise ValueError(f"{name} cannot send dtype {array.dtype.name}; it knows {known}")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} needs a C-contiguous array, got shape {array.shape} with strides "
            f"{array.strides}; pass a copy (numpy.ascontiguousarray)"
        )
    if needs_dim and array.ndim == 0:
        raise ValueError(f"{name} splits along dim 0, and a 0-dim array has none")
    if array.ndim > settings.MAXIMUM_DIMS:
        raise ValueError(
            f"{name} takes arrays of up to {settings.MAXIMUM_DIMS} dims, got {array.ndim}"
        )


def check_out(out: Array, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> None:
    """Refuse an ``out`` that cannot take a result of that shape and dtype: as `check_array`."""
    check_array(out, name)
    check_writeable(out, name)
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"{name}: out has shape {out.shape} and dtype {out.dtype.name}, expected "
            f"{shape} and {dtype.name}"
        )


def check_writeable(array: Array, name: str) -> None:
    """Refuse, with a ValueError, an array that no result can be written into."""
    # CuPy has no read-only arrays.
    if isinstance(array, np.ndarray | np.generic) and not array.flags.writeable:
        raise ValueError(
            f"{name} writes its result into a read-only array of shape {array.shape} and "
            f"dtype {array.dtype.name}; pass a copy, or a writeable out"
        )


def check_root(root: int, world_size: int) -> None:
    """Refuse a root that is no rank: TypeError, or ValueError for another number."""
    if not 0 <= as_integer("root", root) < world_size:
        raise ValueError(f"root {root} is outside [0, {world_size})")


def check_peer(rank: int, tag: int, own_rank: int, world_size: int) -> None:
    """Refuse a partner that is no other rank, and a tag that is none; errors as `check_root`."""
    if not 0 <= as_integer("rank", rank) < world_size:
        raise ValueError(f"rank {rank} is outside [0, {world_size})")
    if rank == own_rank:
        raise ValueError(f"rank {rank} cannot send to or receive from itself")
    if not 0 <= as_integer("tag", tag) <= settings.MAXIMUM_TAG:
        raise ValueError(f"tag must be in [0, {settings.MAXIMUM_TAG}], got {tag}")


def piece_sizes(
    rows: int, counts: Sequence[int] | None, world_size: int, name: str, *, strict: bool
) -> tuple[int, ...]:
    """Rows of each rank's piece: ``counts``, or where that is None a `ShardLayout`'s.

    Raises
    ------
    ValueError
        Where ``counts`` are not one for each rank, or do not add up; for a remainder where
        ``strict``.
    """
    if strict and rows % world_size:
        raise ValueError(
            f"{name}: {rows} rows over {world_size} ranks leave "
            f"{rows % world_size}; strict=True allows no remainder"
        )
    if counts is None:
        return ShardLayout(rows, world_size).sizes
    pieces = tuple(int(count) for count in counts)
    if len(pieces) != world_size or min(pieces) < 0 or sum(pieces) != rows:
        raise ValueError(
            f"{name}: counts {pieces} must be {world_size} numbers, none negative, "
            f"that add up to {rows}; they add up to {sum(pieces)}"
        )
    return pieces
