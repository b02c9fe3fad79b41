"""Element-wise functions. None has parameters; all take and return any shape."""

from __future__ import annotations

import math
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.contracts import LayerCategory
from mpishard.nn.chunks import chunks
from mpishard.nn.layer import Context, Layer, Parameters

__all__ = ["GELU", "ReLU", "SiLU", "Sigmoid", "Tanh", "sigmoid"]

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
    numerator = xp.where(x >= 0, xp.ones((), x.dtype), small)
    small += 1.0
    return xp.divide(numerator, small, out=out)


class _Activation(Layer):
    """What the activations share: the shape stays."""

    category = LayerCategory.ACTIVATION

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The input's shape."""
        return input_shape


class ReLU(_Activation):
    """Rectified linear unit, y = max(x, 0); its slope at 0 is taken as 0."""

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Rectify; saves y, which the next layer mostly saves too."""
        y = array_namespace(x).maximum(x, 0)
        return y, y if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` where y > 0, in its place."""
        dy *= saved > 0
        return dy, None


class Tanh(_Activation):
    """Hyperbolic tangent, y = tanh(x)."""

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Squash; saves y."""
        y = array_namespace(x).tanh(x)
        return y, y if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` * (1 - y^2), in its place."""
        xp = array_namespace(dy)
        flat_dy, flat_y = dy.reshape(-1), saved.reshape(-1)
        for part in chunks(flat_dy):
            slope = flat_y[part] * flat_y[part]
            xp.subtract(1.0, slope, out=slope)
            flat_dy[part] *= slope
        return flat_dy.reshape(dy.shape), None


class Sigmoid(_Activation):
    """Logistic function, y = 1 / (1 + exp(-x))."""

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Squash; saves y."""
        flat_x = x.reshape(-1)
        flat_y = array_namespace(x).empty_like(flat_x)
        for part in chunks(flat_x):
            sigmoid(flat_x[part], out=flat_y[part])
        y = flat_y.reshape(x.shape)
        return y, y if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` * y (1 - y), in its place."""
        xp = array_namespace(dy)
        flat_dy, flat_y = dy.reshape(-1), saved.reshape(-1)
        for part in chunks(flat_dy):
            slope = xp.subtract(1.0, flat_y[part])
            slope *= flat_y[part]
            flat_dy[part] *= slope
        return flat_dy.reshape(dy.shape), None


class _SavedSlope(_Activation):
    """An activation whose forward pass saves its slope, as large as the input would be."""

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` times the saved slope, in its place."""
        dy *= saved.reshape(dy.shape)
        return dy, None


class SiLU(_SavedSlope):
    """Sigmoid linear unit, y = x s(x) with the logistic function s; also called Swish.

    Elfwing, Uchibe & Doya, "Sigmoid-weighted linear units for neural network function
    approximation in reinforcement learning", 2017 (arXiv:1702.03118), eq. 8 and 9; Ramachandran,
    Zoph & Le, "Searching for activation functions", 2017 (arXiv:1710.05941).
    """

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Activate; saves the slope dy/dx = s + y (1 - s)."""
        xp = array_namespace(x)
        flat_x = x.reshape(-1)
        flat_y = xp.empty_like(flat_x)
        slope = xp.empty_like(flat_x) if context.training else None
        for part in chunks(flat_x):
            s, y_part = sigmoid(flat_x[part]), flat_y[part]
            xp.multiply(flat_x[part], s, out=y_part)
            if slope is not None:
                slope_part = slope[part]
                xp.subtract(1.0, s, out=slope_part)
                slope_part *= y_part
                slope_part += s
        return flat_y.reshape(x.shape), slope


class GELU(_SavedSlope):
    """Gaussian error linear unit, in its tanh form.

    y = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): Hendrycks & Gimpel, "Gaussian error
    linear units", 2016 (arXiv:1606.08415), section 2.
    """

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Activate; saves the slope dy/dx, which costs no more memory than x would.

        With h = (1 + tanh(u))/2, so that y = x h, the slope is h + 2 y (1 - h) du/dx.
        """
        xp = array_namespace(x)
        flat_x = x.reshape(-1)
        flat_y = xp.empty_like(flat_x)
        slope = xp.empty_like(flat_x) if context.training else None
        for part in chunks(flat_x):
            x_part, y_part = flat_x[part], flat_y[part]
            square = x_part * x_part
            h = square * (_GELU_SLOPE * _GELU_CUBIC)
            h += _GELU_SLOPE
            h *= x_part
            xp.tanh(h, out=h)
            h *= 0.5
            h += 0.5
            xp.multiply(x_part, h, out=y_part)
            if slope is not None:
                square *= 6.0 * _GELU_SLOPE * _GELU_CUBIC
                square += 2.0 * _GELU_SLOPE
                square *= y_part
                slope_part = slope[part]
                xp.subtract(1.0, h, out=slope_part)
                slope_part *= square
                slope_part += h
        return flat_y.reshape(x.shape), slope
