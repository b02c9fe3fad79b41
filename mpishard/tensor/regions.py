"""Operators on activations at the edges of a tensor-parallel region of a chain of layers.

Shape suffixes: B batch, T time, D width; ``...`` further dims. t is the size of the tensor group.

The operators f and g are those of Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section
3 and figure 3; those along time of Korthikanti et al., "Reducing activation recomputation in large
transformer models", 2022 (arXiv:2205.05198), section 4.2.2 and figure 5. Each is the other's
gradient: all-gather's, of what ranks use for different things, is reduce-scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.communication import CommunicationBackend
from mpishard.contracts import LayerCategory
from mpishard.nn.layers.layer import Context, Gradients, Layer, Parameters, ParameterSpec
from mpishard.tensor.layer import DimSplit, TensorParallelLayer


def local_length(backend: CommunicationBackend, length: int) -> int:
    """Positions of each rank's slice of a sequence of ``length``.

    Raises
    ------
    ValueError
        If the group does not divide it.
    """
    if length % backend.world_size:
        raise ValueError(
            f"sequence parallelism cuts T = {length} positions into {backend.world_size} equal "
            f"slices, and {length % backend.world_size} are left over: use sequences whose "
            f"length is a multiple of {backend.world_size}, or no sequence parallelism"
        )
    return length // backend.world_size


def take_time(backend: CommunicationBackend, x: Array) -> Array:
    """The slice of this rank: x_BT... -> (B, T / t, ...), C-contiguous."""
    length = local_length(backend, x.shape[1])
    # Slices are equal: `local_length` refuses other lengths.
    start = backend.rank * length
    return array_namespace(x).ascontiguousarray(x[:, start : start + length])


def gather_time(backend: CommunicationBackend, x: Array) -> Array:
    """The whole sequence, of each rank's slice: (B, T / t, ...) -> (B, T, ...). Collective."""
    return gather_time_async(backend, x)()


def gather_time_async(backend: CommunicationBackend, x: Array) -> Callable[[], Array]:
    """Issue `gather_time`; the function returned waits. ``x`` must not change before."""
    ranks, shape = backend.world_size, x.shape
    # One row per rank: all-gather joins along the first dim, and finish moves ranks behind samples.
    row = array_namespace(x).ascontiguousarray(x).reshape(1, math.prod(shape))
    work = backend.all_gather_async(row)

    def finish() -> Array:
        by_sample = work.wait().reshape(ranks, *shape).swapaxes(0, 1)
        whole = array_namespace(x).ascontiguousarray(by_sample)
        return whole.reshape(shape[0], ranks * shape[1], *shape[2:])

    return finish


def reduce_scatter_time(backend: CommunicationBackend, x: Array) -> Array:
    """Each rank gets its slice of the sum: (B, T, ...) -> (B, T / t, ...). Collective."""
    return reduce_scatter_time_async(backend, x)()


def reduce_scatter_time_async(backend: CommunicationBackend, x: Array) -> Callable[[], Array]:
    """Issue `reduce_scatter_time`; the function returned waits. ``x`` must not change before."""
    ranks, batch, rest = backend.world_size, x.shape[0], x.shape[2:]
    length = local_length(backend, x.shape[1])
    by_rank = x.reshape(batch, ranks, length, *rest).swapaxes(0, 1)
    rows = array_namespace(x).ascontiguousarray(by_rank)
    rows = rows.reshape(ranks, math.prod((batch, length, *rest)))
    work = backend.reduce_scatter_async(rows)
    return lambda: work.wait().reshape(batch, length, *rest)


class CopyToRegion(TensorParallelLayer):
    """The operator f: y = x, and gradients of the ranks' different uses are summed.

    Stands before a region in which each rank computes another part from the same input. Sends
    nothing forward, and an all-reduce of the input's size backward.
    """

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The input's shape."""
        return input_shape

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """``x`` itself; saves nothing."""
        return x, None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The sum of all ranks' ``dy``, in its place. Collective."""
        return self.backend.all_reduce(array_namespace(dy).ascontiguousarray(dy)), None


