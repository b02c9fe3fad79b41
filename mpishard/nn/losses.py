"""Losses as weighted sums, so that averages over ranks and micro-batches are correct.

A loss returns the *sum* over the elements that it counts, and their number, the *weight*. Both are
summed over all ranks and micro-batches of a step; the mean is the quotient of these sums.
The weights of samples travel with the targets: these losses take ``Samples((targets, weights))``,
too. Losses of regression come first, then those of classification.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from mpishard.base import (
    NAMESPACES,
    Array,
    Scalar,
    array_namespace,
    as_amount,
    as_integer,
    as_number,
    as_positive,
    chunks,
    is_device_array,
    lies_on_device,
    scratch,
    store,
    to_host,
    wide,
)
from mpishard.contracts import ILossFunction, Saved
from mpishard.data import Samples
from mpishard.nn import device_passes
from mpishard.nn.checks import refuse_if_any
from mpishard.nn.layers.activations import sigmoid
from mpishard.nn.targets import as_class_weight, checked_targets, parts_of


def _added(sums: Sequence[Any], divisor: int = 1) -> Any:
    """Return the total of the chunks' sums, divided.

    On a GPU, where the whole array is one chunk, it is an array of one element: the host need not
    wait for it.
    """
    if len(sums) == 1 and lies_on_device(sums[0]):
        return sums[0] if divisor == 1 else sums[0] / divisor
    total = 0.0
    for part in sums:
        total += float(part)
    return total / divisor


class Loss(ILossFunction):
    """Base of losses, which compare a prediction with a target. Like a layer, a loss has no arrays.

    ``forward(prediction, target, training)`` changes neither array and accumulates its sum in
    float64. It returns sum and weight 0.0 if there are no samples. On a GPU they may be arrays of
    one element, for which the host has not waited. ``backward`` returns an array of the
    prediction's shape and dtype, which the caller may overwrite. It can be called only once for
    each forward pass, because it overwrites ``saved``.

    The losses of this module take targets with weights, ``mpishard.data.Samples((targets,
    weights))``. The weights have shape (N,), one for each sample, or the shape of the targets. Each
    loss is multiplied by its weight, and the sum's weight is the sum of these weights. So a sample
    of weight 2 counts as two samples, and one of weight 0 as none. A subclass that takes such
    targets overrides `check_target`.
    """

    def __init_subclass__(cls) -> None:
        # The class whose `forward` it has must say so: another one, of a user, gets float32.
        owner = next(base for base in cls.__mro__ if "forward" in vars(base))
        cls.computes_bfloat16 = bool(vars(owner).get("computes_bfloat16"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def check_target(self, prediction_shape: tuple[int, ...], target: Any) -> None:
        """Refuse targets with weights: a loss that takes them overrides this method.

        Raises
        ------
        TypeError
            If the target is a `mpishard.data.Samples`.
        """
        if isinstance(target, Samples):
            raise TypeError(
                f"{type(self).__name__} takes an array of targets, got {target}; a loss that takes "
                "weights, too, overrides check_target(prediction_shape, target)"
            )


class _RealLoss(Loss):
    """Base of losses of real targets, averaged over output dims and summed over samples."""

    computes_bfloat16 = True
    _factor: ClassVar[float] = 1.0  # of the slopes that `_losses` writes

    @abstractmethod
    def _losses(self, z: Array, t: Array, slope: Array | None) -> Array:
        """Return the loss of each prediction z and target t, and write its slope to ``slope``.

        The slope is that at z, divided by the class's factor. ``slope`` is an array of the shape
        and dtype of z, or None if no gradient is needed.
        """

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[float, float, Saved]:
        """Return the sum for a prediction and a target of one shape (N, ...), and the weight.

        Without weights of samples or classes it is N. Save the gradient itself. The errors raised
        are those of `check_target`.
        """
        self.check_target(prediction.shape, target)
        target, weights = parts_of(target)
        xp = NAMESPACES[type(prediction)]
        outputs = math.prod(prediction.shape[1:])
        gradient = xp.empty_like(prediction) if training else None
        totals, weight_sums = [], []
        for rows in chunks(prediction):
            z = wide(prediction[rows])
            slope = None if gradient is None else scratch(gradient[rows])
            # By chunks, because targets of another dtype would otherwise be copied as a whole.
            targets = target[rows].astype(z.dtype, copy=False)
            losses = self._losses(z, targets, slope)
            factors = self._weights(targets, None if weights is None else weights[rows])
            if factors is None:
                # A count instead of a sum of ones, which the host need not wait for.
                weight_sums.append(float(losses.size))
            else:
                factors = xp.broadcast_to(factors, losses.shape)
                weight_sums.append(factors.sum(dtype="float64"))
                # An error of weight 0 may be infinite or NaN: multiplied it would still count.
                losses = xp.where(factors > 0, losses, 0) * factors
                if slope is not None:
                    # Set and not multiplied, because NaN times 0 is NaN.
                    slope[factors == 0] = 0
                    slope *= factors
            totals.append(losses.sum(dtype="float64"))  # so that small terms of large sums count
            if gradient is not None and slope is not None:
                slope *= self._factor / outputs
                store(gradient[rows], slope)
        return _added(totals, outputs), _added(weight_sums, outputs), gradient

    def _weights(self, t: Array, weights: Array | None) -> Array | None:
        """Return the weight of each target t from those given, None if each is 1."""
        return weights

    def check_target(self, prediction_shape: tuple[int, ...], target: Any) -> None:
        """Refuse targets that are not real numbers or differ in shape from the prediction.

        Targets are never broadcast.

        Raises
        ------
        TypeError
            If the target is not an array, or not one of real numbers. Weights likewise.
        ValueError
            If the shapes differ, or have no dims. If a weight is negative or not finite, or the
            weights have another shape than `Loss` says.
        """
        owner = type(self).__name__
        target = checked_targets(owner, target)
        if not prediction_shape or prediction_shape != target.shape:
            # NumPy would broadcast (N,) and (N, 1) to (N, N) without an error, a frequent mistake.
            is_column = prediction_shape == (*target.shape, 1)
            raise ValueError(
                f"{owner} needs prediction and target of one shape (N, ...), got "
                f"{prediction_shape} and {target.shape}"
                + ("; y[..., None] has the shape" if is_column else "")
            )
        if target.dtype.kind not in "fiub":
            raise TypeError(f"{owner} takes real targets, got an array of {target.dtype}")

    def backward(self, saved: Saved) -> Array:
        """Return the slope at each element, divided by the number of output elements per sample."""
        gradient: Array = saved
        return gradient


class MSE(_RealLoss):
    """Squared error, (prediction - target)^2.

    It is averaged over the output dims and summed over the samples. Each sample has weight 1 unless
    weights are given with the targets (`Loss`).
    """

    _factor = 2.0

    def _losses(self, z: Array, t: Array, slope: Array | None) -> Array:
        xp = NAMESPACES[type(z)]
        # The difference is half of the slope, so that one subtraction serves both.
        return xp.square(xp.subtract(z, t, out=slope))


class MAE(_RealLoss):
    """Absolute error, abs(prediction - target), whose slope at 0 is taken as 0.

    It is averaged over the output dims and summed over the samples. Each sample has weight 1 unless
    weights are given with the targets (`Loss`).
    """

    def _losses(self, z: Array, t: Array, slope: Array | None) -> Array:
        xp = NAMESPACES[type(z)]
        error = xp.subtract(z, t, out=slope)
        losses = xp.abs(error)
        if slope is not None:
            xp.sign(error, out=slope)
        return losses


class Huber(_RealLoss):
    """Squared error for small errors, absolute error for large ones: outliers count for less.

    For an error e it is e^2 / 2 if abs(e) <= delta, and delta (abs(e) - delta / 2) otherwise:
    Huber, "Robust estimation of a location parameter", Ann. Math. Statist. 35, 1964, eq. 6. It is
    averaged over the output dims and summed over the samples. Each sample has weight 1 unless
    weights are given with the targets (`Loss`).

    Parameters
    ----------
    delta : float
        Size of the error at which the parabola ends, in units of the target.

    Raises
    ------
    ValueError
        If delta is not positive and finite.
    """

    def __init__(self, delta: float = 1.0) -> None:
        self.delta = as_positive("delta", delta)

    def _losses(self, z: Array, t: Array, slope: Array | None) -> Array:
        # With s the size of the error and c = min(s, delta), both branches are c (s - c / 2).
        xp = NAMESPACES[type(z)]
        error = xp.subtract(z, t, out=slope)
        losses = xp.abs(error)
        clipped = xp.minimum(losses, self.delta)
        losses -= 0.5 * clipped
        losses *= clipped
        if slope is not None:
            xp.clip(error, -self.delta, self.delta, out=slope)
        return losses


class CrossEntropy(Loss):
    """Negative log-likelihood of the target class under the softmax of the logits.

    For logits z and target c it is log(Z) - z_c with Z = sum_v exp(z_v) (Bishop, "Pattern
    recognition and machine learning", 2006, eq. 4.108). Each target has weight 1 unless it is
    ignored or weights are given: those of classes here, those of samples with the targets (`Loss`).

    Parameters
    ----------
    ignore_index : int
        Targets of this value add nothing to sum, weight and gradient.
    label_smoothing : float
        Fraction e of the target distribution that is spread evenly over all V classes, including
        the target's. The loss becomes log(Z) - (1 - e) z_c - (e / V) sum_v z_v (Szegedy et al.,
        "Rethinking the inception architecture", 2016, arXiv:1512.00567, section 7).
    z_loss : float
        Factor of log(Z)^2, which is added so that the logits do not drift. Chowdhery et al.,
        "PaLM", 2022 (arXiv:2204.02311), section 5, use 1e-4.
    class_weight : sequence of float, optional
        Weight of each class, shape (V,). The whole loss of a target counts as often as its class
        weighs, also with label smoothing. Default: 1 for all.

    Raises
    ------
    TypeError
        If ``class_weight`` is not a sequence, or an argument is not a number.
    ValueError
        If the label smoothing is outside [0, 1), or the factor or a weight is not finite and >= 0,
        or if all weights are 0.
    """

    computes_bfloat16 = True

    def __init__(
        self,
        ignore_index: int = -1,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        class_weight: Iterable[float] | None = None,
    ) -> None:
        if not 0 <= as_number("label_smoothing", label_smoothing) < 1:
            raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
        self.ignore_index = as_integer("ignore_index", ignore_index)
        self.label_smoothing = float(label_smoothing)
        self.z_loss = as_amount("z_loss", z_loss)
        self.class_weight = as_class_weight(class_weight)

    def rows_of(self, target: object) -> tuple[Array, Array, Array]:
        """Return the targets, True for those that count, and their weights, each of shape (N,).

        A target counts if it is not ignored and weighs more than 0. Without weights of samples and
        classes the weights are these bools.
        """
        target, weights = parts_of(target)
        target_N = target.reshape(-1)
        counted_N = target_N != self.ignore_index
        if weights is None and self.class_weight is None:
            return target_N, counted_N, counted_N
        xp = array_namespace(target)
        # float64, because thousands of weights of float32 are added up.
        weight_N = counted_N.astype("float64")
        if self.class_weight is not None:
            # An ignored target may be no index of a class: it takes the weight of class 0, times 0.
            weight_N *= xp.asarray(self.class_weight)[xp.where(counted_N, target_N, 0)]
        if weights is not None:
            weight_N *= xp.broadcast_to(weights, target.shape).reshape(-1)
        return target_N, weight_N > 0, weight_N

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[Scalar, Scalar, Saved]:
        """Return sum and weight for logits of shape (..., V) and integer targets of shape (...).

        Save the gradient itself, because it is made of the exponentials that the loss needs anyway.
        The errors raised are those of `check_target`.
        """
        if is_device_array(prediction):
            return self._forward_on_device(prediction, target, training)
        self.check_target(prediction.shape, target)
        logits_NV = prediction.reshape(-1, prediction.shape[-1])
        target_N, counted_N, weight_N = self.rows_of(target)
        gradient = np.empty_like(logits_NV) if training else None
        total = 0.0
        for rows in chunks(logits_NV):
            logits, counted, weight = wide(logits_NV[rows]), counted_N[rows], weight_N[rows]
            # Ignored targets read class 0, and count 0.
            index = (np.arange(logits.shape[0]), np.where(counted, target_N[rows], 0))
            # Subtracted, so that no exponential overflows.
            largest = logits.max(axis=-1, keepdims=True)
            exponentials = np.subtract(
                logits, largest, out=None if gradient is None else scratch(gradient[rows])
            )
            # Here the exponentials are still logits minus the row's maximum. This is their mean
            # under the target distribution.
            expected = exponentials[index]
            if self.label_smoothing:
                expected *= 1.0 - self.label_smoothing
                expected += self.label_smoothing * exponentials.mean(axis=-1)
            np.exp(exponentials, out=exponentials)
            normalizer = exponentials.sum(axis=-1, keepdims=True)
            log_normalizer = np.log(normalizer)
            losses = log_normalizer[:, 0] - expected
            slope = 1.0
            if self.z_loss:
                log_normalizer += largest  # now log(Z)
                losses += self.z_loss * np.square(log_normalizer[:, 0])
                slope = 1.0 + 2.0 * self.z_loss * log_normalizer
            total += float((np.where(counted, losses, 0) * weight).sum(dtype=np.float64))
            if gradient is not None:
                factor = np.where(counted[:, None], slope / normalizer, 0)
                factor *= weight[:, None]
                exponentials *= factor
                # The target distribution is subtracted from each row that counts.
                if self.label_smoothing:
                    evenly = self.label_smoothing / exponentials.shape[-1]
                    exponentials -= (evenly * weight).astype(exponentials.dtype)[:, None]
                    exponentials[index] -= (1.0 - self.label_smoothing) * weight
                else:
                    # Each row has one index, so that -= meets no element twice.
                    exponentials[index] -= weight
                store(gradient[rows], exponentials)
        saved = None if gradient is None else gradient.reshape(prediction.shape)
        return total, float(weight_N.sum()), saved

    def _forward_on_device(
        self, prediction: Array, target: Array, training: bool
    ) -> tuple[Array, Array, Any]:
        """Do `forward` without a wait: a target that is neither a class nor ignored gives NaN."""
        # Shapes and dtypes cost no wait; the values are checked by `check_target`, with those of
        # the input.
        targets = self._checked_shapes(prediction.shape, target)
        is_weighted = targets is not target or self.class_weight is not None
        target_N, _, weight_N = self.rows_of(target) if is_weighted else (targets, None, None)
        xp = NAMESPACES[type(prediction)]
        sums, gradient_NV = device_passes.cross_entropy(
            xp.ascontiguousarray(prediction).reshape(-1, prediction.shape[-1]),
            target_N.reshape(-1),
            weight_N,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            needs_gradient=training,
        )
        saved = None if gradient_NV is None else gradient_NV.reshape(prediction.shape)
        return sums[0], sums[1], saved

    def check_target(self, prediction_shape: tuple[int, ...], target: Any) -> None:
        """Refuse targets that are not classes.

        Raises
        ------
        TypeError
            If the target is not an array of an integer dtype, or the weights are not real numbers.
        ValueError
            If the shapes do not fit, or a target is neither in [0, V) nor ignored. If a weight is
            negative or not finite, or the weights have another shape than `Loss` says.
        """
        target = self._checked_shapes(prediction_shape, target)
        classes = prediction_shape[-1]
        if is_device_array(target):
            outside = device_passes.count_outside(target, classes, self.ignore_index)
            refuse_if_any(outside, lambda: self._refuse_outside(to_host(target), classes))
        else:
            self._refuse_outside(target, classes)

    def _refuse_outside(self, target: Array, classes: int) -> None:
        wrong = (target != self.ignore_index) & ((target < 0) | (target >= classes))
        if wrong.any():
            raise ValueError(
                f"target {int(target[wrong][0])} is neither in [0, {classes}) nor "
                f"the ignored {self.ignore_index}"
            )

    def _checked_shapes(self, prediction_shape: tuple[int, ...], given: object) -> Array:
        """Return the targets without weights, after all checks but that of the targets' values."""
        target = checked_targets("CrossEntropy", given)
        if not prediction_shape or target.shape != prediction_shape[:-1]:
            raise ValueError(
                "CrossEntropy needs logits of shape (..., V) and targets of shape (...), got "
                f"{prediction_shape} and {target.shape}"
            )
        if target.dtype.kind not in "iu":
            raise TypeError(f"CrossEntropy takes integer targets, got an array of {target.dtype}")
        classes = prediction_shape[-1]
        if self.class_weight is not None and len(self.class_weight) != classes:
            raise ValueError(
                f"class_weight has {len(self.class_weight)} weights for logits of {classes} classes"
            )
        return target

    def backward(self, saved: Saved) -> Array:
        """Return (1 + 2 z_loss log(Z)) softmax(z) minus the target distribution; 0 if ignored.

        It is multiplied by the weight of the target.
        """
        gradient: Array = saved
        return gradient


