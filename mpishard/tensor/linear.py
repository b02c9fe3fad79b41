"""Linear layers whose weight is dealt to the ranks: by rows, by columns, or in pieces.

Shape suffixes: N all leading dims taken together, I inputs, O outputs, R outputs of this rank,
C inputs of this rank; B batch, T time. t is the size of the tensor group. The first two layers are
those of Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section 3: a column-parallel layer
and a row-parallel one behind it need one all-reduce forward and one backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mpishard.arguments import check_sizes
from mpishard.arrays import Array, array_namespace, to_host
from mpishard.bfloat16 import wide_dtype
from mpishard.communication import CommunicationBackend
from mpishard.contracts import LayerCategory
from mpishard.layout import ShardLayout
from mpishard.nn.layers.activations import Softmax
from mpishard.nn.layers.layer import (
    Context,
    Gradients,
    Initializer,
    Layer,
    Parameters,
    ParameterSpec,
    unwritten,
)
from mpishard.nn.layers.linear import Linear
from mpishard.nn.layers.products import product
from mpishard.nn.passes import added
from mpishard.sharding import Box, whole_box
from mpishard.tensor.layer import DimSplit, TensorParallelLayer
from mpishard.tensor.regions import (
    gather_time,
    gather_time_async,
    local_length,
    reduce_scatter_time,
    reduce_scatter_time_async,
)


class SplitLinear(TensorParallelLayer):
    """A linear map y = activation(x W^T + b) whose weight W of shape (O, I) is split over ranks.

    Parameters
    ----------
    backend : CommunicationBackend
        The ranks.
    input_size, output_size : int
        I and O, of the whole layer.
    activation : Layer or None
        Applied element by element to the output.
    bias : bool
        Whether there is a bias b of shape (O,), first 0.
    initializer : Initializer, optional
        Initializer of the whole W; `kaiming_uniform` of I if not given, as of `mpishard.nn.Linear`.
    tied_to : str, optional
        Full name of another parameter that serves as W.
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
            # It is computed on this rank's part of the outputs, which it must not relate to others.
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
        self.bias = bias
        whole = Linear(self.input_size, self.output_size, bias, initializer, tied_to)
        self._whole: Mapping[str, ParameterSpec] = whole.parameters

    @property
    def whole_parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight`` of shape (output_size, input_size) and, with a bias, ``bias``."""
        return self._whole

    def set_from_full_weights(self, weight: Array, bias: Array | None = None) -> None:
        """Let the first values of models that are built from this layer be slices of these.

        The layer itself holds no parameters: a model that has been built keeps its own.

        Parameters
        ----------
        weight : Array
            The whole W, shape (output_size, input_size).
        bias : Array, optional
            Shape (output_size,); if not given, the bias starts as it did.

        Raises
        ------
        TypeError
            For arguments that are no arrays of real numbers.
        ValueError
            For other shapes, a bias of a layer without one, and if W is another parameter.
        """
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        values = {name: self._checked(name, array) for name, array in given.items()}
        self._whole = {
            name: replace(spec, initializer=_constant(values[name])) if name in values else spec
            for name, spec in self._whole.items()
        }

    def _checked(self, name: str, array: Array) -> np.ndarray[Any, Any]:
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
        return np.array(to_host(array), dtype=np.float64)

    def _activate(self, y: Array, context: Context) -> tuple[Array, Any]:
        if self.activation is None:
            return y, None
        return self.activation.forward({}, y, context)

    def _before_activation(self, saved: Any, dy: Array) -> Array:
        """The gradient of the activation's input, in the place of ``dy`` or a new array."""
        if self.activation is None:
            return dy
        return self.activation.backward_input({}, saved, dy)[0]


def _constant(values: np.ndarray[Any, Any]) -> Initializer:
    return lambda _, __: values


