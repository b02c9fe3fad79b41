"""What a loss is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mpishard.arrays import Array

__all__ = ["ILossFunction"]


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

    def derivative(self, prediction: Array, target: Array) -> Array:
        """Gradient of the mean loss with respect to the prediction, in its shape."""
        _, weight, saved = self.forward(prediction, target)
        gradient = self.backward(saved)
        if weight:
            gradient /= weight
        return gradient

    def __call__(self, prediction: Array, target: Array) -> float:
        """Mean loss: the sum divided by the weight (0 where there is no weight)."""
        total, weight, _ = self.forward(prediction, target, training=False)
        return total / weight if weight else 0.0
