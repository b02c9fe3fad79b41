"""The functions of the stand-in's module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cupy_stand_in.array import allocate, call, checked_scalar, give, ndarray
from cupy_stand_in.counts import count
from cupy_stand_in.cuda import current

__all__ = ["namespace"]

_UFUNCS = (
    "abs", "absolute", "add", "arctan2", "bitwise_and", "bitwise_or", "bitwise_xor", "ceil", "cos",
    "divide", "equal", "exp", "expm1", "fabs", "floor", "floor_divide", "fmax", "fmin", "greater",
    "greater_equal", "hypot", "invert", "isfinite", "isinf", "isnan", "left_shift", "less",
    "less_equal", "log", "log1p", "log2", "logaddexp", "logical_and", "logical_not", "logical_or",
    "maximum", "minimum", "multiply", "negative", "not_equal", "power", "reciprocal", "remainder",
    "right_shift", "rint", "sign", "sin", "sqrt", "square", "subtract", "tan", "tanh",
    "true_divide", "trunc",
)  # fmt: skip
_REDUCTIONS = ("sum", "prod", "max", "min", "amax", "amin", "mean", "var", "any", "all",
               "argmax", "argmin", "cumsum")  # fmt: skip
_SAME = (
    "bool_", "complex64", "complex128", "dtype", "finfo", "float16", "float32", "float64", "iinfo",
    "inf", "int8", "int16", "int32", "int64", "nan", "newaxis", "pi", "uint8", "uint16", "uint32",
    "uint64",
)  # fmt: skip


class _Ufunc:
    """A ``cupy.ufunc``: fewer arguments and methods than NumPy's."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc
        self.__name__ = ufunc.__name__

    def __call__(
        self, *args: Any, out: Any = None, dtype: Any = None, casting: str = "same_kind"
    ) -> Any:
        if isinstance(out, tuple):
            (out,) = out
        if len(args) > self._ufunc.nin:
            *args, out = args  # type: ignore[assignment]
        options = {} if dtype is None else {"dtype": dtype}
        return call(self._ufunc, *args, out=out, casting=casting, **options)

    def reduce(self, array: ndarray, axis: int = 0) -> Any:
        if self.__name__ not in ("add", "multiply"):
            raise NotImplementedError(f"`{self.__name__}.reduce` is not supported yet")
        return call(np.sum if self.__name__ == "add" else np.prod, array, axis=axis)

    def reduceat(self, array: ndarray, indices: ndarray, axis: int = 0) -> Any:
        """Differences of running sums, which cancel: as CuPy does it."""
        if self.__name__ != "add":
            raise NotImplementedError(f"`{self.__name__}.reduceat` is not supported yet")
        assert axis == 0
        count("launches")
        running = np.cumsum(array._host, axis=0)
        running = np.concatenate([np.zeros_like(running[:1]), running])
        stops = np.append(indices._host[1:], len(array))
        return give(running[stops] - running[indices._host])


def namespace() -> dict[str, Any]:
    """Names and what they mean, as far as the stand-in has them."""
    names: dict[str, Any] = {name: getattr(np, name) for name in _SAME}
    names |= {name: _Ufunc(getattr(np, name)) for name in _UFUNCS}
    names |= {name: _reduction(name) for name in _REDUCTIONS}
    names |= {name.rstrip("_"): value for name, value in _FUNCTIONS.items()}
    return names


def _reduction(name: str) -> Callable[..., Any]:
    method = {"amax": "max", "amin": "min"}.get(name, name)

    def reduce(a: Any, axis: Any = None, **kwargs: Any) -> Any:
        return getattr(a, method)(axis, **kwargs)  # of an array of the host, too, as CuPy does

    return reduce


def _array(value: Any) -> Any:
    if not isinstance(value, ndarray):
        raise TypeError(f"expected a cupy.ndarray, got {type(value)}")
    return value


# ----------------------------------------------------------------------------------------- creation


def empty(shape: Any, dtype: Any = float) -> Any:
    return allocate(shape, dtype)


def full(shape: Any, fill_value: Any, dtype: Any = None) -> Any:
    kind = np.asarray(fill_value).dtype if dtype is None else dtype
    array = allocate(shape, kind)
    array.fill(fill_value)
    return array


def zeros(shape: Any, dtype: Any = float) -> Any:
    return full(shape, 0, dtype)


def ones(shape: Any, dtype: Any = float) -> Any:
    return full(shape, 1, dtype)


def empty_like(a: Any, dtype: Any = None) -> Any:
    return allocate(_array(a).shape, dtype or a.dtype)


def zeros_like(a: Any, dtype: Any = None) -> Any:
    return full(_array(a).shape, 0, dtype or a.dtype)


def ones_like(a: Any, dtype: Any = None) -> Any:
    return full(_array(a).shape, 1, dtype or a.dtype)


def full_like(a: Any, fill_value: Any, dtype: Any = None) -> Any:
    return full(_array(a).shape, fill_value, dtype or a.dtype)


def arange(*args: Any, dtype: Any = None) -> Any:
    count("launches")
    return give(np.arange(*(checked_scalar(arg, np.int64) for arg in args), dtype=dtype))


