"""Loops over float32 and bfloat16 activations, which numba compiles.

With NumPy a pass is a chain of operations. Each reads and writes a chunk, and bfloat16 is widened
before it and rounded after it, which takes half of a GPT's time outside its products. A loop reads
each element once, computes in float32, and rounds once when it writes. Layers do without these
loops in float64, on a GPU, and if numba is not installed: see `compiled`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.base import (
    BFLOAT16,
    NAMESPACES,
    Array,
    DType,
    chunks,
    compile_loop,
    is_bfloat16,
    numba_module,
    round_into,
    widened,
)

_F = np.float32
_DTYPES = (np.dtype(np.float32), BFLOAT16)
_LOG2_E, _LN_2 = _F(math.log2(math.e)), _F(math.log(2.0))
_SLOPE = _F(math.sqrt(2.0 / math.pi))
_CUBIC = _F(math.sqrt(2.0 / math.pi) * 0.044715)
_ZERO, _HALF, _ONE, _TWO, _SIX = _F(0.0), _F(0.5), _F(1.0), _F(2.0), _F(6.0)
_LEAST, _MOST = _F(-126.0), _F(127.0)  # Range of the exponents of normal float32 numbers.
# Coefficients of the series of exp(r). For abs(r) <= ln(2) / 2 float32 cannot show later terms.
_C2, _C3, _C4, _C5, _C6 = _F(1 / 2), _F(1 / 6), _F(1 / 24), _F(1 / 120), _F(1 / 720)

_lock = threading.Lock()
# Keys are the loop's name and the dtype's character, which NumPy returns without making an object.
_compiled: dict[tuple[str, str], Callable[..., None] | None] = {}


def compiled(loop: Callable[..., None], like: Array) -> Callable[..., None] | None:
    """Return ``loop``, compiled for the dtype of ``like``, or None if NumPy or CuPy must compute.

    The compiled function takes C-contiguous arrays, and bfloat16 arrays as `bits`. The result is
    None if ``like`` is not C-contiguous.
    """
    if type(like) is not np.ndarray or not like.flags.c_contiguous:
        return None
    key = loop.__name__, like.dtype.char
    if key not in _compiled:  # Every pass calls this, so that only the first takes the lock.
        with _lock:  # Thread-ranks arrive at the same time, and only one of them compiles.
            if key not in _compiled:
                _compiled[key] = _compile(loop, like.dtype)
    return _compiled[key]


def bits(array: Array) -> Array:
    """Return ``array``, or its bits as uint16 if it is bfloat16, a dtype that numba lacks."""
    return array.view(np.uint16) if array.dtype == BFLOAT16 else array


def _compile(loop: Callable[..., None], dtype: DType) -> Callable[..., None] | None:
    numba = numba_module()
    if numba is None or dtype not in _DTYPES:
        return None
    # One text of a loop serves both dtypes: it is compiled with one load and store or the other.
    is_narrow = dtype == BFLOAT16
    read, write = (_load_bits, _store_bits) if is_narrow else (_load, _store)
    inner = {"exp": numba.njit(_exp), "load": numba.njit(read), "store": numba.njit(write)}
    kinds = {"narrow": numba.uint16 if is_narrow else numba.float32, "wide": numba.float32}
    arguments = []
    for kind in _SIGNATURES[loop.__name__].split():
        if kind in ("float", "int"):
            arguments.append(numba.float32 if kind == "float" else numba.int64)
        else:
            name, dims = kind.rstrip("=")[:-1], int(kind.rstrip("=")[-1])
            is_read = not kind.endswith("=")
            arguments.append(numba.types.Array(kinds[name], dims, "C", readonly=is_read))
    variant = "bfloat16" if is_narrow else "float32"
    # Sums in lanes, because a sum in order cannot be vectorized.
    return compile_loop(loop, numba.void(*arguments), variant, sums_in_lanes=True, **inner)


# ---------------------------------------------------------------- one element, inside the loops


def _load(array: Array, i: int | tuple[int, int]) -> Any:
    return array[i]


def _store(array: Array, i: int | tuple[int, int], value: Any) -> None:
    array[i] = value


def _load_bits(array: Array, i: int | tuple[int, int]) -> Any:
    return np.uint32(np.uint32(array[i]) << np.uint32(16)).view(np.float32)


def _store_bits(array: Array, i: int | tuple[int, int], value: Any) -> None:
    """Round to the nearest bfloat16, ties to even, with the bits of `bfloat16.round_into`."""
    word = np.float32(value).view(np.uint32)
    # np.uint32 around each result: numba would widen it to 64 bits, and halve the lanes.
    even = np.uint32(np.uint32(word >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(word + np.uint32(0x7FFF)) + even)
    quiet = np.uint32(np.uint32(word & np.uint32(0x80000000)) | np.uint32(0x7FC00000))
    is_nan = (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    array[i] = np.uint16(np.uint32(quiet if is_nan else rounded) >> np.uint32(16))


def _exp(x: Any) -> Any:
    """Return exp(x) = 2^n exp(r), with an error of 2 units in the last place; NaN stays NaN."""
    # A polynomial, because a call of the C library's expf keeps LLVM from vectorizing a loop.
    power = x * _LOG2_E
    power = _LEAST if power < _LEAST else power  # noqa: FURB136 - max would lose NaN
    power = _MOST if power > _MOST else power  # noqa: FURB136
    n = np.floor(power + _HALF)
    r = (power - n) * _LN_2
    series = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r * r + r + _ONE
    return series * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


load, store, exp = _load, _store, _exp  # `compile_loop` replaces these by compiled functions.

_SIGNATURES = {
    "add": "narrow1= narrow1",
    "gelu": "narrow1 narrow1= narrow1=",
    "scale": "narrow1= narrow1",
    "norm_forward": "narrow2 wide1 wide1 float narrow2= narrow2= wide1=",
    "norm_backward": "narrow2= narrow2 wide1 wide1 wide1= wide1=",
    "softmax_forward": "wide2= narrow2= wide1= float int int",
    "softmax_backward": "wide2= wide2= narrow2= narrow2= wide1 float int int",
}
"""Types of the arguments of each loop.