class ReduceFromRegion(TensorParallelLayer):
    """The operator g: the sum of all ranks' x; each rank takes the gradient as it is.

    Stands behind a region in which each rank computes a summand. Sends an all-reduce of the
    input's size forward, and nothing backward.
    """

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The input's shape."""
        return input_shape

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """The sum over the ranks; saves nothing. Collective."""
        xp = array_namespace(x)
        summand = xp.ascontiguousarray(x)
        # Not in place: the layer before may have saved x.
        return self.backend.all_reduce(summand, out=xp.empty_like(summand)), None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` itself."""
        return dy, None


class GatherOutput(TensorParallelLayer):
    """The whole last dim, from each rank's slice of it.

    The layers behind it compute the same on every rank. Each rank therefore takes its slice of
    the gradient, and nothing is summed. Sends an all-gather forward, and nothing backward.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    size : int
        Size of the whole last dim.
    parts, multiple : int
        Partition: see `DimSplit`.

    Raises
    ------
    ValueError
        If it cannot be dealt so.
    """

    def __init__(
        self, backend: CommunicationBackend, size: int, *, parts: int = 1, multiple: int = 1
    ) -> None:
        super().__init__(backend)
        self.split = DimSplit(size, backend.world_size, parts, multiple)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(..., this rank's part of size) -> (..., size)."""
        self.split.require_local("GatherOutput", input_shape, self.backend.rank)
        return (*input_shape[:-1], self.split.size)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """All ranks' slices, in order; saves nothing. Collective."""
        return self.split.gather(self.backend, x), None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The slice of ``dy`` that this rank has."""
        return self.split.take(dy, self.backend.rank), None


class ScatterSequence(TensorParallelLayer):
    """Each rank gets its slice of the sequence: x_BT... -> (B, T / t, ...).

    The layers before it compute the same on every rank. Sends nothing forward, and an all-gather
    backward, which gives each rank the whole gradient.
    """

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(T, ...) -> (T / t, ...), if t divides T."""
        return (local_length(self.backend, _time_of(self, input_shape)), *input_shape[1:])

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """The slice; saves nothing."""
        return take_time(self.backend, x), None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """All ranks' ``dy``, in order. Collective."""
        return gather_time(self.backend, dy), None


class GatherSequence(TensorParallelLayer):
    """The whole sequence, of each rank's slice: (B, T / t, ...) -> (B, T, ...).

    What follows computes the same on every rank, so that each takes its slice of the gradient
    and nothing is summed: layers that are split take slices themselves. Sends an all-gather
    forward, and nothing backward.
    """

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """(T / t, ...) -> (T, ...)."""
        return (_time_of(self, input_shape) * self.backend.world_size, *input_shape[1:])

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """All ranks' slices, in order; saves nothing. Collective."""
        return gather_time(self.backend, x), None

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The slice of ``dy`` that this rank has."""
        return take_time(self.backend, dy), None


def _time_of(layer: TensorParallelLayer, sample_shape: tuple[int, ...]) -> int:
    if not sample_shape:
        raise ValueError(
            f"{type(layer).__name__} needs samples of shape (time, ...), got {sample_shape}"
        )
    return sample_shape[0]


_Operator = GatherSequence | ScatterSequence


class Framed(Layer):
    """``after(layer(before(x)))``, whose parameters and children are the layer's.

    With sequence parallelism most activations are slices along time; a layer that no rule splits
    needs the whole sequence, and what follows it slices. The operators have no parameters, so
    that names stay those of the model.

    Parameters
    ----------
    layer : Layer
        Layer that computes.
    before, after : GatherSequence, ScatterSequence or None
        Operators on the input and on the output.
    """

    category = LayerCategory.COMPOSITE
    computes_bfloat16 = True  # if its layer does

    def __init__(
        self, layer: Layer, *, before: _Operator | None = None, after: _Operator | None = None
    ) -> None:
        self.layer = layer
        self.children = layer.children
        self.before = before
        self.after = after

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """The layer's."""
        return self.layer.parameters

    @property
    def is_random(self) -> bool:
        """True if the layer is random."""
        return self.layer.is_random

    @property
    def takes_integers(self) -> bool:
        """True if the layer takes integers."""
        return self.layer.takes_integers

    def check_input(self, x: Array) -> None:
        """As the layer."""
        self.layer.check_input(x)

    def copy(self) -> Framed:
        """The same operators around a copy of the layer."""
        return Framed(self.layer.copy(), before=self.before, after=self.after)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Output shape of operators and layer, one after the other."""
        shape = self.layer.output_shape(self._layer_input(input_shape))
        return shape if self.after is None else self.after.output_shape(shape)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Those of the layer."""
        return self.layer.estimated_flops(self._layer_input(input_shape))

    def estimated_activation_size(self, input_shape: tuple[int, ...]) -> int:
        """Those of the layer."""
        return self.layer.estimated_activation_size(self._layer_input(input_shape))

    def _layer_input(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return input_shape if self.before is None else self.before.output_shape(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Operator, layer, operator; saves the layer's saved values. Collective."""
        if self.before is not None:
            x, _ = self.before.forward({}, x, context)
        y, saved = self.layer.forward(p, x, context)
        if self.after is not None:
            y, _ = self.after.forward({}, y, context)
        return y, saved

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The same backward; pending is the layer's. Collective."""
        dx, pending = self.layer.backward_input(p, saved, self._layer_gradient(dy))
        return self._input_gradient(dx), pending

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """The layer's."""
        self.layer.backward_weight(pending, g)

    def backward(
        self, p: Parameters, saved: Any, dy: Array, g: Gradients, *,
        needs_input_gradient: bool = True,
    ) -> Array:  # fmt: skip
        """Both halves. Collective."""
        dx = self.layer.backward(
            p, saved, self._layer_gradient(dy), g, needs_input_gradient=needs_input_gradient
        )
        return self._input_gradient(dx)

    def _layer_gradient(self, dy: Array) -> Array:
        return dy if self.after is None else self.after.backward_input({}, None, dy)[0]

    def _input_gradient(self, dx: Array) -> Array:
        if self.before is None or dx is None:
            return dx
        return self.before.backward_input({}, None, dx)[0]
