"""Matrix products on a GPU by cuBLAS, in float32 and float64, or of float32 rounded to fewer bits.

CuPy's ``matmul`` copies operands whose matrices are transposed or lie apart; `gemm` does not. In
"tf32" each operand keeps 10 bits of its fraction, in "bfloat16" 7; both have float32's exponents.
The products of rounded operands are exact in float32, and float32 sums give the result. So the
error of an element of ``a @ b`` is at most about ``2 u (abs(a) @ abs(b))`` beside that of a float32
product, with u = 2^-11 for "tf32" and 2^-9 for "bfloat16".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

from mpishard.base import NAMESPACES, Array, Kernel, address

# A context variable, because each thread-rank may train a model of another precision.
_precision: ContextVar[str | None] = ContextVar("precision of products on a GPU", default=None)
# cuBLAS reads these factors of the product, and of what it is added to, on the host.
_FACTORS = {np.dtype(kind): np.array([0, 1], kind) for kind in (np.float32, np.float64)}

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


def gemm(
    a: Array,
    b: Array,
    out: Array,
    *,
    a_is_turned: bool = False,
    b_is_turned: bool = False,
    adds: bool = False,
) -> None:
    """Write ``a @ b`` to ``out``, or add it, for each matrix of a batch. Nothing is copied.

    Parameters
    ----------
    a, b, out : Array
        Shapes (N, K), (K, M) and (N, M), or with a first dim for the batch, which ``a`` or ``b``
        may lack. The elements of a row must lie side by side; rows and matrices may lie apart.
        Float32 or float64, or a and b bfloat16 as uint16 and ``out`` float32.
    a_is_turned, b_is_turned : bool
        True if an operand's memory is that of its transposed matrices.
    adds : bool
        True if the product is added to the contents of ``out``.
    """
    xp = NAMESPACES[type(a)]
    blas, runtime = xp.cuda.cublas, xp.cuda.runtime
    kind, compute = {
        np.dtype(np.uint16): (runtime.CUDA_R_16BF, blas.CUBLAS_COMPUTE_32F),
        np.dtype(np.float32): (runtime.CUDA_R_32F, blas.CUBLAS_COMPUTE_32F),
        np.dtype(np.float64): (runtime.CUDA_R_64F, blas.CUBLAS_COMPUTE_64F),
    }[a.dtype]
    # For TF32 the tensor cores round by themselves, and need no copy in another dtype.
    if precision_of(a) == "tf32":
        compute = blas.CUBLAS_COMPUTE_32F_FAST_TF32
    out_kind = runtime.CUDA_R_64F if out.dtype == np.float64 else runtime.CUDA_R_32F
    factors = _FACTORS[out.dtype].ctypes.data
    one, zero = factors + out.itemsize, factors
    inner = a.shape[-2] if a_is_turned else a.shape[-1]
    # The batched call serves two matrices as well, as a batch of one.
    # cuBLAS reads columns where these arrays have rows: it makes the transposed result b^T a^T.
    blas.gemmStridedBatchedEx(
        xp.cuda.device.get_cublas_handle(),
        int(b_is_turned),
        int(a_is_turned),
        out.shape[-1],
        out.shape[-2],
        inner,
        one,
        address(b),
        kind,
        *_steps(b),
        address(a),
        kind,
        *_steps(a),
        one if adds else zero,
        address(out),
        out_kind,
        *_steps(out),
        out.shape[0] if out.ndim > 2 else 1,
        compute,
        blas.CUBLAS_GEMM_DEFAULT,
    )


def _steps(x: Array) -> tuple[int, int]:
    """Return the numbers of elements from row to row, and from matrix to matrix."""
    row = max(x.strides[-2] // x.itemsize, x.shape[-1])
    return row, x.strides[0] // x.itemsize if x.ndim > 2 else 0


def narrowed(x: Array) -> Array:
    """Return a C-contiguous array as `gemm` takes it in this thread's precision."""
    return rounded_to_bfloat16(x) if precision_of(x) == "bfloat16" else x


def multiply(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a @ b`` in this thread's precision.

    Parameters
    ----------
    a, b : Array
        Shapes (..., N, K) and (..., K, M), with equal leading dims; one may have none.
    out : Array or None
        Array for the result, of shape (..., N, M). If None, a new array is made.
    """
    xp = NAMESPACES[type(a)]
    shape = (*(a if a.ndim > b.ndim else b).shape[:-2], a.shape[-2], b.shape[-1])
    # cuBLAS refuses empty matrices. A sum over no elements is 0.
    if not (a.size and b.size):
        result = xp.zeros(shape, a.dtype)
    else:
        result = xp.empty(shape, a.dtype) if out is None or not out.flags.c_contiguous else out
        (left, a_is_turned), (right, b_is_turned) = _operand(a), _operand(b)
        gemm(left, right, _as_batch(result), a_is_turned=a_is_turned, b_is_turned=b_is_turned)
    if out is not None and out is not result:
        out[...] = result
        return out
    return result


def _operand(x: Array) -> tuple[Array, bool]:
    """Return C-contiguous matrices of an operand, and True if they are transposed."""
    # cuBLAS reads a transposed operand as it lies, so that most views need no copy.
    is_turned = x.strides[-2] < x.strides[-1]
    whole = NAMESPACES[type(x)].ascontiguousarray(x.swapaxes(-1, -2) if is_turned else x)
    return narrowed(_as_batch(whole)), is_turned


def _as_batch(x: Array) -> Array:
    return x if x.ndim == 2 else x.reshape(-1, *x.shape[-2:])
