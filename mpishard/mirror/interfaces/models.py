"""Interfaces of models: training, prediction, gradients, copies, features."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from mpishard.base import Array, MissingInterfaceError, MissingMemberError
from mpishard.contracts import DynamicShapeInfo, ILossFunction, ModelMetadata, Saved, UserModel
from mpishard.mirror.interfaces.parameters import ICheckpointableModel, IParameterizable


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


class IPipelineDecomposableModel(ABC):
    """A model with backward in two halves, so that a pipeline can delay the second one.

    Qi et al., "Zero bubble pipeline parallelism", 2023 (arXiv:2401.10241), section 2: the previous
    stage waits for B, the gradient of the input, but not for W, the gradient of the parameters.
    """

    @abstractmethod
    def compute_activation_gradients(self, x: Array, target: Array) -> tuple[Array | None, Saved]:
        """Compute B: the mean loss's gradient with respect to ``x``, and the values that W needs.

        Returns
        -------
        dx : Array
            In the shape of ``x``; None if the input has no gradient (token numbers).
        cached : object
            The values for one call of `compute_weight_gradients`.
        """

    @abstractmethod
    def compute_weight_gradients(self, x: Array, target: Array, cached: Saved) -> Array:
        """Compute W: the mean loss's gradient, shape (parameter_count,), from the values of B.

        ``x`` and ``target`` are those of B.

        Raises
        ------
        ValueError
            If ``cached`` is that of another model, or was used before.
        """


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
