"""Ways to send a gradient in fewer bytes: each encodes a vector as bytes, and decodes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from mpishard.base import Array, DType

Key = tuple[int, ...]
"""Seed, step, unit, owner and sender: random numbers are a function of them."""

_LEAST_RANGE = 1e-12  # with a smaller range all elements are sent as the least one
_BLOCK = 128  # elements that share a scale of int8


def _count(ratio: float, length: int) -> int:
    """Return how many elements are sent: at least one, so that none is left out for ever."""
    return max(1, int(ratio * length)) if length else 0


class Code(ABC):
    """An encoding of a vector of known length and dtype; `wire_bytes` of it travel."""

    @abstractmethod
    def wire_bytes(self, length: int, itemsize: int) -> int:
        """Return the number of bytes of an encoded vector."""

    @abstractmethod
    def encode(self, values: Array, key: Key) -> Array:
        """Return ``values``, of shape (n,), as uint8, of shape (`wire_bytes`,)."""

    @abstractmethod
    def decode(self, code: Array, out: Array, key: Key) -> None:
        """Write the decoded vector to ``out``, shape (n,)."""


@dataclass(frozen=True)
class Quantization(Code):
    """The nearest of ``levels`` values from the least element to the greatest: a byte each."""

    levels: int

    def wire_bytes(self, length: int, itemsize: int) -> int:
        return length + 2 * itemsize if length else 0

    def encode(self, values: Array, key: Key) -> Array:
        if not values.size:
            return np.empty(0, np.uint8)
        low, high = values.min(), values.max()
        step = (high - low) / values.dtype.type(self.levels - 1)
        # Differences as small as this are rounding errors, or 0, by which nothing is divided.
        if high - low < _LEAST_RANGE:
            step = step * 0  # 0 in the dtype of the values
            codes = np.zeros(values.size, np.uint8)
        else:
            codes = np.rint((values - low) / step).astype(np.uint8)
        return np.concatenate([np.array([low, step], values.dtype).view(np.uint8), codes])

    def decode(self, code: Array, out: Array, key: Key) -> None:
        if out.size:
            header = 2 * out.dtype.itemsize
            # A copy, because bytes cut out of a message need not be aligned for the dtype.
            low, step = code[:header].copy().view(out.dtype)
            out[...] = code[header:]
            out *= step
            out += low


@dataclass(frozen=True)
class Int8(Code):
    """A signed byte each, with one scale for 128 elements, rounded up or down at random.

    The expected value is the element (Alistarh et al., "QSGD", NeurIPS 2017, section 3.1, with the
    largest element for the norm).
    """

    def wire_bytes(self, length: int, itemsize: int) -> int:
        return length + -(-length // _BLOCK) * itemsize

    def encode(self, values: Array, key: Key) -> Array:
        starts = np.arange(0, values.size, _BLOCK)
        if not values.size:
            return np.empty(0, np.uint8)
        scales = np.maximum.reduceat(np.abs(values), starts) / values.dtype.type(127)
        # Where all 128 are 0 any divisor will do, but 0.
        each = np.repeat(np.where(scales == 0, 1, scales), _BLOCK)[: values.size]
        drawn = np.random.default_rng(key).random(values.size, np.float32)
        # Adding a random number below 1 and rounding down rounds without bias. Rounding errors may
        # make 128 of the largest element, which int8 cannot hold.
        codes = np.clip(np.floor(values / each + drawn), -127, 127).astype(np.int8)
        return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)])

    def decode(self, code: Array, out: Array, key: Key) -> None:
        header = -(-out.size // _BLOCK) * out.dtype.itemsize
        out[...] = code[header:].view(np.int8)
        out *= np.repeat(code[:header].copy().view(out.dtype), _BLOCK)[: out.size]


@dataclass(frozen=True)
class Rounded(Code):
    """Each element, rounded to the nearest of a shorter dtype."""

    dtype: DType

    def wire_bytes(self, length: int, itemsize: int) -> int:
        return length * self.dtype.itemsize

    def encode(self, values: Array, key: Key) -> Array:
        return values.astype(self.dtype).view(np.uint8)

    def decode(self, code: Array, out: Array, key: Key) -> None:
        out[...] = code.copy().view(self.dtype)


@dataclass(frozen=True)
class TopK(Code):
    """The ``ratio`` of all elements that are largest, at least one, with their indices."""

    ratio: float

    def wire_bytes(self, length: int, itemsize: int) -> int:
        return _count(self.ratio, length) * (4 + itemsize)

    def encode(self, values: Array, key: Key) -> Array:
        count = _count(self.ratio, values.size)
        if not count:
            return np.empty(0, np.uint8)
        # A partition, because the order among the largest means nothing and a sort takes longer.
        indices = np.sort(np.argpartition(np.abs(values), values.size - count)[-count:])
        return np.concatenate(
            [indices.astype(np.uint32).view(np.uint8), values[indices].view(np.uint8)]
        )

    def decode(self, code: Array, out: Array, key: Key) -> None:
        header = 4 * _count(self.ratio, out.size)
        # What is not sent is 0: error feedback adds it to the next gradient.
        out.fill(0)
        out[code[:header].copy().view(np.uint32)] = code[header:].copy().view(out.dtype)