class ColumnParallelLinear(SplitLinear):
    """y = activation(x W^T + b); each rank computes some outputs, with its rows of W and b.

    All ranks have the same input, or, with ``sequence_parallel``, their slices of it along time.
    Bytes sent, summed over t ranks, for an input of S bytes and an output of Y, both whole:

    ==================== ============================== ==========================================
    ..                   forward                        backward
    ==================== ============================== ==========================================
    by default           0                              2 (t - 1) S: all-reduce of dx
    sequence_parallel    (t - 1) S: all-gather of x     (t - 1) S: reduce-scatter of dx, and
                                                        (t - 1) S: all-gather of x, of which only
                                                        the slice is kept
    gather_output        (t - 1) Y more                 0 more
    ==================== ============================== ==========================================

    In `backward` these travel while the weight's gradient is computed.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    input_size, output_size : int
        Sizes I and O of the last dim of the input and of the whole output.
    gather_output : bool
        Whether each rank gets the whole output, on which all then compute the same.
    activation : Layer, optional
        Such as ``ReLU()``: element by element, without parameters.
    bias : bool
        Whether there is a bias b of shape (O,), first 0.
    initializer : Initializer, optional
        Initializer of the whole W of shape (O, I); `kaiming_uniform` of I if not given.
    tied_to : str, optional
        Full name of another parameter that serves as W, split in the same way.
    parts : int or tuple of int
        Number of equal blocks of outputs (queries, keys, values), or the blocks' sizes: see
        `DimSplit`.
    multiple : int
        Length of a run in a block, such as the size of a head; ranks may differ by one run.
    sequence_parallel : bool
        Whether the input is this rank's slice of dim 1: (B, T / t, I) -> (B, T, R).

    Raises
    ------
    TypeError
        For no backend, or an activation that is no layer.
    ValueError
        For sizes that are no integers >= 1 or that do not divide, and if there are fewer runs
        than ranks.

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
            backend, input_size, output_size, activation,
            bias=bias, initializer=initializer, tied_to=tied_to,
        )  # fmt: skip
        self.gather_output = gather_output
        self.sequence_parallel = sequence_parallel
        self.split = DimSplit(self.output_size, backend.world_size, parts, multiple)
        self._local = Linear(self.input_size, self.local_output_size, bias)

    @property
    def local_output_size(self) -> int:
        """R, the number of outputs that this rank computes."""
        return self.split.local_size(self.backend.rank)

    def boxes(self, name: str) -> tuple[Box, ...]:
        """The rows of W, or the elements of b, of this rank's outputs: a box for each part."""
        rest = self.whole_parameters[name].shape[1:]
        return tuple((rows, *whole_box(rest)) for rows in self.split.ranges(self.backend.rank))

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(..., I) -> (..., R), or (..., O) if gathered; (T / t, I) -> (T, R) of slices."""
        *leading, _ = self._local.output_shape(input_shape)
        if self.sequence_parallel:
            leading = [_needs_time(self, input_shape) * self.backend.world_size, *leading[1:]]
        return (*leading, self.output_size if self.gather_output else self.local_output_size)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """2 I R for each row: this rank's part of the product."""
        rows = math.prod(self.output_shape(input_shape)[:-1])
        return 2 * self.input_size * self.local_output_size * rows

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Map x of shape (..., I); saves x, or its slice, and the activation's saved values.

        Collective if the input is a slice or the output is gathered.
        """
        whole = gather_time(self.backend, x) if self.sequence_parallel else x
        y, _ = self._local.forward(p, whole, context)
        y, activation_saved = self._activate(y, context)
        if self.gather_output:
            y = self.split.gather(self.backend, y)
        return y, (x, activation_saved) if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The input's gradient, summed over the ranks. Collective."""
        x, dy = saved[0], self._local_gradient(saved[1], dy)
        return self._reduce(_product(dy, p["weight"]))(), (x, dy)

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """Add the gradients of this rank's rows. Collective with ``sequence_parallel``."""
        x, dy = pending
        if self.sequence_parallel:
            x = gather_time(self.backend, x)
        self._local.backward_weight((x, dy), g)

    def backward(
        self, p: Parameters, saved: Any, dy: Array, g: Gradients, *,
        needs_input_gradient: bool = True,
    ) -> Array:  # fmt: skip
        """Both halves; the input's gradient travels while the weight's is computed. Collective."""
        x, dy = saved[0], self._local_gradient(saved[1], dy)
        # First, so that it travels during the first product.
        gathered = gather_time_async(self.backend, x) if self.sequence_parallel else None
        reduced = self._reduce(_product(dy, p["weight"])) if needs_input_gradient else None
        self._local.backward_weight((x if gathered is None else gathered(), dy), g)
        return None if reduced is None else reduced()

    def _local_gradient(self, activation_saved: Any, dy: Array) -> Array:
        """The gradient of this rank's x W^T + b."""
        if self.gather_output:
            dy = self.split.take(dy, self.backend.rank)
        return self._before_activation(activation_saved, dy)

    def _reduce(self, dx: Array) -> Callable[[], Array]:
        """Issue the sum of all ranks' dx, or of this rank's slice; the function returned waits."""
        if self.sequence_parallel:
            return reduce_scatter_time_async(self.backend, dx)
        return self.backend.all_reduce_async(dx).wait