``narrow2=`` is a 2-D array of the layer's dtype (``wide2=``: of float32), which is written. Without
``=`` it is only read.
"""


# ------------------------------------------------------------------------------------ the loops


def add(d: Array, other: Array) -> None:
    """Add ``other`` to d in place; if ``other`` is one row, to each row of d."""
    width = other.size
    for n in range(d.size // width):  # LLVM does not vectorize a range with a step.
        for i in range(width):
            store(d, n * width + i, load(d, n * width + i) + load(other, i))


def gelu(x: Array, y: Array, slope: Array) -> None:
    """Write y, the GELU of x in its tanh form, and the slope dy/dx, as `mpishard.nn.GELU` does."""
    for i in range(x.size):
        value = load(x, i)
        square = value * value
        u = value * (_SLOPE + _CUBIC * square)
        # The logistic function of 2 u, which is (1 + tanh(u)) / 2.
        small = exp(-_TWO * abs(u))
        h = _ONE / (_ONE + small)
        h = small * h if u < _ZERO else h
        result = value * h
        store(y, i, result)
        store(slope, i, h + result * (_ONE - h) * (_TWO * _SLOPE + _SIX * _CUBIC * square))


def scale(d: Array, factors: Array) -> None:
    """Multiply d by the factors in place."""
    for i in range(d.size):
        store(d, i, load(d, i) * load(factors, i))


def norm_forward(
    x: Array, weight: Array, bias: Array, epsilon: float, y: Array, h: Array, inverse: Array
) -> None:
    """Write the layer norm y, the normalised input h, and 1 / standard deviation of each row."""
    rows, width = x.shape
    for n in range(rows):
        total = _ZERO
        for i in range(width):
            total += load(x, (n, i))
        mean = total / _F(width)
        squares = _ZERO
        for i in range(width):
            apart = load(x, (n, i)) - mean
            squares += apart * apart
        factor = _ONE / np.sqrt(squares / _F(width) + epsilon)
        inverse[n] = factor
        for i in range(width):
            normal = (load(x, (n, i)) - mean) * factor
            store(h, (n, i), normal)
            store(y, (n, i), normal * weight[i] + bias[i])


def norm_backward(
    d: Array, h: Array, weight: Array, inverse: Array, dweight: Array, dbias: Array
) -> None:
    """Overwrite d with the input's gradient, and add the gradients of weight and bias."""
    rows, width = d.shape
    for n in range(rows):
        mean_d = mean_dh = _ZERO
        for i in range(width):
            part = load(d, (n, i)) * weight[i]
            mean_d += part
            mean_dh += part * load(h, (n, i))
        mean_d /= _F(width)
        mean_dh /= _F(width)
        # Two loops, because each writes one array only: see `softmax_backward`.
        for i in range(width):
            dweight[i] += load(d, (n, i)) * load(h, (n, i))
        for i in range(width):
            dbias[i] += load(d, (n, i))
        for i in range(width):
            part = load(d, (n, i)) * weight[i]
            store(d, (n, i), (part - mean_d - load(h, (n, i)) * mean_dh) * inverse[n])


