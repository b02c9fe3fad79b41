"""Layers on a slice of the sequence, and dropout on a slice of the width.

Between the parts of a model that are split over the width, normalisation and dropout are split over
time: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022
(arXiv:2205.05198), section 4.2.2. All ranks hold the whole parameters of these layers.

Shape suffixes: B batch, T time, D width, S time of this rank's slice (S = T / t, with t the size
of the tensor group).
"""

from __future__ import annotations

import math

from mpishard.base import NAMESPACES, Array, require_type, wide
from mpishard.communication import CommunicationBackend
from mpishard.contracts import LayerCategory, Saved
from mpishard.nn import (
    Context,
    Dropout,
    Gradients,
    LayerNorm,
    MaskStream,
    Parameters,
    PositionalEmbedding,
    RMSNorm,
    added,
)
from mpishard.tensor.layer import DimSplit, SplitLayer


class SequenceParallelNorm(SplitLayer):
    """Normalisation of the last dim on this rank's slice of the sequence.

    One all-reduce sums the parameters' gradients over the ranks. It has as many elements as the
    parameters, and nothing else is sent.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    norm : LayerNorm or RMSNorm
        The whole layer.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or ``norm`` is another layer.
    """

    category = LayerCategory.NORMALIZATION

    def __init__(self, backend: CommunicationBackend, norm: LayerNorm | RMSNorm) -> None:
        super().__init__(backend, norm)
        # Other layers might mix positions, and would see only a slice.
        require_type("norm", norm, LayerNorm, RMSNorm)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Normalise x, and save the norm's saved values."""
        return self.whole.forward(p, x, context)

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add the parameters' gradients, summed over the ranks. Collective."""
        targets = {name: g[name] for name in self.whole_parameters}
        first = next(iter(targets.values()))
        # The sums are separate from g, which may have gradients of earlier micro-batches. Those are
        # summed over the ranks already.
        sums = NAMESPACES[type(first)].zeros((len(targets), *first.shape), dtype=first.dtype)
        self.whole.backward_weight(pending, dict(zip(targets, sums, strict=True)))
        # One all-reduce for all parameters, because the time for short vectors is mostly latency.
        self.backend.all_reduce(sums)
        for name, part in zip(targets, sums, strict=True):
            targets[name] += part


class SequenceParallelPositionalEmbedding(SplitLayer):
    """Learned vectors for the positions of this rank's slice: y_BSD = x_BSD + P[r S : (r + 1) S].

    Rank r has the gradients of its positions. An all-gather gives all ranks the whole gradient.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    positional : PositionalEmbedding
        The whole layer.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or ``positional`` is another layer.
    """

    category = LayerCategory.EMBEDDING

    def __init__(self, backend: CommunicationBackend, positional: PositionalEmbedding) -> None:
        super().__init__(backend, positional)
        require_type("positional", positional, PositionalEmbedding)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape (S, width), with S t at most the context length."""
        whole = input_shape
        if input_shape:
            # The table must reach to the last rank's positions.
            whole = (input_shape[0] * self.backend.world_size, *input_shape[1:])
        self.whole.output_shape(whole)
        return input_shape

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Return one addition for each element of the slice."""
        return math.prod(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Add the positions' vectors to each sample's slice, and save nothing.

        Raises
        ------
        ValueError
            If the shape is another, or there is a cache, with which slices would have other
            positions.
        """
        self.output_shape(x.shape[1:])
        if context.cache is not None:
            raise ValueError(
                "sequence parallelism reads whole sequences: generate with a partition without "
                "sequence_parallel, which has the same parameters"
            )
        start = self.backend.rank * x.shape[1]
        return added(x, p["weight"][start : start + x.shape[1]]), None

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Return ``dy`` itself; pending is its sum over the batch, an array of its own."""
        return dy, wide(dy).sum(axis=0)

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add all ranks' sums to the first T rows. Collective."""
        # In the order of ranks, which is that of positions. A gather suffices: no two ranks share
        # one.
        whole_TD = self.backend.all_gather(pending)
        dw_TD = g["weight"][: whole_TD.shape[0]]
        dw_TD += whole_TD


class SequenceParallelDropout(SplitLayer):
    """Dropout of this rank's slice of the sequence: (B, T / t, ...).

    Each element has the mask, bit by bit, that `mpishard.nn.Dropout` gives it in the whole
    sequence. Random words for other slices are skipped. Nothing is sent.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    dropout : Dropout
        The whole layer.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or ``dropout`` is not a `Dropout`.
    """

    category = LayerCategory.REGULARIZATION

    def __init__(self, backend: CommunicationBackend, dropout: Dropout) -> None:
        super().__init__(backend, dropout)
        require_type("dropout", dropout, Dropout)
        self.dropout = dropout

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Mask x of shape (B, T / t, ...), and save the mask, which takes a byte per element."""
        if not (context.training and self.is_random):
            return x, None
        # The elements of a slice of the sequence are consecutive in each sample.
        own, ranks, rank = math.prod(x.shape[1:]), self.backend.world_size, self.backend.rank
        part = (rank * own, (rank + 1) * own)
        # The elements of the whole sample, which decide the counts of the generator.
        stream = MaskStream(context, ranks * own, self.dropout.rate, part)
        return self.dropout.mask_by(x, stream)


class TensorParallelDropout(SplitLayer):
    """Dropout of activations whose last dim is this rank's slice.

    Each element has the mask, bit by bit, that `mpishard.nn.Dropout` gives it in the whole last
    dim. A rank makes the masks of whole samples, t times as many as it uses, because its elements
    are spread over each sample. Nothing is sent.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    dropout : Dropout
        The whole layer.
    size : int
        Size of the whole last dim.
    multiple : int
        Length of a run that is not cut: see `DimSplit`.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or ``dropout`` is not a `Dropout`.
    ValueError
        If the dim has no such partition.
    """

    category = LayerCategory.REGULARIZATION

    def __init__(
        self,
        backend: CommunicationBackend,
        dropout: Dropout,
        size: int,
        *,
        multiple: int = 1,
    ) -> None:
        super().__init__(backend, dropout)
        require_type("dropout", dropout, Dropout)
        self.dropout = dropout
        self.split = DimSplit(size, backend.world_size, multiple=multiple)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape, whose last dim must be this rank's part of the whole."""
        self.split.require_local("TensorParallelDropout", input_shape, self.backend.rank)
        return input_shape

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Mask x of shape (B, ..., local size), and save the mask of a byte per element."""
        if not (context.training and self.is_random):
            return x, None
        size, rank = self.split.size, self.backend.rank
        leading = x.shape[1:-1]
        stream = MaskStream(context, math.prod(leading) * size, self.dropout.rate)

        def next_masks(samples: int) -> Array:
            # Some samples at a time, as `Dropout.mask` asks, so that whole masks stay small.
            whole = stream.next_masks(samples).reshape(samples, *leading, size)
            own: Array = self.split.take(whole, rank)
            return own.reshape(samples, math.prod(x.shape[1:]))

        return self.dropout.mask(x, next_masks)
