"""The one order in which contributions are combined, so that every backend gives the same bits.

In round k, slot i absorbs slot i + 2**k, for i a multiple of 2**(k+1), where it exists. Five
ranks: ``((a0 + a1) + (a2 + a3)) + a4``. The tree is a function of the number of contributions
alone: not of arrival, message size, node or library. Each element is combined independently of
its neighbours, so cutting an array into pieces or chunks changes no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, chunk_length

__all__ = ["ReductionOperation", "TreeReducer", "check_reducible"]


class ReductionOperation(IntEnum):
    """How contributions are combined.

    ``MIN`` and ``MAX`` propagate NaN. ``AVERAGE`` is the sum, divided once by the number of
    contributions; it refuses integers.
    """

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    AVERAGE = 4

    Sum = SUM
    Product = PRODUCT
    Min = MIN
    Max = MAX
    Average = AVERAGE


def check_reducible(dtype: np.dtype[Any], operation: ReductionOperation) -> None:
    """Refuse an operation that has no meaning for a dtype.

    Raises
    ------
    ValueError
        For AVERAGE of integers or booleans, and MIN or MAX of complex numbers.
    """
    if operation is ReductionOperation.AVERAGE and dtype.kind in "iub":
        raise ValueError(f"AVERAGE of {dtype.name} would truncate; reduce with SUM and divide")
    if operation in (ReductionOperation.MIN, ReductionOperation.MAX) and dtype.kind == "c":
        raise ValueError(f"{operation.name} is not defined for {dtype.name}: no order")


@functools.cache
def _accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """float32 for the 16-bit floats, the dtype itself otherwise."""
    is_float = dtype.kind == "f" or dtype.name == "bfloat16"
    return np.dtype(np.float32) if is_float and dtype.itemsize == 2 else dtype


_UFUNCS = {
    ReductionOperation.SUM: "add",
    ReductionOperation.AVERAGE: "add",
    ReductionOperation.PRODUCT: "multiply",
    ReductionOperation.MIN: "minimum",
    ReductionOperation.MAX: "maximum",
}


class TreeReducer:
    """Combines equally shaped 1-D contributions chunk by chunk in tree order.

    Holds chunk-sized scratch only, reused between calls; one instance belongs to one rank.
    """

    def __init__(self) -> None:
        self._scratch: dict[tuple[Any, ...], list[Array]] = {}

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept from one call to the next."""
        return sum(int(buffer.nbytes) for kept in self._scratch.values() for buffer in kept)

    def reduce(
        self, contributions: Sequence[Array], operation: ReductionOperation, out: Array
    ) -> None:
        """Combine ``contributions`` (rank order, each of shape (n,)) into ``out`` of shape (n,).

        ``out`` may be one of the contributions or overlap them.
        """
        length = int(out.size)
        if length == 0:
            return
        xp = array_namespace(out)
        dtype = _accumulation_dtype(out.dtype)
        step = min(length, chunk_length(out))
        depth = (len(contributions) - 1).bit_length()
        widened = len(contributions) if dtype != out.dtype else 0
        buffers = self._buffers(xp, dtype, step, 1 + depth + widened)
        combine = getattr(xp, _UFUNCS[operation])
        # Work lands in scratch and is copied out once, because ``out`` may alias an input that
        # a later round still reads; a chunk stays in cache, so the copy costs little.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for start in range(0, length, step):
                stop = min(start + step, length)
                leaves = contributions
                if step < length:
                    leaves = [c[start:stop] for c in contributions]
                target, *scratch = [b[: stop - start] for b in buffers]
                if widened:
                    wide = scratch[depth:]
                    for buffer, leaf in zip(wide, leaves, strict=True):
                        buffer[...] = leaf
                    leaves = wide
                result = _tree(leaves, 0, depth, target, scratch, combine)
                if operation is ReductionOperation.AVERAGE:
                    result = xp.divide(result, len(contributions), out=target)
                out[start:stop] = result

    def _buffers(self, xp: Any, dtype: np.dtype[Any], length: int, count: int) -> list[Array]:
        key = (xp.__name__, dtype.str)
        buffers = self._scratch.setdefault(key, [])
        if buffers and buffers[0].size < length:
            buffers.clear()
        while len(buffers) < count:
            buffers.append(xp.empty(length if not buffers else buffers[0].size, dtype))
        return buffers


def _tree(
    leaves: Sequence[Array],
    first: int,
    level: int,
    target: Array,
    scratch: Sequence[Array],
    combine: Callable[..., Any],
) -> Array:
    """Combine leaves ``first .. first + 2**level - 1``; the result is a leaf or ``target``.

    The left subtree's result waits in ``target`` while a right subtree of level k works in
    ``scratch[k]`` and those below, so log2 of the number of leaves buffers are enough.
    """
    if level == 0:
        return leaves[first]
    left = _tree(leaves, first, level - 1, target, scratch, combine)
    middle = first + (1 << (level - 1))
    if middle >= len(leaves):
        return left
    right = _tree(leaves, middle, level - 1, scratch[level - 1], scratch, combine)
    combine(left, right, out=target)
    return target