def array(obj: Any, dtype: Any = None, copy: bool = True) -> Any:
    if isinstance(obj, ndarray):
        return obj.astype(dtype or obj.dtype, copy=copy)
    count("copies")
    return give(np.array(obj, dtype))


def asarray(a: Any, dtype: Any = None) -> Any:
    return array(a, dtype, copy=False)


def from_dlpack(array: Any) -> Any:
    if array.__dlpack_device__()[0] != 2:
        raise BufferError("CPU arrays cannot be directly imported to CuPy. Use `cupy.array(...)`")
    return array.__dlpack__(stream=current.stream)[...]


def ascontiguousarray(a: Any, dtype: Any = None) -> Any:
    made = asarray(a, dtype)
    return made if made.flags.c_contiguous else made.copy()


def asnumpy(a: Any) -> Any:
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def get_array_module(*args: Any) -> Any:
    import cupy

    return cupy if any(isinstance(arg, ndarray) for arg in args) else np


# ------------------------------------------------------------------------------------------ combine


def concatenate(tup: Sequence[Any], axis: int = 0, out: Any = None) -> Any:
    arrays = [_array(a) for a in tup]
    return call(lambda *hosts, **to: np.concatenate(hosts, axis, **to), *arrays, out=out)


def stack(tup: Sequence[Any], axis: int = 0) -> Any:
    return call(lambda *hosts: np.stack(hosts, axis), *(_array(a) for a in tup))


def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    if x is None:
        return _array(condition).nonzero()
    return call(np.where, _array(condition), x, y)


def matmul(x1: Any, x2: Any, out: Any = None) -> Any:
    """Count the copies that CuPy makes for cuBLAS, which takes whole matrices."""
    is_batched = max(_array(x1).ndim, _array(x2).ndim) > 2
    for operand in (x1, x2):
        is_whole = operand.flags.c_contiguous or (operand.flags.f_contiguous and not is_batched)
        if operand.size and not is_whole:
            count("copies")
    if out is not None and not out.flags.c_contiguous:
        count("copies")
    return call(np.matmul, x1, x2, out=out)


def dot(a: Any, b: Any, out: Any = None) -> Any:
    return _array(a).dot(_array(b), out)


def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    return call(np.tensordot, _array(a), _array(b), axes=axes)


def outer(a: Any, b: Any) -> Any:
    return call(np.outer, _array(a), _array(b))


def einsum(subscripts: str, *operands: Any) -> Any:
    return call(np.einsum, subscripts, *(_array(a) for a in operands))


# ---------------------------------------------------------------------------------------- rearrange


def argsort(a: Any, axis: int = -1, kind: str | None = None) -> Any:
    return _array(a).argsort(axis, kind)


def take(a: Any, indices: Any, axis: int | None = None) -> Any:
    return _array(a).take(indices, axis)


def flatnonzero(a: Any) -> Any:
    return _array(a).ravel().nonzero()[0]


def triu(m: Any, k: int = 0) -> Any:
    return call(np.triu, _array(m), k)


def tril(m: Any, k: int = 0) -> Any:
    return call(np.tril, _array(m), k)


def clip(a: Any, a_min: Any, a_max: Any, out: Any = None) -> Any:
    return call(np.clip, _array(a), a_min, a_max, out=out)


def pad(array: Any, pad_width: Any, **kwargs: Any) -> Any:
    return call(lambda host: np.pad(host, pad_width, "constant", **kwargs), _array(array))


def repeat(a: Any, repeats: int, axis: int | None = None) -> Any:
    return _array(a).repeat(repeats, axis)


def reshape(a: Any, shape: Any) -> Any:
    return _array(a).reshape(shape)


def transpose(a: Any, axes: Any = None) -> Any:
    return _array(a).transpose(axes)


def swapaxes(a: Any, axis1: int, axis2: int) -> Any:
    return _array(a).swapaxes(axis1, axis2)


def moveaxis(a: Any, source: Any, destination: Any) -> Any:
    return a._view(np.moveaxis(_array(a)._host, source, destination))


def expand_dims(a: Any, axis: Any) -> Any:
    return a._view(np.expand_dims(_array(a)._host, axis))


def broadcast_to(a: Any, shape: Any) -> Any:
    return a._view(np.broadcast_to(_array(a)._host, shape))


def may_share_memory(a: Any, b: Any) -> bool:
    if isinstance(a, ndarray) and isinstance(b, ndarray):
        return np.may_share_memory(a._host, b._host)
    return False


def array_equal(a: Any, b: Any) -> Any:
    return call(np.array_equal, _array(a), _array(b))


_FUNCTIONS: dict[str, Any] = {
    function.__name__: function
    for function in (
        empty, full, zeros, ones, empty_like, zeros_like, ones_like, full_like, arange, array,
        asarray, ascontiguousarray, asnumpy, get_array_module, concatenate, stack, where, matmul,
        dot, tensordot, outer, einsum, argsort, take, flatnonzero, triu, tril, clip, pad, repeat,
        reshape, transpose, swapaxes, moveaxis, expand_dims, broadcast_to, may_share_memory,
        array_equal, from_dlpack,
    )
}  # fmt: skip
