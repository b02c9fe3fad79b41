"""The array module of an array, and functions that depend on it: one path for NumPy and CuPy."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from mpishard.base.kernels import Kernel

Array: TypeAlias = npt.NDArray[Any]
"""A NumPy or CuPy array. CuPy's has the interface of NumPy's, by which both are checked."""

DType: TypeAlias = np.dtype[Any]
"""A dtype of NumPy, which CuPy's arrays have too."""

Data: TypeAlias = Any
"""Inputs or targets as users give them: an array, `Samples` of several arrays, or what else the
model takes; None for targets that the loss does not need. The model checks them."""

Scalar: TypeAlias = float | Array
"""A number, or an array of one element on a GPU that the host has not waited for."""


class Namespace(ModuleType):
    """The module ``numpy`` or ``cupy``, as types are checked: its functions return arrays."""

    cuda: Any  # CuPy's alone
    may_share_memory: Callable[[Array, Array], bool]

    def __getattr__(self, name: str) -> Callable[..., Array]:
        raise AttributeError(name)  # no object has this class


_NUMPY: Any = np  # a checker knows it as a module, and as no Namespace


class _DevicePointer(Protocol):
    ptr: int
    device_id: int


class _DeviceArray(Protocol):
    """What an array of CuPy adds to the interface of NumPy's, and its dtype."""

    data: _DevicePointer
    dtype: DType

    def get(self, *, out: Array | None = None) -> Array: ...
    def set(self, values: Array) -> None: ...


SQUARES_BLOCK = 1024
"""Number of elements in a block of `block_squares`."""

_CUDA = 2  # of DLPack's types of devices
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h

RETURNED_BYTES = 32 * 2**20
"""Size from which glibc returns the memory of a freed array: its most for M_MMAP_THRESHOLD."""

_CACHE_OF_CPU = Path("/sys/devices/system/cpu/cpu0/cache")
_USUAL_L2_BYTES = 512 * 1024
_LARGEST_CHUNK_BYTES = 512 * 1024


# A block of threads for each block of elements. CuPy's own sums and products take another order for
# another number of blocks, or another alignment.
_SQUARES = Kernel(
    "block_squares",
    r"""
extern "C" __global__ void block_squares(double* sums, const T* x, long long count) {
    __shared__ T parts[256];
    const int me = threadIdx.x;
    T squares[4];
    for (int k = 0; k < 4; k++) {
        const long long i = 1024LL * blockIdx.x + 256 * k + me;
        squares[k] = i < count ? mul(x[i], x[i]) : T(0);
    }
    parts[me] = add(add(squares[0], squares[1]), add(squares[2], squares[3]));
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (me < half) parts[me] = add(parts[me], parts[me + half]);
    }
    if (me == 0) sums[blockIdx.x] = parts[0];
}
""",
    threads=256,
)


class _Namespaces(dict[type, Namespace]):
    def __missing__(self, kind: type) -> Namespace:
        if issubclass(kind, (np.ndarray, np.generic)):
            _require_plain_type(kind)
            return NAMESPACES[np.ndarray]
        # Not imported: if there is an array of CuPy, CuPy is loaded.
        cupy: Any = sys.modules.get("cupy")
        if cupy is not None and issubclass(kind, cupy.ndarray):
            namespace: Namespace = cupy
            return namespace
        is_sparse = hasattr(kind, "tocsr")  # as the matrices of SciPy
        fix = "; pass its rows as x.toarray(), or train on it by optimize" if is_sparse else ""
        raise TypeError(f"expected a NumPy or CuPy array, got {kind.__qualname__}{fix}")


# Only NumPy's array is an entry. CuPy is looked up each time, as it is imported later or never.
NAMESPACES: Mapping[type, Namespace] = _Namespaces({np.ndarray: _NUMPY})
"""The module, ``numpy`` or ``cupy``, whose functions work on arrays of a type.

``NAMESPACES[type(x)]`` gives the result and errors of ``array_namespace(x)``. Layers use it in each
pass, because it needs no call of a Python function for NumPy's arrays.
"""


