"""Dropout whose mask is a function of the sample."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.contracts import LayerCategory
from mpishard.nn.chunks import chunks
from mpishard.nn.layer import Context, Layer, Parameters

__all__ = ["Dropout"]

_WORDS_PER_COUNT = 8  # words of 32 bits that Philox4x64 makes of one value of its counter


class Dropout(Layer):
    """In training, set elements to 0 at random and scale up the others: y = x m / (1 - rate).

    An element of the mask m is 0 with probability ``rate``, else 1, so that y has the mean x
    and prediction needs no scaling: Srivastava et al., "Dropout: a simple way to prevent neural
    networks from overfitting", JMLR 15, 2014, sections 4 and 10 (the *inverted* form). Without
    training, and at rate 0, y is x.

    The mask belongs to the sample: it is a function of the context's seed, step and path (the
    layer's name in the model), and of the sample's index in the global batch. However the batch
    is cut, over ranks or micro-batches, each sample meets the same mask. It comes from one
    counter-based Philox generator, keyed by a hash of (seed, step, path), in which sample k
    takes counts k c + 1 to (k + 1) c of the counter, with c = ceil(elements / 8): Salmon et al.,
    "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Parameters
    ----------
    rate : float
        Probability in [0, 1) with which an element is set to 0.

    Raises
    ------
    ValueError
        For a rate outside [0, 1).
    """

    category = LayerCategory.REGULARIZATION

    def __init__(self, rate: float) -> None:
        if not 0 <= rate < 1:
            raise ValueError(f"Dropout needs a rate in [0, 1), got {rate}")
        self.rate = float(rate)

    @property
    def is_random(self) -> bool:
        """Whether the rate is above 0."""
        return self.rate > 0

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The input's shape."""
        return input_shape

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Mask x of shape (B, ...); saves the mask, of a byte for each element."""
        if not (context.training and self.is_random):
            return x, None
        xp = array_namespace(x)
        elements = math.prod(x.shape[1:])
        x_BE = x.reshape(x.shape[0], elements)
        y_BE = xp.empty_like(x_BE)
        mask_BE = xp.empty(x_BE.shape, dtype=bool)
        stream = _MaskStream(context, elements, self.rate)
        for rows in chunks(x_BE):
            y = y_BE[rows]
            mask_BE[rows] = xp.asarray(stream.next_masks(y.shape[0]))
            xp.multiply(x_BE[rows], 1.0 / (1.0 - self.rate), out=y)
            y *= mask_BE[rows]
        return y_BE.reshape(x.shape), mask_BE

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """``dy`` m / (1 - rate), in its place."""
        if saved is None:
            return dy, None
        dy_BE = dy.reshape(saved.shape)
        for rows in chunks(dy_BE):
            d = dy_BE[rows]
            d *= 1.0 / (1.0 - self.rate)
            d *= saved[rows]
        return dy_BE.reshape(dy.shape), None


class _MaskStream:
    """The masks of consecutive samples, from ``context.sample_start`` on.

    An element stays where its 32-bit word is at least ``rate`` 2^32. Words are made on the host
    for arrays of a GPU, too: both then train with the same masks.
    """

    def __init__(self, context: Context, elements: int, rate: float) -> None:
        key = f"dropout/{int(context.seed)}/{int(context.step)}/{context.path}"
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        self._elements = elements
        self._counts = -(-elements // _WORDS_PER_COUNT)
        self._threshold = np.uint32(min(round(rate * 2**32), 2**32 - 1))
        self._generator = np.random.Philox(
            key=int.from_bytes(digest, "little"),
            counter=int(context.sample_start) * self._counts,
        )

    def next_masks(self, samples: int) -> np.ndarray[Any, Any]:
        """Masks of the next samples, a bool array of shape (samples, elements)."""
        words = self._generator.random_raw(samples * self._counts * _WORDS_PER_COUNT // 2)
        words_BW = words.astype("<u8", copy=False).view("<u4").reshape(samples, -1)
        mask_BE: np.ndarray[Any, Any] = words_BW[:, : self._elements] >= self._threshold
        return mask_BE