def softmax_forward(
    scores: Array, weights: Array, logs: Array, factor: Any, first: Any, queries: Any
) -> None:
    """Write the softmax of factor * scores over the keys that each row sees, and 0 for the others.

    Row n sees ``first + n % queries + 1`` keys, or all keys if ``queries`` is 0. On entry ``logs``
    has the number to subtract from each row; on return the log of the row's denominator.
    """
    rows, keys = scores.shape
    for n in range(rows):
        seen = keys if queries == 0 else first + n % queries + 1
        total = _ZERO
        shift = logs[n]
        for i in range(seen):
            value = exp(factor * scores[n, i] - shift)
            # Kept in float32 until the division, so that bfloat16 is rounded only once.
            scores[n, i] = value
            total += value
        inverse = _ONE / total
        for i in range(seen):
            store(weights, (n, i), scores[n, i] * inverse)
        for i in range(seen, keys):
            store(weights, (n, i), _ZERO)
        logs[n] = shift + np.log(total)


def softmax_backward(
    scores: Array,
    dweights: Array,
    weights: Array,
    dscores: Array,
    logs: Array,
    factor: Any,
    first: Any,
    queries: Any,
) -> None:
    """Write the softmax w of factor * scores, and the gradient of the scores.

    The gradient is factor * w * (dweights - sum over the row's keys of w * dweights). ``logs`` is
    as `softmax_forward` leaves it; ``scores`` is overwritten.
    """
    rows, keys = scores.shape
    for n in range(rows):
        seen = keys if queries == 0 else first + n % queries + 1
        log, mean = logs[n], _ZERO
        # Each loop writes one array. LLVM vectorizes it after a test at run time that arrays do not
        # overlap, and gives up if a loop has too many of them.
        for i in range(seen):
            scores[n, i] = exp(factor * scores[n, i] - log)
        for i in range(seen):
            mean += scores[n, i] * dweights[n, i]
        for i in range(seen):
            store(weights, (n, i), scores[n, i])
        for i in range(seen):
            store(dscores, (n, i), scores[n, i] * (dweights[n, i] - mean) * factor)
        for i in range(seen, keys):
            store(weights, (n, i), _ZERO)
            store(dscores, (n, i), _ZERO)


# ------------------------------------------------------------------------- sums of activations


def added(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a + b``; bfloat16 arrays are added in float32, and rounded once.

    Parameters
    ----------
    a, b : Array
        Arrays of one dtype. ``b`` has the shape of ``a``, or of its last dims.
    out : Array, optional
        Array for the result, which may be ``a``. If not given, a new array is made.
    """
    if not is_bfloat16(a):
        return NAMESPACES[type(a)].add(a, b, out=out)
    loop = compiled(add, a) if a.size and (out is None or out is a) else None
    if loop is not None:
        # The loop adds in place.
        total = a.copy() if out is None else a
        loop(bits(total.reshape(-1)), bits(b.reshape(-1)))
        return total
    total = np.empty(a.shape, a.dtype) if out is None else out
    is_row = b.size != a.size  # Then b is added to each row of a.
    shape = (-1, b.size) if is_row else -1
    flat_a, flat_b, flat_total = a.reshape(shape), b.reshape(-1), total.reshape(shape)
    for part in chunks(flat_a):
        values = widened(flat_a[part])
        values += widened(flat_b if is_row else flat_b[part])
        round_into(flat_total[part], values)
    return total
