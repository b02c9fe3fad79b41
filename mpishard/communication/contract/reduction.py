"""The one order in which contributions are combined, so that every backend gives the same bits.

In round k, slot i absorbs slot i + 2**k, for i a multiple of 2**(k+1), if that exists. Five
ranks: ``((a0 + a1) + (a2 + a3)) + a4``. The tree is a function of the number of contributions
alone: not of arrival, message size, node or library. Each element is combined independently of
its neighbours, so cutting an array into pieces or chunks changes no bit. Only the sign of a NaN is
not promised, because NumPy's vector loops take that of either operand.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from types import ModuleType
from typing import Literal

import numpy as np

from mpishard.base import Array, DType, Kernel, array_namespace, chunk_length, is_device_array


class ReductionOperation(IntEnum):
    """Operation that combines the contributions of the ranks.

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


Reductions = Literal["exact", "fast"]
"""Who combines arrays on GPUs: the one tree, or a library in an order of its own."""

# A name of its own, because Python takes 0.2 us to look up a member of an enumeration.
_AVERAGE = ReductionOperation.AVERAGE
_MEANINGLESS = ("", "", "c", "c", "iub")
"""Kinds of dtypes for which an operation has no meaning, by the operation's number."""


def check_reducible(dtype: DType, operation: object) -> None:
    """Refuse an operation that has no meaning for a dtype.

    Raises
    ------
    TypeError
        For an operation that is no `ReductionOperation`.
    ValueError
        For AVERAGE of integers or booleans, and MIN or MAX of complex numbers.
    """
    if not isinstance(operation, ReductionOperation):
        known = ", ".join(known.name for known in ReductionOperation)
        raise TypeError(f"operation must be a ReductionOperation ({known}), got {operation!r}")
    if dtype.kind in _MEANINGLESS[operation]:
        if operation is _AVERAGE:
            raise ValueError(f"AVERAGE of {dtype.name} would truncate; reduce with SUM and divide")
        raise ValueError(f"{operation.name} is not defined for {dtype.name}: no order")


_WHOLE_BYTES = 1 << 16


def is_combined_whole(nbytes: int, world_size: int) -> bool:
    """Return whether an all_reduce of private arrays combines them whole, and not piece by piece.

    Every rank then sends the whole array to all others: up to 64 KiB, because a second wait for
    the other ranks takes longer. Backends agree on it, so that a NaN has the same sign on all.
    """
    return nbytes * (world_size - 1) <= _WHOLE_BYTES


@functools.cache
def accumulation_dtype(dtype: DType) -> DType:
    """Return float32 for the 16-bit floats, and the dtype itself otherwise."""
    # The kind of ml_dtypes' bfloat16 is "V", as of any dtype that NumPy does not know.
    is_float = dtype.kind == "f" or dtype.name == "bfloat16"
    return np.dtype(np.float32) if is_float and dtype.itemsize == 2 else dtype


_UFUNCS = {
    ReductionOperation.SUM: "add",
    ReductionOperation.AVERAGE: "add",
    ReductionOperation.PRODUCT: "multiply",
    ReductionOperation.MIN: "minimum",
    ReductionOperation.MAX: "maximum",
}


def _kernel(name: str, value: str, arguments: str = "const T* right") -> Kernel:
    return Kernel(
        name,
        f'extern "C" __global__ void {name}(const T* left, {arguments}, T* out, long long count)\n'
        "{\n"
        "    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;\n"
        f"    if (i < count) out[i] = {value};\n"
        "}\n",
    )


# CuPy's own functions turn float32 numbers below 1.2e-38 into 0, and the host's do not.
_KERNELS = {
    "add": _kernel("combine_sum", "add(left[i], right[i])"),
    "multiply": _kernel("combine_product", "mul(left[i], right[i])"),
    "minimum": _kernel("combine_minimum", "minimum(left[i], right[i])"),
    "maximum": _kernel("combine_maximum", "maximum(left[i], right[i])"),
}
_QUOTIENT = _kernel("divide_sum", "div(left[i], divisor)", "T divisor")


