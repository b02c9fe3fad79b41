"""Operators on activations at the edges of a tensor-parallel region of a chain of layers.

Shape suffixes: B batch, T time, D width; ``...`` further dims. t is the size of the tensor group.

The operators f and g are those of Shoeybi et al., "Megatron-LM", 2019 (arXiv:1909.08053), section
3 and figure 3. Those along time are from Korthikanti et al., "Reducing activation recomputation in
large transformer models", 2022 (arXiv:2205.05198), section 4.2.2 and figure 5. The gradient of an
all-gather whose result the ranks use for different computations is a reduce-scatter, and the
gradient of a reduce-scatter is an all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from mpishard.base import NAMESPACES, Array, DType
from mpishard.communication import CommunicationBackend
from mpishard.contracts import LayerCategory, Saved
from mpishard.nn import Context, Gradients, Layer, Parameters, ParameterSpec, SavedActivations
from mpishard.tensor.layer import DimSplit, TensorParallelLayer


def local_length(backend: CommunicationBackend, length: int) -> int:
    """Return the number of positions in each rank's slice of a sequence of ``length`` positions.

    Raises
    ------
    ValueError
        If the length is not a multiple of the group's size.
    """
    # Equal slices, so that one reshape and one copy join what all ranks have sent.
    if length % backend.world_size:
        raise ValueError(
            f"sequence parallelism cuts T = {length} positions into {backend.world_size} equal "
            f"slices, and {length % backend.world_size} are left over: use sequences whose "
            f"length is a multiple of {backend.world_size}, or no sequence parallelism"
        )
    return length // backend.world_size


def time_of(owner: str, sample_shape: tuple[int, ...], dims: int = 1) -> int:
    """Return the size of a sample's first dim, time.

    ``dims`` is 2 if the sample must have a last dim besides it, width.

    Raises
    ------
    ValueError
        If there are too few dims.
    """
    if len(sample_shape) < dims:
        form = "(time, ..., width)" if dims == 2 else "(time, ...)"
        raise ValueError(f"{owner} needs samples of shape {form}, got {sample_shape}")
    return sample_shape[0]


def take_time(backend: CommunicationBackend, x: Array) -> Array:
    """Return this rank's slice (B, T / t, ...) of x, shape (B, T, ...), as a C-contiguous array."""
    length = local_length(backend, x.shape[1])
    start = backend.rank * length
    # The slice has gaps between samples, and the layers after it reshape their input.
    return NAMESPACES[type(x)].ascontiguousarray(x[:, start : start + length])


def gather_time(backend: CommunicationBackend, x: Array) -> Array:
    """Return the whole sequence (B, T, ...) from each rank's slice (B, T / t, ...). Collective."""
    return gather_time_async(backend, x)()


def gather_time_async(backend: CommunicationBackend, x: Array) -> Callable[[], Array]:
    """Issue `gather_time`, and return a function that waits for the result and returns it.

    ``x`` must not change before.
    """
    ranks, shape = backend.world_size, x.shape
    # all_gather joins along the first dim. Each rank sends one row, and `finish` swaps the dims of
    # ranks and samples.
    row = NAMESPACES[type(x)].ascontiguousarray(x).reshape(1, math.prod(shape))
    work = backend.all_gather_async(row)

    def finish() -> Array:
        by_sample = work.wait().reshape(ranks, *shape).swapaxes(0, 1)
        whole = NAMESPACES[type(x)].ascontiguousarray(by_sample)
        return whole.reshape(shape[0], ranks * shape[1], *shape[2:])

    return finish


def reduce_scatter_time(backend: CommunicationBackend, x: Array) -> Array:
    """Return this rank's slice (B, T / t, ...) of the ranks' sum of x (B, T, ...). Collective."""
    return reduce_scatter_time_async(backend, x)()


