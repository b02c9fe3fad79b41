"""Element-wise activations, softmax, and the gated activation SwiGLU."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, chunks
from mpishard.bfloat16 import BFLOAT16, is_bfloat16, scratch, store, wide
from mpishard.contracts import LayerCategory
from mpishard.nn import passes
from mpishard.nn.layers.layer import Context, Layer, Parameters
from mpishard.nn.passes import bits, compiled

_GELU_SLOPE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


def sigmoid(x: Array, out: Array | None = None) -> Array:
    """The logistic function 1 / (1 + exp(-x)), element by element.

    Computed from exp(-abs(x)), which neither overflows nor loses small values to a sum with 1.

    Parameters
    ----------
    x : Array
        Floating, of any shape.
    out : Array, optional
        Where to write; a new array where not given. May be ``x``.
    """
    xp = array_namespace(x)
    small = xp.abs(x)
    xp.negative(small, out=small)
    xp.exp(small, out=small)
    # exp(x) / (1 + exp(x)) for x < 0, and 1 / (1 + exp(-x)) otherwise.
    numerator = xp.where(x >= 0, xp.ones((), x.dtype), small)
    small += 1.0
    return xp.divide(numerator, small, out=out)


class _Activation(Layer):
    """The part that the activations share: they keep the shape."""

    category = LayerCategory.ACTIVATION

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The input's shape."""
        return input_shape


class ReLU(_Activation):
    """Rectified linear unit, y = max(x, 0); its slope at 0 is taken as 0."""

    computes_bfloat16 = True

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Rectify; saves y, which the next layer mostly saves too."""
        if x.dtype == BFLOAT16:
            # By its bits: NumPy would convert each element to float32 and back.
            words = np.ascontiguousarray(x).view(np.uint16)
            y = np.empty_like(words)
            flat_words, flat_y = words.reshape(-1), y.reshape(-1)
            for part in chunks(flat_words):
                # Flipping the sign makes -0 to -inf, 0x8000 to 0xFF80, the smallest; NaN stays.
                keeps = (flat_words[part] ^ np.uint16(0x8000)) > np.uint16(0x7F80)
                np.multiply(flat_words[part], keeps, out=flat_y[part])
            y = y.view(x.dtype)
        else:
            y = array_namespace(x).maximum(x, 0)
        return y, y if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` where y > 0, in its place."""
        if dy.dtype == BFLOAT16:
            words = dy.view(np.int16)
            words *= saved.view(np.int16) > 0  # the sign of bfloat16 is that of its bits
        else:
            dy *= saved > 0
        return dy, None


class _SavedOutput(_Activation):
    """An activation whose slope is a function of its output, which it saves."""

    computes_bfloat16 = True

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Squash; saves y."""
        flat_x = x.reshape(-1)
        flat_y = array_namespace(x).empty_like(flat_x)
        for part in chunks(flat_x):
            y_part = scratch(flat_y[part])
            self._squash(wide(flat_x[part]), y_part)
            store(flat_y[part], y_part)
        y = flat_y.reshape(x.shape)
        return y, y if context.training else None

    @abstractmethod
    def _squash(self, x: Array, y: Array) -> None:
        """Write the output of one chunk into y."""

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` times the slope, in its place."""
        flat_dy, flat_y = dy.reshape(-1), saved.reshape(-1)
        for part in chunks(flat_dy):
            d = wide(flat_dy[part])
            d *= self._slope(wide(flat_y[part]))
            store(flat_dy[part], d)
        return flat_dy.reshape(dy.shape), None

    @abstractmethod
    def _slope(self, y: Array) -> Array:
        """Return dy/dx, given y."""


class Tanh(_SavedOutput):
    """Hyperbolic tangent, y = tanh(x), whose slope is 1 - y^2."""

    def _squash(self, x: Array, y: Array) -> None:
        array_namespace(x).tanh(x, out=y)

    def _slope(self, y: Array) -> Array:
        slope = y * y
        return array_namespace(y).subtract(1.0, slope, out=slope)


