"""A model measured on a whole data set: losses, statistics of its predictions, its features.

Shape suffixes: N samples of a batch, K outputs of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, to_host
from mpishard.communication import CommunicationBackend
from mpishard.data import Batches, GlobalBatchSampler, LocalBatchSampler, take
from mpishard.layout import ShardLayout
from mpishard.models import ShardedModelBase
from mpishard.models.engine.evaluation import measured
from mpishard.nn.losses import MAE, MSE, BinaryCrossEntropy, CrossEntropy, Huber

Moments = tuple[float, np.ndarray[Any, Any], np.ndarray[Any, Any]]


@dataclass
class DatasetResult:
    """A data set, and the results of a model on it.

    Attributes
    ----------
    x, y : array or data set
        As they were given, not copied; this rank's own with ``local_data``.
    stats : mapping of str to float
        Over the samples of all ranks, and the same on every rank: ``loss``; with `MSE`, `MAE` and
        `Huber` also ``mse``, ``mae`` and ``r2``; with `CrossEntropy` and `BinaryCrossEntropy`
        also ``accuracy``. Empty if nothing was measured.
    predictions : NumPy array or None
        Outputs for *this rank's* samples, shape (n, ...), if they were asked for; they are
        never gathered.
    indices : array of int or None
        Indices in ``x`` of their samples, shape (n,), rising.
    """

    x: Any = field(repr=False)
    y: Any = field(repr=False)
    stats: Mapping[str, float] = field(default_factory=dict)
    predictions: np.ndarray[Any, Any] | None = field(default=None, repr=False)
    indices: np.ndarray[Any, np.dtype[np.int64]] | None = field(default=None, repr=False)


def evaluate(
    model: ShardedModelBase,
    x: Any,
    y: Any,
    sampler: GlobalBatchSampler | LocalBatchSampler,
    *,
    keep_predictions: bool = False,
    part: str = "validation",
) -> DatasetResult:
    """Measure a model on a whole data set, divided over the ranks. Collective.

    Parameters
    ----------
    model : ShardedModelBase
        The model.
    x, y : array or data set
        Inputs and targets.
    sampler : GlobalBatchSampler or LocalBatchSampler
        The order of the samples: one epoch, unshuffled.
    keep_predictions : bool
        Keep the outputs for this rank's samples, in host memory.
    part : str
        The data set's part, for messages of reads that fail.
    """
    engine, backend = model.engine, model.backend
    speaks = engine.replica.speaks  # of the ranks that compute the same samples one counts them
    # An empty batch has the shape of a target, and no target is read for it.
    needs_shape = engine.loss is not None and y is not None
    nothing = take(y, np.zeros(0, np.int64)) if needs_shape else np.zeros(0)
    statistics = statistics_for(engine.loss, math.prod(nothing.shape[1:]))
    # Each leaf is measured alone, so that every world finds the same loss.
    leaves = engine.leaves
    sums = np.zeros((1 if leaves is None else leaves.micro_steps, 2))
    outputs: list[np.ndarray[Any, Any]] = []
    seen: list[np.ndarray[Any, Any]] = []
    with Batches(
        x, y, sampler, model.data_rank, model.data_size,
        steps=range(sampler.batches_per_epoch), part=part,
    ) as batches:  # fmt: skip
        for batch in batches:
            layout = ShardLayout(len(batch.indices), len(sums))
            for number, own in enumerate(map(layout.slice, range(len(sums)))):
                inputs, targets = batch.x[own], None if batch.y is None else batch.y[own]
                prediction, *sums_of_loss = measured(
                    engine, inputs, targets, predicts=keep_predictions
                )
                if speaks:
                    sums[number] += sums_of_loss
                if prediction is not None and statistics is not None and speaks:
                    statistics.add(to_host(prediction), to_host(targets))
                if prediction is not None and keep_predictions:
                    outputs.append(to_host(prediction))
                    seen.append(batch.indices[own])
    if leaves is None:
        total, weight = backend.all_reduce(sums[0])
    else:
        total, weight = leaves.total([(float(loss), float(weight)) for loss, weight in sums])
    stats = {"loss": engine.mean(float(total), float(weight))}
    if statistics is not None:
        stats |= statistics.total(backend)
    result = DatasetResult(x, y, stats)
    if keep_predictions:
        result.predictions = np.concatenate(outputs) if outputs else np.zeros(0, model.dtype)
        result.indices = np.concatenate(seen) if seen else np.zeros(0, np.int64)
    return result


def statistics_for(loss: Any, output_count: int) -> Classification | Regression | None:
    """Return empty statistics of the kind that belongs to ``loss``; None for an unknown loss.

    Parameters
    ----------
    loss : ILossFunction or None
        The loss that is minimised.
    output_count : int
        Elements of one sample's target.
    """
    if isinstance(loss, CrossEntropy | BinaryCrossEntropy):
        return Classification(getattr(loss, "ignore_index", None))
    if isinstance(loss, MSE | MAE | Huber):
        return Regression(output_count)
    return None


class Classification:
    """``accuracy``: the share of targets whose class has the largest logit.

    Yes-or-no targets have one logit each: above 0 it means yes, as does a target above 1/2.

    Parameters
    ----------
    ignore_index : int or None
        Targets of this value are ignored; None for yes-or-no targets.
    """

    def __init__(self, ignore_index: int | None) -> None:
        self._ignored = ignore_index
        self._sums = np.zeros(2)  # right, counted

    def add(self, prediction: Array, target: Array) -> None:
        """Add a batch: outputs and targets as the loss takes them."""
        if self._ignored is None:
            # A logit above 0 is a probability above one half.
            right = (prediction > 0) == (target > 0.5)
            self._sums += float(right.sum()), float(right.size)
        else:
            counted = target != self._ignored
            right = (prediction.argmax(axis=-1) == target) & counted
            self._sums += float(right.sum()), float(counted.sum())

    def total(self, backend: CommunicationBackend) -> dict[str, float]:
        """Return the statistics over the samples of all ranks, NaN without any. Collective."""
        right, counted = backend.all_reduce(self._sums.copy())
        return {"accuracy": float(right / counted) if counted else math.nan}


class Regression:
    """``mse`` and ``mae``, over all elements, and ``r2``, the mean over the outputs of
    1 - (sum of squared errors) / (sum of squared deviations from the target's mean).

    An output whose targets are all equal counts as 1 if it is met exactly, and otherwise as 0.
    Deviations are merged batch by batch and rank by rank without cancellation (Chan, Golub and
    LeVeque, "Algorithms for computing the sample variance", The American Statistician 37, 1983,
    equation 2.1).

    Parameters
    ----------
    output_count : int
        K, the number of elements of one sample's target.
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
        # Gathered and merged by rank on every rank, so that all have the same bits.
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
    """Return count, mean and sum of squared deviations of two sets together."""
    count = one[0] + other[0]
    if count == 0:
        return one
    shift_K = other[1] - one[1]
    share = other[0] / count
    return count, one[1] + share * shift_K, one[2] + other[2] + one[0] * share * shift_K**2
