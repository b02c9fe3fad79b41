"""The operations of a computation graph, as formulas on NumPy arrays.

They are written from the definitions, without blocks or buffers, and share no code with the layers.
If a graph and the layers compute equal results, both are therefore likely to be right.

Each operation has a rule for the shape of its output, in which None is a size that is not known
before the operation runs. Shape suffixes: B batch, T time, D width, H heads, K head size; of images
C and O channels, H rows and W columns, P rows and Q columns of windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpishard.base import Array

Shape = tuple[int | None, ...]
_Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Primitive:
    """Operation with ``compute(*arrays, **attributes)`` and ``shape(*shapes, **attributes)``."""

    compute: Callable[..., Array]
    shape: Callable[..., Shape]


PRIMITIVES: dict[str, Primitive] = {}
"""All operations by name, except "input", "constant" and "layer"."""


def _primitive(shape: Callable[..., Shape]) -> Callable[[Callable[..., Array]], None]:
    def register(compute: Callable[..., Array]) -> None:
        PRIMITIVES[compute.__name__] = Primitive(compute, shape)

    return register


def _same(first: Shape, *_: Shape, **__: object) -> Shape:
    return first


def _broadcast(a: Shape, b: Shape) -> Shape:
    # numpy.broadcast_shapes does not take None, the unknown size of a batch.
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    padded = (1,) * (len(longer) - len(shorter)) + shorter
    return tuple(n if m == 1 or m is None else m for n, m in zip(longer, padded, strict=True))


# ----------------------------------------------------------------------------------- element-wise


@_primitive(_same)
def cast(x: Array, *, dtype: str) -> Array:
    """Return x in another dtype."""
    return x.astype(dtype)


@_primitive(_broadcast)
def add(a: Array, b: Array) -> Array:
    """Return a + b, with NumPy's broadcasting."""
    return a + b


@_primitive(_same)
def relu(x: Array) -> Array:
    """Return max(x, 0)."""
    # Not np.maximum, as the layer has it: the formulas are to be independent.
    return np.where(x > 0, x, 0)


@_primitive(_same)
def tanh(x: Array) -> Array:
    """Return the hyperbolic tangent of x."""
    return np.tanh(x)


@_primitive(_same)
def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    return np.exp(-np.logaddexp(0, -x))  # logaddexp(0, -x) = log(1 + exp(-x)) does not overflow.


@_primitive(_same)
def silu(x: Array) -> Array:
    """Return x times its sigmoid (arXiv:1702.03118, eq. 8)."""
    return x * np.exp(-np.logaddexp(0, -x))