def _divide(sums: Array, divisor: int, out: Array) -> None:
    if is_device_array(sums) and sums.dtype == np.float32:
        _QUOTIENT.launch_for(sums.size, sums.dtype, sums, float(divisor), out, sums.size)
    else:
        array_namespace(sums).divide(sums, divisor, out=out)


@functools.cache
def _combiner(xp: ModuleType, operation: ReductionOperation, dtype: DType) -> Callable[..., object]:
    """Return ``combine(left, right, out=)``; its bits depend neither on length nor on ``out``."""
    # NumPy's and CuPy's functions have the same names, so one look-up serves both.
    ufunc: Callable[..., Array] = getattr(xp, _UFUNCS[operation])
    if xp is not np and dtype == np.float32:
        kernel = _KERNELS[_UFUNCS[operation]]

        def combine(left: Array, right: Array, *, out: Array) -> None:
            kernel.launch_for(out.size, dtype, left, right, out, out.size)

        return combine
    if dtype.kind != "c" or operation is not ReductionOperation.PRODUCT:
        return ufunc

    def multiply(left: Array, right: Array, *, out: Array) -> None:
        # NumPy rounds a product of one complex number differently if it overwrites a factor.
        out[...] = ufunc(left, right)

    return multiply


Subtree = tuple[int, int]
"""``(first, level)``: the part of the tree over slots ``first .. first + 2**level - 1``."""


def complete_subtrees(slots: Collection[int], count: int) -> tuple[Subtree, ...]:
    """Largest subtrees of the tree over ``count`` slots that contain only ``slots``.

    A node that has the contributions of ``slots`` can combine each of these, and nothing more,
    without changing a bit of the result.

    Examples
    --------
    >>> complete_subtrees([0, 1, 2, 3], 8), complete_subtrees([1, 2, 3], 4)
    (((0, 2),), ((1, 0), (2, 1)))
    """

    def within(first: int, level: int) -> tuple[Subtree, ...]:
        under = range(first, min(first + (1 << level), count))
        if all(slot in slots for slot in under):
            return ((first, level),) if under else ()
        if level == 0:
            return ()
        return within(first, level - 1) + within(first + (1 << (level - 1)), level - 1)

    return within(0, (count - 1).bit_length())


