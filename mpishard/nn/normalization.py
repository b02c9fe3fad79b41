"""Layer normalisation.

Shape suffixes: N all leading dims taken together, D width; ``...`` leading dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.nn.chunks import chunks
from mpishard.nn.initializers import ones, zeros
from mpishard.nn.layer import Context, Gradients, Layer, Parameters, ParameterSpec
from mpishard.nn.sizes import check_sizes

__all__ = ["LayerNorm"]


class LayerNorm(Layer):
    """Normalise the last dim to mean 0 and variance 1, then scale and shift.

    y = weight * (x - mean) / sqrt(variance + epsilon) + bias, with mean and (biased) variance
    over the last dim: Ba, Kiros & Hinton, "Layer normalization", 2016 (arXiv:1607.06450), eq. 4.

    Parameters
    ----------
    width : int
        Size D of the last dim.
    epsilon : float
        Added to the variance.

    Raises
    ------
    ValueError
        For a width that is no integer >= 1 or an epsilon that is not positive.
    """

    def __init__(self, width: int, epsilon: float = 1e-5) -> None:
        check_sizes("LayerNorm", width=width)
        if not epsilon > 0:
            raise ValueError(f"LayerNorm needs epsilon > 0, got {epsilon}")
        self.width = width
        self.epsilon = epsilon

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight``, first 1, and ``bias``, first 0, both of shape (width,)."""
        return {
            "weight": ParameterSpec((self.width,), ones()),
            "bias": ParameterSpec((self.width,), zeros()),
        }

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(..., width) -> (..., width)."""
        if not input_shape or input_shape[-1] != self.width:
            raise ValueError(
                f"LayerNorm({self.width}) needs an input whose last dim is {self.width}, "
                f"got sample shape {input_shape}"
            )
        return input_shape

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Normalise x of shape (..., D); saves x, the means and the inverse deviations."""
        xp = array_namespace(x)
        x_ND = x.reshape(-1, self.width)
        y_ND = xp.empty_like(x_ND)
        mean_N1 = xp.empty((x_ND.shape[0], 1), dtype=x.dtype)
        inverse_N1 = xp.empty_like(mean_N1)
        # Means as products with a constant vector: numpy's row sums are three times as slow.
        average_D1 = xp.full((self.width, 1), 1.0 / self.width, dtype=x.dtype)
        for rows in chunks(x_ND):
            mean, inverse, y = mean_N1[rows], inverse_N1[rows], y_ND[rows]
            xp.matmul(x_ND[rows], average_D1, out=mean)
            xp.subtract(x_ND[rows], mean, out=y)
            inverse[:, 0] = xp.einsum("nd,nd->n", y, y)
            inverse /= self.width
            inverse += self.epsilon
            xp.sqrt(inverse, out=inverse)
            xp.divide(1.0, inverse, out=inverse)
            y *= inverse
            y *= p["weight"]
            y += p["bias"]
        saved = (x_ND, mean_N1, inverse_N1) if context.training else None
        return y_ND.reshape(x.shape), saved

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The input's gradient, in the place of ``dy``; pending are the parameters' gradients.

        With h the normalised input and d = weight * dy, and means over the last dim:
        dx = (d - mean(d) - h * mean(d * h)) / sqrt(variance + epsilon). The sums over samples
        that the parameters need are made here, while the chunk is in the cache: what would have
        to be kept for later is as large as the input, and the sums are vectors.
        """
        x_ND, mean_N1, inverse_N1 = saved
        xp = array_namespace(dy)
        dy_ND = dy.reshape(-1, self.width)
        dw_D = xp.zeros(self.width, dtype=dy.dtype)
        db_D = xp.zeros_like(dw_D)
        weight_D1 = p["weight"].reshape(-1, 1) / self.width
        for rows in chunks(dy_ND):
            d, inverse = dy_ND[rows], inverse_N1[rows]
            h = x_ND[rows] - mean_N1[rows]
            h *= inverse
            dh = d * h
            dw_D += dh.sum(axis=0)
            db_D += d.sum(axis=0)
            mean_dh = xp.matmul(dh, weight_D1)
            mean_d = xp.matmul(d, weight_D1)
            d *= p["weight"]
            h *= mean_dh
            d -= h
            d -= mean_d
            d *= inverse
        return dy_ND.reshape(dy.shape), (dw_D, db_D)

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """Add the sums over samples of dy * h and of dy."""
        dw_D, db_D = g["weight"], g["bias"]
        dw_D += pending[0]
        db_D += pending[1]
