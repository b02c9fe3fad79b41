"""Models that are chains of layers, and can be held and computed in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mpishard.base import Array, DType, MissingMemberError
from mpishard.base.mirrored import LayerSpellings


class LayerCategory(LayerSpellings, StrEnum):
    """The purpose of a layer."""

    DENSE = "dense"
    CONVOLUTION = "convolution"
    POOLING = "pooling"
    NORMALIZATION = "normalization"
    ACTIVATION = "activation"
    ATTENTION = "attention"
    EMBEDDING = "embedding"
    REGULARIZATION = "regularization"
    RESHAPE = "reshape"
    COMPOSITE = "composite"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One top-level layer of a layered model.

    Parameters
    ----------
    index : int
        Index among the layers, from 0.
    name : str
        Name of the layer, the first word of its parameters' names.
    category : LayerCategory
        Purpose of the layer.
    layer : object
        The layer.
    parameter_offset, parameter_count : int
        Range in the flat vector. A parameter that two layers share counts for one of them.
    input_shape, output_shape : tuple of int
        Shape of one sample, without the batch dim.
    is_trainable : bool
        Whether training changes a parameter that it uses.
    estimated_flops : int
        Approximate number of floating-point operations of one sample's forward pass; a
        multiplication and an addition are two. Backward has about twice as many.
    estimated_activation_memory : int
        Bytes of one sample's outputs, of the layer and of layers inside it. A forward pass keeps
        about as many bytes for backward.
    """

    index: int
    name: str
    category: LayerCategory
    layer: Any  # of `mpishard.nn` or a user's: no class here is common to both
    parameter_offset: int
    parameter_count: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    is_trainable: bool
    estimated_flops: int
    estimated_activation_memory: int


class ILayeredModel(ABC):
    """A model that is a chain of layers, so that it can be held and computed in parts."""

    @property
    @abstractmethod
    def layers(self) -> Sequence[Any]:
        """The top-level layers, in order."""

    @property
    def layer_count(self) -> int:
        """Number of top-level layers."""
        return len(self.layers)

    @abstractmethod
    def get_layer_info(self, index: int) -> LayerInfo:
        """Return the facts about one layer.

        Raises
        ------
        ValueError
            For an index outside [0, layer_count).
        """

    def get_all_layer_info(self) -> list[LayerInfo]:
        """Return the facts about all layers, in order."""
        return [self.get_layer_info(index) for index in range(self.layer_count)]

    def validate_partition_point(self, after: int) -> bool:
        """Return whether the model may be cut after layer ``after``.

        It may if another layer follows, whose input shape is the output shape of ``after``.

        Raises
        ------
        ValueError
            For an index outside [0, layer_count).
        """
        info = self.get_layer_info(after)
        # After the last layer no layer is left for a second stage.
        if after == self.layer_count - 1:
            return False
        return info.output_shape == self.get_layer_info(after + 1).input_shape

    def extract_sub_model(self, start: int, end: int) -> ILayeredModel:
        """Return a model of the layers ``layers[start:end]``, which shares their parameters.

        Raises
        ------
        ValueError
            For a range that is empty, or reaches outside the layers.
        MissingMemberError
            If the model does not implement it.
        """
        # Not abstract, because only pipelines cut a model.
        raise MissingMemberError(f"{type(self).__name__} does not implement extract_sub_model")

    @property
    @abstractmethod
    # Any, because `mpishard.sharding`, which has the class, is a later room.
    def parameter_table(self) -> Any:
        """The model's `mpishard.sharding.ParameterTable`."""

    @property
    @abstractmethod
    def dtype(self) -> DType:
        """The one dtype of parameters and activations."""

    def check_input(self, x: Array) -> None:
        """Refuse an input that `as_input` refuses, without a copy to the model's device.

        Raises
        ------
        TypeError, ValueError
            For values that the first layer cannot take.
        """
        self.as_input(x)

    def as_input(self, x: Array) -> Array:
        """Return ``x`` as the first layer takes it: in the model's dtype, unless it has tokens.

        Raises
        ------
        TypeError, ValueError
            For values that the first layer cannot take.
        """
        return x

    @abstractmethod
    def fill_parameters(self, start: int, out: Array) -> None:
        """Write ``out.size`` parameters, from index ``start`` of the flat vector, into ``out``."""

    @abstractmethod
    def release_parameters(self, holder: str) -> None:
        """Drop the parameters, which ``holder`` has now; later errors name it."""

    @abstractmethod
    def reclaim_parameters(self, parameters: Array) -> None:
        """Take back ``parameters`` from the holder: the opposite of `release_parameters`."""
