"""Element-wise functions. None has parameters; all take and return any shape."""

from __future__ import annotations

import math
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.contracts import LayerCategory
from mpishard.nn.chunks import chunks
from mpishard.nn.layer import Context, Layer, Parameters

__all__ = ["GELU", "ReLU", "Tanh"]

_GELU_SLOPE = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


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


class GELU(_Activation):
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

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` times the saved slope, in its place."""
        dy *= saved.reshape(dy.shape)
        return dy, None
