"""Matrix products of the layers, in the dtype of their operands.

float32 and float64 are NumPy's and CuPy's. bfloat16 is multiplied by the processor's unit, by way
of `mpishard.onednn`, with sums in float32; without that, as float32, which holds each operand.
"""

from __future__ import annotations

import functools
import time

import numpy as np
from numpy.typing import DTypeLike

from mpishard.arrays import Array, array_namespace
from mpishard.bfloat16 import BFLOAT16, round_into, widened
from mpishard.onednn import library


def product(a: Array, b: Array, out: Array | None = None, *, bias: Array | None = None) -> Array:
    """``a @ b + bias``.

    Parameters
    ----------
    a, b : Array
        Operands of one dtype, of shapes (..., N, K) and (..., K, M).
    out : Array, optional
        Result, of shape (..., N, M), in the operands' dtype; of bfloat16 operands float32 too. A
        new array in the operands' dtype if not given.
    bias : Array, optional
        Shape (M,).
    """
    if a.dtype != BFLOAT16:
        y = array_namespace(a).matmul(a, b, out=out)
        if bias is not None:
            y += bias
        return y
    if out is None:
        out = np.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    # Each element is rounded once, after the bias is added.
    one = library()
    if one is not None and out.size and a.shape[-1]:
        one.multiply(a, b, out, bias)
        return out
    exact = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
    np.matmul(widened(a), widened(b), out=exact)
    if bias is not None:
        exact += widened(bias)
    if exact is not out:
        round_into(out, exact)
    return out


def add_column_sums(total_O: Array, values_NO: Array) -> None:
    """Add the sums over the first dim into ``total_O``, which may be wider than the values."""
    # A product with ones: NumPy's sum over the first dim takes twice as long.
    ones = array_namespace(values_NO).ones((1, values_NO.shape[0]), values_NO.dtype)
    if values_NO.dtype != BFLOAT16:
        total_O += ones[0] @ values_NO
        return
    sums = np.empty((1, values_NO.shape[1]), np.float32)
    total_O += product(ones, values_NO, sums)[0]


@functools.cache  # once in a process
def products_per_second(dtype: DTypeLike, size: int = 256) -> float:
    """Floating-point operations a second of a product of two square matrices, the best of five.

    Parameters
    ----------
    dtype : dtype
        Of operands and result: float32, or bfloat16 as `product` computes it.
    size : int
        Rows and columns.
    """
    a, b, out = (np.ones((size, size), dtype) for _ in range(3))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        product(a, b, out)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
