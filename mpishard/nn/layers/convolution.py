"""Layers of images: convolution, max-pooling, and flattening for linear layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from mpishard.base import (
    NAMESPACES,
    Array,
    DType,
    as_flag,
    check_sizes,
    chunk_length,
    chunks,
    is_size,
    scratch,
    store,
    wide,
    wide_dtype,
)
from mpishard.contracts import LayerCategory, Saved
from mpishard.nn.layers.initializers import kaiming_uniform, zeros
from mpishard.nn.layers.layer import (
    Context,
    Gradients,
    Initializer,
    Layer,
    Parameters,
    ParameterSpec,
    SavedActivations,
    unwritten,
)
from mpishard.nn.layers.products import add_column_sums, product

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Windows:
    """Positions of the windows of a convolution or pooling; pairs are (rows, columns).

    Parameters
    ----------
    kernel : (int, int)
        Size of a window.
    stride : (int, int)
        Distance of neighbouring windows.
    padding : (int, int)
        Numbers of rows and columns of zeros on each side of the image.
    """

    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)

    def counts(self, height: int, width: int) -> Pair:
        """Return the number of windows per dim, floor((size + 2 padding - kernel) / stride) + 1.

        Raises
        ------
        ValueError
            If no window fits in the image.
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
        """Yield, for each position in a window, a view of all windows' elements at this position.

        ``image`` has shape (..., height, width), padding included; each view has shape
        (..., *counts).
        """
        (rows, columns), (down, right) = counts, self.stride
        # One strided view for each position in the kernel: few and large copies, without index
        # arrays.
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                yield image[
                    ...,
                    i : i + down * (rows - 1) + 1 : down,
                    j : j + right * (columns - 1) + 1 : right,
                ]


def size_pair(owner: str, name: str, value: object, least: int = 1) -> Pair:
    """Return ``value``, an integer or a pair of integers, as a pair (rows, columns).

    Raises
    ------
    ValueError
        If ``value`` is something else, or has an integer below ``least``.
    """
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2 or not all(is_size(size, least) for size in pair):
        raise ValueError(
            f"{owner} needs {name} as an integer >= {least} or a pair (rows, columns) of them, "
            f"got {value!r}"
        )
    return int(pair[0]), int(pair[1])


# Size of the columns of a chunk, in chunks of an element-wise pass. It may exceed 1, because the
# columns are written once and read by a matrix product, which brings its own blocks into the cache.
_CHUNKS_AT_A_TIME = 4


