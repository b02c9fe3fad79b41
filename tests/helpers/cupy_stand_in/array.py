"""The array of the stand-in."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import numpy as np

from cupy_stand_in.counts import count
from cupy_stand_in.cuda import Memory, current

__all__ = ["allocate", "call", "checked_scalar", "give", "ndarray", "use"]

_KINDS = "biufc"
_PRIVATE = object()
_NO_FILL = ValueError("non-scalar numpy.ndarray cannot be used for fill")


class _Flags:
    """Contiguity, to be read only; there is no ``writeable``."""

    __slots__ = ("c_contiguous", "f_contiguous", "owndata")

    def __init__(self, host: np.ndarray[Any, Any], owndata: bool) -> None:
        object.__setattr__(self, "c_contiguous", host.flags.c_contiguous)
        object.__setattr__(self, "f_contiguous", host.flags.f_contiguous)
        object.__setattr__(self, "owndata", owndata)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"CuPy's flags have no {name!r} that could be set")


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

    def __array__(self, dtype: object = None, copy: object = None) -> Any:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct "
            "a NumPy array explicitly."
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._memory.device  # CUDA

    def __dlpack__(self, **_: Any) -> ndarray:
        return self

    def get(
        self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True
    ) -> Any:
        count("reads")
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
        self._memory.write(self._host)
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
            count("copies")
            self._memory.read(self._host)
            return give(host)
        return ndarray(_PRIVATE, host, self._memory, self if self.base is None else self.base)

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[ndarray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, key: Any) -> ndarray:
        index, is_basic = _index(key)
        if is_basic:
            return self._view(np.asarray(self._host[index]))
        _use(self)
        count("launches")
        return give(self._host[index])

    def __setitem__(self, key: Any, value: Any) -> None:
        index, is_basic = _index(key)
        if isinstance(value, np.ndarray):
            raise _NO_FILL
        target = np.asarray(self._host[index])
        if not isinstance(value, ndarray):
            count("launches")
            self._memory.write(target if is_basic else self._host)
            self._host[index] = checked_scalar(value, self.dtype)
            return
        is_copy = (
            is_basic
            and target.shape == value.shape
            and target.dtype == value.dtype
            and target.flags.c_contiguous
            and value._host.flags.c_contiguous
        )
        if not is_copy:  # a kernel, for which all must lie on the device
            _use(self, value)
        value._memory.read(value._host)
        if not (is_copy and target.ctypes.data == value._host.ctypes.data):
            count("copies" if is_copy else "launches")
            self._memory.write(target if is_basic else self._host)
        self._host[index] = value._host

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
        count("copies")
        self._memory.read(self._host)
        return give(self._host.copy(order="C"))

    def __copy__(self) -> ndarray:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def astype(self, dtype: Any, order: str = "K", *, copy: bool = True) -> ndarray:
        if not copy and self.dtype == dtype:
            return self
        _use(self)
        count("launches")
        return give(self._host.astype(_known(dtype)))

    def take(self, indices: Any, axis: int | None = None) -> ndarray:
        _use(self, *([indices] if isinstance(indices, ndarray) else []))
        host = indices._host if isinstance(indices, ndarray) else np.asarray(indices)
        count("launches")
        # CuPy wraps what is out of bounds, without a word.
        return give(self._host.take(host, axis, mode="wrap"))

    def argsort(self, axis: int = -1, kind: str | None = None) -> Any:
        if kind not in (None, "stable"):
            raise ValueError("kind can only be None or 'stable'")
        return call(np.argsort, self, axis=axis, kind="stable")

    def nonzero(self) -> tuple[ndarray, ...]:
        _use(self)
        count("launches")
        count("reads")
        current.stream.settle()
        return tuple(give(part) for part in self._host.nonzero())

    def dot(self, other: Any, out: Any = None) -> Any:
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
    array = np.array(host, order="C", ndmin=0)
    _known(array.dtype)
    made = ndarray(_PRIVATE, array, Memory(), None)
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
    count("launches")
    dtype = arrays[0].dtype if arrays else np.dtype(float)
    hosts: list[Any] = []
    for arg in args:
        if isinstance(arg, ndarray):
            hosts.append(arg._host)
        elif isinstance(arg, str | tuple | type(None)):
            hosts.append(arg)
        else:
            hosts.append(checked_scalar(arg, dtype))
    with np.errstate(all="ignore"):  # a GPU does not warn
        if out is None:
            return give(function(*hosts, **kwargs))
        if not isinstance(out, ndarray):
            raise TypeError(f"out must be a cupy.ndarray, got {type(out)}")
        _use(out)
        out._memory.write(out._host)
        function(*hosts, out=out._host, **kwargs)
    return out


def _use(*arrays: ndarray) -> None:
    """A kernel on the current device reads them."""
    for array in arrays:
        if array._memory.device != current.device:
            raise ValueError(
                f"The device where the array resides ({array._memory.device}) is different from "
                f"the current device ({current.device})."
            )
        array._memory.read(array._host)


def use(array: ndarray, *, writes: bool) -> None:
    """A kernel on the current device reads ``array``, and may write it."""
    _use(array)
    if writes:
        array._memory.write(array._host)


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
