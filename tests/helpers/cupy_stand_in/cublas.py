"""cuBLAS of the stand-in: one function, which finds its matrices by addresses, and no races."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cupy_stand_in.counts import count

__all__ = ["CuBLAS"]

_KINDS = {0: np.float32, 1: np.float64, 14: np.uint16}  # CUDA_R_32F, CUDA_R_64F, CUDA_R_16BF


class CuBLAS:
    """``cupy.cuda.cublas``."""

    CUBLAS_COMPUTE_32F = 68
    CUBLAS_COMPUTE_64F = 70
    CUBLAS_COMPUTE_32F_FAST_TF32 = 77
    CUBLAS_GEMM_DEFAULT = -1

    def gemmStridedBatchedEx(  # noqa: N802 - CuPy's name
        self,
        handle: int,
        transa: int,
        transb: int,
        m: int,
        n: int,
        k: int,
        alpha: int,
        A: int,
        Atype: int,
        lda: int,
        strideA: int,
        B: int,
        Btype: int,
        ldb: int,
        strideB: int,
        beta: int,
        C: int,
        Ctype: int,
        ldc: int,
        strideC: int,
        batchCount: int,
        computeType: int,
        algo: int,
    ) -> None:
        """Write ``C = op(A) op(B) + beta C`` of column-major matrices, rounded as asked."""
        count("launches")
        assert handle == 1
        assert algo == self.CUBLAS_GEMM_DEFAULT
        assert (Atype, Btype, Ctype) in ((0, 0, 0), (1, 1, 1), (14, 14, 0))
        is_tf32 = computeType == self.CUBLAS_COMPUTE_32F_FAST_TF32
        assert computeType == (self.CUBLAS_COMPUTE_64F if Ctype else self.CUBLAS_COMPUTE_32F) or (
            is_tf32 and Atype == 0
        )
        assert min(m, n, k, batchCount) > 0
        assert _memory(alpha, Ctype, 1)[0] == 1
        adds = _memory(beta, Ctype, 1)[0]
        assert adds in (0, 1)
        for i in range(batchCount):
            a = _widened(_matrix(A, Atype, (m, k), lda, strideA * i, transa))
            b = _widened(_matrix(B, Btype, (k, n), ldb, strideB * i, transb))
            if is_tf32:
                a, b = _tf32(a), _tf32(b)
            c = _matrix(C, Ctype, (m, n), ldc, strideC * i, 0)
            with np.errstate(all="ignore"):
                c[...] = c + a @ b if adds else a @ b


def _memory(address: int, kind: int, size: int) -> Any:
    dtype = np.dtype(_KINDS[kind])
    raw = (ctypes.c_byte * (size * dtype.itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)


def _matrix(
    address: int, kind: int, shape: tuple[int, int], lead: int, start: int, is_turned: int
) -> Any:
    """``shape`` is that of op(X), whose columns are ``lead`` elements apart."""
    rows, columns = shape[::-1] if is_turned else shape
    assert lead >= rows
    width = np.dtype(_KINDS[kind]).itemsize
    flat = _memory(address + width * start, kind, lead * (columns - 1) + rows)
    stored = np.lib.stride_tricks.as_strided(flat, (rows, columns), (width, width * lead))
    return stored.T if is_turned else stored


def _widened(x: Any) -> Any:
    if x.dtype != np.uint16:
        return x
    return (x.astype(np.uint32) << 16).view(np.float32)


def _tf32(x: Any) -> Any:
    words = np.ascontiguousarray(x).view(np.uint32)
    rounded = (words + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32), x)
