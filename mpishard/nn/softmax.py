"""Softmax as a layer."""

from __future__ import annotations

from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.contracts import LayerCategory
from mpishard.nn.chunks import chunks
from mpishard.nn.layer import Context, Layer, Parameters

__all__ = ["Softmax"]


class Softmax(Layer):
    """Softmax over the last dim: y_v = exp(x_v) / sum_u exp(x_u).

    Bishop, "Pattern recognition and machine learning", 2006, eq. 4.62. It has no parameters. A
    classifier that is trained with `CrossEntropy` needs none: that loss takes logits.
    """

    category = LayerCategory.ACTIVATION

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The input's shape, of which the last dim must not be empty."""
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
            y = y_NV[rows]
            xp.subtract(x_NV[rows], x_NV[rows].max(axis=-1, keepdims=True), out=y)
            xp.exp(y, out=y)
            y /= y.sum(axis=-1, keepdims=True)
        y = y_NV.reshape(x.shape)
        return y, y if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """With the row sums of y dy: y (dy - sum), in the place of ``dy``."""
        xp = array_namespace(dy)
        y_NV = saved.reshape(-1, saved.shape[-1])
        dy_NV = dy.reshape(y_NV.shape)
        for rows in chunks(dy_NV):
            d = dy_NV[rows]
            d -= xp.einsum("nv,nv->n", d, y_NV[rows])[:, None]
            d *= y_NV[rows]
        return dy_NV.reshape(dy.shape), None
