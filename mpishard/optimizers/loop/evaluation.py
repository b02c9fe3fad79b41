"""A model measured on a whole data set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpishard.arrays import Array, to_host
from mpishard.data import GlobalBatchSampler, LocalBatchSampler, take
from mpishard.layout import ShardLayout
from mpishard.models import ShardedModelBase
from mpishard.models.engine.engine import Engine
from mpishard.optimizers.loop.statistics import statistics_for

__all__ = ["DatasetResult", "evaluate"]


@dataclass
class DatasetResult:
    """A data set, and what a model makes of it.

    Attributes
    ----------
    x, y : array or data set
        As they were given, not copied; this rank's, where each brings its own.
    stats : mapping of str to float
        Over the samples of all ranks, and the same on every rank: ``loss``; with `MSE`, `MAE` and
        `Huber` also ``mse``, ``mae`` and ``r2``; with `CrossEntropy` and `BinaryCrossEntropy`
        also ``accuracy``. Empty where nothing was measured.
    predictions : NumPy array or None
        Outputs for *this rank's* samples, shape (n, ...), where they were asked for; they are
        never gathered.
    indices : array of int or None
        Which samples of ``x`` they belong to, shape (n,), rising.
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
) -> DatasetResult:
    """Measure a model on a whole data set, dealt over the ranks. Collective.

    Parameters
    ----------
    model : ShardedModelBase
        What to measure.
    x, y : array or data set
        Inputs and targets.
    sampler : GlobalBatchSampler or LocalBatchSampler
        How to go through them: one epoch, unshuffled.
    keep_predictions : bool
        Keep the outputs for this rank's samples, in host memory.
    """
    engine, backend = model.engine, model.backend
    speaks = engine.replica.speaks  # of ranks that compute the same samples one counts
    nothing = take(y, np.zeros(0, np.int64)) if engine.loss is not None else np.zeros(0)
    statistics = statistics_for(engine.loss, math.prod(nothing.shape[1:]))
    # With leaves each is measured alone, so that every world finds the same loss.
    leaves = engine.leaves
    sums = np.zeros((1 if leaves is None else leaves.micro_steps, 2))
    outputs: list[np.ndarray[Any, Any]] = []
    seen: list[np.ndarray[Any, Any]] = []
    for index in range(sampler.batches_per_epoch):
        indices, _ = sampler.local(0, index, model.data_rank, model.data_size)
        layout = ShardLayout(len(indices), len(sums))
        for number, own in enumerate(indices[layout.slice(part)] for part in range(len(sums))):
            inputs, targets = take(x, own), take(y, own)
            prediction, loss, weight = _measure(engine, inputs, targets, predict=keep_predictions)
            if speaks:
                sums[number] += loss, weight
            if prediction is not None and statistics is not None and speaks:
                statistics.add(to_host(prediction), to_host(targets))
            if prediction is not None and keep_predictions:
                outputs.append(to_host(prediction))
                seen.append(own)
    if leaves is None:
        total, weight = backend.all_reduce(sums[0])
    else:
        total, weight = leaves.total([(float(loss), float(weight)) for loss, weight in sums])
    known = engine.program.knows_loss(engine.loss)
    stats = {"loss": float(total / weight) if weight and known else math.nan}
    if statistics is not None:
        stats |= statistics.total(backend)
    result = DatasetResult(x, y, stats)
    if keep_predictions:
        result.predictions = np.concatenate(outputs) if outputs else np.zeros(0, model.dtype)
        result.indices = np.concatenate(seen) if seen else np.zeros(0, np.int64)
    return result


def _measure(
    engine: Engine, x: Array, y: Array, *, predict: bool
) -> tuple[Array | None, float, float]:
    """Outputs, and sum and weight of the loss, of this rank's batch.

    There are no outputs where a black box tells its loss without them, unless ``predict``, and
    where there are no samples.
    """
    if engine.loss is None:
        total, weight = engine.evaluate(x, y)
        return engine.predict(x) if predict and len(x) else None, total, weight
    engine.program.check_pair(x, y, engine.loss)
    if not engine.policy.shards_parameters and len(x) == 0:
        return None, 0.0, 0.0
    prediction = engine.predict(x)
    return prediction, *engine.program.measure(engine.loss, prediction, y)
