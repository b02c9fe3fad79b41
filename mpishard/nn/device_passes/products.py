"""Matrix products on a GPU's tensor cores, of float32 arrays whose elements are rounded first.

"tf32" keeps 10 bits of each operand's fraction, "bfloat16" 7; both have float32's exponents. The
products of rounded operands are exact in float32, and float32 sums give the result. So the error of
an element of ``a @ b`` is at most about ``2 u (abs(a) @ abs(b))`` beside that of a float32 product,
with u = 2^-11 for "tf32" and 2^-9 for "bfloat16".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from mpishard.base import NAMESPACES, Array, Kernel, Namespace, address

_precision: ContextVar[str | None] = ContextVar("precision of products on a GPU", default=None)
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)  # cuBLAS reads both on the host.

# The bits of `mpishard.base.bfloat16.round_into`.
_ROUND = Kernel(
    "round_to_bfloat16",
    r"""
extern "C" __global__ void round_to_bfloat16(const float* x, unsigned short* y, long long count) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i >= count) return;
    unsigned word = __float_as_uint(x[i]);
    bool is_nan = (word & 0x7fffffffu) > 0x7f800000u;
    unsigned rounded = word + 0x7fffu + (word >> 16 & 1u);
    y[i] = (is_nan ? (word & 0x80000000u) | 0x7fc00000u : rounded) >> 16;
}
""",
)


@contextmanager
def products_in(precision: str | None) -> Iterator[None]:
    """Compute this thread's products of float32 arrays on a GPU in "tf32" or "bfloat16"."""
    token = _precision.set(precision)
    try:
        yield
    finally:
        _precision.reset(token)


def precision_of(a: Array) -> str | None:
    """Return "tf32" or "bfloat16" if `multiply` must make products of ``a``, otherwise None."""
    return _precision.get() if a.dtype == np.float32 else None


def rounded_to_bfloat16(x: Array) -> Array:
    """Return the bits, as uint16, of a C-contiguous float32 array rounded to bfloat16."""
    y = NAMESPACES[type(x)].empty(x.shape, np.uint16)
    _ROUND.launch_for(x.size, np.float32, x, y, x.size)
    return y


def multiply(a: Array, b: Array, out: Array | None, precision: str) -> Array:
    """Return ``a @ b`` of rounded float32 operands: "tf32" or "bfloat16".

    Parameters
    ----------
    a, b : Array
        Shapes (..., N, K) and (..., K, M), with equal leading dims, or none.
    out : Array or None
        Array for the result, of shape (..., N, M). If None, a new array is made.
    precision : {"tf32", "bfloat16"}
        Numbers to which the operands are rounded.
    """
    xp = NAMESPACES[type(a)]
    shape = (*(a if a.ndim > b.ndim else b).shape[:-2], a.shape[-2], b.shape[-1])
    if not (a.size and b.size):
        result = xp.zeros(shape, np.float32)
    else:
        is_place = out is not None and out.flags.c_contiguous
        result = out if out is not None and is_place else xp.empty(shape, np.float32)
        _multiply(xp, _operand(a), _operand(b), result, precision)
    if out is not None and out is not result:
        out[...] = result
        return out
    return result


def _operand(x: Array) -> tuple[Array, bool]:
    """Return C-contiguous memory of an operand, and True if it has the operand transposed."""
    if not x.flags.c_contiguous and x.swapaxes(-1, -2).flags.c_contiguous:
        return x.swapaxes(-1, -2), True
    return NAMESPACES[type(x)].ascontiguousarray(x), False


def _multiply(
    xp: Namespace, left: tuple[Array, bool], right: tuple[Array, bool], out: Array, precision: str
) -> None:
    blas, runtime = xp.cuda.cublas, xp.cuda.runtime
    (a, a_is_turned), (b, b_is_turned) = left, right
    rows, columns = out.shape[-2:]
    inner = a.shape[-2] if a_is_turned else a.shape[-1]
    kind, compute = runtime.CUDA_R_32F, blas.CUBLAS_COMPUTE_32F_FAST_TF32
    if precision == "bfloat16":
        a, b = rounded_to_bfloat16(a), rounded_to_bfloat16(b)
        kind, compute = runtime.CUDA_R_16BF, blas.CUBLAS_COMPUTE_32F
    # cuBLAS reads columns where these arrays have rows: it makes the transposed result b^T a^T.
    blas.gemmStridedBatchedEx(
        xp.cuda.device.get_cublas_handle(),
        int(b_is_turned),
        int(a_is_turned),
        columns,
        rows,
        inner,
        _ONE.ctypes.data,
        address(b),
        kind,
        b.shape[-1],
        b.shape[-2] * b.shape[-1] if b.ndim > 2 else 0,
        address(a),
        kind,
        a.shape[-1],
        a.shape[-2] * a.shape[-1] if a.ndim > 2 else 0,
        _ZERO.ctypes.data,
        address(out),
        runtime.CUDA_R_32F,
        columns,
        rows * columns,
        math.prod(out.shape[:-2]),
        compute,
        blas.CUBLAS_GEMM_DEFAULT,
    )
