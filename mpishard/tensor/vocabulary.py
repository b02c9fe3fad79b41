"""Embedding with rows split over ranks, and losses of predictions with the last dim split.

Shape suffixes: B batch, T time, D width, N all tokens of the input in one dim, M tokens among them
whose rows this rank has, R classes of this rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpishard.base import (
    NAMESPACES,
    Array,
    Scalar,
    as_flag,
    chunks,
    is_device_array,
    require_type,
    wide,
)
from mpishard.communication import CommunicationBackend, ReductionOperation
from mpishard.contracts import ILossFunction, LayerCategory, Saved
from mpishard.nn import (
    Context,
    CrossEntropy,
    Embedding,
    Gradients,
    Initializer,
    Parameters,
    add_rows,
)
from mpishard.sharding import Box
from mpishard.tensor.layer import DimSplit, SplitLayer
from mpishard.tensor.regions import gather_time, local_length, reduce_scatter_time, time_of


class VocabularyParallelEmbedding(SplitLayer):
    """Table with a vector for each token, y = W[tokens], whose rows are split over the ranks.

    All ranks have the same tokens. A rank returns zeros for tokens whose rows it does not have, and
    the sum over the ranks has each token's vector: Shoeybi et al., "Megatron-LM", 2019
    (arXiv:1909.08053), section 3.

    Bytes sent, summed over t ranks, for an output of Y bytes: 2 (t - 1) Y forward (an all-reduce),
    and none backward. With ``sequence_parallel``: (t - 1) Y forward (a reduce-scatter), and
    (t - 1) Y backward (an all-gather of dy).

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    vocabulary_size, width : int
        Sizes V and D of the whole table W of shape (V, D).
    initializer : Initializer, optional
        Initializer of the whole W. The default is normal with standard deviation 0.02.
    sequence_parallel : bool
        If True, the output for tokens (B, T) is this rank's slice of the sequence, (B, T / t, D).

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`.
    ValueError
        If a size is not an integer >= 1, or there are fewer rows than ranks.

    Attributes
    ----------
    split : DimSplit
        Partition of the rows.
    """

    category = LayerCategory.EMBEDDING

    def __init__(
        self,
        backend: CommunicationBackend,
        vocabulary_size: int,
        width: int,
        initializer: Initializer | None = None,
        *,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__(backend, Embedding(vocabulary_size, width, initializer))
        self.vocabulary_size = int(vocabulary_size)
        self.width = int(width)
        self.sequence_parallel = as_flag("sequence_parallel", sequence_parallel)
        self.split = DimSplit(self.vocabulary_size, backend.world_size)

    def boxes(self, name: str) -> tuple[Box, ...]:
        """Return the rows of W that this rank has."""
        return tuple((rows, (0, self.width)) for rows in self.split.ranges(self.backend.rank))

    def output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (..., width) for the shape (...).

        With ``sequence_parallel`` it is (T / t, ..., width) for (T, ...), if t divides T.
        """
        if self.sequence_parallel:
            time = time_of("VocabularyParallelEmbedding with sequence_parallel", input_shape)
            input_shape = (local_length(self.backend, time), *input_shape[1:])
        return super().output_shape(input_shape)

    def forward(self, p: Parameters, x: Array, context: Context) -> tuple[Array, Saved]:
        """Look up integer tokens of any shape, and save them. Collective.

        The errors raised are those of `check_input`.
        """
        # All ranks have the same tokens, so that all refuse them alike, before the sum.
        self.check_input(x)
        local, is_here = self._localize(x)
        # Tokens of other ranks read row 0 here, and are then cleared: this takes only one lookup.
        y = p["weight"].take(NAMESPACES[type(x)].where(is_here, local, 0), axis=0)
        y[~is_here] = 0
        saved = x if context.training else None
        if self.sequence_parallel:
            return reduce_scatter_time(self.backend, y), saved
        # In place: the lookup has made y.
        return self.backend.all_reduce(y), saved

    def backward_input(self, p: Parameters, saved: Saved, dy: Array) -> tuple[None, Saved]:
        """Return no input gradient (None), because tokens have none."""
        return None, (saved, dy)

    def backward_weight(self, pending: Saved, g: Gradients) -> None:
        """Add each row of dy to the gradient of its token's row, if this rank has that row.

        The order of additions is the same in every run. Collective with ``sequence_parallel``.
        """
        tokens, dy = pending
        if self.sequence_parallel:
            dy = gather_time(self.backend, dy)
        local, is_here = self._localize(tokens.reshape(-1))
        if is_device_array(dy):
            # `add_rows` leaves out -1 there, and the host waits for no list of places.
            own_N = NAMESPACES[type(dy)].where(is_here, local, -1)
            add_rows(g["weight"], own_N, dy.reshape(-1, self.width))
            return
        # Only tokens of this rank's rows are sorted and summed.
        places_M = np.flatnonzero(is_here)
        add_rows(g["weight"], local[places_M], wide(dy.reshape(-1, self.width)[places_M]))

    def _localize(self, tokens: Array) -> tuple[Array, Array]:
        """Return each token's index among this rank's rows, and True for tokens that have one."""
        low, high = self.split.within_block(self.backend.rank)
        # Differences of unsigned tokens would not be negative, but wrap around.
        local = tokens.astype("int64") - low
        return local, (local >= 0) & (local < high - low)


class VocabularyParallelCrossEntropy(ILossFunction):
    """`mpishard.nn.CrossEntropy` of logits whose last dim is split over the ranks.

    Whole rows of logits are never gathered. One all-reduce computes the maximum of each row (N
    numbers), a second one the row's sums (2 N numbers, 3 N with label smoothing): Shoeybi et al.,
    "Megatron-LM", 2019, arXiv:1909.08053, section 3. Nothing is sent backward. All ranks have the
    same targets, and get the same sum and weight, bit by bit.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    loss : CrossEntropy
        Loss to compute, with its ignored target, label smoothing, factor of log(Z)^2 and weights of
        classes.
    classes : int
        Size V of the whole last dim, which ``DimSplit(V, world_size)`` splits.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or ``loss`` is another loss.
    ValueError
        If there are fewer classes than ranks.
    """

    def __init__(self, backend: CommunicationBackend, loss: CrossEntropy, classes: int) -> None:
        require_type("backend", backend, CommunicationBackend)
        require_type("loss", loss, CrossEntropy)
        self.backend = backend
        self.loss = loss
        self.split = DimSplit(classes, backend.world_size)

    def check_target(self, prediction_shape: tuple[int, ...], target: Any) -> None:
        """Refuse targets that are not classes.

        Parameters
        ----------
        prediction_shape : tuple of int
            Shape of the *whole* logits, (..., V).
        target : Array or Samples
            Integers of shape (...), or they and their weights (`mpishard.nn.Loss`).

        Raises
        ------
        TypeError, ValueError
            As for `mpishard.nn.CrossEntropy.check_target`. ValueError also if the last dim is not
            V.
        """
        if not prediction_shape or prediction_shape[-1] != self.split.size:
            raise ValueError(
                f"check_target takes the shape (..., {self.split.size}) of the whole logits, got "
                f"{prediction_shape}"
            )
        self.loss.check_target(prediction_shape, target)

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[float, float, Saved]:
        """Return sum and weight for this rank's logits (..., R) and targets (...). Collective.

        Save the gradient itself. The errors raised are those of `check_target`, and a ValueError
        if the last dim of the logits is not R.
        """
        xp = NAMESPACES[type(prediction)]
        low, high = self.split.within_block(self.backend.rank)
        if not prediction.ndim or prediction.shape[-1] != high - low:
            raise ValueError(
                f"rank {self.backend.rank} has classes {low} to {high - 1} of {self.split.size}: "
                f"its logits have shape (..., {high - low}), got {prediction.shape}"
            )
        # Before the first collective, and with the same result on all ranks, which have the same
        # targets.
        self.check_target((*prediction.shape[:-1], self.split.size), target)
        logits_NR = prediction.reshape(-1, high - low)
        target_N, counted_N, weight_N = self.loss.rows_of(target)
        # Differences of unsigned targets would wrap around.
        local_N = target_N.astype("int64") - low
        is_here_N = counted_N & (local_N >= 0) & (local_N < high - low)
        # Targets of other ranks' classes read column 0 here, and their values are then masked.
        local_N = xp.where(is_here_N, local_N, 0)

        # All ranks subtract the maximum of all ranks' logits: their sums then have one scale, and
        # no exponential overflows.
        largest_N = logits_NR.max(axis=-1)
        self.backend.all_reduce(largest_N, ReductionOperation.MAX)
        # This array first has the exponentials, which are then converted to the gradient in place.
        gradient_NR = xp.empty_like(logits_NR) if training else None
        sums = self._own_sums(logits_NR, largest_N, local_N, is_here_N, gradient_NR)
        # One all-reduce for two or three sums, because the time for short vectors is mostly
        # latency.
        self.backend.all_reduce(sums)
        normalizer_N, expected_N = sums[0], sums[1]
        if self.loss.label_smoothing:
            expected_N *= 1.0 - self.loss.label_smoothing
            expected_N += self.loss.label_smoothing / self.split.size * sums[2]
        log_normalizer_N = xp.log(normalizer_N)
        losses_N = log_normalizer_N - expected_N
        slope_N: Scalar = 1.0
        if self.loss.z_loss:
            log_normalizer_N += largest_N  # This makes it log(Z).
            losses_N += self.loss.z_loss * xp.square(log_normalizer_N)
            slope_N = 1.0 + 2.0 * self.loss.z_loss * log_normalizer_N
        total = float((xp.where(counted_N, losses_N, 0) * weight_N).sum(dtype=np.float64))
        weight = float(weight_N.sum())
        if gradient_NR is None:
            return total, weight, None
        factor_N = xp.where(counted_N, slope_N / normalizer_N, 0)
        factor_N *= weight_N
        self._finish_gradient(gradient_NR, factor_N, local_N, is_here_N, weight_N)
        return total, weight, gradient_NR.reshape(prediction.shape)

    def _own_sums(
        self,
        logits_NR: Array,
        largest_N: Array,
        local_N: Array,
        is_here_N: Array,
        exponentials_NR: Array | None,
    ) -> Array:
        """Return this rank's part of each row's sums, of logits minus the row's maximum.

        The sums have shape (2, N), or (3, N) with label smoothing: of exponentials, of the target's
        logit, and of all logits. The exponentials are written to ``exponentials_NR`` unless it is
        None.
        """
        xp = NAMESPACES[type(logits_NR)]
        kinds = 3 if self.loss.label_smoothing else 2
        sums = xp.zeros((kinds, logits_NR.shape[0]), dtype=logits_NR.dtype)
        for rows in chunks(logits_NR):
            shifted = xp.subtract(
                logits_NR[rows],
                largest_N[rows, None],
                out=None if exponentials_NR is None else exponentials_NR[rows],
            )
            # Read before the exponentials overwrite it.
            chosen = shifted[xp.arange(shifted.shape[0]), local_N[rows]]
            sums[1, rows] = xp.where(is_here_N[rows], chosen, 0)
            if self.loss.label_smoothing:
                sums[2, rows] = shifted.sum(axis=-1)
            xp.exp(shifted, out=shifted)
            sums[0, rows] = shifted.sum(axis=-1)
        return sums

    def _finish_gradient(
        self,
        gradient_NR: Array,
        factor_N: Array,
        local_N: Array,
        is_here_N: Array,
        weight_N: Array,
    ) -> None:
        """Scale the exponentials, and subtract the target distribution from rows that count."""
        xp = NAMESPACES[type(gradient_NR)]
        smoothing, dtype = self.loss.label_smoothing, gradient_NR.dtype
        for rows in chunks(gradient_NR):
            gradient = gradient_NR[rows]
            gradient *= factor_N[rows, None]
            if smoothing:
                # Weights are float64, and would not be subtracted from float32 in place.
                evenly = (smoothing / self.split.size * weight_N[rows]).astype(dtype)
                gradient -= evenly[:, None]
            index = (xp.arange(gradient.shape[0]), local_N[rows])
            own = is_here_N[rows] * weight_N[rows]
            gradient[index] -= ((1.0 - smoothing) * own).astype(dtype)

    def backward(self, saved: Saved) -> Array:
        """Return this rank's slice of the gradient of `mpishard.nn.CrossEntropy`."""
        gradient: Array = saved
        return gradient


class GatheredOutputLoss(ILossFunction):
    """Any loss of predictions whose last dim is split over the ranks.

    The whole predictions are gathered, and each rank takes its slice of the gradient. This takes
    one all-gather forward, and nothing backward. All ranks have the same targets.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    loss : ILossFunction
        Loss of the whole predictions.
    classes : int
        Size V of the whole last dim, which ``DimSplit(V, world_size)`` splits.

    Raises
    ------
    TypeError
        If ``backend`` is not a `CommunicationBackend`, or ``loss`` is not a loss.
    ValueError
        If there are fewer classes than ranks.
    """

    def __init__(self, backend: CommunicationBackend, loss: ILossFunction, classes: int) -> None:
        require_type("backend", backend, CommunicationBackend)
        require_type("loss", loss, ILossFunction)
        self.backend = backend
        self.loss = loss
        self.split = DimSplit(classes, backend.world_size)

    def check_target(self, prediction_shape: tuple[int, ...], target: Any) -> None:
        """Refuse targets that the loss refuses, for the shape of the *whole* predictions."""
        self.loss.check_target(prediction_shape, target)

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[Scalar, Scalar, Saved]:
        """Return sum and weight for this rank's slice (..., R) of the predictions. Collective."""
        whole = self.split.gather(self.backend, prediction)
        # A user's loss that is only trained with need not have the parameter ``training``.
        return (
            self.loss.forward(whole, target)
            if training
            else self.loss.forward(whole, target, training=False)
        )

    def backward(self, saved: Saved) -> Array:
        """Return the gradient of this rank's slice."""
        return self.split.take(self.loss.backward(saved), self.backend.rank)


def parallel_loss(
    loss: ILossFunction, backend: CommunicationBackend, classes: int
) -> ILossFunction:
    """Return ``loss`` for predictions whose last dim is split over the ranks of a tensor group.

    Parameters
    ----------
    loss : ILossFunction
        Loss of the whole predictions.
    backend : CommunicationBackend
        The tensor group.
    classes : int
        Size of the whole last dim.

    Returns
    -------
    ILossFunction
        A `VocabularyParallelCrossEntropy` for a `mpishard.nn.CrossEntropy`. For any other loss,
        including subclasses of it, a `GatheredOutputLoss`.
    """
    # The exact type: a subclass may compute another loss, which only whole logits give.
    if type(loss) is CrossEntropy:
        return VocabularyParallelCrossEntropy(backend, loss, classes)
    return GatheredOutputLoss(backend, loss, classes)
