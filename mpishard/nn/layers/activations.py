"""Element-wise activations, softmax, and the gated activation SwiGLU."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import numpy as np

from mpishard.base import (
    BFLOAT16,
    NAMESPACES,
    Array,
    DType,
    chunks,
    is_bfloat16,
    is_device_array,
    scratch,
    store,
    wide,
)
from mpishard.contracts import LayerCategory, Saved
from mpishard.nn import device_passes, passes
from mpishard.nn.layers.layer import Context, Layer, Parameters, SavedActivations
from mpishard.nn.passes import bits, compiled

_GELU_SLOPE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


def sigmoid(x: Array, out: Array | None = None) -> Array:
    """Return the logistic function 1 / (1 + exp(-x)) of each element.

    It is computed from exp(-abs(x)), which does not overflow and keeps the digits of small results.

    Parameters
    ----------
    x : Array
        Floating-point array of any shape.
    out : Array, optional
        Array for the result, which may be ``x``. If not given, a new array is made.
    """
    xp = NAMESPACES[type(x)]
    # exp(-x) itself overflows for large negative x.
    small = xp.abs(x)
    xp.negative(small, out=small)
    xp.exp(small, out=small)
    # exp(x) / (1 + exp(x)) for x < 0, and 1 / (1 + exp(-x)) otherwise.
    numerator = xp.where(x >= 0, xp.ones((), x.dtype), small)
    small += 1.0
    return xp.divide(numerator, small, out=out)


class _Activation(Layer):
    """Base of the element-wise activations, whose output has the shape of their input."""

    category = LayerCategory.ACTIVATION

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape."""
        return input_shape


class ReLU(_Activation):
    """Rectified linear unit, y = max(x, 0), whose slope at 0 is taken as 0."""

    computes_bfloat16 = True

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the output."""
        return SavedActivations(keeps_output=True)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Return max(x, 0) and save it.

        The next layer usually saves the same array, so that this costs no memory.
        """
        if x.dtype == BFLOAT16:
            # Bits are compared as integers, because NumPy would convert each element to float32.
            words = np.ascontiguousarray(x).view(np.uint16)
            y = np.empty_like(words)
            flat_words, flat_y = words.reshape(-1), y.reshape(-1)
            for part in chunks(flat_words):
                # With the sign flipped, the words of -0 to -inf are 0x0000 to 0x7F80. All larger
                # words are kept: positive numbers, +0, and NaN of either sign.
                keeps = (flat_words[part] ^ np.uint16(0x8000)) > np.uint16(0x7F80)
                np.multiply(flat_words[part], keeps, out=flat_y[part])
            y = y.view(x.dtype)
        elif is_device_array(x):
            y = device_passes.activation("relu", _contiguous(x))
        else:
            y = np.maximum(x, 0)
        return y, y if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Set ``dy`` to 0 in place unless y > 0."""
        if dy.dtype == BFLOAT16:
            words = dy.view(np.int16)
            words *= saved.view(np.int16) > 0  # The sign of bfloat16 is also that of the integer.
        elif is_device_array(dy):
            return _backward_on_device("relu", saved, dy), None
        else:
            dy *= saved > 0
        return dy, None


class _SavedOutput(_Activation):
    """Base of activations whose slope is a function of the output, which they save."""

    computes_bfloat16 = True
    _name: str  # of the kernels in `mpishard.nn.device_passes`

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the output."""
        return SavedActivations(keeps_output=True)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Return y, in chunks that fit the cache, and save it."""
        if is_device_array(x):
            y = device_passes.activation(self._name, _contiguous(x))
            return y, y if context.training else None
        flat_x = x.reshape(-1)
        flat_y = NAMESPACES[type(x)].empty_like(flat_x)
        for part in chunks(flat_x):
            y_part = scratch(flat_y[part])
            self._squash(wide(flat_x[part]), y_part)
            store(flat_y[part], y_part)
        y = flat_y.reshape(x.shape)
        return y, y if context.training else None

    @abstractmethod
    def _squash(self, x: Array, y: Array) -> None:
        """Write the output of one chunk to y."""

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Multiply ``dy`` by the slope in place."""
        if is_device_array(dy):
            return _backward_on_device(self._name, saved, dy), None
        flat_dy, flat_y = dy.reshape(-1), saved.reshape(-1)
        for part in chunks(flat_dy):
            d = wide(flat_dy[part])
            d *= self._slope(wide(flat_y[part]))
            store(flat_dy[part], d)
        return flat_dy.reshape(dy.shape), None

    @abstractmethod
    def _slope(self, y: Array) -> Array:
        """Return dy/dx as a new array, given y."""


