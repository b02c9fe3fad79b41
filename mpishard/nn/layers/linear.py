"""Linear layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from mpishard.base import (
    NAMESPACES,
    Array,
    DType,
    as_flag,
    check_sizes,
    chunk_length,
    is_device_array,
    is_size,
)
from mpishard.contracts import LayerCategory, Saved
from mpishard.nn import device_passes
from mpishard.nn.layers.initializers import kaiming_uniform, zeros
from mpishard.nn.layers.layer import (
    Context,
    Gradients,
    Initializer,
    Layer,
    Parameters,
    ParameterSpec,
    SavedActivations,
    gradient_targets,
    unwritten,
)
from mpishard.nn.layers.products import add_column_sums, product

# Minimum number of output rows per block of a weight gradient. The matrix product packs x once per
# block, so that smaller blocks cost time. The scratch memory of larger blocks leaves the cache.
_MINIMUM_BLOCK_ROWS = 256


class Linear(Layer):
    """Linear map of the last dim: y = x W^T + b.

    Parameters
    ----------
    inputs, outputs : int
        Sizes I and O of the last dim of the input and of the output.
    bias : bool
        Add a bias b of shape (O,), initially 0, to each output row.
    initializer : Initializer, optional
        Initializer of the weight W of shape (O, I). The default is `kaiming_uniform` of I.
    tied_to : str, optional
        Full name of another parameter of shape (O, I), which is used as W.

    Raises
    ------
    TypeError
        If ``bias`` is not a bool; as `ParameterSpec`.
    ValueError
        If a size is not an integer >= 1.
    """

    category = LayerCategory.DENSE
    pending_is_saved_and_dy = True
    computes_bfloat16 = True

    def __init__(
        self,
        inputs: int,
        outputs: int,
        bias: bool = True,
        initializer: Initializer | None = None,
        tied_to: str | None = None,
    ) -> None:
        check_sizes("Linear", inputs=inputs, outputs=outputs)
        self.inputs = inputs
        self.outputs = outputs
        self._flops_per_output = 2 * inputs  # of the product, without the bias
        self.bias = as_flag("bias", bias)
        if initializer is None:
            initializer = kaiming_uniform(inputs)
        self._parameters = {"weight": ParameterSpec((outputs, inputs), initializer, tied_to)}
        if self.bias:
            # Behind the weight: the order is that of the flat vector, and of files.
            self._parameters["bias"] = ParameterSpec((outputs,), zeros())

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight`` of shape (outputs, inputs) and, with a bias, ``bias`` of shape (outputs,)."""
        return self._parameters

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (..., outputs) for the shape (..., inputs)."""
        if not input_shape or input_shape[-1] != self.inputs:
            raise ValueError(
                f"Linear({self.inputs}, {self.outputs}) needs an input whose last dim is "
                f"{self.inputs}, got sample shape {input_shape}"
            )
        return (*input_shape[:-1], self.outputs)

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the input."""
        return SavedActivations(keeps_input=True)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Map x of shape (..., I) to y of shape (..., O), and save x itself."""
        x_NI = x.reshape(-1, self.inputs)
        # One product of all rows, because BLAS is fastest on one large matrix.
        y_NO = product(x_NI, p["weight"].T, bias=p["bias"] if self.bias else None)
        return y_NO.reshape(*x.shape[:-1], self.outputs), x if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the input's gradient dy W, of shape (..., I)."""
        # A new array, because dy is still needed for the weight's gradient.
        dx_NI = product(dy.reshape(-1, self.outputs), p["weight"])
        return dx_NI.reshape(saved.shape), (saved, dy)

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add dy^T x to the weight's gradient, and the sum of dy's rows to the bias's gradient."""
        x, dy = pending
        x_NI = x.reshape(-1, self.inputs)
        dy_NO = dy.reshape(-1, self.outputs)
        # A rank without samples adds nothing. `clear_unwritten` later clears a gradient that is
        # still unwritten.
        if x_NI.shape[0] == 0:
            return
        dw_OI = unwritten(g, "weight")
        if dw_OI is not None:
            product(dy_NO.T, x_NI, dw_OI)
        else:
            # The product is made in blocks, so that each block is added while it is in the cache.
            dw_OI = g["weight"]
            xp = NAMESPACES[type(dw_OI)]
            outputs, inputs = dw_OI.shape
            rows = min(outputs, max(_MINIMUM_BLOCK_ROWS, chunk_length(dw_OI) // inputs))
            scratch = xp.empty((rows, inputs), dtype=dw_OI.dtype)
            for start in range(0, outputs, rows):
                block = slice(start, min(start + rows, outputs))
                part = scratch[: block.stop - start]
                product(dy_NO[:, block].T, x_NI, part)
                dw_OI[block] += part
        # On a GPU one kernel sums and writes. On the host the sum is a product with ones.
        if self.bias and is_device_array(dy_NO):
            device_passes.column_sums(dy_NO, *gradient_targets(g, "bias"))
        elif self.bias:
            add_column_sums(g["bias"], dy_NO)


class FeatureLinear(Linear):
    """A `Linear` layer that treats inactive input features as 0.

    The output does not depend on the values of inactive features, not even on NaN. The gradients
    of these features, and of their columns of the weight, are 0. All features are active at first.
    The parameters, and the errors raised, are those of `Linear`.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self._active = frozenset(range(inputs))

    @property
    def active(self) -> tuple[int, ...]:
        """Indices of the active features, ascending."""
        # Sorted, because it is written to files, and compared between ranks.
        return tuple(sorted(self._active))

    @active.setter
    def active(self, indices: Iterable[int]) -> None:
        self._active = self.checked(indices)

    def checked(self, indices: Iterable[int]) -> frozenset[int]:
        """Return the indices as a set, or refuse them if one is not the index of a feature.

        Raises
        ------
        ValueError
            If an index is not an integer in [0, inputs).
        """
        chosen = list(indices)
        wrong = [index for index in chosen if not is_size(index, 0) or int(index) >= self.inputs]
        if wrong:
            raise ValueError(
                f"indices of features must be integers in [0, {self.inputs}), got {wrong[0]!r}"
            )
        return frozenset(int(index) for index in chosen)

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the input, or of a copy if features are inactive."""
        if len(self._active) == self.inputs:
            return super().saved_activations(input_shape, dtype)
        return SavedActivations(math.prod(input_shape) * dtype.itemsize)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Map x of shape (..., I) to y of shape (..., O), and save x with inactive features 0."""
        if len(self._active) < self.inputs:
            # The input is copied because it belongs to the caller. Features become 0 and not their
            # weights, because the product of NaN and 0 is NaN.
            x = x.copy()
            self._clear_inactive(x)
        return super().forward(p, x, context)

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the input's gradient, which is 0 for inactive features."""
        dx, pending = super().backward_input(p, saved, dy)
        self._clear_inactive(dx)
        return dx, pending

    def _clear_inactive(self, x: Array) -> None:
        inactive = sorted(frozenset(range(self.inputs)) - self._active)
        if inactive:
            x[..., NAMESPACES[type(x)].asarray(inactive)] = 0