def reduce_scatter_time_async(backend: CommunicationBackend, x: Array) -> Callable[[], Array]:
    """Issue `reduce_scatter_time`, and return a function that waits for the result and returns it.

    ``x`` must not change before.
    """
    ranks, batch, rest = backend.world_size, x.shape[0], x.shape[2:]
    length = local_length(backend, x.shape[1])
    # reduce_scatter cuts along the first dim, so that ranks come before samples.
    by_rank = x.reshape(batch, ranks, length, *rest).swapaxes(0, 1)
    rows = NAMESPACES[type(x)].ascontiguousarray(by_rank)
    rows = rows.reshape(ranks, math.prod((batch, length, *rest)))
    work = backend.reduce_scatter_async(rows)
    return lambda: work.wait().reshape(batch, length, *rest)


class CopyToRegion(TensorParallelLayer):
    """Operator f: it returns x, and sums the ranks' gradients in the backward pass.

    It stands before a region in which each rank computes another part from the same input. It sends
    nothing forward, and an all-reduce of the input's size backward.
    """

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape."""
        return input_shape

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return none: the output is the input."""
        return SavedActivations(is_view=True)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Return ``x`` itself, and save nothing."""
        return x, None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return the sum of all ranks' ``dy``, in place if ``dy`` is C-contiguous. Collective."""
        # In place, because dy belongs to this method.
        return self.backend.all_reduce(NAMESPACES[type(dy)].ascontiguousarray(dy)), None


class ReduceFromRegion(TensorParallelLayer):
    """Operator g: it sums the ranks' x, and returns the gradient unchanged in the backward pass.

    It stands after a region in which each rank computes a summand. It sends an all-reduce of the
    input's size forward, and nothing backward.
    """

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape."""
        return input_shape

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return none."""
        return SavedActivations()

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Return the sum over the ranks, and save nothing. Collective."""
        xp = NAMESPACES[type(x)]
        summand = xp.ascontiguousarray(x)
        # The sum is a new array, because the layer before may have saved x.
        return self.backend.all_reduce(summand, out=xp.empty_like(summand)), None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return ``dy`` itself."""
        return dy, None


class GatherOutput(TensorParallelLayer):
    """Operator that gathers the whole last dim from the ranks' slices.

    The layers after it compute the same on every rank. Each rank therefore takes its slice of
    the gradient, without a sum. It sends an all-gather forward, and nothing backward.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    size : int
        Size of the whole last dim.
    parts, multiple : int
        Partition of the dim: see `DimSplit`.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`.
    ValueError
        If the dim has no such partition.
    """

    def __init__(
        self, backend: CommunicationBackend, size: int, *, parts: int = 1, multiple: int = 1
    ) -> None:
        super().__init__(backend)
        self.split = DimSplit(size, backend.world_size, parts, multiple)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (..., size) for a shape whose last dim is this rank's part of ``size``."""
        self.split.require_local("GatherOutput", input_shape, self.backend.rank)
        return (*input_shape[:-1], self.split.size)

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return none."""
        return SavedActivations()

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Return all ranks' slices, joined in order, and save nothing. Collective."""
        return self.split.gather(self.backend, x), None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return this rank's slice of ``dy``."""
        return self.split.take(dy, self.backend.rank), None


class ScatterSequence(TensorParallelLayer):
    """Operator that takes this rank's slice of the sequence: (B, T, ...) becomes (B, T / t, ...).

    The layers before it compute the same on every rank. It sends nothing forward, and an all-gather
    backward, after which each rank has the whole gradient.
    """

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (T / t, ...) for the shape (T, ...), if t divides T."""
        return (
            local_length(self.backend, time_of(type(self).__name__, input_shape)),
            *input_shape[1:],
        )

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return none."""
        return SavedActivations()

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Return the slice, and save nothing."""
        return take_time(self.backend, x), None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return all ranks' ``dy``, joined in order. Collective."""
        return gather_time(self.backend, dy), None