def array_namespace(array: Array) -> Namespace:
    """Return the module, ``numpy`` or ``cupy``, whose functions work on ``array``.

    Raises
    ------
    TypeError
        For an object that is not an array, or is one that `require_plain` refuses.
    """
    return NAMESPACES[type(array)]


def require_plain(array: object) -> None:
    """Refuse subclasses of ``numpy.ndarray`` except memory maps; accept any other object.

    A subclass may give its elements another meaning: the mask of a masked array stays behind when
    the elements travel, and a matrix multiplies and broadcasts by other rules.

    Raises
    ------
    TypeError
        Naming the class and the conversion to a plain array.
    """
    if type(array) is not np.ndarray:
        _require_plain_type(type(array))


def _require_plain_type(kind: type) -> None:
    if not issubclass(kind, np.ndarray) or issubclass(kind, np.memmap):
        return
    fix = "; pass numpy.asarray(array)"
    if issubclass(kind, np.ma.MaskedArray):
        fix = ", whose mask would be lost; pass array.filled(value)"
    raise TypeError(f"expected a plain NumPy array, got a {kind.__qualname__}{fix}")


def as_array(value: Any) -> Any:
    """Return an array of another library, such as JAX or PyTorch, as one of NumPy or CuPy.

    It has the same memory if possible, and may be read-only. Arrays of NumPy and CuPy, and objects
    that are no arrays, are returned as they are.

    Raises
    ------
    TypeError
        For an array that NumPy or CuPy cannot read, or that `require_plain` refuses.
    """
    require_plain(value)
    cupy = sys.modules.get("cupy")
    if isinstance(value, np.ndarray) or (cupy is not None and isinstance(value, cupy.ndarray)):
        return value
    if not (hasattr(value, "__array__") or hasattr(value, "__dlpack__")):
        return value
    try:
        # PyTorch exports no tensor that requires a gradient.
        plain = value.detach() if hasattr(value, "detach") else value
        device = plain.__dlpack_device__()[0] if hasattr(plain, "__dlpack_device__") else None
        if device == _CUDA and cupy is not None:
            return cupy.from_dlpack(plain)
        # DLPack is the second choice: NumPy reads no bfloat16 by it, and PyTorch's export loses the
        # sign of a tensor that is negated when it is read.
        return np.asarray(plain) if hasattr(plain, "__array__") else np.from_dlpack(plain)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        kind = type(value)
        raise TypeError(
            f"a {kind.__module__}.{kind.__qualname__} cannot be read as an array ({error}): give a "
            "dense one of float32 or float64, in the memory of the CPU"
        ) from error


def is_device_array(array: Array) -> bool:
    """Return whether ``array`` lies in GPU memory."""
    return array_namespace(array) is not np


def lies_on_device(value: object) -> bool:
    """Return whether any object is an array in GPU memory."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def _is_of_cupy(array: Array) -> TypeGuard[_DeviceArray]:
    return not isinstance(array, np.ndarray)


def to_host(array: Array) -> Array:
    """Return ``array`` as a NumPy array: itself, or a copy from the GPU."""
    return np.asarray(array.get()) if _is_of_cupy(array) else array


def to_device(array: Array) -> Array:
    """Return a copy of ``array`` in GPU memory if CuPy is loaded, otherwise ``array``."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return array
    copy: Array = cupy.empty(array.shape, array.dtype)
    copy_into(copy, array)
    return copy


def address(array: Array) -> int:
    """Address of the first element, in host or GPU memory."""
    if _is_of_cupy(array):
        return int(array.data.ptr)
    # The first field of NumPy's array struct: ``array.ctypes.data`` takes six times as long.
    return ctypes.c_void_p.from_address(id(array) + object.__basicsize__).value or 0


def device_number(array: Array) -> int:
    """Return the number of the GPU in whose memory ``array`` lies.

    Raises
    ------
    TypeError
        For an array of NumPy.
    """
    if not _is_of_cupy(array):
        raise TypeError("expected an array in GPU memory, got one of NumPy")
    return int(array.data.device_id)