class TreeReducer:
    """Combiner of equally shaped 1-D contributions, chunk by chunk, in tree order.

    It keeps chunk-sized scratch arrays between calls, so each rank needs an instance of its own.
    """

    def __init__(self) -> None:
        # By module and dtype. New arrays for each chunk would fault in their pages each time.
        self._scratch: dict[tuple[str, str], list[Array]] = {}
        # NumPy warns of no overflow in this context. To enter it is faster than np.errstate.
        self._quiet = contextvars.Context()
        self._quiet.run(np.seterr, over="ignore", under="ignore", invalid="ignore")

    @property
    def scratch_bytes(self) -> int:
        """Bytes kept from one call to the next."""
        return sum(int(buffer.nbytes) for kept in self._scratch.values() for buffer in kept)

    def reduce(
        self,
        contributions: Sequence[Array],
        operation: ReductionOperation,
        out: Array,
    ) -> None:
        """Combine ``contributions`` (rank order, each of shape (n,)) into ``out`` of shape (n,).

        ``out`` may be one of the contributions or overlap them.
        """
        count = len(contributions)
        # The commonest case, two ranks: one pass over the data, without scratch or chunks.
        if count == 2 and operation is not _AVERAGE and out.size:
            left, right = contributions
            dtype = out.dtype
            if left.dtype is right.dtype is dtype is accumulation_dtype(dtype):
                xp = np if type(out) is np.ndarray else array_namespace(out)
                self._quiet.run(_combiner(xp, operation, dtype), left, right, out=out)
                return
        leaves = {(slot, 0): array for slot, array in enumerate(contributions)}
        self.reduce_subtrees(leaves, count, operation, out)

    def reduce_subtrees(
        self,
        subtrees: Mapping[Subtree, Array],
        count: int,
        operation: ReductionOperation,
        out: Array,
    ) -> None:
        """Combine subtrees that together cover ``count`` slots; the bits are those of `reduce`."""
        if out.size == 0:
            return
        xp = array_namespace(out)
        dtype = accumulation_dtype(out.dtype)
        # If ``out`` aliases an input that a later round still reads, results go to scratch and
        # are copied to ``out``. A chunk stays in cache, so the copy costs little.
        is_apart = count == 2 or not any(xp.may_share_memory(out, a) for a in subtrees.values())
        self._quiet.run(
            self._combine_chunks,
            subtrees,
            [key for key, array in subtrees.items() if array.dtype != dtype],
            count,
            _combiner(xp, operation, dtype),
            count if operation is _AVERAGE else 0,
            out,
            direct=is_apart and out.dtype == dtype,
        )

    def _combine_chunks(
        self,
        subtrees: Mapping[Subtree, Array],
        narrow: Sequence[Subtree],
        count: int,
        combine: Callable[..., object],
        divisor: int,
        out: Array,
        *,
        direct: bool,
    ) -> None:
        """Combine chunk by chunk; ``narrow`` subtrees are widened, ``direct`` writes ``out``."""
        xp, length = array_namespace(out), int(out.size)
        # In chunks that stay in the cache through all log2(count) rounds.
        step = min(length, chunk_length(out))
        depth = (count - 1).bit_length()
        dtype = accumulation_dtype(out.dtype)
        buffers = self._buffers(xp, dtype, step, 1 + depth + len(narrow))
        for start in range(0, length, step):
            stop = min(start + step, length)
            leaves = subtrees
            if step < length:
                leaves = {key: array[start:stop] for key, array in subtrees.items()}
            target, *scratch = [b[: stop - start] for b in buffers]
            if direct:
                target = out[start:stop]
            if narrow:
                leaves = dict(leaves)
                for key, wide in zip(narrow, scratch[depth:], strict=False):
                    wide[...] = leaves[key]
                    leaves[key] = wide
            result = _tree(leaves, 0, depth, count, target, scratch, combine)
            if divisor:  # 1, too: the division turns complex infinities into NaN
                _divide(result, divisor, target)
                result = target
            if result is not target or not direct:
                out[start:stop] = result

    def _buffers(self, xp: ModuleType, dtype: DType, length: int, count: int) -> list[Array]:
        key = (xp.__name__, dtype.str)
        buffers = self._scratch.setdefault(key, [])
        if buffers and buffers[0].size < length:
            buffers.clear()
        while len(buffers) < count:
            buffers.append(xp.empty(length if not buffers else buffers[0].size, dtype))
        return buffers


def _tree(
    leaves: Mapping[Subtree, Array],
    first: int,
    level: int,
    count: int,
    target: Array,
    scratch: Sequence[Array],
    combine: Callable[..., object],
) -> Array:
    """Combine slots ``first .. first + 2**level - 1``; the result is a leaf or ``target``.

    The left subtree's result waits in ``target`` while a right subtree of level k works in
    ``scratch[k]`` and those below, so log2(``count``) buffers are enough.
    """
    known = leaves.get((first, level))
    if known is not None:
        return known
    # The left subtree first, into ``target`` itself: the right one then needs only lower buffers.
    left = _tree(leaves, first, level - 1, count, target, scratch, combine)
    middle = first + (1 << (level - 1))
    if middle >= count:
        return left
    right = _tree(leaves, middle, level - 1, count, scratch[level - 1], scratch, combine)
    combine(left, right, out=target)
    return target