class WindowColumns:
    """Scratch memory of one pass over a batch, which each chunk of samples uses again.

    Shape suffixes: B samples, C and O channels, H rows, W columns, K elements of a window in all
    channels, P and Q rows and columns of windows, S = P Q windows, N = B S.

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
        Dtype of the columns. The default is that of the images.
    """

    def __init__(
        self, windows: Windows, images: Array, counts: Pair, dtype: DTypeLike | None = None
    ) -> None:
        xp = NAMESPACES[type(images)]
        batch, channels, height, width = images.shape
        self._windows = windows
        self._batch = batch
        # Dims of a sample's columns: channels, positions in a window, P and Q.
        self._dims = (channels, math.prod(windows.kernel), *counts)
        self._size = math.prod(self._dims)
        # A few samples at a time, because columns take as much memory as kernel positions times the
        # image.
        limit = _CHUNKS_AT_A_TIME * chunk_length(images)
        self._samples = max(1, min(batch, limit // self._size))
        dtype = images.dtype if dtype is None else dtype
        # Allocated once for each pass: new memory for each chunk would have to be cleared by the
        # kernel.
        self._scratch = xp.empty(min(batch, self._samples) * self._size, dtype=dtype)
        down, right = windows.padding
        self._inner = (..., slice(down, down + height), slice(right, right + width))
        self._frame: Array | None = None
        if down or right:
            # The border of zeros is written only here, because gathering fills the inner part.
            framed = (self._samples, channels, height + 2 * down, width + 2 * right)
            self._frame = xp.zeros(framed, dtype=dtype)

    def chunks(self) -> Iterator[slice]:
        """Yield slices of the batch that fit in the scratch memory; the last may exceed it."""
        for start in range(0, self._batch, self._samples):
            yield slice(start, start + self._samples)

    def empty(self, samples: int) -> Array:
        """Return columns of shape (B, K, S) without contents."""
        columns = self._scratch[: samples * self._size]
        return columns.reshape(samples, -1, math.prod(self._dims[2:]))

    def by_sample(self, images_BCHW: Array) -> Array:
        """Return the columns of each sample, shape (B, K, S)."""
        columns = self.empty(images_BCHW.shape[0])
        self._gather(images_BCHW, columns.reshape(-1, *self._dims))
        return columns

    def by_row(self, images_BCHW: Array) -> Array:
        """Return the columns of all samples side by side, shape (K, B S)."""
        samples = images_BCHW.shape[0]
        (channels, positions, *counts), flat = self._dims, self._scratch[: samples * self._size]
        # Samples behind positions, so that one product sums over all samples of the chunk.
        columns = flat.reshape(channels, positions, samples, *counts)
        self._gather(images_BCHW, columns.transpose(2, 0, 1, 3, 4))
        return flat.reshape(channels * positions, -1)

    def scatter(self, columns_BKS: Array, images_BCHW: Array) -> None:
        """Write to each pixel the sum of its elements in the columns, the transpose of gathering.

        Elements of the padding are dropped.
        """
        samples = images_BCHW.shape[0]
        columns = columns_BKS.reshape(samples, *self._dims)
        framed = images_BCHW if self._frame is None else self._frame[:samples]
        # Parts are added, because windows may overlap.
        framed.fill(0)
        for position, view in enumerate(self._windows.views(framed, self._dims[2:])):
            view[...] += columns[:, :, position]
        if self._frame is not None:
            images_BCHW[...] = framed[self._inner]

    def _gather(self, images_BCHW: Array, columns: Array) -> None:
        """Fill ``columns``, a view of shape (B, C, positions, P, Q)."""
        framed = images_BCHW
        if self._frame is not None:
            framed = self._frame[: images_BCHW.shape[0]]
            framed[self._inner] = images_BCHW
        for position, view in enumerate(self._windows.views(framed, self._dims[2:])):
            columns[:, :, position] = view


class Conv2D(Layer):
    """Two-dimensional convolution (a cross-correlation) of images with channels first.

    y[b, o, p, q] = bias[o] + sum over c, i, j of weight[o, c, i, j] *
    x[b, c, p stride + i - padding, q stride + j - padding], with zeros outside the image:
    LeCun et al., "Gradient-based learning applied to document recognition", Proc. IEEE 86, 1998,
    section II; Goodfellow, Bengio & Courville, "Deep learning", 2016, eq. 9.6.

    The windows of a few samples at a time are copied to the columns of a matrix, which is
    multiplied by the kernels (Chellapilla, Puri & Simard, "High performance convolutional neural
    networks for document processing", 2006, section 3). The backward pass makes the columns again,
    so that only the input is saved.

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
        Add a bias of shape (O,), initially 0, to the channels.
    initializer : Initializer, optional
        Initializer of the weight of shape (O, C, rows, columns). The default is `kaiming_uniform`
        of the K = C * rows * columns elements of one window.

    Raises
    ------
    ValueError
        If a size is not an integer >= 1, or a padding not one >= 0.

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
        self.bias = as_flag("bias", bias)
        self.windows = Windows(
            size_pair("Conv2D", "kernel", kernel),
            size_pair("Conv2D", "stride", stride),
            size_pair("Conv2D", "padding", padding, least=0),
        )
        shape = (outputs, inputs, *self.windows.kernel)
        window = math.prod(shape[1:])
        self._flops_per_output = 2 * window  # of the product, without the bias
        if initializer is None:
            initializer = kaiming_uniform(window)
        self._parameters = {"weight": ParameterSpec(shape, initializer)}
        if self.bias:
            self._parameters["bias"] = ParameterSpec((outputs,), zeros())

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight`` of shape (O, C, rows, columns) and, with a bias, ``bias`` of shape (O,)."""
        return self._parameters

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (O, P, Q) for the shape (C, H, W): see `Windows.counts`."""
        if len(input_shape) != 3 or input_shape[0] != self.inputs:
            raise ValueError(
                f"Conv2D({self.inputs}, {self.outputs}) needs samples of shape "
                f"({self.inputs}, H, W), got {input_shape}"
            )
        return (self.outputs, *self.windows.counts(*input_shape[1:]))

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the input."""
        return SavedActivations(keeps_input=True)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Map x_BCHW to y_BOPQ, and save x itself."""
        xp = NAMESPACES[type(x)]
        y = xp.empty((x.shape[0], *self.output_shape(x.shape[1:])), dtype=x.dtype)
        y_BOS = _with_flat_images(y)
        # A view: the kernels are the rows of a matrix already.
        w_OK = p["weight"].reshape(self.outputs, -1)
        bias_O1 = wide(p["bias"])[:, None] if self.bias else None
        columns = WindowColumns(self.windows, x, y.shape[2:])
        for rows in columns.chunks():
            part = scratch(y_BOS[rows])
            # One product per sample, because its result has the layout of y.
            product(w_OK, columns.by_sample(x[rows]), part)
            if self.bias:
                part += bias_O1
            store(y_BOS[rows], part)
        return y, x if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the input's gradient: w^T dy, the columns' gradient, summed for each pixel."""
        xp = NAMESPACES[type(dy)]
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

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add dy times the columns to the weight's gradient, and the sum of dy to the bias's."""
        x, dy = pending
        xp = NAMESPACES[type(dy)]
        # There is no chunk that would write the gradient.
        if x.shape[0] == 0:
            return
        dy_BOS = _with_flat_images(dy)
        columns = WindowColumns(self.windows, x, dy.shape[2:])
        target = unwritten(g, "weight")
        # The first chunk may write, if nothing has been added to the gradient yet; all others add.
        is_written = target is None
        dw_OK = (g["weight"] if target is None else target).reshape(self.outputs, -1)
        for rows in columns.chunks():
            # One product for all samples of the chunk, which also sums over them.
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
    """Return y_BOPQ as y_BOS."""
    return y.reshape(*y.shape[:2], y.shape[2] * y.shape[3])


class MaxPool2D(Layer):
    """Maximum of each window of each channel.

    Riesenhuber & Poggio, "Hierarchical models of object recognition in cortex", 1999. Of equal
    elements, the first in row-major order has the gradient. Last rows or columns that no window
    reaches are left out. The layer has no parameters.

    Parameters
    ----------
    kernel : int or (int, int)
        Rows and columns of a window.
    stride : int or (int, int), optional
        Distance of neighbouring windows. The default is the kernel: windows do not overlap.

    Raises
    ------
    ValueError
        If kernel or stride is neither an integer >= 1 nor a pair of them.
    """

    category = LayerCategory.POOLING
    computes_bfloat16 = True

    def __init__(self, kernel: int | Pair, stride: int | Pair | None = None) -> None:
        size = size_pair("MaxPool2D", "kernel", kernel)
        step = size if stride is None else size_pair("MaxPool2D", "stride", stride)
        self.windows = Windows(size, step)
        self._flops_per_output = math.prod(size)  # comparisons

    @property
    def _position_dtype(self) -> DType:
        # The smallest dtype that holds a position in a window: one byte for up to 256 elements.
        return np.min_scalar_type(math.prod(self.windows.kernel) - 1)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (C, P, Q) for the shape (C, H, W): see `Windows.counts`."""
        if len(input_shape) != 3 or input_shape[0] == 0:
            raise ValueError(f"MaxPool2D needs samples of shape (C, H, W), got {input_shape}")
        return (input_shape[0], *self.windows.counts(*input_shape[1:]))

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of each maximum's position."""
        positions = math.prod(self.output_shape(input_shape))
        return SavedActivations(positions * self._position_dtype.itemsize)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Map x_BCHW to y_BCPQ, and save x's shape and each maximum's position in its window."""
        xp = NAMESPACES[type(x)]
        y = xp.empty((x.shape[0], *self.output_shape(x.shape[1:])), dtype=x.dtype)
        counts = y.shape[2:]
        which = xp.zeros(y.shape, dtype=self._position_dtype) if context.training else None
        for rows in chunks(x):
            largest = scratch(y[rows])
            for position, view in enumerate(self.windows.views(wide(x[rows]), counts)):
                if position == 0:
                    largest[...] = view
                    continue
                if which is not None:
                    # Positions rise, so that the last one with a larger element is the maximum's.
                    moved = xp.multiply(view > largest, position, dtype=which.dtype)
                    xp.maximum(which[rows], moved, out=which[rows])
                xp.maximum(largest, view, out=largest)  # NaN stays NaN.
            store(y[rows], largest)
        return y, None if which is None else (x.shape, which)

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the elements of ``dy`` at the positions of the maxima, and 0 elsewhere."""
        shape, which = saved
        dx = NAMESPACES[type(dy)].empty(shape, dtype=dy.dtype)
        for rows in chunks(dx):
            part, d, chosen = scratch(dx[rows]), wide(dy[rows]), which[rows]
            # Pixels without a maximum keep the 0.
            part.fill(0)
            for position, view in enumerate(self.windows.views(part, dy.shape[2:])):
                # Elements are added, because overlapping windows may have the same maximum.
                view[...] += d * (chosen == position)
            store(dx[rows], part)
        return dx, None


class Flatten(Layer):
    """Reshape of each sample to one dim, in C order: (d1, d2, ...) becomes (d1 d2 ...,)."""

    category = LayerCategory.RESHAPE
    computes_bfloat16 = True
    _flops_per_output = 0

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the product of the dims, (1,) for samples without dims."""
        return (math.prod(input_shape),)

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return none: the output is a view of the input."""
        return SavedActivations(is_view=True)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Return a view of x if its memory layout allows, otherwise a copy, and save x's shape."""
        y = x.reshape(x.shape[0], *self.output_shape(x.shape[1:]))
        return y, x.shape if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return ``dy`` in the shape of x."""
        return dy.reshape(saved), None