class Tanh(_SavedOutput):
    """Hyperbolic tangent, y = tanh(x), whose slope is 1 - y^2."""

    _name = "tanh"

    def _squash(self, x: Array, y: Array) -> None:
        NAMESPACES[type(x)].tanh(x, out=y)

    def _slope(self, y: Array) -> Array:
        slope = y * y
        return NAMESPACES[type(y)].subtract(1.0, slope, out=slope)


class Sigmoid(_SavedOutput):
    """Logistic function, y = 1 / (1 + exp(-x)), whose slope is y (1 - y)."""

    _name = "sigmoid"

    def _squash(self, x: Array, y: Array) -> None:
        sigmoid(x, out=y)

    def _slope(self, y: Array) -> Array:
        slope = NAMESPACES[type(y)].subtract(1.0, y)
        slope *= y
        return slope


class _SavedSlope(_Activation):
    """Base of activations whose forward pass saves the slope, an array of the input's size."""

    computes_bfloat16 = True
    _name: str  # of the kernel in `mpishard.nn.device_passes`
    _loop: Callable[..., None] | None = None  # Loop of `mpishard.nn.passes` for numba, if any.

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the slope."""
        return SavedActivations(math.prod(input_shape) * dtype.itemsize)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Return y and save the slope dy/dx."""
        if is_device_array(x):
            return device_passes.activation_with_slope(
                self._name, _contiguous(x), needs_slope=context.training
            )
        xp = NAMESPACES[type(x)]
        flat_x = x.reshape(-1)
        flat_y = xp.empty_like(flat_x)
        # The loop makes output and slope in one pass; NumPy makes a pass for each operation, chunk
        # by chunk.
        loop = None if self._loop is None else compiled(self._loop, flat_x)
        slope: Array | None = None
        if loop is not None:
            # The compiled loop always writes a slope: a variant without it would be compiled anew.
            slope = xp.empty_like(flat_x)
            loop(bits(flat_x), bits(flat_y), bits(slope))
            return flat_y.reshape(x.shape), slope if context.training else None
        if context.training:
            slope = xp.empty_like(flat_x)
        for part in chunks(flat_x):
            y_part = scratch(flat_y[part])
            slope_part = None if slope is None else scratch(slope[part])
            self._activate(wide(flat_x[part]), y_part, slope_part)
            store(flat_y[part], y_part)
            if slope is not None and slope_part is not None:
                store(slope[part], slope_part)
        return flat_y.reshape(x.shape), slope

    @abstractmethod
    def _activate(self, x: Array, y: Array, slope: Array | None) -> None:
        """Write the output of one chunk to y, and its slope to ``slope`` unless that is None."""

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Multiply ``dy`` by the saved slope in place."""
        # One multiplication is bound by memory, and gains nothing from chunks.
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

    _name = "silu"

    def _activate(self, x: Array, y: Array, slope: Array | None) -> None:
        """Write y, and the slope dy/dx = s + y (1 - s)."""
        xp, s = NAMESPACES[type(x)], sigmoid(x)
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

    _name = "gelu"
    _loop = staticmethod(passes.gelu)

    def _activate(self, x: Array, y: Array, slope: Array | None) -> None:
        """Write y = x h with h = (1 + tanh(u)) / 2, and the slope h + 2 y (1 - h) du/dx."""
        xp = NAMESPACES[type(x)]
        square = x * x
        h = square * (_GELU_SLOPE * _GELU_CUBIC)
        h += _GELU_SLOPE
        h *= x
        # In place, because a new array for each operation would push the chunk out of the cache.
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

    Bishop, "Pattern recognition and machine learning", 2006, eq. 4.62. It has no parameters.
    Classifiers that are trained with `CrossEntropy` need no `Softmax`: that loss takes logits.
    """

    category = LayerCategory.ACTIVATION
    computes_bfloat16 = True

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape, whose last dim must be at least 1."""
        if not input_shape or input_shape[-1] == 0:
            raise ValueError(
                f"Softmax needs an input with a last dim of at least 1, got {input_shape}"
            )
        return input_shape

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the output."""
        return SavedActivations(keeps_output=True)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Return and save y. exp cannot overflow, as each row's maximum is subtracted first."""
        xp = NAMESPACES[type(x)]
        if xp is not np:
            x = _contiguous(x)
            y = xp.empty_like(x)
            device_passes.softmax(x, y)
            return y, y if context.training else None
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

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Overwrite ``dy`` with the input's gradient y_v (dy_v - sum_u y_u dy_u)."""
        y_NV = saved.reshape(-1, saved.shape[-1])
        if is_device_array(dy):
            dy = _contiguous(dy)
            device_passes.softmax_gradient(dy.reshape(y_NV.shape), y_NV)
            return dy, None
        dy_NV = dy.reshape(y_NV.shape)
        for rows in chunks(dy_NV):
            d, y = wide(dy_NV[rows]), wide(y_NV[rows])
            d -= np.einsum("nv,nv->n", d, y)[:, None]
            d *= y
            store(dy_NV[rows], d)
        return dy_NV.reshape(dy.shape), None


