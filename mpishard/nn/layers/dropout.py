"""Dropout whose mask depends on the sample and not on the rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np

from mpishard.base import (
    NAMESPACES,
    Array,
    DType,
    as_number,
    chunks,
    is_device_array,
    scratch,
    store,
    wide,
)
from mpishard.contracts import LayerCategory, Saved
from mpishard.nn import device_passes
from mpishard.nn.layers.layer import Context, Layer, Parameters, SavedActivations

_WORDS_PER_COUNT = 8  # Number of 32-bit words that Philox4x64 makes of one value of its counter.


class Dropout(Layer):
    """In training, set elements to 0 at random and scale the others: y = x m / (1 - rate).

    An element of the mask m is 0 with probability ``rate`` and 1 otherwise. The mean of y is then
    x, and prediction needs no scaling: Srivastava et al., "Dropout: a simple way to prevent neural
    networks from overfitting", JMLR 15, 2014, sections 4 and 10 (the *inverted* form). Outside
    training, and at rate 0, y is x.

    The mask is a function of the context's seed, step and path (the layer's name in the model), and
    of the sample's index in the global batch. A sample has the same mask, however the batch is cut
    over ranks or micro-batches. A counter-based Philox generator, keyed by a hash of (seed, step,
    path), makes it. Sample k takes counts k c + 1 to (k + 1) c of the counter, with
    c = ceil(elements / 8): Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Parameters
    ----------
    rate : float
        Probability in [0, 1) with which an element is set to 0.

    Raises
    ------
    ValueError
        If the rate is outside [0, 1).
    """

    category = LayerCategory.REGULARIZATION
    computes_bfloat16 = True

    def __init__(self, rate: float) -> None:
        if not 0 <= as_number("rate", rate) < 1:
            raise ValueError(f"Dropout needs a rate in [0, 1), got {rate}")
        self.rate = float(rate)

    @property
    def is_random(self) -> bool:
        """True if the rate is above 0."""
        return self.rate > 0

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input's shape."""
        return input_shape

    def saved_activations(self, input_shape: tuple[int, ...], dtype: DType) -> SavedActivations:
        """Return that of the mask, a byte for each element; none at rate 0."""
        if not self.is_random:
            return SavedActivations(is_view=True)
        return SavedActivations(math.prod(input_shape))

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Mask x of shape (B, ...), and save the mask, which takes one byte for each element."""
        # x itself: no layer may write to its input.
        if not (context.training and self.is_random):
            return x, None
        return self.mask_by(x, MaskStream(context, math.prod(x.shape[1:]), self.rate))

    def mask_by(self, x: Array, stream: MaskStream) -> tuple[Array, Saved]:
        """Do what `forward` does in training, with the next masks of a stream.

        A GPU makes them itself: they are those of the host, bit by bit.
        """
        if not is_device_array(x):
            return self.mask(x, stream.next_masks)
        xp = NAMESPACES[type(x)]
        # The kernel numbers elements in C order, as the host's masks do.
        x_BE = xp.ascontiguousarray(x).reshape(x.shape[0], math.prod(x.shape[1:]))
        y_BE, mask_BE = device_passes.dropout(x_BE, 1.0 / (1.0 - self.rate), **stream.state())
        return y_BE.reshape(x.shape), mask_BE

    def mask(self, x: Array, next_masks: Callable[[int], Array]) -> tuple[Array, Saved]:
        """Do what `forward` does in training, with given masks.

        Parameters
        ----------
        x : Array
            Input of shape (B, ...).
        next_masks : callable
            ``next_masks(samples)`` returns the masks of the next ``samples`` samples, a bool array
            of shape (samples, elements of a sample).
        """
        xp = NAMESPACES[type(x)]
        x_BE = x.reshape(x.shape[0], math.prod(x.shape[1:]))
        y_BE = xp.empty_like(x_BE)
        mask_BE = xp.empty(x_BE.shape, dtype=bool)
        for rows in chunks(x_BE):
            y = scratch(y_BE[rows])
            mask_BE[rows] = xp.asarray(next_masks(y.shape[0]))
            xp.multiply(wide(x_BE[rows]), 1.0 / (1.0 - self.rate), out=y)
            y *= mask_BE[rows]
            store(y_BE[rows], y)
        return y_BE.reshape(x.shape), mask_BE

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[Array, Saved]:
        """Multiply ``dy`` by m / (1 - rate) in place."""
        # Forward returned its input, at rate 0.
        if saved is None:
            return dy, None
        scale = 1.0 / (1.0 - self.rate)
        if is_device_array(dy):
            dy = NAMESPACES[type(dy)].ascontiguousarray(dy)
            device_passes.dropout_backward(dy, saved, scale)
            return dy, None
        dy_BE = dy.reshape(saved.shape)
        for rows in chunks(dy_BE):
            d = wide(dy_BE[rows])
            d *= scale
            d *= saved[rows]
            store(dy_BE[rows], d)
        return dy_BE.reshape(dy.shape), None


class MaskStream:
    """Masks of consecutive samples, beginning with sample ``context.sample_start``.

    An element is kept if its 32-bit word is at least ``rate`` 2^32. The host makes the words for
    arrays on a GPU, too, if a caller asks for them here; otherwise the GPU makes the same words.

    Parameters
    ----------
    context : Context
        Source of seed, step and path, which are the key.
    elements : int
        Number of elements of a sample.
    rate : float
        Probability in (0, 1) with which an element is set to 0.
    part : (int, int), optional
        The range ``(start, stop)`` of each sample's elements whose masks are needed. The default is
        all elements. Counts of the generator that only others need are skipped.
    """

    def __init__(
        self, context: Context, elements: int, rate: float, part: tuple[int, int] | None = None
    ) -> None:
        # The word "dropout" keeps these bits apart from those of initial values and sample orders.
        key = f"dropout/{int(context.seed)}/{int(context.step)}/{context.path}"
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        # The generator can begin only at a whole count. The words before the part in its first
        # count are made and not used.
        start, stop = part or (0, elements)
        first = start // _WORDS_PER_COUNT
        self._words = slice(start - first * _WORDS_PER_COUNT, stop - first * _WORDS_PER_COUNT)
        self._counts = -(-self._words.stop // _WORDS_PER_COUNT)
        self._counts_between = -(-elements // _WORDS_PER_COUNT) - self._counts
        # A rate just below 1 rounds to 2^32, which uint32 cannot represent.
        self._threshold = np.uint32(min(round(rate * 2**32), 2**32 - 1))
        self._key = int.from_bytes(digest, "little")
        per_sample = self._counts + self._counts_between
        self._counter = int(context.sample_start) * per_sample + first
        self._generator = np.random.Philox(key=self._key, counter=self._counter)

    def state(self) -> dict[str, int]:
        """Return the arguments of `device_passes.dropout` for the first sample's masks."""
        return {
            "key": self._key,
            "counter": self._counter,
            "threshold": int(self._threshold),
            "counts": self._counts,
            "counts_between": self._counts_between,
            "skipped": self._words.start,
        }

    def next_masks(self, samples: int) -> Array:
        """Return the masks of the next samples, a bool array (samples, elements of the part)."""
        if self._counts_between:
            # The generator skips the words between two samples' parts, so that each is a call.
            words = np.stack([self._next_words(1) for _ in range(samples)])
        else:
            words = self._next_words(samples).reshape(samples, -1)
        masks: Array = words[:, self._words] >= self._threshold
        return masks

    def _next_words(self, samples: int) -> Array:
        """Return the words of ``samples`` samples end to end, and advance to the next sample."""
        # Each raw number has 64 bits, two words.
        words = self._generator.random_raw(samples * self._counts * _WORDS_PER_COUNT // 2)
        if self._counts_between:
            self._generator.advance(self._counts_between)
        # Words are little-endian on every machine, so that masks do not depend on the processor.
        return words.astype("<u8", copy=False).view("<u4")