class Sigmoid(_SavedOutput):
    """Logistic function, y = 1 / (1 + exp(-x)), whose slope is y (1 - y)."""

    def _squash(self, x: Array, y: Array) -> None:
        sigmoid(x, out=y)

    def _slope(self, y: Array) -> Array:
        slope = array_namespace(y).subtract(1.0, y)
        slope *= y
        return slope


class _SavedSlope(_Activation):
    """An activation whose forward pass saves its slope, as large as the input would be."""

    computes_bfloat16 = True
    _loop: Callable[..., None] | None = None  # one of `mpishard.nn.passes`

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Activate; saves the slope dy/dx."""
        xp = array_namespace(x)
        flat_x = x.reshape(-1)
        flat_y = xp.empty_like(flat_x)
        loop = None if self._loop is None else compiled(self._loop, flat_x)
        if loop is not None:
            slope = xp.empty_like(flat_x)
            loop(bits(flat_x), bits(flat_y), bits(slope))
            return flat_y.reshape(x.shape), slope if context.training else None
        slope = xp.empty_like(flat_x) if context.training else None
        for part in chunks(flat_x):
            y_part = scratch(flat_y[part])
            slope_part = None if slope is None else scratch(slope[part])
            self._activate(wide(flat_x[part]), y_part, slope_part)
            store(flat_y[part], y_part)
            if slope is not None:
                store(slope[part], slope_part)
        return flat_y.reshape(x.shape), slope

    @abstractmethod
    def _activate(self, x: Array, y: Array, slope: Array | None) -> None:
        """Write y and, unless it is None, the slope of one chunk."""

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` times the saved slope, in its place."""
        if not is_bfloat16(dy):
            dy *= saved.reshape(dy.shape)
            return dy, None
        flat_dy, slope = dy.reshape(-1), saved.reshape(-1)
        loop = compiled(passes.scale, flat_dy)
        if loop is not None:
            loop(bits(flat_dy), bits(slope))
            return flat_dy.reshape(dy.shape), None
        for part in chunks(flat_dy):
            d = wide(flat_dy[part])
            d *= wide(slope[part])
            store(flat_dy[part], d)
        return flat_dy.reshape(dy.shape), None


class SiLU(_SavedSlope):
    """Sigmoid linear unit, y = x s(x) with the logistic function s; also called Swish.

    Elfwing, Uchibe & Doya, "Sigmoid-weighted linear units for neural network function
    approximation in reinforcement learning", 2017 (arXiv:1702.03118), eq. 8 and 9; Ramachandran,
    Zoph & Le, "Searching for activation functions", 2017 (arXiv:1710.05941).
    """

    def _activate(self, x: Array, y: Array, slope: Array | None) -> None:
        """The slope is dy/dx = s + y (1 - s)."""
        xp, s = array_namespace(x), sigmoid(x)
        xp.multiply(x, s, out=y)
        if slope is not None:
            xp.subtract(1.0, s, out=slope)
            slope *= y
            slope += s


class GELU(_SavedSlope):
    """Gaussian error linear unit, in its tanh form.

    y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): Hendrycks & Gimpel, "Gaussian error
    linear units", 2016 (arXiv:1606.08415), section 2.
    """

    _loop = staticmethod(passes.gelu)

    def _activate(self, x: Array, y: Array, slope: Array | None) -> None:
        """With h = (1 + tanh(u))/2, so that y = x h, the slope is h + 2 y (1 - h) du/dx."""
        xp = array_namespace(x)
        square = x * x
        h = square * (_GELU_SLOPE * _GELU_CUBIC)
        h += _GELU_SLOPE
        h *= x
        xp.tanh(h, out=h)
        h *= 0.5
        h += 0.5
        xp.multiply(x, h, out=y)
        if slope is not None:
            square *= 6.0 * _GELU_SLOPE * _GELU_CUBIC
            square += 2.0 * _GELU_SLOPE
            square *= y
            xp.subtract(1.0, h, out=slope)
            slope *= square
            slope += h


