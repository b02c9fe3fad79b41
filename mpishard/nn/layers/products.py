"""Matrix products of the layers, in the dtype of their operands.

NumPy or CuPy multiplies float32 and float64, or oneDNN float32 if `base.products` says so; a GPU
may round float32 operands first, as `mpishard.nn.device_passes.products_in` says. The processor's
unit for bfloat16 multiplies bfloat16, through `base.onednn`, and sums in float32. Without that unit
NumPy multiplies the operands as float32, which represents each of them exactly.
"""

from __future__ import annotations

import functools
import time

import numpy as np
from numpy.typing import DTypeLike

from mpishard.base import (
    BFLOAT16,
    NAMESPACES,
    Array,
    library,
    multiply_float32,
    round_into,
    widened,
)
from mpishard.nn import device_passes


def product(a: Array, b: Array, out: Array | None = None, *, bias: Array | None = None) -> Array:
    """Return ``a @ b + bias``.

    Parameters
    ----------
    a, b : Array
        Operands of one dtype, of shapes (..., N, K) and (..., K, M).
    out : Array, optional
        Array for the result, of shape (..., N, M) and the operands' dtype. float32 is possible for
        bfloat16 operands, too. If not given, a new array of the operands' dtype is made.
    bias : Array, optional
        Vector of shape (M,) that is added to each row.
    """
    if a.dtype != BFLOAT16:
        xp = NAMESPACES[type(a)]
        if xp is np and (y := multiply_float32(a, b, out, bias)) is not None:
            return y
        # Only the tensor cores of a GPU gain from rounded operands.
        if xp is np or device_passes.precision_of(a) is None:
            y = xp.matmul(a, b, out=out)
        else:
            y = device_passes.multiply(a, b, out)
        if bias is not None:
            y += bias
        return y
    if out is None:
        out = np.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
    # The bias is added before the result is rounded, so that each element is rounded only once.
    one = library()
    # oneDNN takes no empty matrices. NumPy makes an empty result, or zeros.
    if one is not None and out.size and a.shape[-1] and one.multiply(a, b, out, bias):
        return out
    # Sums in float32, as the unit has them, so that only their order may differ.
    exact = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
    np.matmul(widened(a), widened(b), out=exact)
    if bias is not None:
        exact += widened(bias)
    if exact is not out:
        round_into(out, exact)
    return out


def add_column_sums(total_O: Array, values_NO: Array) -> None:
    """Add the sums of ``values_NO`` over its first dim to ``total_O``.

    The dtype of ``total_O`` may be wider than that of the values.
    """
    # The sums are a product with ones, because NumPy's sum over the first dim takes twice as long.
    ones = NAMESPACES[type(values_NO)].ones((1, values_NO.shape[0]), values_NO.dtype)
    if values_NO.dtype != BFLOAT16:
        total_O += ones[0] @ values_NO
        return
    sums = np.empty((1, values_NO.shape[1]), np.float32)
    total_O += product(ones, values_NO, sums)[0]


@functools.cache  # A process measures each dtype and size once.
def products_per_second(dtype: DTypeLike, size: int = 256) -> float:
    """Measure the floating-point operations per second of a product of two square matrices.

    The result is that of the fastest of five products.

    Parameters
    ----------
    dtype : dtype
        The dtype of operands and result, such as float32 or bfloat16.
    size : int
        Number of rows, and of columns, of each matrix.
    """
    a, b, out = (np.ones((size, size), dtype) for _ in range(3))
    # The best, because other ranks and processes can only make a product slower.
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        product(a, b, out)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
