"""Losses of predictions of which each rank has a slice of the last dim."""

from __future__ import annotations

from typing import Any

from mpishard.arrays import Array
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILossFunction
from mpishard.nn.cross_entropy import CrossEntropy
from mpishard.tensor.cross_entropy import VocabularyParallelCrossEntropy
from mpishard.tensor.split import DimSplit

__all__ = ["GatheredOutputLoss", "parallel_loss"]


class GatheredOutputLoss(ILossFunction):
    """Any loss: the whole predictions are gathered, and each rank takes its slice of the gradient.

    One all-gather forward, none backward. All ranks have the same targets.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    loss : ILossFunction
        Of the whole predictions.
    classes : int
        Size V of the whole last dim, dealt as ``DimSplit(V, world_size)``.

    Raises
    ------
    TypeError
        For no backend, or what is no loss.
    ValueError
        For fewer classes than ranks.
    """

    def __init__(self, backend: CommunicationBackend, loss: ILossFunction, classes: int) -> None:
        if not isinstance(backend, CommunicationBackend):
            raise TypeError(f"backend must be a CommunicationBackend, got {type(backend).__name__}")
        if not isinstance(loss, ILossFunction):
            raise TypeError(f"loss must be an ILossFunction, got {type(loss).__name__}")
        self.backend = backend
        self.loss = loss
        self.split = DimSplit(classes, backend.world_size)

    def check_target(self, prediction_shape: tuple[int, ...], target: Array) -> None:
        """Refuse what the loss refuses; ``prediction_shape`` is that of the *whole* predictions."""
        self.loss.check_target(prediction_shape, target)

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[float, float, Any]:
        """The slice (..., R) of the predictions against the loss's targets. Collective."""
        whole = self.split.gather(self.backend, prediction)
        # A loss of the user's may know no other way than that of a training pass.
        return (
            self.loss.forward(whole, target)
            if training
            else self.loss.forward(whole, target, training=False)
        )

    def backward(self, saved: Any) -> Array:
        """The gradient of this rank's slice."""
        return self.split.take(self.loss.backward(saved), self.backend.rank)


def parallel_loss(
    loss: ILossFunction, backend: CommunicationBackend, classes: int
) -> ILossFunction:
    """``loss`` for predictions whose last dim is dealt to the ranks of a tensor group.

    Parameters
    ----------
    loss : ILossFunction
        Of the whole predictions.
    backend : CommunicationBackend
        The tensor group.
    classes : int
        Size of the whole last dim.

    Returns
    -------
    ILossFunction
        A `VocabularyParallelCrossEntropy` for a `mpishard.nn.CrossEntropy`; for any other, and
        for classes derived from it, a `GatheredOutputLoss`.
    """
    if type(loss) is CrossEntropy:
        return VocabularyParallelCrossEntropy(backend, loss, classes)
    return GatheredOutputLoss(backend, loss, classes)
