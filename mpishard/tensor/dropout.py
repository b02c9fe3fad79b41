"""Dropout of activations of which each rank has a slice, with the masks of the whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.contracts import LayerCategory
from mpishard.nn.dropout import Dropout, MaskStream
from mpishard.nn.layer import Context, Parameters
from mpishard.tensor.layer import TensorParallelLayer
from mpishard.tensor.split import DimSplit

__all__ = ["SequenceParallelDropout", "TensorParallelDropout"]


class _SlicedDropout(TensorParallelLayer):
    """What the two share: the rate, and the gradient."""

    category = LayerCategory.REGULARIZATION

    def __init__(self, backend: CommunicationBackend, dropout: Dropout) -> None:
        super().__init__(backend)
        if not isinstance(dropout, Dropout):
            raise TypeError(f"dropout must be a Dropout, got {type(dropout).__name__}")
        self.dropout = dropout

    @property
    def is_random(self) -> bool:
        """Whether the rate is above 0."""
        return self.dropout.is_random

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The input's shape."""
        return input_shape

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` m / (1 - rate), in its place."""
        return self.dropout.backward_input(p, saved, dy)


class SequenceParallelDropout(_SlicedDropout):
    """Dropout of this rank's slice of the sequence: (B, T / t, ...).

    An element's mask is the one that `mpishard.nn.Dropout` gives it in the whole sequence, bit
    by bit; words of other slices are jumped over. Sends nothing.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    dropout : Dropout
        Its rate.

    Raises
    ------
    TypeError
        For no backend, or no `Dropout`.
    """

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Mask x of shape (B, T / t, ...); saves the mask, of a byte for each element."""
        if not (context.training and self.is_random):
            return x, None
        own, ranks, rank = math.prod(x.shape[1:]), self.backend.world_size, self.backend.rank
        part = (rank * own, (rank + 1) * own)
        stream = MaskStream(context, ranks * own, self.dropout.rate, part)
        return self.dropout.mask(x, stream.next_masks)


class TensorParallelDropout(_SlicedDropout):
    """Dropout of activations whose last dim is this rank's slice.

    An element's mask is the one that `mpishard.nn.Dropout` gives it in the whole last dim, bit
    by bit. Each rank makes the masks of whole samples, t times what it uses, for its elements
    lie everywhere in them. Sends nothing.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    dropout : Dropout
        Its rate.
    size : int
        Of the whole last dim.
    parts, multiple : int
        How it is dealt: see `DimSplit`.

    Raises
    ------
    TypeError
        For no backend, or no `Dropout`.
    ValueError
        Where the dim cannot be dealt so.
    """

    def __init__(
        self,
        backend: CommunicationBackend,
        dropout: Dropout,
        size: int,
        *,
        parts: int = 1,
        multiple: int = 1,
    ) -> None:
        super().__init__(backend, dropout)
        self.split = DimSplit(size, backend.world_size, parts, multiple)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The input's shape, whose last dim must be this rank's part of the whole."""
        local = self.split.local_size(self.backend.rank)
        if not input_shape or input_shape[-1] != local:
            raise ValueError(
                f"TensorParallelDropout needs an input whose last dim is {local} of "
                f"{self.split.size} on rank {self.backend.rank} of {self.backend.world_size}, got "
                f"sample shape {input_shape}"
            )
        return input_shape

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Mask x of shape (B, ..., local); saves the mask, of a byte for each element."""
        if not (context.training and self.is_random):
            return x, None
        size, rank = self.split.size, self.backend.rank
        leading = x.shape[1:-1]
        stream = MaskStream(context, math.prod(leading) * size, self.dropout.rate)

        def next_masks(samples: int) -> np.ndarray[Any, Any]:
            whole = stream.next_masks(samples).reshape(samples, *leading, size)
            own: np.ndarray[Any, Any] = self.split.take(whole, rank)
            return own.reshape(samples, math.prod(x.shape[1:]))

        return self.dropout.mask(x, next_masks)
