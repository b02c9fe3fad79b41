"""Losses as weighted sums, so that averages over ranks and micro-batches come out right.

A loss gives the *sum* over what it counts and the *weight*, how many it counted; the mean is
their quotient, taken once, after both were summed over everything that belongs to one step.

Shape suffixes: N all leading dims taken together, V classes.
"""

from __future__ import annotations

import math
from typing import Any

from mpishard.arrays import Array, array_namespace
from mpishard.contracts import ILossFunction
from mpishard.nn.chunks import chunks

__all__ = ["MSE", "CrossEntropy", "Loss"]


class Loss(ILossFunction):
    """A loss of a prediction against a target. Like a layer, it holds no arrays.

    ``forward(prediction, target, training)`` leaves both arrays as they are, accumulates its
    sum in float64, and gives sum and weight 0.0 where there are no samples. What ``backward``
    returns has the prediction's shape and dtype and belongs to the caller, who may overwrite
    it; ``backward`` uses up ``saved``, so that it can be called once.
    """


class CrossEntropy(Loss):
    """Negative log-likelihood of the target class under softmax of the logits.

    For logits z and target c: log(sum_v exp(z_v)) - z_c, counted once for each target that is
    not ignored (Bishop, "Pattern recognition and machine learning", 2006, eq. 4.108).

    Parameters
    ----------
    ignore_index : int
        Targets of this value count for nothing.
    """

    def __init__(self, ignore_index: int = -1) -> None:
        self.ignore_index = ignore_index

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[float, float, Any]:
        """Logits of shape (..., V) against integer targets of shape (...).

        Saves the gradient itself, which takes the exponentials that the loss needs anyway.
        Errors are those of `check_target`.
        """
        xp = array_namespace(prediction)
        self.check_target(prediction.shape, target)
        logits_NV = prediction.reshape(-1, prediction.shape[-1])
        target_N = target.reshape(-1)
        counted_N = target_N != self.ignore_index
        gradient = xp.empty_like(logits_NV) if training else None
        total = 0.0
        for rows in chunks(logits_NV):
            logits, counted = logits_NV[rows], counted_N[rows]
            index = (xp.arange(logits.shape[0]), xp.where(counted, target_N[rows], 0))
            largest = logits.max(axis=-1, keepdims=True)
            exponentials = xp.subtract(
                logits, largest, out=None if gradient is None else gradient[rows]
            )
            chosen = exponentials[index]
            xp.exp(exponentials, out=exponentials)
            normalizer = exponentials.sum(axis=-1, keepdims=True)
            losses = xp.log(normalizer[:, 0]) - chosen
            total += float(xp.where(counted, losses, 0).sum(dtype=xp.float64))
            if gradient is not None:
                exponentials *= xp.where(counted[:, None], 1.0 / normalizer, 0)
                exponentials[index] -= counted
        saved = None if gradient is None else gradient.reshape(prediction.shape)
        return total, float(counted_N.sum()), saved

    def check_target(self, prediction_shape: tuple[int, ...], target: Array) -> None:
        """Refuse targets that name no class.

        Raises
        ------
        TypeError
            For what is no array, and for any but an integer dtype.
        ValueError
            For shapes that do not fit, or a target that is neither in [0, V) nor ignored.
        """
        array_namespace(target)
        if not prediction_shape or target.shape != prediction_shape[:-1]:
            raise ValueError(
                "CrossEntropy needs logits of shape (..., V) and targets of shape (...), got "
                f"{prediction_shape} and {target.shape}"
            )
        if target.dtype.kind not in "iu":
            raise TypeError(f"CrossEntropy takes integer targets, got an array of {target.dtype}")
        classes = prediction_shape[-1]
        wrong = (target != self.ignore_index) & ((target < 0) | (target >= classes))
        if wrong.any():
            raise ValueError(
                f"target {int(target[wrong][0])} is neither in [0, {classes}) nor "
                f"the ignored {self.ignore_index}"
            )

    def backward(self, saved: Any) -> Array:
        """softmax(z) minus the target's unit vector; 0 where the target is ignored."""
        return saved


class MSE(Loss):
    """Squared error, averaged over the output dims and summed over the samples."""

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[float, float, Any]:
        """Prediction and target of one shape (N, ...); the weight is N.

        Errors are those of `check_target`.
        """
        self.check_target(prediction.shape, target)
        xp = array_namespace(prediction)
        outputs = math.prod(prediction.shape[1:])
        error = xp.subtract(prediction, target, dtype=prediction.dtype, casting="same_kind")
        total = float(xp.square(error).sum(dtype=xp.float64)) / outputs
        return total, float(prediction.shape[0]), (error, outputs) if training else None

    def check_target(self, prediction_shape: tuple[int, ...], target: Array) -> None:
        """Refuse targets of another shape: they are never broadcast.

        Raises
        ------
        TypeError
            For what is no array, and for a dtype that is not of real numbers.
        ValueError
            Where the shapes differ.
        """
        array_namespace(target)
        if not prediction_shape or prediction_shape != target.shape:
            raise ValueError(
                "MSE needs prediction and target of one shape (N, ...), got "
                f"{prediction_shape} and {target.shape}"
            )
        if target.dtype.kind not in "fiub":
            raise TypeError(f"MSE takes real targets, got an array of {target.dtype}")

    def backward(self, saved: Any) -> Array:
        """2 (prediction - target) / (number of output elements per sample)."""
        error, outputs = saved
        return error * (2.0 / outputs)
