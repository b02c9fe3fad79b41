"""The flat vector of a plain model, which its shallow copies and sub-models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpishard.arrays import Array, copy_into
from mpishard.devices import HOST, Device

__all__ = ["ParameterVector", "VectorPart"]


class ParameterVector:
    """A flat vector that is made on first use.

    Parameters
    ----------
    length : int
        Number of elements.
    dtype : numpy.dtype
        Dtype of the elements.
    initialize : callable
        ``initialize(start, out)`` writes the first values of the range that begins at ``start``
        into a host array.
    values : Array, optional
        First values, shape (length,); they are not copied.
    device : Device
        Device on which it is made.
    """

    def __init__(
        self,
        length: int,
        dtype: np.dtype[Any],
        initialize: Callable[[int, Array], None],
        values: Array | None = None,
        device: Device = HOST,
    ) -> None:
        self.length = length
        self.dtype = dtype
        self._initialize = initialize
        self._values = values
        self._device = device

    def get(self) -> Array:
        """The vector itself, shape (length,), made if need be."""
        if self._values is None:
            # Made on the host also for a GPU, so that both start with the same bits.
            values = np.empty(self.length, self.dtype)
            self._initialize(0, values)
            self._values = self._device.put(values)
        return self._values

    def replace(self, values: Array) -> None:
        """Hold ``values``, shape (length,), which are the callee's from now on."""
        self._values = values

    def fill(self, start: int, out: Array) -> None:
        """Write the range that begins at ``start`` into ``out``, without making the vector.

        ``out`` is a host array.
        """
        if self._values is None:
            self._initialize(start, out)
        else:
            copy_into(out, self._values[start : start + int(out.size)])

    def holding(self, values: Array | None) -> ParameterVector:
        """Another vector of this length and dtype, with ``values`` or first values."""
        return ParameterVector(self.length, self.dtype, self._initialize, values, self._device)

    def copy(self) -> ParameterVector:
        """A vector of its own, with the values that this one has."""
        return self.holding(None if self._values is None else self._values.copy())


class VectorPart(ParameterVector):
    """The range ``[start, start + length)`` of another vector, in its memory."""

    def __init__(self, whole: ParameterVector, start: int, length: int) -> None:
        def initialize(first: int, out: Array) -> None:
            whole.fill(start + first, out)

        super().__init__(length, whole.dtype, initialize, device=whole._device)
        self._whole = whole
        self._start = start

    def get(self) -> Array:
        return self._whole.get()[self._start : self._start + self.length]

    def replace(self, values: Array) -> None:
        self.get()[...] = values

    def copy(self) -> ParameterVector:
        """As `ParameterVector.copy`; the values are taken now, so that this makes the whole."""
        return self.holding(self.get().copy())
