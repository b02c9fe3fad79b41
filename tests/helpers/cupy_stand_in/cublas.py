"""cuBLAS of the stand-in: one function, which finds its matrices by their addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cupy_stand_in.counts import count

__all__ = ["CuBLAS"]

CUDA_R_32F, CUDA_R_16BF = 0, 14


class CuBLAS:
    """``cupy.cuda.cublas``."""

    CUBLAS_COMPUTE_32F = 68
    CUBLAS_COMPUTE_32F_FAST_TF32 = 77
    CUBLAS_GEMM_DEFAULT = -1

    def gemmStridedBatchedEx(  # noqa: N802 - CuPy's name
        self, handle: int, transa: int, transb: int, m: int, n: int, k: int, alpha: int,
        A: int, Atype: int, lda: int, strideA: int, B: int, Btype: int, ldb: int, strideB: int,
        beta: int, C: int, Ctype: int, ldc: int, strideC: int, batchCount: int, computeType: int,
        algo: int,
    ) -> None:  # fmt: skip
        """Write ``C = op(A) op(B)`` of column-major matrices, with operands rounded as asked."""
        count("launches")
        assert handle == 1
        assert Atype == Btype in (CUDA_R_32F, CUDA_R_16BF)
        assert Ctype == CUDA_R_32F
        assert computeType in (self.CUBLAS_COMPUTE_32F, self.CUBLAS_COMPUTE_32F_FAST_TF32)
        assert min(m, n, k, batchCount) > 0
        assert _floats(alpha, CUDA_R_32F, 1)[0] == 1.0
        assert _floats(beta, CUDA_R_32F, 1)[0] == 0.0
        is_tf32 = computeType == self.CUBLAS_COMPUTE_32F_FAST_TF32
        for i in range(batchCount):
            a = _matrix(A, Atype, (m, k), lda, strideA * i, transa)
            b = _matrix(B, Btype, (k, n), ldb, strideB * i, transb)
            if is_tf32:
                a, b = _tf32(a), _tf32(b)
            with np.errstate(all="ignore"):
                _matrix(C, Ctype, (m, n), ldc, strideC * i, 0)[...] = a @ b


def _floats(address: int, kind: int, size: int) -> Any:
    if kind == CUDA_R_32F:
        return np.ctypeslib.as_array((ctypes.c_float * size).from_address(address))
    words = np.ctypeslib.as_array((ctypes.c_uint16 * size).from_address(address))
    return (words.astype(np.uint32) << 16).view(np.float32)


def _matrix(
    address: int, kind: int, shape: tuple[int, int], lead: int, start: int, is_turned: int
) -> Any:
    """``shape`` is that of op(X), whose columns are ``lead`` elements apart."""
    rows, columns = shape[::-1] if is_turned else shape
    assert lead >= rows
    width = 4 if kind == CUDA_R_32F else 2
    flat = _floats(address + width * start, kind, lead * (columns - 1) + rows)
    stored = np.lib.stride_tricks.as_strided(flat, (rows, columns), (4, 4 * lead))
    return stored.T if is_turned else stored


def _tf32(x: Any) -> Any:
    words = np.ascontiguousarray(x).view(np.uint32)
    rounded = (words + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)
