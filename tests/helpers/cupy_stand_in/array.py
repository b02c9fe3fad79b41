"""The array of the stand-in."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import numpy as np

from cupy_stand_in.counts import count
from cupy_stand_in.cuda import Memory, current, is_pinned, on_device

__all__ = ["allocate", "call", "checked_scalar", "give", "ndarray", "use"]

_KINDS = "biufc"
_PRIVATE = object()
_SUMS = (np.sum, np.mean, np.var, np.prod, np.cumsum, np.dot, np.matmul, np.einsum, np.tensordot)
_NO_FILL = ValueError("non-scalar numpy.ndarray cannot be used for fill")


class _Flags:
    """Contiguity, to be read only. There is no ``writeable``; setting it changes nothing."""

    def __init__(self, host: np.ndarray[Any, Any], owndata: bool) -> None:
        self._host, self._owndata = host, owndata

    c_contiguous = property(lambda self: self._host.flags.c_contiguous)
    f_contiguous = property(lambda self: self._host.flags.f_contiguous)
    owndata = property(lambda self: self._owndata)


class _Pointer:
    """``ndarray.data``."""

    def __init__(self, host: np.ndarray[Any, Any], device: int) -> None:
        self.ptr = host.ctypes.data
        self.device_id = device


class ndarray:  # noqa: N801 - CuPy's name
    """``cupy.ndarray``: made by functions of the module, never directly."""

    __slots__ = ("__weakref__", "_host", "_memory", "base")
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, key: object, host: np.ndarray[Any, Any], memory: Memory, base: ndarray | None
    ) -> None:
        if key is not _PRIVATE:
            raise TypeError("use cupy.empty")
        self._host = host
        self._memory = memory
        self.base = base

    # ---------------------------------------------------------------------------------- attributes

    dtype = property(lambda self: self._host.dtype)
    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    nbytes = property(lambda self: self._host.nbytes)
    itemsize = property(lambda self: self._host.itemsize)
    flags = property(lambda self: _Flags(self._host, self.base is None))
    data = property(lambda self: _Pointer(self._host, self._memory.device))
    T = property(lambda self: self.transpose())

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        self._hand_over()
        interface = self._host.__array_interface__
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "strides": None if self._host.flags.c_contiguous else self.strides,
            "data": (interface["data"][0] if self.size else 0, False),
            "version": 3,
            "stream": 1,
        }

    # ----------------------------------------------------------------------- to and from the host

    def __array__(self, dtype: object = None) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._memory.device  # CUDA

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if stream != -1:
            return self
        # The consumer, such as mpi4py, wants no wait for any stream.
        self._hand_over()
        return self._host.__dlpack__(**options)

    def _hand_over(self) -> None:
        """To MPI, which reads and writes GPU memory only if it is built for CUDA."""
        if os.environ.get("MPISHARD_CUDA_AWARE") != "1":
            raise AssertionError(
                "the address of a device array is given to a library that is not said to be built "
                "for CUDA: it would crash"
            )
        self._memory.hand_over(self._host)

    def get(
        self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True
    ) -> Any:
        count("reads")
        with on_device(self._memory.device):
            self._memory.read(self._host)
            current.stream.settle()
        if out is None:
            return self._host.copy(order="C")
        if not isinstance(out, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
        if out.dtype != self.dtype:
            raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
        if out.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected {self.shape}, actual {out.shape}")
        if not (out.flags.c_contiguous or out.flags.f_contiguous):
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        out[...] = self._host
        return out

    def set(self, arr: Any, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not (self._host.flags.c_contiguous or self._host.flags.f_contiguous):
            raise RuntimeError("Cannot set to non-contiguous array")
        count("copies")
        with on_device(self._memory.device):
            self._memory.write(self._host)
            if is_pinned(arr):
                current.stream.begin_to_read(arr)
        self._host[...] = arr

    def item(self) -> Any:
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        value: bytes = self.get().tobytes(order)
        return value

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError("The truth value of an array of other than one element is ambiguous")
        return bool(self.item())

    def __repr__(self) -> str:
        return repr(self.get())

    def __format__(self, spec: str) -> str:
        return format(self.get(), spec)

    # ---------------------------------------------------------------------------- NumPy's protocols

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        import cupy

        function = getattr(cupy, ufunc.__name__, None)
        if method != "__call__" or function is None:
            return NotImplemented
        if "out" in kwargs:
            (kwargs["out"],) = kwargs["out"]
        return function(*inputs, **kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        import cupy

        module = func.__module__.partition(".")[2]
        if module or not hasattr(cupy, func.__name__):
            return NotImplemented
        if not all(kind in (ndarray, np.ndarray) for kind in types):
            return NotImplemented
        return getattr(cupy, func.__name__)(*args, **kwargs)

    # ------------------------------------------------------------------------------ items and views

    def _view(self, host: np.ndarray[Any, Any]) -> ndarray:
        """A view of this array's memory; a new array where NumPy had to copy."""
        if host.size and not np.may_share_memory(host, self._host):
            launch()
            _use(self)
            return give(host)
        return ndarray(_PRIVATE, host, self._memory, self if self.base is None else self.base)

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> ndarray:
        index, is_basic = _index(key)
        if is_basic:
            return self._view(_part(self._host, index))
        _use(self)
        launch()
        return give(self._host[index])

    def __setitem__(self, key: Any, value: Any) -> None:
        index, is_basic = _index(key)
        if isinstance(value, np.ndarray):
            raise _NO_FILL
        target = _part(self._host, index)
        if not isinstance(value, ndarray):
            _require_near(self)
            launch()
            self._memory.write(target if is_basic else self._host)
            self._host[index] = checked_scalar(value, self.dtype)
            return
        source = value._host
        while source.ndim and source.shape[0] == 1:
            source = source[0]
        # Empty arrays are never alike: a new one has strides of 0, and a slice has its own.
        is_alike = (
            is_basic
            and source.size > 0
            and ((target.shape, target.strides) == (source.shape, source.strides))
        )
        if is_alike and target.ctypes.data == source.ctypes.data:
            return
        if is_alike and target.flags.c_contiguous and target.dtype == source.dtype:
            count("copies")
            value._memory.read(source)
            self._memory.write(target)
        else:  # a kernel, for which all must lie on the device
            launch()
            _require_near(self)
            _use(value)
            self._memory.write(target if is_basic else self._host)
            if not is_basic and _repeats(self._host.shape, index):
                raise AssertionError("an element is set twice: which value stays is undefined")
        self._host[index] = source

    def reshape(self, *shape: Any) -> ndarray:
        return self._view(self._host.reshape(*shape))

    def ravel(self) -> ndarray:
        return self._view(self._host.ravel())

    def transpose(self, *axes: Any) -> ndarray:
        return self._view(self._host.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        return self._view(self._host.swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None) -> ndarray:
        return self._view(self._host.squeeze(axis))

    def view(self, dtype: Any = None) -> ndarray:
        return self._view(self._host.view() if dtype is None else self._host.view(_known(dtype)))

    # -------------------------------------------------------------------------------------- values

    def fill(self, value: Any) -> None:
        if isinstance(value, np.ndarray):
            raise _NO_FILL
        self[...] = value

    def copy(self, order: str = "C") -> ndarray:
        """On the current device, from whichever it lies on."""
        is_near = self._memory.device == current.device
        if is_near:
            launch()
        else:
            count("copies")
        self._memory.read(self._host)
        return give(self._host.copy(order="C"))

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def astype(self, dtype: Any, order: str = "K", *, copy: bool = True) -> ndarray:
        host = self._host.astype(_known(dtype), order=order, copy=copy)
        if host is self._host:
            return self
        _use(self)
        launch()
        return _made(host)

    def take(self, indices: Any, axis: int | None = None) -> ndarray:
        _use(self, *([indices] if isinstance(indices, ndarray) else []))
        host = indices._host if isinstance(indices, ndarray) else np.asarray(indices)
        launch()
        # CuPy wraps what is out of bounds, without a word.
        return give(self._host.take(host, axis, mode="wrap"))

    def argsort(self, axis: int = -1, kind: str | None = None) -> Any:
        if kind not in (None, "stable"):
            raise ValueError("kind can only be None or 'stable'")
        return call(np.argsort, self, axis=axis, kind="stable")

    def nonzero(self) -> tuple[ndarray, ...]:
        _use(self)
        launch()
        count("reads")
        current.stream.settle()
        return tuple(give(part) for part in self._host.nonzero())

    def dot(self, other: Any, out: Any = None) -> Any:
        if not isinstance(other, ndarray):
            raise TypeError(f"Argument 'b' has incorrect type: {type(other)}")
        if out is not None:
            if np.result_type(self.dtype, other.dtype) != out.dtype:
                raise ValueError("Not supported dtype combination.")
            if not out.flags.c_contiguous:
                raise ValueError("Output array must be C-contiguous")
        return call(np.dot, self, other, out=out)

    def round(self, decimals: int = 0) -> Any:
        return call(np.round, self, decimals)

    def repeat(self, repeats: int, axis: int | None = None) -> Any:
        return call(np.repeat, self, repeats, axis)

    # ----------------------------------------------------------------------------------- operators

    def __pos__(self) -> ndarray:
        return self.copy()

    def __neg__(self) -> Any:
        return call(np.negative, self)

    def __invert__(self) -> Any:
        return call(np.invert, self)

    def __abs__(self) -> Any:
        return call(np.abs, self)


# ------------------------------------------------------------------------------------ for functions


def give(host: Any) -> ndarray:
    """A new array on the current device, in C order, that holds what NumPy gave: 0-d, too."""
    return _made(np.array(host, order="C", ndmin=0))


def _made(host: np.ndarray[Any, Any]) -> ndarray:
    _known(host.dtype)
    made = ndarray(_PRIVATE, host, Memory(), None)
    made._memory.write(made._host)
    return made


def allocate(shape: Any, dtype: Any) -> ndarray:
    """A new array that holds anything but zeros."""
    host = np.empty(shape, _known(dtype))
    host.reshape(-1).view(np.uint8)[:] = 0xA5
    return ndarray(_PRIVATE, host, Memory(), None)


def checked_scalar(value: Any, dtype: Any) -> Any:
    """``value`` where releases of CuPy agree on what it does to an array of ``dtype``."""
    if isinstance(value, np.generic):
        if np.result_type(dtype, value.dtype) != np.result_type(dtype, value.item()):
            raise TypeError(
                f"a NumPy scalar of {value.dtype} and an array of {dtype}: releases of CuPy differ "
                "in the result's dtype; use a Python scalar"
            )
    elif not isinstance(value, bool | int | float | complex):
        raise TypeError(f"Unsupported type {type(value)}")
    return value


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What NumPy's ``function`` does, for arrays on the current device and for Python scalars."""
    out = kwargs.pop("out", None)
    arrays = [arg for arg in args if isinstance(arg, ndarray)]
    _use(*arrays)
    launch()
    dtype = arrays[0].dtype if arrays else np.dtype(float)
    hosts: list[Any] = []
    for arg in args:
        if isinstance(arg, ndarray):
            hosts.append(_flushed(function, arg._host))
        elif isinstance(arg, str | tuple | type(None)):
            hosts.append(arg)
        else:
            hosts.append(checked_scalar(arg, dtype))
    with np.errstate(all="ignore"):  # a GPU does not warn
        if out is None:
            return give(_varied(function, _flushed(function, function(*hosts, **kwargs)), arrays))
        if not isinstance(out, ndarray):
            raise TypeError(f"out must be a cupy.ndarray, got {type(out)}")
        _require_near(out)
        out._memory.write(out._host)
        result = function(*hosts, out=out._host, **kwargs)
        out._host[...] = _varied(function, _flushed(function, result), arrays)
    return out


def _flushed(function: Any, values: Any) -> Any:
    """``values`` as CuPy's functions read and write them: float32 numbers below 1.2e-38 are 0."""
    is_moved = not isinstance(function, np.ufunc)  # as by `where` or `concatenate`
    if is_moved or getattr(values, "dtype", None) != np.float32:
        return values
    is_tiny = np.abs(values) < np.finfo(np.float32).smallest_normal
    return np.where(is_tiny, np.copysign(np.float32(0), values), values)


def _varied(function: Any, result: Any, arrays: list[ndarray]) -> Any:
    """Another last bit of a sum or product for what ``cuda.varies`` names."""
    import cupy

    result, varies = np.asarray(result), cupy.cuda.varies
    if function not in _SUMS or result.dtype.kind not in "fc" or not varies:
        return result
    odd = 0
    for array in arrays:
        start = array if array.base is None else array.base
        odd += sum(array.shape) if "sizes" in varies else 0
        if "alignment" in varies:  # each allocation is aligned
            odd += (array.data.ptr - start.data.ptr) % 16 // array.itemsize
    return result * (1 + (odd % 3 - 1) * np.finfo(result.dtype).eps)


def launch() -> None:
    """Begin a kernel, which CuPy has to compile."""
    import cupy

    if not cupy.cuda.has_headers:
        raise RuntimeError(
            "Failed to find CUDA headers. Please install CUDA toolkit headers (e.g., pip install "
            "cupy-cuda12x[ctk]) or specify CUDA_PATH environment variable."
        )
    count("launches")


def _require_near(array: ndarray) -> None:
    if array._memory.device != current.device:
        raise ValueError(
            f"The device where the array resides ({array._memory.device}) is different from "
            f"the current device ({current.device}). Peer access is unavailable between these "
            "devices."
        )


def _use(*arrays: ndarray) -> None:
    """A kernel on the current device reads them."""
    for array in arrays:
        _require_near(array)
        array._memory.read(array._host)


def use(array: ndarray, *, writes: bool) -> None:
    """A kernel on the current device reads ``array``, and may write it."""
    _use(array)
    if writes:
        array._memory.write(array._host)


def _part(host: np.ndarray[Any, Any], index: Any) -> Any:
    """``host[index]``, and a view of a single element, too."""
    part = host[index]
    if isinstance(part, np.ndarray):
        return part
    return host[(*index, ...) if isinstance(index, tuple) else (index, ...)]


def _repeats(shape: tuple[int, ...], index: Any) -> bool:
    """Whether ``index`` names an element twice."""
    places = np.arange(int(np.prod(shape))).reshape(shape)[index].ravel()
    return len(np.unique(places)) < places.size


def _known(dtype: Any) -> np.dtype[Any]:
    known: np.dtype[Any] = np.dtype(dtype)
    if known.kind not in _KINDS or known.name == "bfloat16":
        raise ValueError(f"Unsupported dtype {known}")
    return known


def _index(key: Any) -> tuple[Any, bool]:
    """``key`` for NumPy, and whether it gives a view."""
    is_basic = True
    parts: list[Any] = []
    for part in key if isinstance(key, tuple) else (key,):
        if isinstance(part, ndarray):
            _use(part)
            parts.append(part._host)
            is_basic = False
        elif part is None or part is Ellipsis or isinstance(part, slice):
            parts.append(part)
        elif isinstance(part, SupportsIndex) and not isinstance(part, np.ndarray | bool):
            parts.append(operator.index(part))
        else:  # CuPy copies lists and NumPy arrays to the device at each use; nobody should
            raise TypeError(f"an index of type {type(part).__name__} is not on the device")
    return (tuple(parts) if isinstance(key, tuple) else parts[0]), is_basic
