"""The interfaces of models, losses and optimizers.

The names mirror a documented class hierarchy; ``T`` is the dtype of the flat vector. A class
implements what it can do: members that a model cannot fulfil raise, naming the interface, when
they are first called. A black box needs only ``get_parameters``, ``set_parameters`` and
``compute_gradients``, and need not derive from anything here.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np

from mpishard.arrays import Array
from mpishard.errors import MissingMemberError

if TYPE_CHECKING:
    from mpishard.communication import CommunicationBackend

__all__ = [
    "ICheckpointableModel",
    "ICloneable",
    "IFeatureAware",
    "IFeatureImportance",
    "IFullModel",
    "IGradientBasedOptimizer",
    "IGradientComputable",
    "IJitCompilable",
    "ILayeredModel",
    "ILossFunction",
    "IModel",
    "IModelSerializer",
    "IOptimizer",
    "IParameterizable",
    "IShardedModel",
    "IShardedOptimizer",
    "LayerInfo",
    "ModelMetadata",
    "PathLike",
    "ShardedModel",
]

PathLike = str | Path


@dataclass
class ModelMetadata:
    """What a model says about itself."""

    name: str
    version: str = "1"
    training_date: datetime = field(default_factory=lambda: datetime.now(UTC))
    properties: dict[str, Any] = field(default_factory=dict)
    feature_count: int = 0
    complexity: int = 0
    description: str = ""

    def set_property(self, key: str, value: Any) -> None:
        """Set one property."""
        self.properties[key] = value

    def remove_property(self, key: str) -> bool:
        """Remove one property; whether it was there."""
        return self.properties.pop(key, None) is not None


class ILossFunction(ABC):
    """A loss as a weighted sum, so that the mean over ranks is exact for uneven batches."""

    @abstractmethod
    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[float, float, Any]:
        """Sum of the losses, sum of their weights, and what `backward` needs.

        Nothing need be kept for `backward` where ``training`` is False.
        """

    def check_target(self, prediction_shape: tuple[int, ...], target: Array) -> None:
        """Refuse targets that `forward` could not take; nothing is communicated before."""

    @abstractmethod
    def backward(self, saved: Any) -> Array:
        """Gradient of the *sum* with respect to the prediction."""

    def __call__(self, prediction: Array, target: Array) -> float:
        """Mean loss: the sum divided by the weight (0 where there is no weight)."""
        total, weight, _ = self.forward(prediction, target, training=False)
        return total / weight if weight else 0.0


class IModel(ABC):
    """Something that learns and predicts."""

    @abstractmethod
    def train(self, x: Array, y: Array) -> float:
        """One step of training; the loss before it."""

    @abstractmethod
    def predict(self, x: Array) -> Array:
        """Outputs for inputs."""

    def get_model_metadata(self) -> ModelMetadata:
        """What the model says about itself."""
        return ModelMetadata(type(self).__name__)


class IModelSerializer(ABC):
    """Bytes and files."""

    @abstractmethod
    def serialize(self) -> bytes:
        """The model's parameters as bytes."""

    @abstractmethod
    def deserialize(self, data: bytes) -> None:
        """Take parameters from what `serialize` gave."""

    @abstractmethod
    def save_model(self, path: PathLike) -> None:
        """Write the model to ``path``, a directory."""

    @abstractmethod
    def load_model(self, path: PathLike) -> None:
        """Take parameters from ``path``."""


class ICheckpointableModel(IModelSerializer):
    """Streams."""

    def save_state(self, stream: BinaryIO) -> None:
        """Write `serialize` to a stream."""
        stream.write(self.serialize())

    def load_state(self, stream: BinaryIO) -> None:
        """Read from a stream what `save_state` wrote."""
        self.deserialize(stream.read())


class IParameterizable(ABC):
    """A flat vector of parameters, shape (parameter_count,)."""

    @property
    @abstractmethod
    def parameter_count(self) -> int:
        """Length of the flat vector."""

    @abstractmethod
    def get_parameters(self) -> Array:
        """A copy of the flat vector."""

    @abstractmethod
    def set_parameters(self, parameters: Array) -> None:
        """Take the values of a flat vector; ValueError where the length differs."""

    def with_parameters(self, parameters: Array) -> Self:
        """A new model with these parameters."""
        model = copy.deepcopy(self)
        model.set_parameters(parameters)
        return model


class IFeatureAware(ABC):
    """Input features in use. Only the linear models know theirs."""

    def get_active_feature_indices(self) -> Iterable[int]:
        """Indices of the features in use."""
        raise MissingMemberError(f"{type(self).__name__} does not implement IFeatureAware")

    def set_active_feature_indices(self, indices: Iterable[int]) -> None:
        """Use these features and no others."""
        raise MissingMemberError(f"{type(self).__name__} does not implement IFeatureAware")

    def is_feature_used(self, index: int) -> bool:
        """Whether one feature is in use."""
        return index in set(self.get_active_feature_indices())


