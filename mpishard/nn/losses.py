"""Losses as weighted sums, so that averages over ranks and micro-batches come out right.

A loss gives the *sum* over the elements that it counts, and their number, the *weight*. The mean is
their quotient, taken once, after both were summed over everything that belongs to one step.
Regression comes first, then classification.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any

from mpishard.arrays import Array, array_namespace, chunks
from mpishard.contracts import ILossFunction
from mpishard.nn.layers.activations import sigmoid


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
            total += self._sum(error)  # in float64: sums of many small errors keep their digits
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
    """Absolute error, abs(prediction - target); its slope at 0 is taken as 0.

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


class CrossEntropy(Loss):
    """Negative log-likelihood of the target class under softmax of the logits.

    For logits z and target c: log(Z) - z_c with Z = sum_v exp(z_v), counted once for each target
    that is not ignored (Bishop, "Pattern recognition and machine learning", 2006, eq. 4.108).

    Parameters
    ----------
    ignore_index : int
        Targets of this value count for nothing.
    label_smoothing : float
        The part e of the target distribution that is spread evenly over all V classes, the
        target's among them: the loss becomes log(Z) - (1 - e) z_c - (e / V) sum_v z_v (Szegedy
        et al., "Rethinking the inception architecture", 2016, arXiv:1512.00567, section 7).
    z_loss : float
        Factor of log(Z)^2, which is added so that logits do not drift; 1e-4 in Chowdhery et al.,
        "PaLM", 2022 (arXiv:2204.02311), section 5.

    Raises
    ------
    ValueError
        For a label smoothing outside [0, 1), or a factor that is not finite and >= 0.
    """

    def __init__(
        self, ignore_index: int = -1, *, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> None:
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        if not 0 <= z_loss < math.inf:
            raise ValueError(f"z_loss must be finite and >= 0, got {z_loss}")
        self.ignore_index = ignore_index
        self.label_smoothing = float(label_smoothing)
        self.z_loss = float(z_loss)

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
            # The mean of each row's logits under the target distribution.
            expected = exponentials[index]
            if self.label_smoothing:
                expected *= 1.0 - self.label_smoothing
                expected += self.label_smoothing * exponentials.mean(axis=-1)
            xp.exp(exponentials, out=exponentials)
            normalizer = exponentials.sum(axis=-1, keepdims=True)
            log_normalizer = xp.log(normalizer)
            losses = log_normalizer[:, 0] - expected
            slope = 1.0
            if self.z_loss:
                log_normalizer += largest  # now log(Z)
                losses += self.z_loss * xp.square(log_normalizer[:, 0])
                slope = 1.0 + 2.0 * self.z_loss * log_normalizer
            total += float(xp.where(counted, losses, 0).sum(dtype=xp.float64))
            if gradient is not None:
                exponentials *= xp.where(counted[:, None], slope / normalizer, 0)
                # Now the target distribution is subtracted from each row that counts.
                if self.label_smoothing:
                    evenly = self.label_smoothing / exponentials.shape[-1]
                    exponentials -= (evenly * counted).astype(exponentials.dtype)[:, None]
                    exponentials[index] -= (1.0 - self.label_smoothing) * counted
                else:
                    exponentials[index] -= counted
        saved = None if gradient is None else gradient.reshape(prediction.shape)
        return total, float(counted_N.sum()), saved

    def check_target(self, prediction_shape: tuple[int, ...], target: Array) -> None:
        """Refuse targets that name no class.

        Raises
        ------
        TypeError
            For an argument that is no array, and for any but an integer dtype.
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
        """(1 + 2 z_loss log(Z)) softmax(z) minus the target distribution; 0 where ignored."""
        return saved


class BinaryCrossEntropy(Loss):
    """Negative log-likelihood of yes-or-no targets under the logistic function of the logits.

    For a logit z and a target t, 0, 1 or a probability between them: log(1 + exp(z)) - t z,
    computed as max(z, 0) - t z + log(1 + exp(-abs(z))), which does not overflow (Bishop, "Pattern
    recognition and machine learning", 2006, eq. 4.90). It is averaged over the output dims and
    summed over the samples, each of which weighs 1.
    """

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[float, float, Any]:
        """Logits and targets of one shape (N, ...); the weight is N.

        Saves the gradient itself. Errors are those of `check_target`.
        """
        self.check_target(prediction.shape, target)
        xp = array_namespace(prediction)
        outputs = math.prod(prediction.shape[1:])
        gradient = xp.empty_like(prediction) if training else None
        total = 0.0
        for rows in chunks(prediction):
            z, t = prediction[rows], target[rows].astype(prediction.dtype, copy=False)
            losses = xp.abs(z)
            xp.negative(losses, out=losses)
            xp.exp(losses, out=losses)
            xp.log1p(losses, out=losses)
            losses += xp.maximum(z, 0)
            losses -= t * z
            total += float(losses.sum(dtype=xp.float64))
            if gradient is not None:
                part = gradient[rows]
                sigmoid(z, out=part)
                part -= t
                part *= 1.0 / outputs
        return total / outputs, float(prediction.shape[0]), gradient

    def check_target(self, prediction_shape: tuple[int, ...], target: Array) -> None:
        """Refuse targets that are no probabilities.

        Raises
        ------
        TypeError
            For an argument that is no array, and for a dtype that is not of real numbers.
        ValueError
            If the shapes differ, or for a target outside [0, 1].
        """
        check_real_target(type(self).__name__, prediction_shape, target)
        fits = (target >= 0) & (target <= 1)
        if not fits.all():
            raise ValueError(
                f"BinaryCrossEntropy takes targets in [0, 1], got {target[~fits][0]}; classes "
                "that are numbered otherwise need CrossEntropy, or y == positive_class"
            )

    def backward(self, saved: Any) -> Array:
        """(s(z) - t) / (number of output elements per sample), with the logistic function s."""
        return saved
