"""Interfaces of models: training, prediction, gradients, copies, features, losses, metadata."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self, TypeAlias

from mpishard.base import Array, MissingInterfaceError, MissingMemberError, Scalar
from mpishard.contracts.parameters import ICheckpointableModel, IParameterizable

UserModel: TypeAlias = Any
"""A user's model. Its members are looked for by name, and it need not derive from a class here."""

Saved: TypeAlias = Any
"""What a forward pass keeps for its backward pass. Only the layer or loss that made it reads it."""


class IFeatureAware(ABC):
    """The input features that a model uses. Only linear models know theirs.

    Members that a model does not implement raise `MissingInterfaceError`, a RuntimeError.
    """

    def get_active_feature_indices(self) -> Iterable[int]:
        """Return the indices of the features in use."""
        raise MissingInterfaceError(f"{type(self).__name__} does not implement IFeatureAware")

    def set_active_feature_indices(self, indices: Iterable[int]) -> None:
        """Use these features and no others."""
        raise MissingInterfaceError(f"{type(self).__name__} does not implement IFeatureAware")

    def is_feature_used(self, index: int) -> bool:
        """Return whether the feature is in use."""
        return index in set(self.get_active_feature_indices())


class IFeatureImportance(ABC):
    """The importance of each input feature."""

    def get_feature_importance(self) -> dict[str, float]:
        """Return the importance by feature name; `MissingInterfaceError` if it is not known."""
        raise MissingInterfaceError(f"{type(self).__name__} does not implement IFeatureImportance")


class ILossFunction(ABC):
    """A loss as a weighted sum, so that the mean over ranks is exact for uneven batches."""

    @abstractmethod
    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[Scalar, Scalar, Saved]:
        """Return the sum of the losses, the sum of their weights, and the values for `backward`.

        The values may be None if ``training`` is False. On a GPU the sums may be arrays of one
        element, for which the host does not wait.
        """

    def check_target(self, prediction_shape: tuple[int, ...], target: Array) -> None:
        """Refuse targets that `forward` could not take. Called before any communication."""

    @abstractmethod
    def backward(self, saved: Saved) -> Array:
        """Return the gradient of the *sum* with respect to the prediction."""

    def derivative(self, prediction: Array, target: Array) -> Array:
        """Return the gradient of the mean loss with respect to the prediction, in its shape."""
        _, weight, saved = self.forward(prediction, target)
        gradient = self.backward(saved)
        # On a GPU this waits for the sum. `forward` and `backward` do not.
        if counted := float(weight):
            gradient /= counted
        return gradient

    def __call__(self, prediction: Array, target: Array) -> float:
        """Return the mean loss: the sum divided by the weight; 0 if the weight is 0."""
        total, weight, _ = self.forward(prediction, target, training=False)
        counted = float(weight)
        return float(total) / counted if counted else 0.0


# Not frozen, because a sharded model adds its own facts to those of the plain model.
@dataclass
class ModelMetadata:
    """A model's description of itself.

    Parameters
    ----------
    name : str
        The model's name: that of its class, unless it has another.
    version : str
        Version of the model, chosen by its author.
    training_date : datetime
        Time of training, with time zone. Default: the present.
    properties : dict
        Other properties, by name.
    feature_count : int
        Number of features of one sample; 0 if it is not known.
    complexity : int
        Number of parameters.
    description : str
        One line of text.
    additional_info : dict
        Other facts that tools can show, beside `properties`.
    model_data : bytes
        Bytes from ``serialize``, which keep metadata and model together; empty unless set.
    feature_importance : dict of str to float
        Importance by feature name; empty for a model that does not know its features.
    model_type : str
        The kind of model: the name of its class.
    """

    name: str
    version: str = "1"
    training_date: datetime = field(default_factory=lambda: datetime.now(UTC))
    properties: dict[str, Any] = field(default_factory=dict)
    feature_count: int = 0
    complexity: int = 0
    description: str = ""
    additional_info: dict[str, Any] = field(default_factory=dict)
    model_data: bytes = b""
    feature_importance: Mapping[str, float] = field(default_factory=dict)
    model_type: str = ""

    def set_property(self, key: str, value: Any) -> None:
        """Set one property."""
        self.properties[key] = value

    def remove_property(self, key: str) -> bool:
        """Remove one property; return whether it was there."""
        was_there = key in self.properties
        self.properties.pop(key, None)
        return was_there


@dataclass(frozen=True, slots=True)
class DynamicShapeInfo:
    """The dims that may differ from one batch to the next.

    The number of samples may always differ. Dims are counted in the shape of a *sample*, without
    the batch dim: for sequences of shape (T, D), (0,) means that T may differ.
    """

    dynamic_input_dims: tuple[int, ...] = ()
    dynamic_output_dims: tuple[int, ...] = ()


