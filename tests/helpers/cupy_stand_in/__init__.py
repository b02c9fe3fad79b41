"""A strict stand-in for CuPy, so that code for GPUs can be tested where there is none.

Its arrays are NumPy's underneath, and refuse what CuPy's refuse: to become NumPy arrays
unasked, to be mixed with them, to be computed with on another device than they lie on, which also
some assignments do. Reductions give 0-d arrays, results lie in C order, and casts keep the order of
dims. No array is read-only, sums by `add.reduceat` are differences of running sums, and functions
replace float32 numbers below 1.2e-38 by 0, which kernels in CUDA C++ need not do. Where
releases of CuPy differ (the type of a NumPy scalar times an array, bfloat16) it refuses, and so it
does what CUDA leaves undefined: to read what another thread's stream may still be writing, or to
overwrite what it may still be reading; to change pinned memory that is still being copied; to give
MPI an address while the stream has work; to set an element twice. What it lacks is an
AttributeError, for what it has was compared with CuPy's sources and documentation ("Differences
between CuPy and NumPy"), one by one.

Tests may ask for more: `counts.counting` counts kernels, copies and waits, ``cuda.varies`` makes
last bits of sums and products depend on sizes or addresses, and `installed` can leave out CUDA's
headers.

It knows nothing of speed, of memory that runs out, of streams other than each thread's own, or
of the last bits of CUDA's arithmetic: code that passes here should run on a GPU, and is not
proven to.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from cupy_stand_in import operators as _operators  # noqa: F401 - completes ndarray
from cupy_stand_in.array import ndarray
from cupy_stand_in.cuda import Cuda
from cupy_stand_in.functions import namespace
from cupy_stand_in.kernels import RawKernel
from cupy_stand_in.nccl import added_to

__all__ = ["installed"]


@contextmanager
def installed(device_count: int = 1, *, has_headers: bool = True) -> Iterator[ModuleType]:
    """Make ``import cupy`` give the stand-in inside the block.

    Parameters
    ----------
    device_count : int
        How many GPUs there seem to be.
    has_headers : bool
        Whether CUDA is installed, and not only its driver: its compiler and headers.

    Yields
    ------
    module
        The stand-in.

    Examples
    --------
    >>> with installed() as cupy:
    ...     doubled = 2 * cupy.arange(3)
    ...     print(type(doubled).__name__, doubled.get())
    ndarray [0 2 4]
    """
    module = ModuleType("cupy", __doc__)
    vars(module).update(
        namespace(), ndarray=ndarray, RawKernel=RawKernel, cuda=Cuda(device_count, has_headers)
    )
    module.__stand_in__ = True  # type: ignore[attr-defined]
    before = sys.modules.get("cupy")
    sys.modules["cupy"] = module
    try:
        with added_to(module.cuda):
            yield module
    finally:
        if before is None:
            del sys.modules["cupy"]
        else:
            sys.modules["cupy"] = before
