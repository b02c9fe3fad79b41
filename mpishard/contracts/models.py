"""Losses, and what models say of themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from mpishard.base import Array, Scalar

PathLike = str | Path
"""A path in the file system."""

UserModel: TypeAlias = Any
"""A user's model. Its members are looked for by name, and it need not derive from a class here."""

Saved: TypeAlias = Any
"""What a forward pass keeps for its backward pass. Only the layer or loss that made it reads it."""


class ILossFunction(ABC):
    """A loss as a weighted sum, so that the mean over ranks is exact for uneven batches.

    With ``is_sum`` the sum itself is the loss, and is not divided by the weights.
    """

    is_sum: bool = False
    computes_bfloat16: bool = False
    """Whether `forward` takes a bfloat16 prediction. Others get it as float32, an array more."""

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
        if self.is_sum:
            return gradient
        # On a GPU this waits for the sum. `forward` and `backward` do not.
        if counted := float(weight):
            gradient /= counted
        return gradient

    def __call__(self, prediction: Array, target: Array) -> float:
        """Return the mean loss: the sum divided by the weight; 0 if the weight is 0."""
        # Without `training` nothing is kept: no gradient follows.
        total, weight, _ = self.forward(prediction, target, training=False)
        counted = 1.0 if self.is_sum else float(weight)
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