@_primitive(lambda x: (*x[:-1], None if x[-1] is None else x[-1] // 2))
def swiglu(x: Array) -> Array:
    """Return the second half of the last dim times the silu of the first (arXiv:2002.05202)."""
    gate, value = np.split(x, 2, axis=-1)
    y: Array = gate * np.exp(-np.logaddexp(0, -gate)) * value
    return y


@_primitive(_same)
def gelu(x: Array) -> Array:
    """Return x times the normal distribution function, in tanh form (arXiv:1606.08415, sec. 2)."""
    # The paper's form, which the layer rearranges to save operations.
    y: Array = x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return y


# ---------------------------------------------------------------------------- products and tables


@_primitive(lambda x, weight: (*x[:-1], weight[0]))
def matmul_transposed(x: Array, weight: Array) -> Array:
    """Return x W^T, for x of shape (..., I) and W of shape (O, I)."""
    # einsum states which dims are summed, so that this does not repeat the layer's transposes.
    y: Array = np.einsum("...i,oi->...o", x, weight, optimize=True)
    return y


@_primitive(lambda table, indices: (*indices, *table[1:]))
def take_rows(table: Array, indices: Array) -> Array:
    """Return the table's row of each index; an index outside the table is a ValueError."""
    # NumPy would take a negative index from the end of the table.
    if indices.size and not 0 <= indices.min() <= indices.max() < len(table):
        raise ValueError(f"an index is outside [0, {len(table)})")
    return table[indices]


@_primitive(lambda table, x: (x[1], *table[1:]))
def first_rows(table: Array, x: Array) -> Array:
    """Return the first T rows of the table, for x of shape (B, T, ...)."""
    return table[: x.shape[1]]


# ------------------------------------------------------------------------------- over the last dim


@_primitive(_same)
def layer_norm(x: Array, weight: Array, bias: Array, *, epsilon: float) -> Array:
    """Return (x - mean) / sqrt(variance + epsilon), scaled, shifted (arXiv:1607.06450, eq. 4)."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    y: Array = weight * centred / np.sqrt(variance + epsilon) + bias
    return y


@_primitive(_same)
def rms_norm(x: Array, weight: Array, *, epsilon: float) -> Array:
    """Return x / sqrt(mean of x^2 + epsilon), scaled (arXiv:1910.07467, eq. 4)."""
    y: Array = weight * x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon)
    return y


@_primitive(_same)
def zero_columns(x: Array, *, columns: tuple[int, ...]) -> Array:
    """Return x with 0 in the given elements of the last dim, even in place of NaN."""
    # Not a product with 0, which keeps NaN and infinity.
    return np.where(np.isin(np.arange(x.shape[-1]), columns), 0, x)


@_primitive(_same)
def softmax(x: Array) -> Array:
    """Return exp(x) / (sum of exp(x)), computed after the maximum is subtracted from x."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    y: Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return y


# -------------------------------------------------------------------------------------- attention


@_primitive(lambda x, *, heads, kv_heads, **_: (x[0], heads, x[1], x[2] // (heads + 2 * kv_heads)))
def split_heads(x: Array, *, heads: int, kv_heads: int, part: int) -> Array:
    """Return the queries, keys or values (part 0, 1 or 2) of x = [q | k | v], shape (B, H, T, K).

    A head of keys and values that several heads of queries share is repeated for each of them.
    """
    batch, length, width = x.shape
    size = width // (heads + 2 * kv_heads)
    start = (0, heads, heads + kv_heads)[part] * size
    count = heads if part == 0 else kv_heads
    own = x[..., start : start + count * size].reshape(batch, length, count, size)
    return np.moveaxis(np.repeat(own, heads // count, axis=2), 1, 2)


@_primitive(lambda q, k: (*q[:-1], k[-2]))
def scores(q: Array, k: Array) -> Array:
    """Return the product of each query and key, divided by sqrt(K)."""
    y: Array = np.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1])
    return y


@_primitive(lambda q, k: (*q[:-1], k[-2]))
def causal_scores(q: Array, k: Array) -> Array:
    """Return the product of each query and key over sqrt(K), -infinity for keys after the query."""
    scores: Array = np.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1])
    later = np.arange(k.shape[2])[None, :] > np.arange(q.shape[2])[:, None]
    scores[..., later] = -np.inf
    return scores


@_primitive(lambda weights, v: (*weights[:-1], v[-1]))
def weighted_sum(weights: Array, v: Array) -> Array:
    """Return the weighted sum of the values for each query."""
    y: Array = np.einsum("bhts,bhsk->bhtk", weights, v)
    return y


@_primitive(lambda y: (y[0], y[2], y[1] * y[3]))
def merge_heads(y: Array) -> Array:
    """Reshape (B, H, T, K) to (B, T, H K)."""
    batch, heads, length, size = y.shape
    return np.moveaxis(y, 1, 2).reshape(batch, length, heads * size)


# ----------------------------------------------------------------------------------------- images


def _flat(x: Shape) -> Shape:
    # One unknown dim makes the product unknown.
    sizes = [size for size in x[1:] if size is not None]
    return (x[0], math.prod(sizes) if len(sizes) == len(x) - 1 else None)


@_primitive(_flat)
def flatten(x: Array) -> Array:
    """Reshape (B, ...) to (B, product of the rest)."""
    return x.reshape(x.shape[0], math.prod(x.shape[1:]))


def _window_counts(
    sizes: Shape, kernel: _Pair, stride: _Pair, padding: _Pair = (0, 0)
) -> tuple[int | None, ...]:
    return tuple(
        None if n is None else (n + 2 * pad - size) // step + 1
        for n, size, step, pad in zip(sizes, kernel, stride, padding, strict=True)
    )


def _windows(x: Array, kernel: _Pair, stride: _Pair) -> Array:
    """Return a view of all windows of x_BCHW, shape (B, C, P, Q, rows, columns)."""
    views = np.lib.stride_tricks.sliding_window_view(x, kernel, axis=(2, 3))
    return views[:, :, :: stride[0], :: stride[1]]


@_primitive(
    lambda x, w, *, stride, padding: (x[0], w[0], *_window_counts(x[2:], w[2:], stride, padding))
)
def convolve(x: Array, weight: Array, *, stride: _Pair, padding: _Pair) -> Array:
    """Return the cross-correlation of x_BCHW with kernels of shape (O, C, rows, columns)."""
    (top, left), pads = padding, ((0, 0), (0, 0))
    padded = np.pad(x, (*pads, (top, top), (left, left)))
    windows = _windows(padded, weight.shape[2:], stride)
    y: Array = np.einsum("bcpqij,ocij->bopq", windows, weight, optimize=True)
    return y


@_primitive(lambda x, bias: x)
def add_by_channel(x: Array, bias: Array) -> Array:
    """Add one number per channel to x of shape (B, C, ...)."""
    return x + bias.reshape(-1, *(1,) * (x.ndim - 2))


@_primitive(lambda x, *, kernel, stride: (*x[:2], *_window_counts(x[2:], kernel, stride)))
def max_pool(x: Array, *, kernel: _Pair, stride: _Pair) -> Array:
    """Return the maximum of each window of x_BCHW."""
    y: Array = _windows(x, kernel, stride).max(axis=(-2, -1))
    return y
