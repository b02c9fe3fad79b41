"""A model measured on a whole data set: losses, statistics of its predictions, its features.

Shape suffixes: N samples of a batch, K outputs of a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mpishard.base import Array, Data, ShardLayout, to_host
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILossFunction
from mpishard.data import Batches, Dataset, GlobalBatchSampler, LocalBatchSampler, map_arrays, take
from mpishard.models import ShardedModelBase, measured
from mpishard.nn import MAE, MSE, BinaryCrossEntropy, CrossEntropy, Huber, parts_of

Moments = tuple[Array, Array, Array]


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
        also ``accuracy``. Weights that the targets have count in each. Empty if nothing was
        measured.
    predictions : NumPy array or None
        Outputs for *this rank's* samples, shape (n, ...), if they were asked for; they are
        never gathered.
    indices : array of int or None
        Indices in ``x`` of their samples, shape (n,), rising.
    """

    x: Dataset = field(repr=False)
    y: Dataset | None = field(repr=False)
    stats: Mapping[str, float] = field(default_factory=dict)
    predictions: Array | None = field(default=None, repr=False)
    indices: npt.NDArray[np.int64] | None = field(default=None, repr=False)


def evaluate(
    model: ShardedModelBase,
    x: Dataset,
    y: Dataset | None,
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
    counts = (
        engine.replica.reports_loss
    )  # of the ranks that compute the same samples one counts them
    # An empty batch has the shape of a target, and no target is read for it.
    nothing: Data = np.zeros(0)
    if engine.loss is not None and y is not None:
        nothing = take(y, np.zeros(0, np.int64))
    statistics = statistics_for(engine.loss, nothing)
    # Each leaf is measured alone, so that every world finds the same loss.
    leaves, subject = engine.leaves, engine.layout.subject
    sums = np.zeros((1 if leaves is None else leaves.micro_steps, 2))
    outputs: list[Array] = []
    seen: list[Array] = []
    with Batches(
        x,
        y,
        sampler,
        model.data_rank,
        model.data_size,
        steps=range(sampler.batches_per_epoch),
        part=part,
    ) as batches:
        for batch in batches:
            layout = ShardLayout(len(batch.indices), len(sums))
            for number, own in enumerate(map(layout.slice, range(len(sums)))):
                inputs, targets = batch.x[own], None if batch.y is None else batch.y[own]
                prediction, *sums_of_loss = measured(
                    engine, inputs, targets, predicts=keep_predictions
                )
                if counts:
                    sums[number] += sums_of_loss
                if prediction is not None and statistics is not None and counts:
                    statistics.add(to_host(prediction), map_arrays(to_host, targets))
                # On all ranks of a replica: each keeps the outputs of the samples that it has read.
                if prediction is not None and keep_predictions:
                    outputs.append(to_host(prediction))
                    seen.append(batch.indices[own])
    # Leaves are added in the order of their tree, which has the same bits in every world.
    if leaves is None:
        total, weight = backend.all_reduce(sums[0], subject=subject)
    else:
        parts = [(float(loss), float(weight)) for loss, weight in sums]
        total, weight = leaves.total(parts, subject)
    stats = {"loss": engine.mean(float(total), float(weight))}
    if statistics is not None:
        stats |= statistics.total(backend)
    result = DatasetResult(x, y, stats)
    if keep_predictions:
        result.predictions = np.concatenate(outputs) if outputs else np.zeros(0, model.dtype)
        result.indices = np.concatenate(seen) if seen else np.zeros(0, np.int64)
    return result


def statistics_for(loss: ILossFunction | None, target: Data) -> Classification | Regression | None:
    """Return empty statistics of the kind that belongs to ``loss``; None for an unknown loss.

    Parameters
    ----------
    loss : ILossFunction or None
        The loss that is minimised.
    target : Array or Samples
        A batch of targets, as the loss takes them.
    """
    # By the class of the loss: a loss of the user's does not say what its targets mean.
    if isinstance(loss, CrossEntropy | BinaryCrossEntropy):
        return Classification(getattr(loss, "ignore_index", None))
    if isinstance(loss, MSE | MAE | Huber):
        return Regression(math.prod(parts_of(target)[0].shape[1:]))
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
        target, weights = parts_of(target)
        if self._ignored is None:
            # A logit above 0 is a probability above one half.
            right = (prediction > 0) == (target > 0.5)
            counted = np.ones(target.shape, bool)
        else:
            counted = target != self._ignored
            right = (prediction.argmax(axis=-1) == target) & counted
        if weights is not None:
            right, counted = right * weights, counted * weights
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
        self._moments = _no_moments(output_count)

    def add(self, prediction: Array, target: Data) -> None:
        """Add a batch: outputs and targets as the loss takes them."""
        target, weights = parts_of(target)
        # A rank may have no sample of the last batch, and no mean of it.
        if len(target) == 0:
            return
        # In float64: the squares of float32 deviations lose the digits that r2 compares.
        target_NK = np.asarray(target, dtype=np.float64).reshape(len(target), -1)
        weight_NK = np.ones_like(target_NK)
        if weights is not None:
            weight_NK *= np.broadcast_to(weights, target.shape).reshape(target_NK.shape)
            target_NK = np.where(weight_NK > 0, target_NK, 0)  # others may be NaN
        error_NK = prediction.reshape(target_NK.shape) - target_NK
        self._absolute += float((weight_NK * np.abs(error_NK)).sum())
        self._squared_K += (weight_NK * np.square(error_NK)).sum(axis=0)
        count_K = weight_NK.sum(axis=0)
        # An output whose weights are all 0 has no mean, and counts nothing.
        mean_K = (weight_NK * target_NK).sum(axis=0) / np.where(count_K, count_K, 1)
        deviations_K = (weight_NK * np.square(target_NK - mean_K)).sum(axis=0)
        self._moments = _merged(self._moments, (count_K, mean_K, deviations_K))

    def total(self, backend: CommunicationBackend) -> dict[str, float]:
        mine = np.concatenate([[self._absolute], self._squared_K, *self._moments])
        # Gathered and merged by rank on every rank, so that all have the same bits.
        rows = backend.all_gather(mine[None])
        absolute = float(rows[:, 0].sum())
        squared_K = rows[:, 1 : 1 + len(self._squared_K)].sum(axis=0)
        moments = _no_moments(len(squared_K))
        for row in rows:
            count_K, mean_K, deviations_K = np.split(row[1 + len(squared_K) :], 3)
            moments = _merged(moments, (count_K, mean_K, deviations_K))
        count_K, _, deviations_K = moments
        counted = float(count_K.sum())
        if counted == 0:
            return dict.fromkeys(("mse", "mae", "r2"), math.nan)
        is_constant_K = deviations_K == 0
        unexplained_K = squared_K / np.where(is_constant_K, 1.0, deviations_K)
        # Not 0 / 0: see the class.
        unexplained_K[is_constant_K] = squared_K[is_constant_K] > 0
        return {
            "mse": float(squared_K.sum() / counted),
            "mae": absolute / counted,
            "r2": float(1 - unexplained_K.mean()),
        }


def _no_moments(output_count: int) -> Moments:
    return np.zeros(output_count), np.zeros(output_count), np.zeros(output_count)


def _merged(one: Moments, other: Moments) -> Moments:
    """Return weight, mean and sum of squared deviations of two sets together, by output."""
    count_K = one[0] + other[0]
    shift_K = other[1] - one[1]
    share_K = other[0] / np.where(count_K, count_K, 1)
    return count_K, one[1] + share_K * shift_K, one[2] + other[2] + one[0] * share_K * shift_K**2
