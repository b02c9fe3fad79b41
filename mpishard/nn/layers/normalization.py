"""Layers that normalise the last dim.

Shape suffixes: N all leading dims taken together, D width; ``...`` leading dims.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from mpishard.base import (
    NAMESPACES,
    Array,
    DType,
    as_positive,
    check_sizes,
    chunks,
    is_device_array,
    scratch,
    store,
    wide,
    wide_dtype,
    widened_dtype,
)
from mpishard.contracts import LayerCategory, Saved
from mpishard.nn import device_passes, passes
from mpishard.nn.layers.initializers import ones, zeros
from mpishard.nn.layers.layer import (
    Context,
    Gradients,
    Layer,
    Parameters,
    ParameterSpec,
    SavedActivations,
    gradient_targets,
)
from mpishard.nn.passes import bits, compiled


class _Norm(Layer):
    """Base of normalisations, with the last dim's width and an epsilon against division by 0."""

    category = LayerCategory.NORMALIZATION
    computes_bfloat16 = True  # Moments, and sums over samples, are float32.

    def __init__(self, width: int, epsilon: float) -> None:
        kind = type(self).__name__
        check_sizes(kind, width=width)
        self.width = width
        self.epsilon = as_positive("epsilon", epsilon)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape (..., width)."""
        if not input_shape or input_shape[-1] != self.width:
            raise ValueError(
                f"{type(self).__name__}({self.width}) needs an input whose last dim is "
                f"{self.width}, got sample shape {input_shape}"
            )
        return input_shape

    def _inverse_root(self, squares_N: Array, out_N1: Array) -> None:
        """Write 1 / sqrt(squares / width + epsilon) for each row's sum of squares."""
        # In place, because the array of a chunk is saved for backward anyway.
        out_N1[:, 0] = squares_N
        out_N1 /= self.width
        out_N1 += self.epsilon
        np.sqrt(out_N1, out=out_N1)
        np.divide(1.0, out_N1, out=out_N1)

    def _forward_on_device(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        x_ND = NAMESPACES[type(x)].ascontiguousarray(x).reshape(-1, self.width)
        bias = p.get("bias")  # An RMS norm has none, and saves its input instead of h.
        keeps_normal = context.training and bias is not None
        y_ND, h_ND, inverse_N = device_passes.norm(
            x_ND, p["weight"], bias, self.epsilon, keeps_normal=keeps_normal
        )
        kept = (x_ND if h_ND is None else h_ND), inverse_N
        return y_ND.reshape(x.shape), kept if context.training else None

    def _backward_on_device(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the input's gradient; pending are the sums of `device_passes.norm_backward`."""
        saved_ND, inverse_N = saved
        dy_ND = NAMESPACES[type(dy)].ascontiguousarray(dy).reshape(-1, self.width)
        partial = device_passes.norm_backward(
            dy_ND, saved_ND, p["weight"], inverse_N, has_bias="bias" in p
        )
        return dy_ND.reshape(dy.shape), partial

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add the sums over samples of dy * h and, with a bias, of dy to the gradients."""
        if is_device_array(pending):
            device_passes.column_sums(pending, *gradient_targets(g, *self.parameters))
            return
        for name, sums_D in zip(self.parameters, pending, strict=True):
            # `g[name] += ..` would also call __setitem__, for nothing.
            total_D = g[name]
            total_D += sums_D


class LayerNorm(_Norm):
    """Normalise the last dim to mean 0 and variance 1, then scale and shift.

    y = weight * (x - mean) / sqrt(variance + epsilon) + bias, with mean and (biased) variance
    over the last dim: Ba, Kiros & Hinton, "Layer normalization", 2016 (arXiv:1607.06450), eq. 4.

    Parameters
    ----------
    width : int
        Size D of the last dim.
    epsilon : float
        Number that is added to the variance.

    Raises
    ------
    ValueError
        If the width is not an integer >= 1, or epsilon is not positive.
    """

    _flops_per_output = 7  # 2 for each moment, 1 each to normalise, scale and shift

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        super().__init__(width, epsilon)

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight``, initially 1, and ``bias``, initially 0, both of shape (width,)."""
        return {
            "weight": ParameterSpec((self.width,), ones()),
            "bias": ParameterSpec((self.width,), zeros()),
        }

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the normalised input, and of a number for each row."""
        rows = math.prod(input_shape[:-1])
        size = math.prod(input_shape) * dtype.itemsize
        return SavedActivations(size + rows * widened_dtype(dtype).itemsize)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Normalise x of shape (..., D), and save the normalised input and 1 / deviations."""
        if is_device_array(x):
            return self._forward_on_device(p, x, context)
        x_ND = x.reshape(-1, self.width)
        y_ND = np.empty_like(x_ND)
        # Prediction does not keep the normalised input, whose memory is that of the result.
        h_ND = np.empty_like(x_ND) if context.training else y_ND
        dtype, weight, bias = wide_dtype(x), wide(p["weight"]), wide(p["bias"])
        inverse_N1 = np.empty((x_ND.shape[0], 1), dtype=dtype)
        loop, epsilon = compiled(passes.norm_forward, x_ND), np.float32(self.epsilon)
        if loop is not None:
            loop(bits(x_ND), weight, bias, epsilon, bits(y_ND), bits(h_ND), inverse_N1[:, 0])
            return y_ND.reshape(x.shape), (h_ND, inverse_N1) if context.training else None
        # Means are products with a constant vector: NumPy's row sums take three times as long.
        average_D1 = np.full((self.width, 1), 1.0 / self.width, dtype=dtype)
        for rows in chunks(x_ND):
            inverse, x_rows = inverse_N1[rows], wide(x_ND[rows])
            h, y = scratch(h_ND[rows]), scratch(y_ND[rows])
            np.subtract(x_rows, np.matmul(x_rows, average_D1), out=h)
            self._inverse_root(np.einsum("nd,nd->n", h, h), inverse)
            # One division for each row, and a multiplication for each element.
            h *= inverse
            store(h_ND[rows], h)
            np.multiply(h, weight, out=y)
            y += bias
            store(y_ND[rows], y)
        return y_ND.reshape(x.shape), (h_ND, inverse_N1) if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Overwrite ``dy`` with the input's gradient; pending are the parameters' gradients.

        With h the normalised input, d = weight * dy, and means over the last dim:
        dx = (d - mean(d) - h * mean(d * h)) / sqrt(variance + epsilon). The parameters' gradients
        are vectors. They are summed here, while a chunk is in the cache, because dy, which they
        need, is overwritten. Sums and means are products with a vector: NumPy's sums are slower.
        """
        h_ND, inverse_N1 = saved
        if is_device_array(dy):
            return self._backward_on_device(p, saved, dy)
        dy_ND = dy.reshape(-1, self.width)
        sums_2D = np.zeros((2, self.width), dtype=wide_dtype(dy))
        dw_D, db_D = sums_2D
        weight = wide(p["weight"])
        loop = compiled(passes.norm_backward, dy_ND)
        if loop is not None:
            loop(bits(dy_ND), bits(h_ND), weight, inverse_N1[:, 0], dw_D, db_D)
            return dy_ND.reshape(dy.shape), sums_2D
        weight_D1 = weight.reshape(-1, 1) / self.width
        for rows in chunks(dy_ND):
            d, h = wide(dy_ND[rows]), wide(h_ND[rows])
            # As products with ones the sums run in BLAS.
            ones_N = np.ones(d.shape[0], dtype=d.dtype)
            dh = d * h
            dw_D += ones_N @ dh
            db_D += ones_N @ d
            mean_dh = np.matmul(dh, weight_D1)
            mean_d = np.matmul(d, weight_D1)
            d *= weight
            # dh is not needed any more, and is in the cache.
            d -= np.multiply(h, mean_dh, out=dh)
            d -= mean_d
            d *= inverse_N1[rows]
            store(dy_ND[rows], d)
        return dy_ND.reshape(dy.shape), sums_2D


class RMSNorm(_Norm):
    """Divide the last dim by its root mean square, then scale.

    y = weight * x / sqrt(mean(x^2) + epsilon): Zhang & Sennrich, "Root mean square layer
    normalization", 2019 (arXiv:1910.07467), eq. 4.

    Parameters
    ----------
    width : int
        Size D of the last dim.
    epsilon : float
        Number that is added to the mean square.

    Raises
    ------
    ValueError
        If the width is not an integer >= 1, or epsilon is not positive.
    """

    _flops_per_output = 4  # 2 for the mean square, 1 to normalise and 1 to scale

    def __init__(self, width: int, epsilon: float = 1e-6) -> None:
        super().__init__(width, epsilon)

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight``, initially 1, of shape (width,)."""
        return {"weight": ParameterSpec((self.width,), ones())}

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the input, and of a number for each row."""
        numbers = math.prod(input_shape[:-1]) * widened_dtype(dtype).itemsize
        return SavedActivations(numbers, keeps_input=True)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Normalise x of shape (..., D), and save x and 1 / root mean squares."""
        if is_device_array(x):
            return self._forward_on_device(p, x, context)
        x_ND = x.reshape(-1, self.width)
        y_ND = np.empty_like(x_ND)
        inverse_N1 = np.empty((x_ND.shape[0], 1), dtype=wide_dtype(x))
        weight = wide(p["weight"])
        for rows in chunks(x_ND):
            inverse, x_rows, y = inverse_N1[rows], wide(x_ND[rows]), scratch(y_ND[rows])
            self._inverse_root(np.einsum("nd,nd->n", x_rows, x_rows), inverse)
            np.multiply(x_rows, inverse, out=y)
            y *= weight
            store(y_ND[rows], y)
        # x itself, which the layer before has saved in most cases; h would be one more array.
        return y_ND.reshape(x.shape), (x_ND, inverse_N1) if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Overwrite ``dy`` with the input's gradient; pending is the weight's gradient.

        With h the normalised input and d = weight * dy: dx = (d - h * mean(d * h)) / rms(x). The
        weight's gradient is summed here, as in `LayerNorm`.
        """
        x_ND, inverse_N1 = saved
        if is_device_array(dy):
            return self._backward_on_device(p, saved, dy)
        dy_ND = dy.reshape(-1, self.width)
        dw_D = np.zeros(self.width, dtype=wide_dtype(dy))
        weight = wide(p["weight"])
        weight_D1 = weight.reshape(-1, 1) / self.width
        for rows in chunks(dy_ND):
            d, inverse = wide(dy_ND[rows]), inverse_N1[rows]
            # Made again: one multiplication is cheaper than reading another array.
            h = wide(x_ND[rows]) * inverse
            dh = d * h
            dw_D += np.ones(d.shape[0], dtype=d.dtype) @ dh
            h *= np.matmul(dh, weight_D1)
            d *= weight
            d -= h
            d *= inverse
            store(dy_ND[rows], d)
        return dy_ND.reshape(dy.shape), dw_D[None]
