"""Parts of a plain model: its flat vector, and a training pass through its layers and loss.

A model's shallow copies and sub-models share its vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.base import (
    HOST,
    NAMESPACES,
    Array,
    Device,
    DType,
    as_loss,
    copy_into,
    lies_on_device,
    read_numbers,
)
from mpishard.contracts import ILossFunction
from mpishard.nn.layers.composites import Sequential
from mpishard.nn.layers.layer import Context, GradientTargets
from mpishard.sharding import ParameterTable


# Compared by identity: arrays have no truth value.
@dataclass(eq=False)
class ParameterVector:
    """Flat vector that is made on first use.

    Parameters
    ----------
    length : int
        Number of elements.
    dtype : numpy.dtype
        Dtype of the elements.
    initialize : callable
        ``initialize(start, out)`` writes the initial values of the range that begins at ``start``
        to the host array ``out``.
    values : Array, optional
        Values of shape (length,), which are not copied. If not given, the vector is initialized.
    device : Device
        Device on which the vector is made.
    """

    length: int
    dtype: DType
    initialize: Callable[[int, Array], None]
    values: Array | None = None
    device: Device = HOST

    def get(self) -> Array:
        """Return the vector itself, shape (length,), and make it if necessary."""
        if self.values is None:
            # The host makes the values for a GPU, too, so that both start with the same bits.
            values = np.empty(self.length, self.dtype)
            self.initialize(0, values)
            self.values = self.device.put(values)
        return self.values

    def replace(self, values: Array) -> None:
        """Replace the vector by ``values``, shape (length,), which are not copied."""
        self.values = values

    def fill(self, start: int, out: Array) -> None:
        """Copy the range that begins at ``start`` to the host array ``out``.

        This does not make the vector if it has not been used.
        """
        if self.values is None:
            self.initialize(start, out)
        else:
            copy_into(out, self.values[start : start + int(out.size)])

    def holding(self, values: Array | None) -> ParameterVector:
        """Return a vector of this length and dtype, with ``values``, or initial values if None."""
        return ParameterVector(self.length, self.dtype, self.initialize, values, self.device)

    def copy(self) -> ParameterVector:
        """Return a copy with memory of its own."""
        return self.holding(None if self.values is None else self.values.copy())


class VectorPart(ParameterVector):
    """Range ``[start, start + length)`` of another vector, in the memory of that vector."""

    def __init__(self, whole: ParameterVector, start: int, length: int) -> None:
        def initialize(first: int, out: Array) -> None:
            # Initial values without making the whole vector, which a stage of a pipeline must not
            # do.
            whole.fill(start + first, out)

        super().__init__(length, whole.dtype, initialize, device=whole.device)
        self._whole = whole
        self._start = start

    def get(self) -> Array:
        return self._whole.get()[self._start : self._start + self.length]

    def replace(self, values: Array) -> None:
        # Into the memory of the whole, which other parts and the model share.
        self.get()[...] = values

    def copy(self) -> ParameterVector:
        """Return a copy with memory of its own. This makes the whole vector if necessary."""
        return self.holding(self.get().copy())


class TrainingPass:
    """Forward pass of layers and loss over a batch, and one backward pass, whole or in two halves.

    The constructor runs the forward pass.

    Parameters
    ----------
    chain : Sequential
        The layers.
    table : ParameterTable
        Table of the layers' parameters.
    vector : Array
        The parameters, shape (table.length,).
    loss : ILossFunction
        The loss.
    x, y : Array
        Inputs and targets of a batch that layers and loss can take.
    context : Context
        Seed, step and sample index for random layers.
    """

    def __init__(
        self,
        chain: Sequential,
        table: ParameterTable,
        vector: Array,
        loss: ILossFunction,
        x: Array,
        y: Array,
        context: Context,
    ) -> None:
        self.chain = chain
        self._table = table
        self._vector = vector
        self._x_shape = x.shape
        self.is_pending = False  # True after `input_gradient`, until `weight_gradients`.
        prediction, self._saved = chain.forward(table.nested_views(vector), x, context)
        total, weight, loss_saved = loss.forward(prediction, y)
        # On a GPU the sums may be arrays, and the host does not wait for them before it has begun
        # the backward pass.
        self._total = total if lies_on_device(total) else as_loss(total, loss, "sum")
        self._weight: Any = weight
        # The weight is 0 if there are no samples, or if all targets are ignored.
        self._has_samples = bool(lies_on_device(weight) or weight)
        # Backward pops the gradient from this list, so that no name keeps the large array alive.
        self._output_gradient = [loss.backward(loss_saved)] if self._has_samples else []

    @property
    def mean_loss(self) -> float:
        """The mean loss; 0 if the weight is 0. On a GPU the host waits for it."""
        total, weight = read_numbers([self._total, self._weight])
        return total / weight if weight else 0.0

    def _divide(self, sums: Array) -> None:
        """Divide a gradient of the loss's sum by the weight, in place; if it is 0, they are 0."""
        if lies_on_device(self._weight):
            weight = self._weight.astype(sums.dtype)
            # Without a branch on the weight, for which the host would have to wait.
            sums /= weight + (weight == 0)
        else:
            sums /= self._weight

    def gradients(self) -> Array:
        """Return the gradient of the mean loss, shape (table.length,)."""

        def add(targets: GradientTargets) -> None:
            # The popped gradient has no name here, which would keep it until the end of backward.
            self.chain.backward(
                self._table.nested_views(self._vector),
                self._saved,
                self._output_gradient.pop(),
                targets,
                needs_input_gradient=False,
            )

        return self._mean_gradient(add)

    def input_gradient(self) -> Array | None:
        """Run the input's half: return the gradient of the mean loss in x's shape.

        It is None if x holds integers, which have no gradient.
        """
        self.is_pending = True
        if not self._has_samples:
            xp = NAMESPACES[type(self._vector)]
            is_number = self.chain.takes_integers
            return None if is_number else xp.zeros(self._x_shape, self._vector.dtype)
        views = self._table.nested_views(self._vector)
        dx, self._saved = self.chain.backward_input(views, self._saved, self._output_gradient.pop())
        if dx is not None:
            self._divide(dx)
        return dx

    def weight_gradients(self) -> Array:
        """Run the parameters' half after `input_gradient`: return the values of `gradients`."""
        self.is_pending = False
        # The second half frees arrays as it uses them, if nothing else refers to them.
        pending, self._saved = self._saved, None
        return self._mean_gradient(lambda targets: self.chain.backward_weight(pending, targets))

    def _mean_gradient(self, add: Callable[[GradientTargets], None]) -> Array:
        """Return the gradient of the mean loss; ``add(targets)`` adds that of the loss's sum."""
        xp = NAMESPACES[type(self._vector)]
        if not self._has_samples:
            return xp.zeros_like(self._vector)
        gradients = xp.empty_like(self._vector)  # `GradientTargets` clears it if need be.
        targets = GradientTargets(
            {name: self._table[name] for name, _ in self.chain.walk_parameters()},
            lambda entry: gradients[entry.start : entry.stop],
            {entry.name for entry in self._table.entries},
        )
        add(targets)
        targets.clear_unwritten()
        self._divide(gradients)
        return gradients
