"""Losses as weighted sums, so that averages over ranks and micro-batches come out right.

A loss gives the *sum* over the elements that it counts, and their number, the *weight*. The mean is
their quotient, taken once, after both were summed over everything that belongs to one step.
These are the losses of regression; `mpishard.nn.losses.cross_entropy` has those of classification.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

from mpishard.arrays import Array, array_namespace, chunks
from mpishard.contracts import ILossFunction

__all__ = ["MAE", "MSE", "Huber", "Loss", "check_real_target"]


class Loss(ILossFunction):
    """A loss of a prediction against a target. Like a layer, it holds no arrays.

    ``forward(prediction, target, training)`` leaves both arrays as they are, accumulates its
    sum in float64, and gives sum and weight 0.0 if there are no samples. What ``backward``
    returns has the prediction's shape and dtype and belongs to the caller, who may overwrite
    it; ``backward`` uses up ``saved``, so that it can be called once.
    """


def check_real_target(owner: str, prediction_shape: tuple[int, ...], target: Array) -> None:
    """Refuse targets of another shape than the prediction's: they are never broadcast.

    Raises
    ------
    TypeError
        For an argument that is no array, and for a dtype that is not of real numbers.
    ValueError
        If the shapes differ.
    """
    array_namespace(target)
    if not prediction_shape or prediction_shape != target.shape:
        is_column = prediction_shape == (*target.shape, 1)
        raise ValueError(
            f"{owner} needs prediction and target of one shape (N, ...), got {prediction_shape} "
            f"and {target.shape}" + ("; y[..., None] has the shape" if is_column else "")
        )
    if target.dtype.kind not in "fiub":
        raise TypeError(f"{owner} takes real targets, got an array of {target.dtype}")


class _ErrorLoss(Loss):
    """A function of prediction - target, averaged over output dims and summed over samples."""

    @abstractmethod
    def _sum(self, error: Array) -> float:
        """The function summed over all elements, in float64. May overwrite none of them."""

    @abstractmethod
    def _differentiate(self, error: Array, outputs: int) -> None:
        """Overwrite each element with the function's slope there, divided by ``outputs``."""

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[float, float, Any]:
        """Prediction and target of one shape (N, ...); the weight is N.

        Saves the errors. Errors raised are those of `check_target`.
        """
        self.check_target(prediction.shape, target)
        xp = array_namespace(prediction)
        outputs = math.prod(prediction.shape[1:])
        errors = xp.empty_like(prediction) if training else None
        total = 0.0
        for rows in chunks(prediction):
            error = xp.subtract(
                prediction[rows], target[rows], out=None if errors is None else errors[rows],
                dtype=prediction.dtype, casting="same_kind",
            )  # fmt: skip
            total += self._sum(error)
        return total / outputs, float(prediction.shape[0]), (errors, outputs) if training else None

    def check_target(self, prediction_shape: tuple[int, ...], target: Array) -> None:
        """Refuse targets as `check_real_target`: of another shape or not of real numbers."""
        check_real_target(type(self).__name__, prediction_shape, target)

    def backward(self, saved: Any) -> Array:
        """The slope at each element over the number of output elements of a sample."""
        errors, outputs = saved
        self._differentiate(errors, outputs)
        return errors


class MSE(_ErrorLoss):
    """Squared error, (prediction - target)^2.

    It is averaged over the output dims and summed over the samples, each of which weighs 1.
    """

    def _sum(self, error: Array) -> float:
        xp = array_namespace(error)
        return float(xp.square(error).sum(dtype=xp.float64))

    def _differentiate(self, error: Array, outputs: int) -> None:
        error *= 2.0 / outputs


class MAE(_ErrorLoss):
    """Absolute error, abs(prediction - target), of which the slope at 0 is taken as 0.

    It is averaged over the output dims and summed over the samples, each of which weighs 1.
    """

    def _sum(self, error: Array) -> float:
        xp = array_namespace(error)
        return float(xp.abs(error).sum(dtype=xp.float64))

    def _differentiate(self, error: Array, outputs: int) -> None:
        array_namespace(error).sign(error, out=error)
        error *= 1.0 / outputs


class Huber(_ErrorLoss):
    """Squared for small errors, absolute for large ones, so that outliers count for less.

    For an error e: e^2 / 2 where abs(e) <= delta, else delta (abs(e) - delta / 2): Huber, "Robust
    estimation of a location parameter", Ann. Math. Statist. 35, 1964, eq. 6. It is averaged over
    the output dims and summed over the samples, each of which weighs 1.

    Parameters
    ----------
    delta : float
        Error at which the parabola ends, in units of the target.

    Raises
    ------
    ValueError
        For a delta that is not positive and finite.
    """

    def __init__(self, delta: float = 1.0) -> None:
        if not 0 < delta < math.inf:
            raise ValueError(f"Huber needs a finite delta > 0, got {delta}")
        self.delta = float(delta)

    def _sum(self, error: Array) -> float:
        # With s the size of e and c = min(s, delta), both branches are c (s - c / 2).
        xp = array_namespace(error)
        size = xp.abs(error)
        clipped = xp.minimum(size, self.delta)
        size -= 0.5 * clipped
        size *= clipped
        return float(size.sum(dtype=xp.float64))

    def _differentiate(self, error: Array, outputs: int) -> None:
        array_namespace(error).clip(error, -self.delta, self.delta, out=error)
        error *= 1.0 / outputs
