"""A layer between operators that bring it the positions it takes, under the layer's own name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpishard.arrays import Array
from mpishard.contracts import LayerCategory
from mpishard.nn.layer import Context, Gradients, Layer, Parameters, ParameterSpec
from mpishard.tensor.regions import GatherSequence, ScatterSequence

__all__ = ["Framed"]

_Operator = GatherSequence | ScatterSequence


class Framed(Layer):
    """``after(layer(before(x)))``, whose parameters and children are the layer's.

    With sequence parallelism most activations are slices along time; a layer that no rule splits
    needs the whole sequence, and what follows it slices. The operators have no parameters, so
    that names stay those of the model.

    Parameters
    ----------
    layer : Layer
        What computes.
    before, after : GatherSequence, ScatterSequence or None
        What the input and the output go through.
    """

    category = LayerCategory.COMPOSITE

    def __init__(
        self, layer: Layer, *, before: _Operator | None = None, after: _Operator | None = None
    ) -> None:
        self.layer = layer
        self.before = before
        self.after = after

    @property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """The layer's."""
        return self.layer.parameters

    @property
    def children(self) -> Mapping[str, Layer]:
        """The layer's."""
        return self.layer.children

    @property
    def is_random(self) -> bool:
        """Whether the layer is."""
        return self.layer.is_random

    @property
    def takes_integers(self) -> bool:
        """Whether the layer does."""
        return self.layer.takes_integers

    def check_input(self, x: Array) -> None:
        """As the layer."""
        self.layer.check_input(x)

    def copy(self) -> Framed:
        """The same operators around a copy of the layer."""
        return Framed(self.layer.copy(), before=self.before, after=self.after)

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of operators and layer, one after the other."""
        shape = self.layer.output_shape(self._layer_input(input_shape))
        return shape if self.after is None else self.after.output_shape(shape)

    def estimated_flops(self, input_shape: tuple[int, ...]) -> int:
        """Those of the layer."""
        return self.layer.estimated_flops(self._layer_input(input_shape))

    def estimated_activation_size(self, input_shape: tuple[int, ...]) -> int:
        """Those of the layer."""
        return self.layer.estimated_activation_size(self._layer_input(input_shape))

    def _layer_input(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        return input_shape if self.before is None else self.before.output_shape(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Any]:
        """Operator, layer, operator; saves what the layer saves. Collective."""
        if self.before is not None:
            x, _ = self.before.forward({}, x, context)
        y, saved = self.layer.forward(p, x, context)
        if self.after is not None:
            y, _ = self.after.forward({}, y, context)
        return y, saved

    def backward_input(self, p: Parameters, saved: Any, dy: Array) -> tuple[Array, Any]:
        """The same backward; pending is the layer's. Collective."""
        dx, pending = self.layer.backward_input(p, saved, self._layer_gradient(dy))
        return self._input_gradient(dx), pending

    def backward_weight(self, pending: Any, g: Gradients) -> None:
        """The layer's."""
        self.layer.backward_weight(pending, g)

    def backward(
        self,
        p: Parameters,
        saved: Any,
        dy: Array,
        g: Gradients,
        *,
        needs_input_gradient: bool = True,
    ) -> Array:
        """Both halves. Collective."""
        dx = self.layer.backward(
            p, saved, self._layer_gradient(dy), g, needs_input_gradient=needs_input_gradient
        )
        return self._input_gradient(dx)

    def _layer_gradient(self, dy: Array) -> Array:
        return dy if self.after is None else self.after.backward_input({}, None, dy)[0]

    def _input_gradient(self, dx: Array) -> Array:
        if self.before is None or dx is None:
            return dx
        return self.before.backward_input({}, None, dx)[0]
