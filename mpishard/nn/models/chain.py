"""A chain of layers as a model uses it: its files, and a training pass through it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.checkpoint.exchange.plain import PlainModelFiles
from mpishard.contracts import ILossFunction
from mpishard.nn.layers.composites import Sequential
from mpishard.nn.layers.layer import Context, Layer
from mpishard.nn.layers.linear import FeatureLinear
from mpishard.nn.layers.targets import GradientTargets
from mpishard.sharding import ParameterEntry, ParameterTable

__all__ = ["ChainFiles", "TrainingPass"]


_ACTIVE = "active_features"


class ChainFiles(PlainModelFiles):
    """Serialisation of a chain of layers, with the active features of each `FeatureLinear`."""

    chain: Sequential

    @property
    @abstractmethod
    def parameter_table(self) -> ParameterTable:
        """Where each parameter lies."""

    @abstractmethod
    def _parameters(self) -> Array:
        """The flat vector itself."""

    def _flat_vector(self) -> Array:
        return self._parameters()

    def checkpoint_parameters(self) -> Sequence[ParameterEntry]:
        return self.parameter_table.entries

    def choices(self) -> dict[str, Any]:
        """The active features of the layers in which some are not, by the layer's full name."""
        active = {
            name: list(layer.active)
            for name, layer in _feature_layers(self.chain)
            if len(layer.active) < layer.inputs
        }
        return {_ACTIVE: active} if active else {}

    def check_choices(self, choices: Mapping[str, Any]) -> None:
        layers = dict(_feature_layers(self.chain))
        for name, indices in choices.get(_ACTIVE, {}).items():
            if name not in layers:
                raise ValueError(
                    f"{name!r} uses only the input features {indices} in what was saved, and in "
                    f"this {type(self).__name__} it cannot leave features out: it must be a "
                    "FeatureLinear, as in the linear models"
                )
            layers[name].checked(indices)

    def take_choices(self, choices: Mapping[str, Any]) -> None:
        active = choices.get(_ACTIVE, {})
        for name, layer in _feature_layers(self.chain):
            layer.active = active.get(name, range(layer.inputs))


def _feature_layers(layer: Layer, name: str = "") -> Iterator[tuple[str, FeatureLinear]]:
    """Yield (dotted name, layer) of each layer that can leave features out."""
    if isinstance(layer, FeatureLinear):
        yield name, layer
    for child_name, child in layer.children.items():
        yield from _feature_layers(child, f"{name}.{child_name}" if name else child_name)


class TrainingPass:
    """The layers and the loss, run on a batch; then backward, once, whole or in halves.

    Parameters
    ----------
    chain : Sequential
        The layers.
    table : ParameterTable
        Of their parameters.
    vector : Array
        The parameters, shape (table.length,).
    loss : ILossFunction
        The loss.
    x, y : Array
        A batch that layers and loss can take.
    context : Context
        What random layers go by.
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
        self.mean_loss = total / self._weight if self._weight else 0.0
        # In a list, from which backward takes it: it is large, and the layers let it go early.
        self._output_gradient = [loss.backward(loss_saved)] if self._weight else []

    @property
    def is_pending(self) -> bool:
        """Whether the input's half of backward is done and the parameters' half is not."""
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
        """The input's half: gradient of the mean loss in x's shape; None where x has none."""
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
