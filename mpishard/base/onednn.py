"""Products of matrices by oneDNN's C API: bfloat16 on the processor's unit for it, and float32.

Of float32 oneDNN multiplies what `base.products` gives it.

oneDNN (https://uxlfoundation.github.io/oneDNN, formerly MKL-DNN) is called through ctypes, which
releases Python's lock meanwhile. Every thread has its own engine, stream and primitives, because
oneDNN's scratch memory belongs to the thread that creates a primitive. The calling thread alone
computes a product, so that its bits do not depend on the number of cores.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mpishard.base import settings
from mpishard.base.arrays import Array, address
from mpishard.base.bfloat16 import BFLOAT16
from mpishard.base.blas import Processor

WHEEL = "onednn-cpu-gomp"
_VERSION = 3  # of the C API
_CPU, _IN_ORDER = 1, 1  # dnnl_cpu, dnnl_stream_in_order
_DTYPES = {BFLOAT16: 2, np.dtype(np.float32): 3}  # dnnl_bf16, dnnl_f32
_SOURCE, _WEIGHTS, _BIAS, _TARGET = 1, 33, 41, 17  # DNNL_ARG_...
_MOST_PRIMITIVES = 512
# Other processors emulate bfloat16, which is slower than a product in float32.
_UNITS = frozenset({"avx512_bf16", "amx_bf16"})


class _Version(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("major", "minor", "patch")]


class _Argument(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("memory", ctypes.c_void_p)]


@functools.cache
def processor_has_unit() -> bool:
    """Return whether the processor has a bfloat16 unit (AVX512-BF16 or AMX-BF16)."""
    return bool(_UNITS & Processor.of_this_machine().flags)


@functools.cache
def library() -> Library | None:
    """Return the oneDNN library; None without one, or on a processor without a bfloat16 unit.

    Raises
    ------
    ValueError
        If MPISHARD_ONEDNN names a file that is no oneDNN library of version 3.
    """
    return find_library() if processor_has_unit() else None


def find_library() -> Library | None:
    """Return the oneDNN library, whatever the processor has; None without one.

    Raises
    ------
    ValueError
        If MPISHARD_ONEDNN names a file that is no oneDNN library of version 3.
    """
    given = settings.onednn_library()
    if given == "off":
        return None
    if given != "auto":
        return _library_at(given)
    for path in _candidate_paths():
        try:
            return _library_at(path)
        # A library that is found may be of another version. Only one that the user names is an
        # error.
        except ValueError:
            continue
    return None


def reason_for_none() -> str:
    """Return the reason why `library` returns None."""
    if not processor_has_unit():
        return "the processor has no unit for bfloat16 (AVX512-BF16 or AMX-BF16)"
    return reason_for_no_library()


def reason_for_no_library() -> str:
    """Return the reason why `find_library` returns None."""
    if settings.onednn_library() == "off":
        return "MPISHARD_ONEDNN=off"
    return "no oneDNN library was found: pip install 'mpishard[bf16]'"


@functools.cache  # one for both dtypes, with the primitives of each thread
def _library_at(path: str) -> Library:
    return Library(path)


def _candidate_paths() -> Iterator[str]:
    """Yield paths at which a library may lie: of the wheel, of conda, of the system."""
    # Imported here, because each takes longer than this module, and few programs need them.
    import ctypes.util
    import importlib.metadata

    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "libdnnl.so.3":
            yield str(Path(str(file.locate())).resolve())
    # conda puts the libraries of an environment here.
    yield str(Path(sys.prefix) / "lib" / "libdnnl.so.3")
    found = ctypes.util.find_library("dnnl")
    if found is not None:
        yield found


class Library:
    """A loaded oneDNN library.

    Parameters
    ----------
    path : str
        Path or name of the shared library.

    Attributes
    ----------
    path, version : str
        The path, and the version of the library.

    Raises
    ------
    ValueError
        If it cannot be loaded, or its API is not that of version 3.
    """

    def __init__(self, path: str) -> None:
        try:
            self.c = ctypes.CDLL(path)
            self.c.dnnl_version.restype = ctypes.POINTER(_Version)
            version = self.c.dnnl_version().contents
        except (OSError, AttributeError) as error:
            raise ValueError(f"MPISHARD_ONEDNN: {path} is no oneDNN library: {error}") from error
        self.path = path
        self.version = f"{version.major}.{version.minor}.{version.patch}"
        if version.major != _VERSION:
            raise ValueError(f"MPISHARD_ONEDNN: {path} is oneDNN {self.version}, needs version 3")
        # Only one thread may use a primitive or stream at a time, and thread-ranks multiply at the
        # same time.
        self._threads = threading.local()

    def multiply(self, a: Array, b: Array, out: Array, bias: Array | None = None) -> bool:
        """Compute ``out = a @ b + bias`` with sums in float32; each element is rounded once.

        Parameters
        ----------
        a, b : Array
            Of one dtype, bfloat16 or float32, of shapes (..., N, K) and (..., K, M).
        out : Array
            float32 or bfloat16, of shape (..., N, M).
        bias : Array, optional
            bfloat16 or float32, of shape (M,).

        Returns
        -------
        bool
            False, and nothing is computed, for matrices that oneDNN does not take, or takes only
            slowly: no dim of them is contiguous, rows overlap, or a stride is negative.

        Raises
        ------
        RuntimeError
            If a call of oneDNN fails, with its status.
        """
        arrays = [a, b, out] if bias is None else [a, b, out, bias]
        primitives: dict[object, _Product | None] | None = getattr(
            self._threads, "primitives", None
        )
        if primitives is None:
            # One thread for each product, because other ranks use the other cores. OpenMP keeps
            # this limit for each calling thread.
            limit = getattr(self.c, "omp_set_num_threads", None)
            if limit is not None:
                limit(1)
            engine, stream = ctypes.c_void_p(), ctypes.c_void_p()
            self.check(self.c.dnnl_engine_create(ctypes.byref(engine), _CPU, ctypes.c_size_t(0)))
            self.check(self.c.dnnl_stream_create(ctypes.byref(stream), engine, _IN_ORDER))
            self._threads.engine, self._threads.stream = engine, stream
            primitives = self._threads.primitives = {}
        # A list first, because it is made faster than a generator, and each product needs a key.
        key = tuple([(x.shape, x.strides, x.dtype.char) for x in arrays])
        if key not in primitives:
            if len(primitives) >= _MOST_PRIMITIVES:  # for batches whose sizes always change
                primitives.clear()
            is_plain = all(map(_is_plain, (a, b, out)))
            primitives[key] = _Product(self, self._threads.engine, arrays) if is_plain else None
        product = primitives[key]
        if product is None:
            return False
        product.run(self._threads.stream, arrays)
        return True

    @staticmethod
    def check(status: int) -> None:
        """Raise for a status that is not success."""
        if status:
            raise RuntimeError(f"oneDNN refused with status {status} (dnnl_status_t)")


def _is_plain(array: Array) -> bool:
    """Return whether each matrix of an array has contiguous rows, or contiguous columns."""
    size = array.itemsize
    (rows, columns), (step, inner) = array.shape[-2:], array.strides[-2:]
    # A dim of one element may have any stride.
    by_row = (columns == 1 or inner == size) and (rows == 1 or step >= columns * size)
    by_column = (rows == 1 or step == size) and (columns == 1 or inner >= rows * size)
    return (by_row or by_column) and all(s >= 0 and s % size == 0 for s in array.strides)


class _Product:
    """A matmul primitive for arrays of certain shapes, strides and dtypes, with its memory."""

    def __init__(self, library: Library, engine: ctypes.c_void_p, arrays: list[Array]) -> None:
        self._c = c = library.c
        kinds = (_SOURCE, _WEIGHTS, _TARGET, _BIAS)
        shapes = [self._description(library, array, arrays[2].ndim) for array in arrays]
        a, b, out, bias = [*shapes, None][:4]
        found, self._primitive = ctypes.c_void_p(), ctypes.c_void_p()
        library.check(
            c.dnnl_matmul_primitive_desc_create(ctypes.byref(found), engine, a, b, bias, out, None)
        )
        library.check(c.dnnl_primitive_create(ctypes.byref(self._primitive), found))
        c.dnnl_primitive_desc_destroy(found)
        self._memories = [ctypes.c_void_p() for _ in arrays]
        # Without a buffer: `run` sets the addresses of its arrays. A primitive copies its
        # description.
        for shape, memory in zip(shapes, self._memories, strict=True):
            library.check(
                c.dnnl_memory_create(ctypes.byref(memory), shape, engine, ctypes.c_void_p(0))
            )
            c.dnnl_memory_desc_destroy(shape)
        self._arguments = (_Argument * len(arrays))(
            *(_Argument(k, m) for k, m in zip(kinds, self._memories, strict=False))
        )
        self._check = library.check

    @staticmethod
    def _description(library: Library, array: Array, dims: int) -> ctypes.c_void_p:
        missing = dims - array.ndim  # a bias has one dim
        shape = (1,) * missing + array.shape
        # A bias gets leading dims of size 1, with the stride of a contiguous array.
        sizes = [array.shape[0] if missing else 0] * missing
        # oneDNN counts strides in elements.
        strides = [*sizes, *(stride // array.itemsize for stride in array.strides)]
        vector = ctypes.c_int64 * dims
        made = ctypes.c_void_p()
        library.check(
            library.c.dnnl_memory_desc_create_with_strides(
                ctypes.byref(made), dims, vector(*shape), _DTYPES[array.dtype], vector(*strides)
            )
        )
        return made

    def run(self, stream: ctypes.c_void_p, arrays: list[Array]) -> None:
        """Compute with other arrays of the same layout."""
        for memory, array in zip(self._memories, arrays, strict=True):
            self._c.dnnl_memory_set_data_handle(memory, ctypes.c_void_p(address(array)))
        self._check(
            self._c.dnnl_primitive_execute(self._primitive, stream, len(arrays), self._arguments)
        )

    def __del__(self) -> None:
        # The attributes are missing if the constructor raised before it set them.
        for memory in getattr(self, "_memories", ()):
            self._c.dnnl_memory_destroy(memory)
        if getattr(self, "_primitive", None):
            self._c.dnnl_primitive_destroy(self._primitive)
