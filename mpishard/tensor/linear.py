"""Linear layers whose weight is split over the ranks: by rows or by columns.

Shape suffixes: N all leading dims taken together, I inputs, O outputs, R outputs of this rank,
C inputs of this rank; B batch, T time. t is the size of the tensor group. The layers are those of
Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section 3. A column-parallel layer followed
by a row-parallel layer needs one all-reduce forward and one backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from mpishard.base import (
    Array,
    DType,
    array_namespace,
    as_flag,
    check_sizes,
    to_host,
)
from mpishard.communication import CommunicationBackend
from mpishard.contracts import LayerCategory, Saved
from mpishard.nn import (
    Context,
    Gradients,
    Initializer,
    Layer,
    Linear,
    Parameters,
    ParameterSpec,
    SavedActivations,
    Softmax,
    added,
    product,
)
from mpishard.sharding import Box, whole_box
from mpishard.tensor.layer import DimSplit, TensorParallelLayer
from mpishard.tensor.regions import (
    gather_time,
    gather_time_async,
    local_length,
    reduce_scatter_time,
    reduce_scatter_time_async,
    time_of,
)


class SplitLinear(TensorParallelLayer):
    """Base of linear maps y = activation(x W^T + b) whose weight W (O, I) is split over ranks.

    Parameters
    ----------
    backend : CommunicationBackend
        The ranks.
    input_size, output_size : int
        Sizes I and O of the whole layer.
    activation : Layer or None
        Element-wise layer that is applied to the output.
    bias : bool
        Add a bias b of shape (O,), initially 0.
    initializer : Initializer, optional
        Initializer of the whole W. The default is `kaiming_uniform` of I, as in
        `mpishard.nn.Linear`.
    tied_to : str, optional
        Full name of another parameter, which is used as W.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or the activation is not a layer.
    ValueError
        If a size is not an integer >= 1, or the activation is not element-wise, has parameters or
        is random.
    """

    category = LayerCategory.DENSE

    def __init__(
        self,
        backend: CommunicationBackend,
        input_size: int,
        output_size: int,
        activation: Layer | None = None,
        *,
        bias: bool = True,
        initializer: Initializer | None = None,
        tied_to: str | None = None,
    ) -> None:
        super().__init__(backend)
        check_sizes(type(self).__name__, input_size=input_size, output_size=output_size)
        if activation is not None:
            if not isinstance(activation, Layer):
                raise TypeError(
                    f"activation must be a layer, such as ReLU(), or None; got {activation!r}"
                )
            # The activation sees only this rank's outputs, so that it must not mix outputs.
            # Parameters would have one value for all outputs, and each rank would compute another
            # gradient.
            mixes = isinstance(activation, Softmax)
            if mixes or next(activation.walk_parameters(), None) or activation.is_random:
                raise ValueError(
                    "activation must work element by element, without parameters and randomness, "
                    f"which {type(activation).__name__} does not: make it a layer of its own, "
                    "behind whole outputs"
                )
        self.input_size = int(input_size)
        self.output_size = int(output_size)
        self.activation = activation
        self.computes_bfloat16 = activation is None or activation.computes_bfloat16
        self.bias = as_flag("bias", bias)
        whole = Linear(self.input_size, self.output_size, bias, initializer, tied_to)
        self._whole: Mapping[str, ParameterSpec] = whole.parameters

    @property
    def whole_parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight`` of shape (output_size, input_size) and, with a bias, ``bias``."""
        return self._whole

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the input, and of the activation."""
        if self.activation is None:
            return SavedActivations(keeps_input=True)
        # The activation's own output may be gathered, or summed: it is counted here.
        own = self.activation.saved_activations(self._activation_shape(input_shape), dtype)
        output = math.prod(self._activation_shape(input_shape)) * dtype.itemsize
        arrays = (*own.arrays, *(output,) * (own.keeps_input + own.keeps_output))
        return SavedActivations(sum(arrays), keeps_input=True, arrays=arrays)

    def _activation_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return self.output_shape(input_shape)

    def set_from_full_weights(self, weight: Array, bias: Array | None = None) -> None:
        """Set the initial values of models that are later built from this layer.

        The values are slices of the arguments. A model that has been built keeps its own values,
        because the layer holds no parameters.

        Parameters
        ----------
        weight : Array
            The whole W, shape (output_size, input_size).
        bias : Array, optional
            The bias, shape (output_size,). If not given, its initial values stay as they are.

        Raises
        ------
        TypeError
            If an argument is not an array of real numbers.
        ValueError
            If a shape is another, the layer has no bias, or W is tied to another parameter.
        """
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        values = {name: self._checked(name, array) for name, array in given.items()}
        self._whole = {
            # The whole array is kept: other ranks' slices are cut when a model is built.
            name: replace(spec, initializer=lambda *_, name=name: values[name])
            if name in values
            else spec
            for name, spec in self._whole.items()
        }

    def _checked(self, name: str, array: Array) -> Array:
        owner = f"{type(self).__name__}({self.input_size}, {self.output_size})"
        spec = self._whole.get(name)
        if spec is None:
            raise ValueError(f"{owner} has no {name} to set")
        if spec.tied_to is not None:
            raise ValueError(f"the {name} of {owner} is {spec.tied_to}: set the values of that")
        array_namespace(array)
        if array.dtype.kind not in "biuf":
            raise TypeError(f"the {name} of {owner} must be real, got an array of {array.dtype}")
        if array.shape != spec.shape:
            raise ValueError(
                f"the whole {name} of {owner} has shape {spec.shape}, got {array.shape}"
            )
        # A copy, because the caller may change the array before a model is built.
        return np.array(to_host(array), dtype=np.float64)

    def _activate(self, y: Array, context: Context) -> tuple[Array, Saved]:
        if self.activation is None:
            return y, None
        return self.activation.forward({}, y, context)

    def _before_activation(self, saved: Saved, dy: Array) -> Array:
        """Return the gradient of the activation's input, which may be ``dy`` or a new array."""
        if self.activation is None:
            return dy
        dx, _ = self.activation.backward_input({}, saved, dy)
        assert dx is not None, "an activation has an input gradient"
        return dx


