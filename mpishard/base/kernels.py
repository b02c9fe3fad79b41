"""Kernels in CUDA C++: the one place where the package reaches CuPy's compiler.

A kernel is text, with a name and the number of threads of a block. A module that needs one makes a
`Kernel` at its top and launches it with arrays on a GPU. It is compiled when a process first
launches it on a device for a dtype; CuPy keeps the code in its cache folder, and later processes
load it. The text sees

* ``T``: ``float`` or ``double``, as the call says;
* ``add, sub, mul, div, root, maximum, minimum, sign, less, differs``: operations on ``float`` and
  ``double`` that round as the host's do. Use them where the bits of the host are promised, and
  the operators of C++ elsewhere. CuPy compiles with ``-ftz=true``, which cannot be switched off:
  the operators and CuPy's own functions turn float32 numbers below 1.2e-38 into 0, and these
  operations do not. No operation is contracted to a fused multiply-add.

Write ``extern "C" __global__ void name(T* y, const T* x, long long count)`` with one line for the
signature, ``const`` before each array that is only read, no dynamic shared memory, and no
``#include``. Tests without a GPU compile the same text for the host, and take reads and writes of
arrays from its signature: see ``tests/helpers/cupy_stand_in/kernels.py``.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

# A fused multiply-add rounds once, and the host rounds twice.
_OPTIONS = ("--fmad=false",)
_TYPES = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}

_OPERATIONS = r"""
#ifdef __CUDACC__
#define OPERATION __device__ __forceinline__
#define FLOAT_OPERATION(name, instruction) \
    OPERATION float name(float a, float b) { \
        float c; asm(instruction " %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
#define FLOAT_TEST(name, instruction) \
    OPERATION bool name(float a, float b) { \
        int c; asm("{ .reg .pred p; " instruction " p, %1, %2; selp.s32 %0, 1, 0, p; }" \
                   : "=r"(c) : "f"(a), "f"(b)); return c; }
FLOAT_OPERATION(add, "add.rn.f32")
FLOAT_OPERATION(sub, "sub.rn.f32")
FLOAT_OPERATION(mul, "mul.rn.f32")
FLOAT_OPERATION(div, "div.rn.f32")
FLOAT_TEST(less, "setp.lt.f32")
FLOAT_TEST(differs, "setp.neu.f32")
OPERATION float root(float a) { float c; asm("sqrt.rn.f32 %0, %1;" : "=f"(c) : "f"(a)); return c; }
#else
#define OPERATION static inline
OPERATION float add(float a, float b) { return a + b; }
OPERATION float sub(float a, float b) { return a - b; }
OPERATION float mul(float a, float b) { return a * b; }
OPERATION float div(float a, float b) { return a / b; }
OPERATION bool less(float a, float b) { return a < b; }
OPERATION bool differs(float a, float b) { return a != b; }
OPERATION float root(float a) { return sqrtf(a); }
#endif
OPERATION double add(double a, double b) { return a + b; }
OPERATION double sub(double a, double b) { return a - b; }
OPERATION double mul(double a, double b) { return a * b; }
OPERATION double div(double a, double b) { return a / b; }
OPERATION bool less(double a, double b) { return a < b; }
OPERATION bool differs(double a, double b) { return a != b; }
OPERATION double root(double a) { return sqrt(a); }
// NaN if one of them is, as in NumPy.
OPERATION T maximum(T a, T b) { return less(b, a) || differs(a, a) ? a : b; }
OPERATION T minimum(T a, T b) { return less(a, b) || differs(a, a) ? a : b; }
OPERATION T sign(T a) {
    return less(a, T(0)) ? T(-1) : less(T(0), a) ? T(1) : differs(a, a) ? a : T(0); }
"""


# Frozen, and so hashable: a kernel is a key of the cache of compiled ones.
@dataclass(frozen=True)
class Kernel:
    """A kernel of CUDA C++.

    Parameters
    ----------
    name : str
        Its name in the text.
    text : str
        The text, of which the module's docstring says more.
    threads : int
        Threads of a block.
    """

    name: str
    text: str
    threads: int = 256

    def source(self, dtype: Any) -> str:
        """Return all that is compiled for ``T`` of a dtype, float32 or float64."""
        return f"typedef {_TYPES[np.dtype(dtype)]} T;\n{_OPERATIONS}\n{self.text}"

    def launch(self, blocks: int, dtype: Any, *arguments: Any) -> None:
        """Begin the kernel on the current device and stream; nothing is waited for.

        Parameters
        ----------
        blocks : int
            Number of blocks. With 0 nothing is done.
        dtype : dtype
            float32 or float64, which ``T`` stands for.
        *arguments : cupy.ndarray, float, int or None
            In the order of the signature: C-contiguous arrays on the current device, for a null
            pointer None, for ``long long`` an int, for ``T`` a float.
        """
        # CUDA refuses a launch of no blocks.
        if blocks == 0:
            return
        dtype = np.dtype(dtype)
        # By value: releases of CuPy read None as an address of a pointer, or as a pointer.
        # The exact types int and float: a scalar of NumPy has the size that its caller chose.
        given = [
            np.uint64(0)
            if value is None
            else np.int64(value)
            if type(value) is int
            else dtype.type(value)
            if type(value) is float
            else value
            for value in arguments
        ]
        cupy = sys.modules["cupy"]  # whoever has an array of a GPU has loaded it
        _compiled(cupy, self, dtype)((blocks,), (self.threads,), tuple(given))

    def launch_for(self, count: int, dtype: object, *arguments: object) -> None:
        """Begin the kernel with at least ``count`` threads: see `launch`."""
        self.launch(-(-count // self.threads), dtype, *arguments)


@functools.cache
def _compiled(cupy: ModuleType, kernel: Kernel, dtype: np.dtype[Any]) -> Any:
    return cupy.RawKernel(kernel.source(dtype), kernel.name, options=_OPTIONS)
