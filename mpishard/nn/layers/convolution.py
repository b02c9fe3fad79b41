"""Layers of images: convolution, max-pooling, and flattening for linear layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from mpishard.arguments import check_sizes, is_size
from mpishard.arrays import Array, array_namespace, chunk_length, chunks
from mpishard.bfloat16 import scratch, store, wide, wide_dtype
from mpishard.contracts import LayerCategory
from mpishard.nn.layers.initializers import kaiming_uniform, zeros
from mpishard.nn.layers.layer import (
    Context,
    Gradients,
    Initializer,
    Layer,
    Parameters,
    ParameterSpec,
    unwritten,
)
from mpishard.nn.layers.products import add_column_sums, product

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Windows:
    """Positions of the windows of a convolution or pooling; pairs are (rows, columns).

    Parameters
    ----------
    kernel, stride, padding : tuple of int
        Size of a window, distance of neighbours, and how many rows and columns of zeros
        surround the image on each side.
    """

    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)

    def counts(self, height: int, width: int) -> Pair:
        """Number of windows along each dim: floor((size + 2 padding - kernel) / stride) + 1.

        Raises
        ------
        ValueError
            If none does.
        """
        rows, columns = (
            (size + 2 * padding - kernel) // stride + 1
            for size, kernel, stride, padding in zip(
                (height, width), self.kernel, self.stride, self.padding, strict=True
            )
        )
        if rows < 1 or columns < 1:
            raise ValueError(
                f"a kernel of {self.kernel} does not fit images of {(height, width)} with "
                f"padding {self.padding}"
            )
        return rows, columns

    def views(self, image: Array, counts: Pair) -> Iterator[Array]:
        """Yield, for each position in a window, the elements that all windows have there.

        ``image`` has shape (..., height, width), padding included; each view has shape
        (..., *counts).
        """
        (rows, columns), (down, right) = counts, self.stride
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                yield image[
                    ...,
                    i : i + down * (rows - 1) + 1 : down,
                    j : j + right * (columns - 1) + 1 : right,
                ]


def size_pair(owner: str, name: str, value: Any, least: int = 1) -> Pair:
    """``value``, an integer or a pair of them, as a pair (rows, columns).

    Raises
    ------
    ValueError
        For something else, or an integer below ``least``.
    """
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2 or not all(is_size(size, least) for size in pair):
        raise ValueError(
            f"{owner} needs {name} as an integer >= {least} or a pair (rows, columns) of them, "
            f"got {value!r}"
        )
    return int(pair[0]), int(pair[1])


# The columns of a chunk may take so many times what a chunk of an element-wise pass takes: they
# are written once and read by a matrix product, which brings its own blocks into the cache.
_CHUNKS_AT_A_TIME = 4


class WindowColumns:
    """Scratch memory of one pass over a batch, used again for each chunk of it.

    Parameters
    ----------
    windows : Windows
        Kernel, stride and padding.
    images : Array
        Array of shape (batch, C, H, W), which is cut into windows, or its gradient. Only its shape,
        dtype and device matter.
    counts : (int, int)
        Numbers P and Q of windows along each dim.
    dtype : dtype, optional
        Of the columns, if not that of the images.
    """

    def __init__(
        self, windows: Windows, images: Array, counts: Pair, dtype: DTypeLike | None = None
    ) -> None:
        xp = array_namespace(images)
        batch, channels, height, width = images.shape
        self._windows = windows
        self._counts = counts
        self._channels = channels
        self._batch = batch
        self._size = channels * math.prod(windows.kernel) * math.prod(counts)
        limit = _CHUNKS_AT_A_TIME * chunk_length(images)
        self._samples = max(1, min(batch, limit // self._size))
        dtype = images.dtype if dtype is None else dtype
        self._scratch = xp.empty(min(batch, self._samples) * self._size, dtype=dtype)
        down, right = windows.padding
        self._inner = (..., slice(down, down + height), slice(right, right + width))
        self._frame: Array | None = None
        if down or right:
            # Its border is written once, here: gathering fills the inner part alone.
            framed = (self._samples, channels, height + 2 * down, width + 2 * right)
            self._frame = xp.zeros(framed, dtype=dtype)

    def chunks(self) -> Iterator[slice]:
        """Slices of the batch that each fit the scratch memory; the last may reach beyond it."""
        for start in range(0, self._batch, self._samples):
            yield slice(start, start + self._samples)

    def empty(self, samples: int) -> Array:
        """Columns of shape (B, K, S) to be written."""
        return self._scratch[: samples * self._size].reshape(samples, -1, math.prod(self._counts))

    def by_sample(self, images_BCHW: Array) -> Array:
        """The columns of each sample, shape (B, K, S)."""
        columns = self.empty(images_BCHW.shape[0])
        self._gather(images_BCHW, columns.reshape(-1, self._channels, *self._rest()))
        return columns

    def by_row(self, images_BCHW: Array) -> Array:
        """The columns of all samples side by side, shape (K, B S)."""
        samples = images_BCHW.shape[0]
        (positions, *counts), flat = self._rest(), self._scratch[: samples * self._size]
        columns = flat.reshape(self._channels, positions, samples, *counts)
        self._gather(images_BCHW, columns.transpose(2, 0, 1, 3, 4))
        return flat.reshape(self._channels * positions, -1)

    def scatter(self, columns_BKS: Array, images_BCHW: Array) -> None:
        """Write into each pixel the sum of its columns' elements: the transpose of gathering."""
        samples = images_BCHW.shape[0]
        columns = columns_BKS.reshape(samples, self._channels, *self._rest())
        framed = images_BCHW if self._frame is None else self._frame[:samples]
        # Windows overlap, so their parts are added; the padding is written too, and then dropped.
        framed.fill(0)
        for position, view in enumerate(self._windows.views(framed, self._counts)):
            view[...] += columns[:, :, position]
        if self._frame is not None:
            images_BCHW[...] = framed[self._inner]

    def _gather(self, images_BCHW: Array, columns: Array) -> None:
        """Fill ``columns``, a view of shape (B, C, positions, P, Q)."""
        framed = images_BCHW
        if self._frame is not None:
            framed = self._frame[: images_BCHW.shape[0]]
            framed[self._inner] = images_BCHW
        for position, view in enumerate(self._windows.views(framed, self._counts)):
            columns[:, :, position] = view

    def _rest(self) -> tuple[int, int, int]:
        """Positions in a window, P and Q."""
        return (math.prod(self._windows.kernel), *self._counts)


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
        Initializer of the weight of shape (O, C, rows, columns). Default: `kaiming_uniform` of
        the K = C * rows * columns elements of one window.

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
    pending_is_saved_and_dy = True
    computes_bfloat16 = True

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
        bias_O1 = wide(p["bias"])[:, None] if self.bias else None
        columns = WindowColumns(self.windows, x, y.shape[2:])
        for rows in columns.chunks():
            part = scratch(y_BOS[rows])
            # Sample by sample, because the result then has the layout of y.
            product(w_OK, columns.by_sample(x[rows]), part)
            if self.bias:
                part += bias_O1
            store(y_BOS[rows], part)
        return y, x if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The input's gradient: that of the columns, w^T dy, added up where they came from."""
        xp = array_namespace(dy)
        dx = xp.empty(saved.shape, dtype=dy.dtype)
        dy_BOS = _with_flat_images(dy)
        w_KO = p["weight"].reshape(self.outputs, -1).T
        columns = WindowColumns(self.windows, dx, dy.shape[2:], wide_dtype(dx))
        for rows in columns.chunks():
            part = scratch(dx[rows])
            d_BKS = product(w_KO, dy_BOS[rows], columns.empty(part.shape[0]))
            columns.scatter(d_BKS, part)
            store(dx[rows], part)
        return dx, (saved, dy)

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
            # All samples of the chunk in one product, whose sum over them is then free.
            d_OBS = xp.ascontiguousarray(dy_BOS[rows].swapaxes(0, 1))
            d_ON = d_OBS.reshape(self.outputs, -1)
            columns_NK = columns.by_row(x[rows]).T
            if is_written:
                dw_OK += product(d_ON, columns_NK, xp.empty_like(dw_OK))
            else:
                product(d_ON, columns_NK, dw_OK)
                is_written = True
            if self.bias:
                add_column_sums(g["bias"], d_ON.T)