class IFeatureImportance(ABC):
    """How much each input feature matters."""

    def get_feature_importance(self) -> dict[str, float]:
        """Importance by feature name."""
        raise MissingMemberError(f"{type(self).__name__} does not implement IFeatureImportance")


class ICloneable(ABC):
    """Copies. Neither communicates."""

    def clone(self) -> Self:
        """A shallow copy, which shares the arrays."""
        return copy.copy(self)

    def deep_copy(self) -> Self:
        """A copy with arrays of its own."""
        return copy.deepcopy(self)


class IGradientComputable(ABC):
    """Gradients without an update."""

    @abstractmethod
    def compute_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> Array:
        """Gradient of the mean loss, shape (parameter_count,); parameters stay unchanged."""

    def apply_gradients(self, gradients: Array, learning_rate: float) -> None:
        """``theta -= learning_rate * gradients``."""
        raise MissingMemberError(f"{type(self).__name__} does not implement apply_gradients")


class IJitCompilable(ABC):
    """Computation graphs."""

    @property
    def supports_jit_compilation(self) -> bool:
        """Whether `export_computation_graph` works."""
        return False

    def export_computation_graph(self, input_nodes: list[Any]) -> Any:
        """The output node of the model's graph."""
        if input_nodes is None:
            raise TypeError("input_nodes must be a list, got None")
        raise MissingMemberError(f"{type(self).__name__} does not implement IJitCompilable")


class IFullModel(
    IModel, ICheckpointableModel, IParameterizable, IFeatureAware, IFeatureImportance, ICloneable,
    IGradientComputable, IJitCompilable,
):  # fmt: skip
    """Everything a model may be asked."""

    @property
    def default_loss_function(self) -> ILossFunction | None:
        """The loss that is used where none is given; None where there is none."""
        return None


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """One top-level layer of a layered model.

    ``parameter_offset`` and ``parameter_count`` are its range of the flat vector; shapes are
    those of one sample, without the batch dim.
    """

    index: int
    name: str
    layer: Any
    parameter_offset: int
    parameter_count: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]


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
        """What is known of one layer."""

    def get_all_layer_info(self) -> list[LayerInfo]:
        """What is known of all layers, in order."""
        return [self.get_layer_info(index) for index in range(self.layer_count)]

    @property
    @abstractmethod
    def parameter_table(self) -> Any:
        """The model's `mpishard.sharding.ParameterTable`."""

    @property
    @abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """The one dtype of parameters and activations."""

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


class IShardedModel(IFullModel):
    """A model whose parameters live on several ranks."""

    @property
    @abstractmethod
    def wrapped_model(self) -> Any:
        """The user's model."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process or thread."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def local_parameter_shard(self) -> Array:
        """What this rank owns, end to end; all parameters where they are replicated."""

    @property
    @abstractmethod
    def sharding_configuration(self) -> Any:
        """The choices this model was made with."""

    @abstractmethod
    def gather_full_parameters(self) -> Array:
        """All parameters in layer order, on every rank. Collective."""

    @abstractmethod
    def synchronize_gradients(self) -> None:
        """Reduce gradients that are still local. Collective."""


ShardedModel = IShardedModel


class IOptimizer(ABC):
    """Something that finds parameters for data."""

    @abstractmethod
    def optimize(self, input_data: Any) -> Any:
        """Train the model of ``input_data`` on its data; an `OptimizationResult`."""

    @abstractmethod
    def get_options(self) -> Mapping[str, Any]:
        """The choices this optimizer was made with."""

    @abstractmethod
    def reset(self) -> None:
        """Forget all state."""

    def should_early_stop(self) -> bool:
        """Whether training should end now."""
        return False


class IGradientBasedOptimizer(IOptimizer):
    """An optimizer whose update is a function of a gradient."""

    @abstractmethod
    def get_current_learning_rate(self) -> float:
        """The rate that the next update uses."""


class IShardedOptimizer(IOptimizer):
    """An optimizer that works with the other ranks."""

    @property
    @abstractmethod
    def wrapped_optimizer(self) -> Any:
        """The user's optimizer."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """The rank of this process or thread."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def sharding_configuration(self) -> Any:
        """The choices this optimizer was made with."""

    @property
    def backend(self) -> CommunicationBackend:
        """How the ranks talk."""
        backend: CommunicationBackend = self.sharding_configuration.communication_backend
        return backend
