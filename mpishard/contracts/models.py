"""What a model may be asked: to learn, to predict, for gradients, copies and graphs."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mpishard.arrays import Array
from mpishard.contracts.features import IFeatureAware, IFeatureImportance
from mpishard.contracts.losses import ILossFunction
from mpishard.contracts.metadata import ModelMetadata
from mpishard.contracts.parameters import IParameterizable
from mpishard.contracts.serialization import ICheckpointableModel
from mpishard.contracts.shapes import IModelShape
from mpishard.errors import MissingMemberError

if TYPE_CHECKING:
    from mpishard.nn.graph import ComputationNode

__all__ = ["ICloneable", "IFullModel", "IGradientComputable", "IJitCompilable", "IModel"]


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
        return ModelMetadata(type(self).__name__, model_type=type(self).__name__)


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
        """Gradient of the mean loss, shape (parameter_count,); parameters stay unchanged.

        Raises
        ------
        MissingLossError
            Where no loss is given and the model has none: a RuntimeError.
        """

    @abstractmethod
    def apply_gradients(self, gradients: Array, learning_rate: float) -> None:
        """``theta -= learning_rate * gradients``; ValueError where the length differs."""


class IJitCompilable(ABC):
    """Computation graphs."""

    @property
    def supports_jit_compilation(self) -> bool:
        """Whether `export_computation_graph` works."""
        return False

    def export_computation_graph(self, input_nodes: list[ComputationNode]) -> ComputationNode:
        """The output node of the graph that `predict` computes.

        Parameters
        ----------
        input_nodes : list of ComputationNode
            Where empty, the model's input node is appended. A node that it holds is taken as
            the model's input, so that graphs can be joined.

        Raises
        ------
        TypeError
            For None.
        MissingMemberError
            Where the model cannot: a NotImplementedError.
        """
        if input_nodes is None:
            raise TypeError("input_nodes must be a list, got None")
        raise MissingMemberError(
            f"{type(self).__name__} does not implement IJitCompilable: it has no computation "
            "graph to export"
        )


class IFullModel(
    IModel, ICheckpointableModel, IParameterizable, IFeatureAware, IFeatureImportance, ICloneable,
    IGradientComputable, IJitCompilable, IModelShape,
):  # fmt: skip
    """Everything a model may be asked. As a context manager it is closed on exit."""

    @property
    def default_loss_function(self) -> ILossFunction | None:
        """The loss that is used where none is given; None where there is none."""
        return None

    def apply_gradients(self, gradients: Array, learning_rate: float) -> None:
        """``theta -= learning_rate * gradients``."""
        parameters = self.get_parameters()
        if gradients.shape != parameters.shape:
            raise ValueError(
                f"{type(self).__name__} has {self.parameter_count} parameters; got gradients of "
                f"shape {gradients.shape}"
            )
        parameters -= learning_rate * gradients
        self.set_parameters(parameters)

    def close(self) -> None:
        """Let go of what the model holds. Idempotent. Unless a model says so, that is nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