class SwiGLU(Layer):
    """Gated activation y = a s(a) b for x = [a | b], with the logistic function s.

    `SiLU` of the first half is the gate of the second. The layer stands between a linear layer with
    2 F outputs and one with F inputs: Shazeer, "GLU variants improve transformer", 2020
    (arXiv:2002.05202), eq. 6.
    """

    category = LayerCategory.ACTIVATION
    computes_bfloat16 = True

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (..., F) for the shape (..., 2 F)."""
        if not input_shape or input_shape[-1] == 0 or input_shape[-1] % 2:
            raise ValueError(
                f"SwiGLU needs samples whose last dim is even, got sample shape {input_shape}"
            )
        return (*input_shape[:-1], input_shape[-1] // 2)

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the input."""
        return SavedActivations(keeps_input=True)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Map x of shape (..., 2 F) to y of shape (..., F), and save x itself."""
        if is_device_array(x):
            y_NF = device_passes.swiglu(_contiguous(x).reshape(-1, x.shape[-1]))
            return y_NF.reshape(*x.shape[:-1], y_NF.shape[1]), x if context.training else None
        y_NF = np.empty((x.size // x.shape[-1], x.shape[-1] // 2), dtype=x.dtype)
        x_N2F = x.reshape(-1, x.shape[-1])
        for rows in chunks(y_NF):
            a, b = _halves(wide(x_N2F[rows]))
            y = sigmoid(a, out=scratch(y_NF[rows]))
            y *= a
            y *= b
            store(y_NF[rows], y)
        return y_NF.reshape(*x.shape[:-1], y_NF.shape[1]), x if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the gradient [dy b s (1 + a (1 - s)) | dy a s] of x = [a | b]."""
        if is_device_array(dy):
            dx_N2F = device_passes.swiglu_backward(
                _contiguous(saved).reshape(-1, saved.shape[-1]),
                _contiguous(dy).reshape(-1, dy.shape[-1]),
            )
            return dx_N2F.reshape(saved.shape), None
        # A new array, because the gradient is twice as large as dy.
        dx = np.empty(saved.shape, dtype=dy.dtype)
        dx_N2F, x_N2F = (array.reshape(-1, saved.shape[-1]) for array in (dx, saved))
        dy_NF = dy.reshape(-1, dy.shape[-1])
        for rows in chunks(dy_NF):
            d, dx_rows = wide(dy_NF[rows]), scratch(dx_N2F[rows])
            (a, b), (da, db) = _halves(wide(x_N2F[rows])), _halves(dx_rows)
            s = sigmoid(a)
            # db holds the gate a s, and da the slope, until both are multiplied by dy.
            np.multiply(a, s, out=db)
            np.subtract(1.0, s, out=da)
            da *= db
            da += s
            da *= b
            da *= d
            db *= d
            store(dx_N2F[rows], dx_rows)
        return dx, None


def _contiguous(x: Array) -> Array:
    """Return an array on a GPU itself if it is C-contiguous, otherwise a copy."""
    return NAMESPACES[type(x)].ascontiguousarray(x)


def _backward_on_device(name: str, y: Array, dy: Array) -> Array:
    """Return dy times the slope of an activation whose output is y, in place if possible."""
    dy = _contiguous(dy)
    device_passes.activation_backward(name, dy, y)
    return dy


def _halves(x_N2F: Array) -> tuple[Array, Array]:
    half = x_N2F.shape[1] // 2
    return x_N2F[:, :half], x_N2F[:, half:]