def is_own(array: Array) -> bool:
    """Return whether ``array`` certainly lies in memory that no other process has mapped.

    NumPy itself allocated such an array. Mapped and shared arrays, and those of other libraries,
    may lie anywhere.
    """
    base: object = array.base
    # A view's bases lead to the array that owns the memory, or to an object of another library.
    while isinstance(base, np.ndarray):
        array, base = base, base.base
    return base is None and bool(array.flags.owndata)


def beside(array: Array, other: Array) -> Array:
    """Return ``array`` itself, or a copy of it in the memory of ``other``: host or current GPU."""
    if not _is_of_cupy(other):
        return to_host(array)
    xp = NAMESPACES[type(other)]
    if not is_device_array(array):
        return xp.asarray(array)
    # CuPy copies between devices, but it warns if a computation reads another device's array.
    return array if device_number(array) == xp.cuda.runtime.getDevice() else array.copy()


def copy_into(target: Array, source: Array) -> None:
    """Do ``target[...] = source``, with the source on the host or any GPU.

    Parameters
    ----------
    target : Array
        On the host, or C-contiguous on the current GPU.
    source : Array
        Array of the same shape.
    """
    if not target.size:
        return
    if is_device_array(target) == is_device_array(source):
        # CuPy assigns some shapes by a kernel, which cannot read another device's array.
        target[...] = beside(source, target)
    elif _is_of_cupy(target):
        target.set(np.asarray(source, target.dtype, order="C"))
    else:
        contiguous = source.dtype == target.dtype and target.flags.c_contiguous
        assert _is_of_cupy(source)
        target[...] = source.get(out=target) if contiguous else source.get()


def read_numbers(numbers: Sequence[Any]) -> list[float]:
    """Return numbers as floats; those that lie on a GPU, as arrays of one element, by one copy.

    The host waits for that copy, and for nothing if no number lies on a GPU.

    Parameters
    ----------
    numbers : sequence of (float or Array)
        Numbers, and arrays of one element.
    """
    # Joined on the GPU, because each copy of its own would wait for the GPU again.
    far = [n.reshape(1).astype(np.float64, copy=False) for n in numbers if lies_on_device(n)]
    if not far:
        return [float(number) for number in numbers]
    read = iter(to_host(array_namespace(far[0]).concatenate(far)).tolist())
    return [next(read) if lies_on_device(number) else float(number) for number in numbers]


def lie_end_to_end(first: Array, second: Array) -> bool:
    """Return whether two 1-D arrays on a GPU follow each other in one 1-D array, their base."""
    base = first.base
    return (
        # Only a common base proves that one view may span both. Arrays of two allocations may touch
        # by chance.
        base is not None
        and base is second.base
        and base.ndim == 1
        and base.dtype == first.dtype == second.dtype
        and address(first) + first.nbytes == address(second)
    )


def stretched(array: Array, length: int) -> Array:
    """Return ``length`` elements of the 1-D base of ``array``, from where ``array`` begins."""
    base = array.base
    assert base is not None, "an array of a longer one"
    start = (address(array) - address(base)) // array.dtype.itemsize
    return base[start : start + length]


def synchronize(array: Array) -> None:
    """Wait until the array's GPU has finished this thread's work; nothing for a host array."""
    xp = array_namespace(array)
    if xp is not np:
        with xp.cuda.Device(device_number(array)):
            xp.cuda.get_current_stream().synchronize()