class ColumnParallelLinear(SplitLinear):
    """Linear map whose outputs are split: each rank computes some, with its rows of W and b.

    y = activation(x W^T + b). All ranks have the same input or, with ``sequence_parallel``, their
    slices of it along time. Bytes sent, summed over t ranks, for a whole input of S bytes and a
    whole output of Y bytes:

    ==================== ============================== ==========================================
    ..                   forward                        backward
    ==================== ============================== ==========================================
    by default           0                              2 (t - 1) S: all-reduce of dx
    sequence_parallel    (t - 1) S: all-gather of x     (t - 1) S: reduce-scatter of dx, and
                                                        (t - 1) S: all-gather of x, of which only
                                                        the slice is kept
    gather_output        (t - 1) Y more                 0 more
    ==================== ============================== ==========================================

    In `backward` these collectives overlap with products.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    input_size, output_size : int
        Sizes I and O of the last dim of the input and of the whole output.
    gather_output : bool
        If True, each rank gets the whole output. All ranks must then compute the same with it.
    activation : Layer, optional
        Element-wise layer without parameters, such as ``ReLU()``.
    bias : bool
        Add a bias b of shape (O,), initially 0.
    initializer : Initializer, optional
        Initializer of the whole W of shape (O, I). The default is `kaiming_uniform` of I.
    tied_to : str, optional
        Full name of another parameter, split in the same way, which is used as W.
    parts : int or tuple of int
        Number of equal blocks of outputs (queries, keys, values), or the blocks' sizes: see
        `DimSplit`.
    multiple : int
        Length of a run in a block, such as the size of a head. The ranks' numbers of runs may
        differ by one.
    sequence_parallel : bool
        If True, the input is this rank's slice of dim 1, (B, T / t, I), and the output (B, T, R).

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or the activation is not a layer.
    ValueError
        If a size is not an integer >= 1 or does not divide, or there are fewer runs than ranks.

    Attributes
    ----------
    split : DimSplit
        Partition of the outputs.
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        input_size: int,
        output_size: int,
        gather_output: bool = False,
        activation: Layer | None = None,
        *,
        bias: bool = True,
        initializer: Initializer | None = None,
        tied_to: str | None = None,
        parts: int | tuple[int, ...] = 1,
        multiple: int = 1,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(
            backend,
            input_size,
            output_size,
            activation,
            bias=bias,
            initializer=initializer,
            tied_to=tied_to,
        )
        self.gather_output = as_flag("gather_output", gather_output)
        self.sequence_parallel = as_flag("sequence_parallel", sequence_parallel)
        self.split = DimSplit(self.output_size, backend.world_size, parts, multiple)
        # A plain layer does the computing; this class only communicates.
        self._local = Linear(self.input_size, self.local_output_size, bias)

    @property
    def local_output_size(self) -> int:
        """Number R of outputs that this rank computes."""
        return self.split.local_size(self.backend.rank)

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return a box for each part: the rows of W, or elements of b, of this rank's outputs."""
        rest = self.whole_parameters[name].shape[1:]
        # One box for each of queries, keys and values, which lie apart in the whole parameter.
        return tuple((rows, *whole_box(rest)) for rows in self.split.ranges(self.backend.rank))

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (..., R) for (..., I), or (..., O) if gathered; (T, ...) for slices of T / t."""
        *leading, _ = self._local.output_shape(input_shape)
        if self.sequence_parallel:
            time = time_of(f"{type(self).__name__} with sequence_parallel", input_shape, 2)
            # The layer gathers the whole sequence: a rank has some outputs at every position.
            leading = [time * self.backend.world_size, *leading[1:]]
        return (*leading, self.output_size if self.gather_output else self.local_output_size)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Return 2 I R for each row: this rank's part of the product."""
        rows = math.prod(self.output_shape(input_shape)[:-1])
        return 2 * self.input_size * self.local_output_size * rows

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Map x of shape (..., I), and save x (or its slice) and the activation's saved values.

        Collective if the input is a slice or the output is gathered.
        """
        whole = gather_time(self.backend, x) if self.sequence_parallel else x
        y, _ = self._local.forward(p, whole, context)
        y, activation_saved = self._activate(y, context)
        if self.gather_output:
            y = self.split.gather(self.backend, y)
        return y, (x, activation_saved) if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the input's gradient, summed over the ranks. Collective."""
        x, dy = saved[0], self._local_gradient(saved[1], dy)
        return self._reduce(_product(dy, p["weight"]))(), (x, dy)

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add the gradients of this rank's rows. Collective with ``sequence_parallel``."""
        x, dy = pending
        if self.sequence_parallel:
            # Gathered again, because the whole sequence would take t times the memory until
            # backward.
            x = gather_time(self.backend, x)
        self._local.backward_weight((x, dy), g)

    def backward(
        self,
        p: Parameters,
        saved: Saved,
        dy: Array,
        g: Gradients,
        *,
        needs_input_gradient: bool = True,
    ) -> Array | None:
        """Run both halves, with the sum of dx under way during the weight's product. Collective."""
        x, dy = saved[0], self._local_gradient(saved[1], dy)
        # The all-gather is issued first, so that it is under way during the first product.
        gathered = gather_time_async(self.backend, x) if self.sequence_parallel else None
        reduced = self._reduce(_product(dy, p["weight"])) if needs_input_gradient else None
        # The longest product, during which the sum of dx travels.
        self._local.backward_weight((x if gathered is None else gathered(), dy), g)
        return None if reduced is None else reduced()

    def _activation_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        # The activation is applied before the outputs are gathered.
        return (*self.output_shape(input_shape)[:-1], self.local_output_size)

    def _local_gradient(self, activation_saved: Saved, dy: Array) -> Array:
        """Return the gradient of this rank's x W^T + b."""
        if self.gather_output:
            dy = self.split.take(dy, self.backend.rank)
        return self._before_activation(activation_saved, dy)

    def _reduce(self, dx: Array) -> Callable[[], Array]:
        """Issue the sum of dx, or of this rank's slice of dx, over the ranks.

        The function that is returned waits for the sum and returns it.
        """
        if self.sequence_parallel:
            return reduce_scatter_time_async(self.backend, dx)
        # In place: dx is the new array of a product.
        return self.backend.all_reduce_async(dx).wait


