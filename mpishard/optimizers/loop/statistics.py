"""Figures of how well predictions fit targets, summed over batches and ranks.

Shape suffixes: N samples of a batch, K outputs of a sample, W ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, to_host
from mpishard.communication import CommunicationBackend
from mpishard.nn.losses.cross_entropy import BinaryCrossEntropy, CrossEntropy
from mpishard.nn.losses.regression import MAE, MSE, Huber

__all__ = ["Statistics", "statistics_for"]

Moments = tuple[float, np.ndarray[Any, Any], np.ndarray[Any, Any]]


class Statistics(ABC):
    """Sums over the batches that this rank has seen."""

    @abstractmethod
    def add(self, prediction: Array, target: Array) -> None:
        """Take a batch in: outputs and targets as the loss takes them."""

    @abstractmethod
    def total(self, backend: CommunicationBackend) -> dict[str, float]:
        """The figures over the samples of all ranks, NaN where there are none. Collective."""


def statistics_for(loss: Any, output_count: int) -> Statistics | None:
    """The figures that mean something beside ``loss``; None where nothing is known of it.

    Parameters
    ----------
    loss : ILossFunction or None
        What is minimised.
    output_count : int
        Elements of one sample's target.
    """
    if isinstance(loss, CrossEntropy | BinaryCrossEntropy):
        return Classification(getattr(loss, "ignore_index", None))
    if isinstance(loss, MSE | MAE | Huber):
        return Regression(output_count)
    return None


class Classification(Statistics):
    """``accuracy``: the share of targets whose class has the largest logit.

    Of yes-or-no targets, which have one logit each, that is above 0 for yes; a target above 1/2 is
    a yes.

    Parameters
    ----------
    ignore_index : int or None
        Targets of this value count for nothing; None for yes-or-no targets.
    """

    def __init__(self, ignore_index: int | None) -> None:
        self._ignored = ignore_index
        self._sums = np.zeros(2)  # right, counted

    def add(self, prediction: Array, target: Array) -> None:
        if self._ignored is None:
            right = (prediction > 0) == (target > 0.5)
            self._sums += float(right.sum()), float(right.size)
        else:
            counted = target != self._ignored
            right = (prediction.argmax(axis=-1) == target) & counted
            self._sums += float(right.sum()), float(counted.sum())

    def total(self, backend: CommunicationBackend) -> dict[str, float]:
        right, counted = backend.all_reduce(self._sums.copy())
        return {"accuracy": float(right / counted) if counted else math.nan}


class Regression(Statistics):
    """``mse`` and ``mae``, over all elements, and ``r2``, the mean over the outputs of
    1 - (sum of squared errors) / (sum of squared deviations from the target's mean).

    An output whose targets are all equal counts as 1 where it is met exactly and as 0 elsewhere.
    Deviations are merged batch by batch and rank by rank without cancellation (Chan, Golub and
    LeVeque, "Algorithms for computing the sample variance", The American Statistician 37, 1983,
    equation 2.1).

    Parameters
    ----------
    output_count : int
        K, the elements of one sample's target.
    """  # noqa: D205

    def __init__(self, output_count: int) -> None:
        self._absolute = 0.0
        self._squared_K = np.zeros(output_count)
        self._moments: Moments = (0.0, np.zeros(output_count), np.zeros(output_count))

    def add(self, prediction: Array, target: Array) -> None:
        if len(target) == 0:
            return
        xp = array_namespace(prediction)
        target_NK = xp.asarray(target, dtype=xp.float64).reshape(len(target), -1)
        error_NK = prediction.reshape(len(target), -1) - target_NK
        self._absolute += float(xp.abs(error_NK).sum())
        self._squared_K += to_host(xp.square(error_NK).sum(axis=0))
        mean_K = target_NK.mean(axis=0)
        deviations_K = xp.square(target_NK - mean_K).sum(axis=0)
        batch = float(len(target)), to_host(mean_K), to_host(deviations_K)
        self._moments = _merged(self._moments, batch)

    def total(self, backend: CommunicationBackend) -> dict[str, float]:
        count, mean_K, deviations_K = self._moments
        mine = np.concatenate([[count, self._absolute], self._squared_K, mean_K, deviations_K])
        rows = backend.all_gather(mine[None])
        outputs = len(mean_K)
        absolute = float(rows[:, 1].sum())
        squared_K = rows[:, 2 : 2 + outputs].sum(axis=0)
        moments: Moments = 0.0, np.zeros(outputs), np.zeros(outputs)
        for row in rows:
            mean_K, deviations_K = np.split(row[2 + outputs :], 2)
            moments = _merged(moments, (float(row[0]), mean_K, deviations_K))
        samples, _, deviations_K = moments
        if samples == 0 or outputs == 0:
            return dict.fromkeys(("mse", "mae", "r2"), math.nan)
        is_constant_K = deviations_K == 0
        unexplained_K = squared_K / np.where(is_constant_K, 1.0, deviations_K)
        unexplained_K[is_constant_K] = squared_K[is_constant_K] > 0
        return {
            "mse": float(squared_K.sum() / (samples * outputs)),
            "mae": absolute / (samples * outputs),
            "r2": float(1 - unexplained_K.mean()),
        }


def _merged(one: Moments, other: Moments) -> Moments:
    """Count, mean and sum of squared deviations of two sets together."""
    count = one[0] + other[0]
    if count == 0:
        return one
    shift_K = other[1] - one[1]
    share = other[0] / count
    return count, one[1] + share * shift_K, one[2] + other[2] + one[0] * share * shift_K**2