class BinaryCrossEntropy(_RealLoss):
    """Negative log-likelihood of yes-or-no targets under the logistic function of the logits.

    For a logit z and a target t in [0, 1] it is log(1 + exp(z)) - t z (Bishop, "Pattern recognition
    and machine learning", 2006, eq. 4.90). It is computed as max(z, 0) - t z + log(1 +
    exp(-abs(z))), which does not overflow. It is averaged over the output dims and summed over the
    samples. Each sample has weight 1 unless weights are given: those of the two classes here, those
    of samples with the targets (`Loss`).

    Parameters
    ----------
    class_weight : sequence of float, optional
        Weights of the targets 0 and 1. Between them the weight is interpolated. Default: 1 for
        both.

    Raises
    ------
    TypeError
        If ``class_weight`` is not a sequence of numbers.
    ValueError
        If it has not two weights, finite and >= 0, of which one is above 0.
    """

    def __init__(self, *, class_weight: Iterable[float] | None = None) -> None:
        self.class_weight = as_class_weight(class_weight)
        if self.class_weight is not None and len(self.class_weight) != 2:
            raise ValueError(
                "class_weight of BinaryCrossEntropy has the weights of targets 0 and 1, got "
                f"{len(self.class_weight)} weights"
            )

    def _weights(self, t: Array, weights: Array | None) -> Array | None:
        if self.class_weight is None:
            return weights
        no, yes = self.class_weight
        # Linear in t, so that a target of 0.3 weighs between both classes.
        of_class: Array = no + (yes - no) * t
        return of_class if weights is None else of_class * weights

    def _losses(self, z: Array, t: Array, slope: Array | None) -> Array:
        xp = NAMESPACES[type(z)]
        losses = xp.abs(z)
        xp.negative(losses, out=losses)
        xp.exp(losses, out=losses)
        xp.log1p(losses, out=losses)
        losses += xp.maximum(z, 0)
        losses -= t * z
        if slope is not None:
            sigmoid(z, out=slope)
            slope -= t
        return losses

    def check_target(self, prediction_shape: tuple[int, ...], target: Any) -> None:
        """Refuse targets that are not probabilities.

        Raises
        ------
        TypeError
            If the target is not an array, or not one of real numbers. Weights likewise.
        ValueError
            If the shapes differ, or a target is outside [0, 1]. If a weight is negative or not
            finite, or the weights have another shape than `Loss` says.
        """
        super().check_target(prediction_shape, target)
        target, _ = parts_of(target)
        fits = (target >= 0) & (target <= 1)
        if not fits.all():
            raise ValueError(
                f"BinaryCrossEntropy takes targets in [0, 1], got {target[~fits][0]}; classes "
                "that are numbered otherwise need CrossEntropy, or y == positive_class"
            )