@functools.cache  # once in a process
def reuse_freed_memory() -> None:
    """Let the allocator of this process keep the memory that a step frees for the next step.

    By default glibc returns freed memory to the kernel, which clears each page anew when the next
    step allocates the same activations: 10 to 20 % of a GPT's step. It returns every block of at
    least M_MMAP_THRESHOLD bytes, here `RETURNED_BYTES`. It also returns free memory at the top of
    the heap above M_TRIM_THRESHOLD (mallopt(3)). A pool of activations would save no more. Other
    allocators have no such call and stay as they are.
    """
    if os.name != "posix":
        return
    # Only glibc has it; macOS and musl do not.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # If one of them is set, glibc no longer adapts the other, so that both need a value.
        mallopt(_M_MMAP_THRESHOLD, RETURNED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Let glibc return to the kernel all freed memory that `reuse_freed_memory` has kept so far.

    No step reuses large arrays that are freed once, such as the parameters of a PyTorch module: the
    pieces of memory between those that live on have other sizes than activations.
    """
    if os.name == "posix" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def chunk_length(array: Array) -> int:
    """Number of elements that an element-wise pass should take at a time.

    On the CPU a handful of operands of a chunk fit the L2 cache together, so that a chain of
    operations reads memory once; on a GPU every launch costs more than it saves, and the whole
    array is one chunk.
    """
    if is_device_array(array):
        return max(1, int(array.size))
    # Elements of 16 bits are computed in float32.
    return max(1, _chunk_bytes() // max(4, int(array.dtype.itemsize)))


def device_bytes(array: Array) -> int:
    """Size in bytes of the memory of the GPU on which ``array`` lies."""
    return _device_bytes(array_namespace(array), device_number(array))


@functools.cache  # The driver is asked once for each GPU.
def _device_bytes(xp: Namespace, device: int) -> int:
    with xp.cuda.Device(device):
        return int(xp.cuda.runtime.memGetInfo()[1])


def block_squares(array: Array) -> Array:
    """Sums of squares of blocks of 1024 elements, the last one shorter, in float64.

    The bits of each sum depend on the block's values alone: not on the number of blocks, on where
    they lie, on the sizes of caches or on BLAS threads, because no BLAS is used. A GPU has other
    bits than the host. The sums are taken in the array's dtype.

    Parameters
    ----------
    array : Array
        1-D, of n elements; on a GPU contiguous, of float32 or float64.

    Returns
    -------
    Array
        Shape (ceil(n / 1024),).
    """
    if is_device_array(array):
        # float64, because callers add up many blocks.
        sums = array_namespace(array).empty(-(-int(array.size) // SQUARES_BLOCK), np.float64)
        _SQUARES.launch(sums.size, array.dtype, sums, array, int(array.size))
        return sums
    blocks, rest = divmod(int(array.size), SQUARES_BLOCK)
    # Blocks of one length give the same bits however the vector is cut into pieces.
    parts = [array[: array.size - rest].reshape(blocks, SQUARES_BLOCK)]
    if rest:
        parts.append(array[array.size - rest :].reshape(1, rest))
    # An overflow is a result, and no warning: the norm is infinite.
    with np.errstate(over="ignore", invalid="ignore"):
        # einsum calls no BLAS here, and sums each row alike, whatever the number of rows.
        return np.concatenate([np.einsum("ij,ij->i", p, p) for p in parts]).astype(np.float64)


@functools.cache  # once in a process
def _chunk_bytes() -> int:
    """A quarter of the L2 cache; with smaller chunks NumPy's calls would cost more than passes."""
    return min(_LARGEST_CHUNK_BYTES, (_l2_bytes(_CACHE_OF_CPU) or _USUAL_L2_BYTES) // 4)


def _l2_bytes(caches: Path) -> int | None:
    """Size of a core's L2 cache in bytes, as Linux reports it; None if it is not known."""
    try:
        # Linux numbers caches in no fixed order of levels.
        for cache in sorted(caches.glob("index*")):
            if (cache / "level").read_text().strip() == "2":
                return int((cache / "size").read_text().strip().removesuffix("K")) * 1024
    except (OSError, ValueError):
        return None  # a container may hide it
    return None


def chunks(array: Array) -> Iterator[slice]:
    """Slices of the first dim, each of about `chunk_length` elements and at least one row.

    Parameters
    ----------
    array : Array
        At least one dim; only the first may have size 0.

    Yields
    ------
    slice
        In order, disjoint, together the whole first dim; none if it is empty.
    """
    length = int(array.shape[0])
    if length == 0:
        return
    rows = max(1, chunk_length(array) * length // int(array.size))
    for start in range(0, length, rows):
        yield slice(start, min(start + rows, length))
