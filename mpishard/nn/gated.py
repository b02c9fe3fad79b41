"""Gated activations, which halve the last dim.

Shape suffixes: N all leading dims taken together, F outputs.
"""

from __future__ import annotations

from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.contracts import LayerCategory
from mpishard.nn.activations import sigmoid
from mpishard.nn.chunks import chunks
from mpishard.nn.layer import Context, Layer, Parameters

__all__ = ["SwiGLU"]


class SwiGLU(Layer):
    """y = a s(a) b for x = [a | b], with the logistic function s: `SiLU` of one half as a gate.

    Between a linear layer to 2 F outputs and one from F: Shazeer, "GLU variants improve
    transformer", 2020 (arXiv:2002.05202), eq. 6.
    """

    category = LayerCategory.ACTIVATION

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
            a, b = _halves(x_N2F[rows])
            y = sigmoid(a, out=y_NF[rows])
            y *= a
            y *= b
        return y_NF.reshape(*x.shape[:-1], y_NF.shape[1]), x if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The gradient of x: dy b s (1 + a (1 - s)) beside dy a s."""
        xp = array_namespace(dy)
        dx = xp.empty(saved.shape, dtype=dy.dtype)
        dx_N2F, x_N2F = (array.reshape(-1, saved.shape[-1]) for array in (dx, saved))
        dy_NF = dy.reshape(-1, dy.shape[-1])
        for rows in chunks(dy_NF):
            (a, b), (da, db) = _halves(x_N2F[rows]), _halves(dx_N2F[rows])
            s = sigmoid(a)
            xp.multiply(a, s, out=db)
            xp.subtract(1.0, s, out=da)
            da *= db
            da += s
            da *= b
            da *= dy_NF[rows]
            db *= dy_NF[rows]
        return dx, None


def _halves(x_N2F: Array) -> tuple[Array, Array]:
    half = x_N2F.shape[1] // 2
    return x_N2F[:, :half], x_N2F[:, half:]