def _with_flat_images(y: Array) -> Array:
    """y_BOPQ as y_BOS."""
    return y.reshape(*y.shape[:2], y.shape[2] * y.shape[3])


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
    computes_bfloat16 = True

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
            largest = scratch(y[rows])
            for position, view in enumerate(self.windows.views(wide(x[rows]), counts)):
                if position == 0:
                    largest[...] = view
                    continue
                if which is not None:
                    # Positions rise, so that the maximum is the last one whose element was larger.
                    moved = xp.multiply(view > largest, position, dtype=which.dtype)
                    xp.maximum(which[rows], moved, out=which[rows])
                xp.maximum(largest, view, out=largest)  # hands on NaN
            store(y[rows], largest)
        return y, None if which is None else (x.shape, which)

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """Each element of ``dy`` where its largest element was, 0 elsewhere."""
        shape, which = saved
        dx = array_namespace(dy).empty(shape, dtype=dy.dtype)
        for rows in chunks(dx):
            part, d, chosen = scratch(dx[rows]), wide(dy[rows]), which[rows]
            part.fill(0)
            for position, view in enumerate(self.windows.views(part, dy.shape[2:])):
                # Added, not written: overlapping windows may choose the same element.
                view[...] += d * (chosen == position)
            store(dx[rows], part)
        return dx, None


class Flatten(Layer):
    """Each sample's dims as one, in C order: (d1, d2, ...) -> (d1 d2 ...,)."""

    category = LayerCategory.RESHAPE
    computes_bfloat16 = True

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