class RowParallelLinear(SplitLinear):
    """y = activation(x W^T + b), to which each rank adds its inputs times its columns of W.

    The input's last dim is this rank's slice, as a `ColumnParallelLinear` leaves it. The partial
    products are summed over the ranks; then b, which all ranks have, is added once. Bytes sent,
    summed over t ranks, for a whole output of Y bytes: 2 (t - 1) Y forward, an all-reduce, and
    none backward; with ``sequence_parallel`` (t - 1) Y forward, a reduce-scatter, and (t - 1) Y
    backward, an all-gather of dy, from which each rank has the bias's whole gradient, too.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    input_size, output_size : int
        Sizes I and O of the last dim of the whole input and of the output.
    activation : Layer, optional
        Such as ``ReLU()``: element by element, without parameters.
    bias : bool
        Whether there is a bias b of shape (O,), first 0.
    initializer : Initializer, optional
        Initializer of the whole W of shape (O, I); `kaiming_uniform` of I if not given.
    tied_to : str, optional
        Full name of another parameter that serves as W, split in the same way.
    multiple : int
        Length of the runs in which inputs are dealt, such as the size of a head: see `DimSplit`.
    sequence_parallel : bool
        Whether the output is this rank's slice of dim 1: (B, T, C) -> (B, T / t, O).

    Raises
    ------
    TypeError
        For no backend, or an activation that is no layer.
    ValueError
        For sizes that are no integers >= 1 or that do not divide, and if there are fewer runs
        than ranks.

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
            backend, input_size, output_size, activation,
            bias=bias, initializer=initializer, tied_to=tied_to,
        )  # fmt: skip
        self.sequence_parallel = sequence_parallel
        # In the runs in which the column split before it deals its outputs: nothing is exchanged.
        self.split = DimSplit(self.input_size, backend.world_size, 1, multiple)
        self._local = Linear(self.local_input_size, self.output_size, bias)

    @property
    def local_input_size(self) -> int:
        """C, the number of inputs that this rank has."""
        return self.split.local_size(self.backend.rank)

    def boxes(self, name: str) -> tuple[Box, ...]:
        """The columns of W of this rank's inputs; all of b."""
        if name == "bias":
            return super().boxes(name)
        return (((0, self.output_size), *self.split.ranges(self.backend.rank)),)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(..., C) -> (..., O), or (T, C) -> (T / t, O) if t divides T."""
        leading = self._local.output_shape(input_shape)[:-1]
        if self.sequence_parallel:
            time = local_length(self.backend, _needs_time(self, input_shape))
            leading = (time, *leading[1:])
        return (*leading, self.output_size)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """2 C O for each row: this rank's part of the product."""
        return self._local.estimated_flops(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Map x of shape (..., C); saves x and the activation's saved values. Collective."""
        y = _product(x, p["weight"].T)
        if self.sequence_parallel:
            y = reduce_scatter_time(self.backend, y)
        else:
            # In place: y is this rank's own product.
            self.backend.all_reduce(y)
        # After the sum over ranks, or the bias would count once for each rank.
        if self.bias:
            y = added(y, p["bias"], out=y)
        y, activation_saved = self._activate(y, context)
        return y, (x, activation_saved) if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The gradient of this rank's inputs. Collective with ``sequence_parallel``."""
        return self._local.backward_input(p, saved[0], self._whole_gradient(saved[1], dy))

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """Add the gradients of this rank's columns, and of the bias."""
        self._local.backward_weight(pending, g)

    def backward(
        self, p: Parameters, saved: Any, dy: Array, g: Gradients, *,
        needs_input_gradient: bool = True,
    ) -> Array:  # fmt: skip
        """Both halves. Collective with ``sequence_parallel``."""
        return self._local.backward(
            p, saved[0], self._whole_gradient(saved[1], dy), g,
            needs_input_gradient=needs_input_gradient,
        )  # fmt: skip

    def _whole_gradient(self, activation_saved: Any, dy: Array) -> Array:
        """The gradient of x W^T + b at all positions, which all ranks' parts share."""
        dy = self._before_activation(activation_saved, dy)
        return gather_time(self.backend, dy) if self.sequence_parallel else dy


def _product(x: Array, matrix: Array) -> Array:
    """X times ``matrix`` along the last dim, C-contiguous."""
    y_NO = product(x.reshape(-1, matrix.shape[0]), matrix)
    return y_NO.reshape(*x.shape[:-1], matrix.shape[1])


def _needs_time(layer: SplitLinear, sample_shape: tuple[int, ...]) -> int:
    if len(sample_shape) < 2:
        raise ValueError(
            f"{type(layer).__name__} with sequence_parallel needs samples of shape (time, ..., "
            f"width), got {sample_shape}"
        )
    return sample_shape[0]


class Stage3ShardedLinear(SplitLinear):
    """y = activation(x W^T + b), with W sharded as by ZeRO stage 3 and b on every rank.

    Each rank holds a piece of the flattened W, as `ShardLayout` cuts it, and computes the whole
    output of its own samples with a W that is gathered for the product and let go: Rajbhandari
    et al., "ZeRO", SC 2020 (arXiv:1910.02054), section 5.3. Bytes sent, summed over N ranks, for
    a W of S bytes: (N - 1) S forward, an all-gather; (N - 1) S backward for the input's gradient,
    another, and (N - 1) S for the weight's, a reduce-scatter; and 2 (N - 1) times the bias.

    Gradients are *summed* over ranks, as losses are: if each rank starts backward with the
    gradient of its samples' sum, division by the number of all ranks' samples gives the mean's.
    The ranks may have different numbers of samples, 0 among them; all call it together.

    `mpishard.FSDPModel` does so for any model, unit by unit and overlapped; this is for one layer.

    Parameters
    ----------
    backend : CommunicationBackend
        The ranks.
    input_size, output_size : int
        Sizes I and O of the last dim of the input and of the output.
    activation : Layer, optional
        Such as ``ReLU()``: element by element, without parameters.

    Raises
    ------
    TypeError
        For no backend, or an activation that is no layer.
    ValueError
        For a size that is no integer >= 1.
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        input_size: int,
        output_size: int,
        activation: Layer | None = None,
    ) -> None:
        super().__init__(backend, input_size, output_size, activation)
        self._linear = Linear(self.input_size, self.output_size)

    @property
    def _layout(self) -> ShardLayout:
        return ShardLayout(self.input_size * self.output_size, self.backend.world_size)

    @property
    def shard_length(self) -> int:
        """Elements of W that this rank holds."""
        return self._layout.size(self.backend.rank)

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """``weight`` of shape (shard_length,), a piece of the flattened W, and all of ``bias``."""
        whole = self.whole_parameters
        spec = whole["weight"]
        piece = self._layout.slice(self.backend.rank)
        weight = replace(
            spec,
            shape=(self.shard_length,),
            initializer=lambda generator, _: spec.initializer(generator, spec.shape).reshape(-1)[
                piece
            ],
        )
        return {"weight": weight, "bias": whole["bias"]}

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Boxes of W: rest of a row, whole rows, start of a row; end to end the piece."""
        if name == "bias":
            return super().boxes(name)
        piece, width = self._layout.slice(self.backend.rank), self.input_size
        boxes: list[Box] = []
        start = piece.start
        while start < piece.stop:
            row, column = divmod(start, width)
            rows = (piece.stop - start) // width if column == 0 else 0
            if rows:
                boxes.append(((row, row + rows), (0, width)))
                start += rows * width
            else:
                stop = min(piece.stop - row * width, width)
                boxes.append(((row, row + 1), (column, stop)))
                start = row * width + stop
        return tuple(boxes)

    def is_split(self, name: str) -> bool:
        """True for W on more than one rank, even if W has fewer elements than there are ranks."""
        return name == "weight" and self.backend.world_size > 1

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(..., I) -> (..., O)."""
        return self._linear.output_shape(input_shape)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """2 I O for each row, those of the product."""
        return self._linear.estimated_flops(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Map this rank's x of shape (..., I); saves it, and not W. Collective."""
        y, saved = self._linear.forward(self._gathered(p), x, context)
        y, activation_saved = self._activate(y, context)
        return y, (saved, activation_saved) if context.training else None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The gradient of this rank's input, with W gathered again. Collective."""
        dy = self._before_activation(saved[1], dy)
        return self._linear.backward_input(self._gathered(p), saved[0], dy)

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """Add this rank's piece of W's gradient, and the bias's, over all samples. Collective."""
        xp = array_namespace(pending[1])
        dtype = wide_dtype(pending[1])
        # All of it, for the time of the reduction: each rank has samples for every element.
        own = {
            "weight": xp.zeros((self.output_size, self.input_size), dtype=dtype),
            "bias": xp.zeros(self.output_size, dtype=dtype),
        }
        self._linear.backward_weight(pending, own)
        target = unwritten(g, "weight")
        flat = own["weight"].reshape(-1)
        # Under way while the small all-reduce of the bias runs.
        reduced = self.backend.reduce_scatter_async(flat, out=target)
        self.backend.all_reduce(own["bias"])
        db_O = g["bias"]
        db_O += own["bias"]
        if target is None:
            dw = g["weight"]
            dw += reduced.wait()
        else:
            reduced.wait()

    def backward(
        self, p: Parameters, saved: Any, dy: Array, g: Gradients, *,
        needs_input_gradient: bool = True,
    ) -> Array:  # fmt: skip
        """Both halves, or the weight's alone, for which W is not gathered. Collective."""
        if needs_input_gradient:
            return super().backward(p, saved, dy, g)
        self.backward_weight((saved[0], self._before_activation(saved[1], dy)), g)
        return None

    def _gathered(self, p: Parameters) -> dict[str, Array]:
        flat = self.backend.all_gather(p["weight"])
        return {"weight": flat.reshape(self.output_size, self.input_size), "bias": p["bias"]}
