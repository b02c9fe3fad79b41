"""Models that are chains of layers, and can be held and computed in parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.errors import MissingMemberError


class LayerCategory(StrEnum):
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

    # As the mirrored hierarchy spells its enumerations.
    Dense = DENSE
    Convolution = CONVOLUTION
    Pooling = POOLING
    Normalization = NORMALIZATION
    Activation = ACTIVATION
    Attention = ATTENTION
    Embedding = EMBEDDING
    Regularization = REGULARIZATION
    Reshape = RESHAPE
    Composite = COMPOSITE
    Other = OTHER


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One top-level layer of a layered model.

    Parameters
    ----------
    index : int
        Its place among the layers, from 0.
    name : str
        Its name, the first word of its parameters' names.
    category : LayerCategory
        Purpose of the layer.
    layer : object
        The layer.
    parameter_offset, parameter_count : int
        Its range of the flat vector. A parameter that is another layer's too counts there.
    input_shape, output_shape : tuple of int
        Shape of one sample, without the batch dim.
    is_trainable : bool
        Whether training changes a parameter that it uses.
    estimated_flops : int
        Floating-point operations of one sample's forward pass, about; a multiplication and an
        addition are two. Backward is about twice as many.
    estimated_activation_memory : int
        Bytes of one sample's outputs, of the layer and of layers inside it: about what a forward
        pass leaves for backward.
    """

    index: int
    name: str
    category: LayerCategory
    layer: Any
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
        """Facts about one layer.

        Raises
        ------
        ValueError
            For an index outside [0, layer_count).
        """

    def get_all_layer_info(self) -> list[LayerInfo]:
        """Facts about all layers, in order."""
        return [self.get_layer_info(index) for index in range(self.layer_count)]

    def validate_partition_point(self, after: int) -> bool:
        """True if the model may be cut behind layer ``after``.

        It may if a layer follows, and takes the shape that ``after`` gives.

        Raises
        ------
        ValueError
            For an index outside [0, layer_count).
        """
        info = self.get_layer_info(after)
        # Behind the last layer there is nothing left to be a stage.
        if after == self.layer_count - 1:
            return False
        return info.output_shape == self.get_layer_info(after + 1).input_shape

    def extract_sub_model(self, start: int, end: int) -> ILayeredModel:
        """A model of the layers ``layers[start:end]``, which shares their parameters.

        Raises
        ------
        ValueError
            For a range that is empty, or reaches outside the layers.
        MissingMemberError
            If the model cannot.
        """
        raise MissingMemberError(f"{type(self).__name__} does not implement extract_sub_model")

    @property
    @abstractmethod
    def parameter_table(self) -> Any:
        """The model's `mpishard.sharding.ParameterTable`."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The one dtype of parameters and activations."""

    def check_input(self, x: Array) -> None:
        """Refuse the inputs that `as_input` refuses, without a copy to the model's device.

        Raises
        ------
        TypeError, ValueError
            For values that the first layer cannot take.
        """
        self.as_input(x)

    def as_input(self, x: Array) -> Array:
        """``x`` as the first layer takes it: in the model's dtype, unless integers are tokens.

        Raises
        ------
        TypeError, ValueError
            For values that the first layer cannot take.
        """
        return x

    @abstractmethod
    def fill_parameters(self, start: int, out: Array) -> None:
        """Write the parameters of the flat range that begins at ``start`` into ``out``."""

    @abstractmethod
    def release_parameters(self, holder: str) -> None:
        """Let the parameters go: ``holder`` has them now, and errors will name it."""

    @abstractmethod
    def reclaim_parameters(self, parameters: Array) -> None:
        """Hold ``parameters``, which a holder gives back: the opposite of `release_parameters`."""


class IPipelineDecomposableModel(ABC):
    """Backward in two halves, so that a pipeline can put off the one that nobody waits for.

    Qi et al., "Zero bubble pipeline parallelism", 2023 (arXiv:2401.10241), section 2: B, the
    gradient of the input, is what the stage before waits for; W, that of the parameters, is not.
    """

    @abstractmethod
    def compute_activation_gradients(self, x: Array, target: Array) -> tuple[Array, Any]:
        """B: the mean loss's gradient with respect to ``x``, and the values that W needs.

        Returns
        -------
        dx : Array
            In the shape of ``x``; None if the input has no gradient (token numbers).
        cached : object
            For one call of `compute_weight_gradients`.
        """

    @abstractmethod
    def compute_weight_gradients(self, x: Array, target: Array, cached: Any) -> Array:
        """W: the mean loss's gradient of shape (parameter_count,), from the values that B cached.

        ``x`` and ``target`` are those that B had.

        Raises
        ------
        ValueError
            If ``cached`` is not of this model, or was used before.
        """