class GatherSequence(TensorParallelLayer):
    """Operator that gathers the whole sequence: (B, T / t, ...) becomes (B, T, ...).

    The layers after it compute the same on every rank. Each rank therefore takes its slice of the
    gradient, without a sum. (Layers that are split take slices themselves.) It sends an all-gather
    forward, and nothing backward.
    """

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (T, ...) for the shape (T / t, ...)."""
        return (
            time_of(type(self).__name__, input_shape) * self.backend.world_size,
            *input_shape[1:],
        )

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return none."""
        return SavedActivations()

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Return all ranks' slices, joined in order, and save nothing. Collective."""
        return gather_time(self.backend, x), None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return this rank's slice of ``dy``."""
        return take_time(self.backend, dy), None


_Operator = GatherSequence | ScatterSequence


class Framed(Layer):
    """Layer with operators on its input and output: ``after(layer(before(x)))``.

    With sequence parallelism most activations are slices along time. A layer that no rule splits
    needs the whole sequence, and the layers after it need slices. The parameters and children are
    those of the layer. The operators have none, so that parameters keep their names.

    Parameters
    ----------
    layer : Layer
        Layer that computes.
    before, after : GatherSequence, ScatterSequence or None
        Operators on the input and on the output.
    """

    category = LayerCategory.COMPOSITE
    computes_bfloat16 = True  # A model's layers are checked before they are framed.

    def __init__(
        self, layer: Layer, *, before: _Operator | None = None, after: _Operator | None = None
    ) -> None:
        self.layer = layer
        # The layer's own, so that walks over parameters find the same names.
        self.children = layer.children
        self.before = before
        self.after = after

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Parameters of the layer."""
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
        """Refuse an input that the layer refuses."""
        self.layer.check_input(x)

    def copy(self) -> Framed:
        """Return the same operators around a copy of the layer."""
        return Framed(self.layer.copy(), before=self.before, after=self.after)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the output shape of operators and layer, one after the other."""
        shape = self.layer.output_shape(self._layer_input(input_shape))
        return shape if self.after is None else self.after.output_shape(shape)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Return the layer's operations."""
        return self.layer.estimated_flops(self._layer_input(input_shape))

    def estimated_activation_size(self, input_shape: tuple[int, ...]) -> int:
        """Return the size of the layer's activations."""
        return self.layer.estimated_activation_size(self._layer_input(input_shape))

    def _layer_input(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return input_shape if self.before is None else self.before.output_shape(input_shape)

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return the layer's, on the array that it computes with."""
        parts, shape = [], input_shape
        for part in (self.before, self.layer, self.after):
            if part is not None:
                saved, shape = part.saved_activations(shape, dtype), part.output_shape(shape)
                parts.append((saved, math.prod(shape) * dtype.itemsize))
        return SavedActivations.of_chain(parts)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Run operator, layer and operator, and save the layer's saved values. Collective."""
        if self.before is not None:
            x, _ = self.before.forward({}, x, context)
        y, saved = self.layer.forward(p, x, context)
        if self.after is not None:
            y, _ = self.after.forward({}, y, context)
        return y, saved

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array | None, Saved]:
        """Run the input's halves in reverse order; pending is the layer's. Collective."""
        dx, pending = self.layer.backward_input(p, saved, self._layer_gradient(dy))
        return self._input_gradient(dx), pending

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add the gradients of the layer's parameters."""
        self.layer.backward_weight(pending, g)

    def backward(
        self,
        p: Parameters,
        saved: Saved,
        dy: Array,
        g: Gradients,
        *,
        needs_input_gradient: bool = True,
    ) -> Array | None:
        """Run both halves. Collective."""
        dx = self.layer.backward(
            p, saved, self._layer_gradient(dy), g, needs_input_gradient=needs_input_gradient
        )
        return self._input_gradient(dx)

    def _layer_gradient(self, dy: Array) -> Array:
        return dy if self.after is None else self.after.backward_input({}, None, dy)[0]

    def _input_gradient(self, dx: Array | None) -> Array | None:
        # Tokens have no gradient, on any rank, so that no rank waits here.
        if self.before is None or dx is None:
            return dx
        return self.before.backward_input({}, None, dx)[0]