class IModelShape(ABC):
    """Shapes of one sample, without the batch dim; by default they are not known."""

    def get_input_shape(self) -> list[int]:
        """Return the shape of one sample; [] if it is not known."""
        return []

    def get_output_shape(self) -> list[int]:
        """Return the shape of one sample's prediction; [] if it is not known."""
        return []

    def get_dynamic_shape_info(self) -> DynamicShapeInfo:
        """Return the dims of these shapes that may differ from batch to batch."""
        return DynamicShapeInfo()


class IModel(ABC):
    """A model that can be trained and makes predictions."""

    @abstractmethod
    def train(self, x: Array, y: Array) -> float:
        """Make one step of training; return the loss before it."""

    @abstractmethod
    def predict(self, x: Array) -> Array:
        """Return the predictions for inputs ``x``."""

    def get_model_metadata(self) -> ModelMetadata:
        """Return the model's description of itself."""
        return ModelMetadata(type(self).__name__, model_type=type(self).__name__)


class ICloneable(ABC):
    """A model that can be copied, without communication."""

    def clone(self) -> Self:
        """Return a shallow copy, which shares the arrays."""
        return copy.copy(self)

    def deep_copy(self) -> Self:
        """Return a copy with arrays of its own."""
        return copy.deepcopy(self)


class IGradientComputable(ABC):
    """A model that computes gradients without an update."""

    @abstractmethod
    def compute_gradients(
        self, x: Array, y: Array, loss_function: ILossFunction | None = None
    ) -> Array:
        """Return the gradient of the mean loss, shape (parameter_count,); change no parameter.

        Raises
        ------
        MissingLossError
            If no loss is given and the model has none: a RuntimeError.
        """

    @abstractmethod
    def apply_gradients(self, gradients: Array, learning_rate: float) -> None:
        """Do ``theta -= learning_rate * gradients``; ValueError if the length differs."""


class IJitCompilable(ABC):
    """A model that can export its computation graph."""

    @property
    def supports_jit_compilation(self) -> bool:
        """Whether `export_computation_graph` is implemented."""
        return False

    def export_computation_graph(self, input_nodes: list[Any]) -> Any:
        """Return the output node of the graph that `predict` computes.

        Parameters
        ----------
        input_nodes : list of nodes
            If it is empty, the model's input node is appended. Otherwise its node is used as the
            model's input, so that graphs can be joined.

        Returns
        -------
        node
            The output, in the node class of the model; models of `mpishard.nn` return a
            `mpishard.nn.ComputationNode`.

        Raises
        ------
        TypeError
            For None.
        MissingMemberError
            If the model does not implement it: a NotImplementedError.
        """
        if input_nodes is None:
            raise TypeError("input_nodes must be a list, got None")
        raise MissingMemberError(
            f"{type(self).__name__} does not implement IJitCompilable: it has no computation "
            "graph to export"
        )


class IFullModel(
    IModel,
    ICheckpointableModel,
    IParameterizable,
    IFeatureAware,
    IFeatureImportance,
    ICloneable,
    IGradientComputable,
    IJitCompilable,
    IModelShape,
):
    """A model with all interfaces. It is a context manager, which closes the model on exit."""

    @property
    def default_loss_function(self) -> ILossFunction | None:
        """The loss that is used if none is given; None if the model has none."""
        return None

    def apply_gradients(self, gradients: Array, learning_rate: float) -> None:
        """Do ``theta -= learning_rate * gradients``; ValueError if the length differs."""
        parameters = self.get_parameters()
        # NumPy would broadcast a gradient of one element over all parameters.
        if gradients.shape != parameters.shape:
            raise ValueError(
                f"{type(self).__name__} has {self.parameter_count} parameters; got gradients of "
                f"shape {gradients.shape}"
            )
        parameters -= learning_rate * gradients
        self.set_parameters(parameters)

    def close(self) -> None:
        """Free the model's memory. Idempotent. By default there is nothing to free."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class IShardedModel(IFullModel):
    """A model whose parameters are spread over several ranks."""

    @property
    @abstractmethod
    def wrapped_model(self) -> UserModel:
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
        """The parameters that this rank owns, end to end; all of them if they are replicated."""

    @property
    @abstractmethod
    def sharding_configuration(self) -> Any:
        """The `ShardingConfiguration` of this model."""

    @abstractmethod
    def gather_full_parameters(self) -> Array:
        """Return all parameters in layer order, on every rank. Collective."""

    @abstractmethod
    def synchronize_gradients(self) -> Array | None:
        """Reduce gradients that are still local, and return them. Collective."""


ShardedModel = IShardedModel
"""A shorter name of `IShardedModel`."""
