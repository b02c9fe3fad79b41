"""Convolution of images as matrix products.

Shape suffixes: B batch, C channels of the input, O channels of the output, H rows and W columns of
the input, P rows and Q columns of the output, S = P Q, K = C * (rows of the kernel) * (columns of
the kernel), N = S times the samples of one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.contracts import LayerCategory
from mpishard.nn.columns import WindowColumns
from mpishard.nn.initializers import kaiming_uniform, zeros
from mpishard.nn.layer import Context, Gradients, Initializer, Layer, Parameters, ParameterSpec
from mpishard.nn.sizes import check_sizes
from mpishard.nn.targets import unwritten
from mpishard.nn.windows import Pair, Windows, size_pair

__all__ = ["Conv2D"]


class Conv2D(Layer):
    """Two-dimensional convolution, as a cross-correlation, of images with channels first.

    y[b, o, p, q] = bias[o] + sum over c, i, j of weight[o, c, i, j] *
    x[b, c, p stride + i - padding, q stride + j - padding], with zeros outside the image:
    LeCun et al., "Gradient-based learning applied to document recognition", Proc. IEEE 86, 1998,
    section II; Goodfellow, Bengio & Courville, "Deep learning", 2016, eq. 9.6.

    The windows of a few samples at a time are laid out as the columns of a matrix, which meets
    the kernels in one matrix product (Chellapilla, Puri & Simard, "High performance convolutional
    neural networks for document processing", 2006, section 3); they are made again in the
    backward pass, so that no more than the input is kept.

    Parameters
    ----------
    inputs, outputs : int
        Numbers C and O of channels.
    kernel : int or (int, int)
        Rows and columns of the kernel.
    stride : int or (int, int)
        Distance of neighbouring windows.
    padding : int or (int, int)
        Rows and columns of zeros on each side.
    bias : bool
        Whether there is a bias of shape (O,), first 0.
    initializer : Initializer, optional
        Of the weight of shape (O, C, rows, columns); `kaiming_uniform` of the K = C * rows *
        columns elements that feed on one window where not given.

    Raises
    ------
    ValueError
        For sizes that are no integers >= 1, or a padding below 0.

    Examples
    --------
    A convolutional classifier of images of 8 x 8 pixels and one channel:

    >>> import mpishard as ms
    >>> chain = ms.nn.Sequential(
    ...     ms.nn.Conv2D(1, 16, kernel=3, padding=1), ms.nn.ReLU(), ms.nn.MaxPool2D(2),
    ...     ms.nn.Conv2D(16, 32, kernel=3, padding=1), ms.nn.ReLU(), ms.nn.MaxPool2D(2),
    ...     ms.nn.Flatten(), ms.nn.Linear(32 * 2 * 2, 10),
    ... )
    >>> model = ms.nn.Model(chain, ms.nn.CrossEntropy(), input_shape=(1, 8, 8))
    >>> model.parameter_count
    6090
    """

    category = LayerCategory.CONVOLUTION

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        bias: bool = True,
        initializer: Initializer | None = None,
    ) -> None:
        check_sizes("Conv2D", inputs=inputs, outputs=outputs)
        self.inputs = inputs
        self.outputs = outputs
        self.bias = bias
        self.windows = Windows(
            size_pair("Conv2D", "kernel", kernel),
            size_pair("Conv2D", "stride", stride),
            size_pair("Conv2D", "padding", padding, least=0),
        )
        shape = (outputs, inputs, *self.windows.kernel)
        fan_in = inputs * shape[2] * shape[3]
        weight = ParameterSpec(shape, initializer or kaiming_uniform(fan_in))
        self._parameters = {"weight": weight}
        if bias:
            self._parameters["bias"] = ParameterSpec((outputs,), zeros())

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight`` of shape (O, C, rows, columns) and, with a bias, ``bias`` of shape (O,)."""
        return self._parameters

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(C, H, W) -> (O, P, Q), with P = floor((H + 2 padding - kernel) / stride) + 1."""
        if len(input_shape) != 3 or input_shape[0] != self.inputs:
            raise ValueError(
                f"Conv2D({self.inputs}, {self.outputs}) needs samples of shape "
                f"({self.inputs}, H, W), got {input_shape}"
            )
        return (self.outputs, *self.windows.counts(*input_shape[1:]))

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """2 K for each element of the output, those of the product."""
        window = math.prod(self._parameters["weight"].shape[1:])
        return 2 * window * math.prod(self.output_shape(input_shape))

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """x_BCHW -> y_BOPQ; saves x itself."""
        xp = array_namespace(x)
        y = xp.empty((x.shape[0], *self.output_shape(x.shape[1:])), dtype=x.dtype)
        y_BOS = _with_flat_images(y)
        w_OK = p["weight"].reshape(self.outputs, -1)
        columns = WindowColumns(self.windows, x, y.shape[2:])
        for rows in columns.chunks():
            part = y_BOS[rows]
            xp.matmul(w_OK, columns.by_sample(x[rows]), out=part)
            if self.bias:
                part += p["bias"][:, None]
        return y, x if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The input's gradient: that of the columns, w^T dy, added up where they came from."""
        xp = array_namespace(dy)
        dx = xp.empty(saved.shape, dtype=dy.dtype)
        dy_BOS = _with_flat_images(dy)
        w_KO = p["weight"].reshape(self.outputs, -1).T
        columns = WindowColumns(self.windows, dx, dy.shape[2:])
        for rows in columns.chunks():
            part = dx[rows]
            d_BKS = xp.matmul(w_KO, dy_BOS[rows], out=columns.empty(part.shape[0]))
            columns.scatter(d_BKS, part)
        return dx, (saved, dy)

    def backward(
        self,
        p: Parameters,
        saved: Any,
        dy: Array,
        g: Gradients,
        *,
        needs_input_gradient: bool = True,
    ) -> Array:
        """Both halves, or the weight's alone."""
        if needs_input_gradient:
            return super().backward(p, saved, dy, g)
        self.backward_weight((saved, dy), g)
        return None

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """Add dy times the columns into the weight's gradient, the sum of dy into the bias's."""
        x, dy = pending
        xp = array_namespace(dy)
        if x.shape[0] == 0:
            return
        dy_BOS = _with_flat_images(dy)
        columns = WindowColumns(self.windows, x, dy.shape[2:])
        target = unwritten(g, "weight")
        is_written = target is None
        dw_OK = (g["weight"] if target is None else target).reshape(self.outputs, -1)
        for rows in columns.chunks():
            d_OBS = xp.ascontiguousarray(dy_BOS[rows].swapaxes(0, 1))
            d_ON = d_OBS.reshape(self.outputs, -1)
            columns_NK = columns.by_row(x[rows]).T
            if is_written:
                dw_OK += xp.matmul(d_ON, columns_NK)
            else:
                xp.matmul(d_ON, columns_NK, out=dw_OK)
                is_written = True
            if self.bias:
                db_O = g["bias"]
                db_O += d_ON @ xp.ones(d_ON.shape[1], dtype=dy.dtype)


def _with_flat_images(y: Array) -> Array:
    """y_BOPQ as y_BOS."""
    return y.reshape(*y.shape[:2], y.shape[2] * y.shape[3])
