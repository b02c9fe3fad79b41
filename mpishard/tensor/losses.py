"""Losses of predictions of which each rank has a slice of the last dim."""

from __future__ import annotations

from typing import Any

from mpishard.arrays import Array, array_namespace, chunks
from mpishard.communication import CommunicationBackend, ReductionOperation
from mpishard.contracts import ILossFunction
from mpishard.nn.losses import CrossEntropy
from mpishard.tensor.layer import DimSplit

__all__ = ["GatheredOutputLoss", "VocabularyParallelCrossEntropy", "parallel_loss"]


class VocabularyParallelCrossEntropy(ILossFunction):
    """`mpishard.nn.CrossEntropy` of logits whose last dim is dealt to the ranks.

    Whole rows of logits are never gathered: for each row, the largest logit and then the sums of
    what ranks have of the rest travel (Shoeybi et al., "Megatron-LM", 2019, arXiv:1909.08053,
    section 3). Two all-reduces, of N and 2 N numbers, 3 N with label smoothing; none backward.
    All ranks have the same targets, and get the same sum and weight, bit by bit.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    loss : CrossEntropy
        Loss that is computed: its ignored target, label smoothing and factor of log(Z)^2.
    classes : int
        Size V of the whole last dim, dealt as ``DimSplit(V, world_size)``.

    Raises
    ------
    TypeError
        For no backend, or another loss.
    ValueError
        For fewer classes than ranks.
    """

    def __init__(self, backend: CommunicationBackend, loss: CrossEntropy, classes: int) -> None:
        if not isinstance(backend, CommunicationBackend):
            raise TypeError(f"backend must be a CommunicationBackend, got {type(backend).__name__}")
        if not isinstance(loss, CrossEntropy):
            raise TypeError(f"loss must be a CrossEntropy, got {type(loss).__name__}")
        self.backend = backend
        self.loss = loss
        self.split = DimSplit(classes, backend.world_size)

    def check_target(self, prediction_shape: tuple[int, ...], target: Array) -> None:
        """Refuse targets that name no class.

        Parameters
        ----------
        prediction_shape : tuple of int
            Shape of the *whole* logits, (..., V).
        target : Array
            Integers of shape (...).

        Raises
        ------
        TypeError, ValueError
            As `mpishard.nn.CrossEntropy.check_target`; and for a last dim that is not V.
        """
        if not prediction_shape or prediction_shape[-1] != self.split.size:
            raise ValueError(
                f"check_target takes the shape (..., {self.split.size}) of the whole logits, got "
                f"{prediction_shape}"
            )
        self.loss.check_target(prediction_shape, target)

    def forward(
        self, prediction: Array, target: Array, training: bool = True
    ) -> tuple[float, float, Any]:
        """Logits (..., R), this rank's, against integer targets (...). Collective.

        Saves the gradient itself. Errors are those of `check_target`, and a ValueError if the
        last dim is not R.
        """
        xp = array_namespace(prediction)
        low, high = self.split.within_block(self.backend.rank)
        if not prediction.ndim or prediction.shape[-1] != high - low:
            raise ValueError(
                f"rank {self.backend.rank} has classes {low} to {high - 1} of {self.split.size}: "
                f"its logits have shape (..., {high - low}), got {prediction.shape}"
            )
        self.check_target((*prediction.shape[:-1], self.split.size), target)
        logits_NR = prediction.reshape(-1, high - low)
        target_N = target.reshape(-1)
        counted_N = target_N != self.loss.ignore_index
        local_N = target_N.astype("int64") - low
        is_here_N = counted_N & (local_N >= 0) & (local_N < high - low)
        # Targets of other ranks' classes read column 0 here, and what they read is masked.
        local_N = xp.where(is_here_N, local_N, 0)

        # Of all ranks' logits, so that no exponential overflows on any of them.
        largest_N = logits_NR.max(axis=-1)
        self.backend.all_reduce(largest_N, ReductionOperation.MAX)
        # It first holds the exponentials, from which the gradient is made in place.
        gradient_NR = xp.empty_like(logits_NR) if training else None
        sums = self._own_sums(logits_NR, largest_N, local_N, is_here_N, gradient_NR)
        # Two or three numbers a row travel, and not its logits.
        self.backend.all_reduce(sums)
        normalizer_N, expected_N = sums[0], sums[1]
        if self.loss.label_smoothing:
            expected_N *= 1.0 - self.loss.label_smoothing
            expected_N += self.loss.label_smoothing / self.split.size * sums[2]
        log_normalizer_N = xp.log(normalizer_N)
        losses_N = log_normalizer_N - expected_N
        slope_N = 1.0
        if self.loss.z_loss:
            log_normalizer_N += largest_N  # now log(Z)
            losses_N += self.loss.z_loss * xp.square(log_normalizer_N)
            slope_N = 1.0 + 2.0 * self.loss.z_loss * log_normalizer_N
        total = float(xp.where(counted_N, losses_N, 0).sum(dtype=xp.float64))
        weight = float(counted_N.sum())
        if gradient_NR is None:
            return total, weight, None
        factor_N = xp.where(counted_N, slope_N / normalizer_N, 0)
        self._finish_gradient(gradient_NR, factor_N, local_N, is_here_N, counted_N)
        return total, weight, gradient_NR.reshape(prediction.shape)

    def _own_sums(
        self,
        logits_NR: Array,
        largest_N: Array,
        local_N: Array,
        is_here_N: Array,
        exponentials_NR: Array | None,
    ) -> Array:
        """Part of each row's sums on this rank, after subtracting the row's largest logit.

        Of exponentials, which are written if asked for; the target's logit; with label
        smoothing the sum of logits. Shape (2, N) or (3, N).
        """
        xp = array_namespace(logits_NR)
        kinds = 3 if self.loss.label_smoothing else 2
        sums = xp.zeros((kinds, logits_NR.shape[0]), dtype=logits_NR.dtype)
        for rows in chunks(logits_NR):
            shifted = xp.subtract(
                logits_NR[rows], largest_N[rows, None],
                out=None if exponentials_NR is None else exponentials_NR[rows],
            )  # fmt: skip
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
        counted_N: Array,
    ) -> None:
        """Scale the exponentials, and subtract the target distribution from rows that count."""
        xp = array_namespace(gradient_NR)
        smoothing, dtype = self.loss.label_smoothing, gradient_NR.dtype
        for rows in chunks(gradient_NR):
            gradient = gradient_NR[rows]
            gradient *= factor_N[rows, None]
            if smoothing:
                evenly = (smoothing / self.split.size * counted_N[rows]).astype(dtype)
                gradient -= evenly[:, None]
            index = (xp.arange(gradient.shape[0]), local_N[rows])
            gradient[index] -= ((1.0 - smoothing) * is_here_N[rows]).astype(dtype)

    def backward(self, saved: Any) -> Array:
        """The gradient of this rank's logits, as `mpishard.nn.CrossEntropy`'s of the whole."""
        return saved


class GatheredOutputLoss(ILossFunction):
    """Any loss: the whole predictions are gathered, and each rank takes its slice of the gradient.

    One all-gather forward, none backward. All ranks have the same targets.

    Parameters
    ----------
    backend : CommunicationBackend
        The tensor group.
    loss : ILossFunction
        Loss of the whole predictions.
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
        """As of the loss; ``prediction_shape`` is that of the *whole* predictions."""
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
        Loss of the whole predictions.
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
