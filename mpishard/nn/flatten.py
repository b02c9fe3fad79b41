"""Samples of any shape as vectors."""

from __future__ import annotations

import math
from typing import Any

from mpishard.arrays import Array
from mpishard.contracts import LayerCategory
from mpishard.nn.layer import Context, Layer, Parameters

__all__ = ["Flatten"]


class Flatten(Layer):
    """Each sample's dims as one, in C order: (d1, d2, ...) -> (d1 d2 ...,)."""

    category = LayerCategory.RESHAPE

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The product of the dims; a sample that is one number becomes a vector of one."""
        return (math.prod(input_shape),)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """0: nothing is computed."""
        return 0

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """A view of x where its memory allows; saves x's shape."""
        y = x.reshape(x.shape[0], *self.output_shape(x.shape[1:]))
        return y, x.shape if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` in the shape of x."""
        return dy.reshape(saved), None