class Softmax(Layer):
    """Softmax over the last dim: y_v = exp(x_v) / sum_u exp(x_u).

    Bishop, "Pattern recognition and machine learning", 2006, eq. 4.62. It has no parameters. A
    classifier that is trained with `CrossEntropy` needs none: that loss takes logits.
    """

    category = LayerCategory.ACTIVATION
    computes_bfloat16 = True

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The input's shape, whose last dim must not be empty."""
        if not input_shape or input_shape[-1] == 0:
            raise ValueError(
                f"Softmax needs an input with a last dim of at least 1, got {input_shape}"
            )
        return input_shape

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Normalise the exponentials of each row, its largest element taken off; saves y."""
        xp = array_namespace(x)
        x_NV = x.reshape(-1, x.shape[-1])
        y_NV = xp.empty_like(x_NV)
        for rows in chunks(x_NV):
            x_rows, y = wide(x_NV[rows]), scratch(y_NV[rows])
            xp.subtract(x_rows, x_rows.max(axis=-1, keepdims=True), out=y)
            xp.exp(y, out=y)
            y /= y.sum(axis=-1, keepdims=True)
            store(y_NV[rows], y)
        y = y_NV.reshape(x.shape)
        return y, y if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """With the row sums of y dy: y (dy - sum), in the place of ``dy``."""
        xp = array_namespace(dy)
        y_NV = saved.reshape(-1, saved.shape[-1])
        dy_NV = dy.reshape(y_NV.shape)
        for rows in chunks(dy_NV):
            d, y = wide(dy_NV[rows]), wide(y_NV[rows])
            d -= xp.einsum("nv,nv->n", d, y)[:, None]
            d *= y
            store(dy_NV[rows], d)
        return dy_NV.reshape(dy.shape), None


class SwiGLU(Layer):
    """y = a s(a) b for x = [a | b], with the logistic function s: `SiLU` of one half as a gate.

    Between a linear layer to 2 F outputs and one from F: Shazeer, "GLU variants improve
    transformer", 2020 (arXiv:2002.05202), eq. 6.
    """

    category = LayerCategory.ACTIVATION
    computes_bfloat16 = True

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(..., 2 F) -> (..., F)."""
        if not input_shape or input_shape[-1] == 0 or input_shape[-1] % 2:
            raise ValueError(
                f"SwiGLU needs samples whose last dim is even, got sample shape {input_shape}"
            )
        return (*input_shape[:-1], input_shape[-1] // 2)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Gate x of shape (..., 2 F); saves x itself."""
        xp = array_namespace(x)
        y_NF = xp.empty((x.size // x.shape[-1], x.shape[-1] // 2), dtype=x.dtype)
        x_N2F = x.reshape(-1, x.shape[-1])
        for rows in chunks(y_NF):
            a, b = _halves(wide(x_N2F[rows]))
            y = sigmoid(a, out=scratch(y_NF[rows]))
            y *= a
            y *= b
            store(y_NF[rows], y)
        return y_NF.reshape(*x.shape[:-1], y_NF.shape[1]), x if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The gradient of x: dy b s (1 + a (1 - s)) beside dy a s."""
        xp = array_namespace(dy)
        dx = xp.empty(saved.shape, dtype=dy.dtype)
        dx_N2F, x_N2F = (array.reshape(-1, saved.shape[-1]) for array in (dx, saved))
        dy_NF = dy.reshape(-1, dy.shape[-1])
        for rows in chunks(dy_NF):
            d, dx_rows = wide(dy_NF[rows]), scratch(dx_N2F[rows])
            (a, b), (da, db) = _halves(wide(x_N2F[rows])), _halves(dx_rows)
            s = sigmoid(a)
            xp.multiply(a, s, out=db)
            xp.subtract(1.0, s, out=da)
            da *= db
            da += s
            da *= b
            da *= d
            db *= d
            store(dx_N2F[rows], dx_rows)
        return dx, None


def _halves(x_N2F: Array) -> tuple[Array, Array]:
    half = x_N2F.shape[1] // 2
    return x_N2F[:, :half], x_N2F[:, half:]
