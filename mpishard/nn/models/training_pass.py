"""A training pass through a chain of layers and a loss."""

from __future__ import annotations

from mpishard.arguments import as_loss
from mpishard.arrays import Array, array_namespace
from mpishard.contracts import ILossFunction
from mpishard.nn.layers.composites import Sequential
from mpishard.nn.layers.layer import Context
from mpishard.nn.layers.targets import GradientTargets
from mpishard.sharding import ParameterTable

__all__ = ["TrainingPass"]


class TrainingPass:
    """The layers and the loss, run on a batch; then backward, once, whole or in halves.

    Parameters
    ----------
    chain : Sequential
        The layers.
    table : ParameterTable
        Table of their parameters.
    vector : Array
        The parameters, shape (table.length,).
    loss : ILossFunction
        The loss.
    x, y : Array
        A batch that layers and loss can take.
    context : Context
        Source of randomness for random layers.
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
        self._is_pending = False
        prediction, self._saved = chain.forward(table.nested_views(vector), x, context)
        total, self._weight, loss_saved = loss.forward(prediction, y)
        # The weight is 0 if there are no samples, or if all targets are ignored.
        self.mean_loss = as_loss(total, loss, "sum") / self._weight if self._weight else 0.0
        # In a list, from which backward takes it: it is large, and the layers let it go early.
        self._output_gradient = [loss.backward(loss_saved)] if self._weight else []

    @property
    def is_pending(self) -> bool:
        """True if the input's half of backward is done and the parameters' half is not."""
        return self._is_pending

    def gradients(self) -> Array:
        """Gradient of the mean loss, shape (table.length,)."""
        if not self._weight:
            return array_namespace(self._vector).zeros_like(self._vector)
        gradients, targets = self._targets()
        views = self._table.nested_views(self._vector)
        self.chain.backward(
            views, self._saved, self._output_gradient.pop(), targets, needs_input_gradient=False
        )
        targets.clear_unwritten()
        gradients /= self._weight
        return gradients

    def input_gradient(self) -> Array:
        """The input's half: gradient of the mean loss in x's shape; None if x has none."""
        self._is_pending = True
        if not self._weight:
            xp = array_namespace(self._vector)
            is_number = self.chain.takes_integers
            return None if is_number else xp.zeros(self._x_shape, self._vector.dtype)
        views = self._table.nested_views(self._vector)
        dx, self._saved = self.chain.backward_input(views, self._saved, self._output_gradient.pop())
        if dx is not None:
            dx /= self._weight
        return dx

    def weight_gradients(self) -> Array:
        """The parameters' half, after `input_gradient`: what `gradients` would have given."""
        self._is_pending = False
        if not self._weight:
            return array_namespace(self._vector).zeros_like(self._vector)
        gradients, targets = self._targets()
        pending, self._saved = self._saved, None
        self.chain.backward_weight(pending, targets)
        targets.clear_unwritten()
        gradients /= self._weight
        return gradients

    def _targets(self) -> tuple[Array, GradientTargets]:
        gradients = array_namespace(self._vector).empty_like(self._vector)
        targets = GradientTargets(
            {name: self._table[name] for name, _ in self.chain.walk_parameters()},
            lambda entry: gradients[entry.start : entry.stop],
            {entry.name for entry in self._table.entries},
        )
        return gradients, targets
