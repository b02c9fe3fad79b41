"""What files and bytes hold of a chain of layers: parameters, and what is chosen of the layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpishard.arrays import Array
from mpishard.checkpoint.exchange.plain import PlainModelFiles
from mpishard.nn.composites import Sequential
from mpishard.nn.feature_linear import FeatureLinear
from mpishard.nn.layer import Layer
from mpishard.sharding import ParameterEntry, ParameterTable

__all__ = ["ChainFiles"]

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
