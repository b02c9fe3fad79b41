"""Max-pooling, and flattening of images for linear layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, chunks
from mpishard.contracts import LayerCategory
from mpishard.nn.layers.convolution import Pair, Windows, size_pair
from mpishard.nn.layers.layer import Context, Layer, Parameters

__all__ = ["Flatten", "MaxPool2D"]


class MaxPool2D(Layer):
    """The largest element of each window of each channel.

    Riesenhuber & Poggio, "Hierarchical models of object recognition in cortex", 1999; of equal
    elements the first, row by row, is the one that the gradient goes to. Where windows do not
    reach the last rows or columns, those count for nothing. It has no parameters.

    Parameters
    ----------
    kernel : int or (int, int)
        Size of a window: rows and columns.
    stride : int or (int, int), optional
        Distance of neighbouring windows; the kernel if not given, so that none overlap.

    Raises
    ------
    ValueError
        For a kernel or stride that is no integer >= 1 and no pair of them.
    """

    category = LayerCategory.POOLING

    def __init__(self, kernel: int | Pair, stride: int | Pair | None = None) -> None:
        size = size_pair("MaxPool2D", "kernel", kernel)
        step = size if stride is None else size_pair("MaxPool2D", "stride", stride)
        self.windows = Windows(size, step)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(C, H, W) -> (C, P, Q), with P = floor((H - kernel) / stride) + 1, and so Q."""
        if len(input_shape) != 3 or input_shape[0] == 0:
            raise ValueError(f"MaxPool2D needs samples of shape (C, H, W), got {input_shape}")
        return (input_shape[0], *self.windows.counts(*input_shape[1:]))

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """A comparison for each element of each window."""
        return math.prod(self.windows.kernel) * math.prod(self.output_shape(input_shape))

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """x_BCHW -> y_BCPQ; saves x's shape and the position of each y, in the smallest dtype."""
        xp = array_namespace(x)
        y = xp.empty((x.shape[0], *self.output_shape(x.shape[1:])), dtype=x.dtype)
        counts = y.shape[2:]
        # The smallest dtype that tells apart all positions in a window.
        position_dtype = np.min_scalar_type(math.prod(self.windows.kernel) - 1)
        which = xp.zeros(y.shape, dtype=position_dtype) if context.training else None
        for rows in chunks(x):
            largest = y[rows]
            for position, view in enumerate(self.windows.views(x[rows], counts)):
                if position == 0:
                    largest[...] = view
                    continue
                if which is not None:
                    moved = xp.multiply(view > largest, position, dtype=which.dtype)
                    xp.maximum(which[rows], moved, out=which[rows])
                xp.maximum(largest, view, out=largest)  # hands on NaN
        return y, None if which is None else (x.shape, which)

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """Each element of ``dy`` where its largest element was, 0 elsewhere."""
        shape, which = saved
        dx = array_namespace(dy).zeros(shape, dtype=dy.dtype)
        for rows in chunks(dx):
            d, chosen = dy[rows], which[rows]
            for position, view in enumerate(self.windows.views(dx[rows], dy.shape[2:])):
                # Added, not written: overlapping windows may choose the same element.
                view[...] += d * (chosen == position)
        return dx, None


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
        """A view of x if its memory allows; saves x's shape."""
        y = x.reshape(x.shape[0], *self.output_shape(x.shape[1:]))
        return y, x.shape if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` in the shape of x."""
        return dy.reshape(saved), None