class RowParallelLinear(SplitLinear):
    """Linear map whose inputs are split: each rank multiplies its inputs by its columns of W.

    y = activation(x W^T + b). The input's last dim is this rank's slice, as a
    `ColumnParallelLinear` returns it. The partial products are summed over the ranks; then b, which
    all ranks have, is added once.

    Bytes sent, summed over t ranks, for a whole output of Y bytes: 2 (t - 1) Y forward (an
    all-reduce), and none backward. With ``sequence_parallel``: (t - 1) Y forward (a
    reduce-scatter), and (t - 1) Y backward (an all-gather of dy). Each rank then has all of dy, and
    so the bias's whole gradient, too.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    input_size, output_size : int
        Sizes I and O of the last dim of the whole input and of the output.
    activation : Layer, optional
        Element-wise layer without parameters, such as ``ReLU()``.
    bias : bool
        Add a bias b of shape (O,), initially 0.
    initializer : Initializer, optional
        Initializer of the whole W of shape (O, I). The default is `kaiming_uniform` of I.
    tied_to : str, optional
        Full name of another parameter, split in the same way, which is used as W.
    multiple : int
        Length of a run of inputs, such as the size of a head: see `DimSplit`.
    sequence_parallel : bool
        If True, the input is (B, T, C), and the output this rank's slice of dim 1, (B, T / t, O).

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or the activation is not a layer.
    ValueError
        If a size is not an integer >= 1 or does not divide, or there are fewer runs than ranks.

    Attributes
    ----------
    split : DimSplit
        Partition of the inputs.
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        input_size: int,
        output_size: int,
        activation: Layer | None = None,
        *,
        bias: bool = True,
        initializer: Initializer | None = None,
        tied_to: str | None = None,
        multiple: int = 1,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(
            backend,
            input_size,
            output_size,
            activation,
            bias=bias,
            initializer=initializer,
            tied_to=tied_to,
        )
        self.sequence_parallel = as_flag("sequence_parallel", sequence_parallel)
        # The runs are those of the column-parallel layer before, whose outputs are these inputs.
        self.split = DimSplit(self.input_size, backend.world_size, 1, multiple)
        # As in `ColumnParallelLinear`. Its bias is only for the gradient: forward adds it after the
        # sum.
        self._local = Linear(self.local_input_size, self.output_size, bias)

    @property
    def local_input_size(self) -> int:
        """Number C of inputs that this rank has."""
        return self.split.local_size(self.backend.rank)

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return the columns of W for this rank's inputs, or all of b."""
        if name == "bias":
            return super().boxes(name)
        # One box: a row split has one run of columns for each rank.
        return (((0, self.output_size), *self.split.ranges(self.backend.rank)),)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (..., O) for (..., C); with ``sequence_parallel`` (T / t, O) for (T, C)."""
        leading = self._local.output_shape(input_shape)[:-1]
        if self.sequence_parallel:
            time = time_of(f"{type(self).__name__} with sequence_parallel", input_shape, 2)
            time = local_length(self.backend, time)
            leading = (time, *leading[1:])
        return (*leading, self.output_size)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Return 2 C O for each row: this rank's part of the product."""
        return self._local.estimated_flops(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Map x of shape (..., C), and save x and the activation's saved values. Collective."""
        # Without the bias, which the plain layer's forward would add on each rank.
        y = _product(x, p["weight"].T)
        if self.sequence_parallel:
            y = reduce_scatter_time(self.backend, y)
        else:
            self.backend.all_reduce(y)  # In place, because y is a new array.
        # The bias is added after the sum over ranks, which would add it once for each rank.
        if self.bias:
            y = added(y, p["bias"], out=y)
        y, activation_saved = self._activate(y, context)
        return y, (x, activation_saved) if context.training else None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the gradient of this rank's inputs. Collective with ``sequence_parallel``."""
        return self._local.backward_input(p, saved[0], self._whole_gradient(saved[1], dy))

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add the gradients of this rank's columns, and of the bias."""
        self._local.backward_weight(pending, g)

    def backward(
        self,
        p: Parameters,
        saved: Saved,
        dy: Array,
        g: Gradients,
        *,
        needs_input_gradient: bool = True,
    ) -> Array | None:
        """Run both halves. Collective with ``sequence_parallel``."""
        return self._local.backward(
            p,
            saved[0],
            self._whole_gradient(saved[1], dy),
            g,
            needs_input_gradient=needs_input_gradient,
        )

    def _whole_gradient(self, activation_saved: Saved, dy: Array) -> Array:
        """Return the gradient of x W^T + b at all positions, which every rank needs."""
        dy = self._before_activation(activation_saved, dy)
        # Each rank has other columns of W, whose gradient needs dy at all positions.
        return gather_time(self.backend, dy) if self.sequence_parallel else dy


def _product(x: Array, matrix: Array) -> Array:
    """Return x times ``matrix`` along the last dim, as a C-contiguous array."""
    y_NO = product(x.reshape(-1, matrix.shape[0]), matrix)
    return y_NO.reshape(*x.shape[:-1], matrix.shape[1])
