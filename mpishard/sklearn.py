"""Estimators of scikit-learn that are trained on ranks.

`ShardedClassifier` and `ShardedRegressor` train a model of mpishard, by default an MLP, inside
``fit``: on threads, or on the job's ranks if a launcher started the program. Each process makes its
predictions by itself. This module imports scikit-learn; ``import mpishard`` does not.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from mpishard.base import Array
from mpishard.communication import CommunicationBackend, current_backend, init
from mpishard.data import Samples, is_sparse, take
from mpishard.distributed import as_distributed, launch
from mpishard.nn import MLP, MSE, BinaryCrossEntropy, CrossEntropy, Loss
from mpishard.optimizers import AdamW, Optimizer
from mpishard.training import OptimizationInputData

__all__ = ["ShardedClassifier", "ShardedRegressor"]

_DTYPES = [np.float64, np.float32]


class _ShardedEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    _loss: type[Loss]

    def __init__(
        self,
        model: Callable[[int, int, int], Any] | None = None,
        *,
        hidden: Sequence[int] = (100,),
        optimizer: Any = None,
        learning_rate: float = 0.01,
        epochs: int = 100,
        batch_size: int = 200,
        strategy: str = "fsdp",
        world_size: int = 2,
        random_state: Any = None,
    ) -> None:
        # scikit-learn copies an estimator by these attributes, which must be the arguments
        # themselves.
        self.model = model
        self.hidden = hidden
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.epochs = epochs
        self.batch_size = batch_size
        self.strategy = strategy
        self.world_size = world_size
        self.random_state = random_state

    @property
    def model_(self) -> Any:
        """A plain model with the fitted parameters, made anew at each call."""
        check_is_fitted(self, "parameters_")
        model = self._made(self.seed_)
        # The estimator keeps only the parameters, so that it can be pickled whatever the model is.
        model.set_parameters(self.parameters_)
        return model

    def _design_for(self, outputs: int) -> None:
        """Store the design of the model; later changes of the settings hold for the next fit."""
        if self.model is not None and not callable(self.model):
            raise TypeError(
                "model must be a function (features, outputs, seed) that returns a model, got a "
                f"{type(self.model).__name__}"
            )
        if not isinstance(self.hidden, Iterable):
            raise TypeError(f"hidden must be a sequence of sizes, got {self.hidden!r}")
        if not isinstance(self.optimizer, Optimizer | None):
            raise TypeError(
                "optimizer must be an update rule, such as mpishard.optimizers.SGD(0.1), got "
                f"{self.optimizer!r}"
            )
        self.n_outputs_, self._design = outputs, (self.model, tuple(self.hidden))

    def _made(self, seed: int) -> Any:
        function, hidden = self._design
        if function is not None:
            return function(self.n_features_in_, self.n_outputs_, seed)
        sizes = [self.n_features_in_, *hidden, self.n_outputs_]
        return MLP(sizes, seed=seed, loss=self._loss())

    def _train(self, x: Any, y: Array, weights: Array | None) -> Self:
        """Train on samples, which may be sparse rows; None as their weights is 1 for all."""
        if weights is not None:
            if not (weights >= 0).all():
                raise ValueError(f"weights must be 0 or more, got {weights[~(weights >= 0)][0]}")
            kept = weights > 0
            if not kept.any():
                raise ValueError("at least one sample must have a weight above 0")
            # Left out, because batches of other samples would make another model.
            x, y, weights = x[kept], y[kept], weights[kept]
        # Drawn as scikit-learn does, so each fit advances a RandomState that estimators share.
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        if current_backend.get() is not None:  # a thread-rank called fit, as all of its world do
            trained = self._on_rank(init(), x, y, weights, seed)
        else:
            trained = launch(self._on_rank, x, y, weights, seed, world_size=self.world_size)
        self.seed_, self.parameters_, self.loss_curve_ = trained
        return self

    def _on_rank(
        self, backend: CommunicationBackend, x: Any, y: Array, weights: Array | None, seed: int
    ) -> tuple[int, Array, list[float]]:
        """Train on this rank; return seed, all parameters, and the loss of each epoch.

        The results are the same on all ranks.
        """
        arrays = [*((x.data, x.indices, x.indptr) if is_sparse(x) else (x,)), y]
        arrays += [] if weights is None else [weights]
        checksum = 0
        for array in arrays:
            checksum = zlib.crc32(np.ascontiguousarray(array).data, checksum)
        if (backend.all_gather(np.array([checksum])) != checksum).any():
            raise ValueError(
                "fit was given different data on different ranks: load the same on every rank, and "
                "give a random_state to whatever splits or shuffles them"
            )
        # Without a random_state each process has drawn a seed of its own.
        seed = int(backend.broadcast(np.array([seed]))[0])
        optimizer = AdamW(self.learning_rate) if self.optimizer is None else self.optimizer
        # A copy, because each rank needs its own rule, and the estimator's must not change.
        sharded = as_distributed(copy.deepcopy(optimizer), backend, self.strategy)
        result = sharded.optimize(
            OptimizationInputData(
                model=self._made(seed),
                x_train=x,
                y_train=y if weights is None else Samples((y, weights)),
                epochs=self.epochs,
                seed=seed,
                batch_size=min(self.batch_size, len(y)),
                progress=False,
            )
        )
        return seed, result.model.gather_full_parameters(), result.fitness_history

    def _outputs(self, X: object) -> Array:
        check_is_fitted(self, "parameters_")
        x = validate_data(self, X, reset=False, accept_sparse="csr", dtype=_DTYPES)
        model = self.model_
        if not is_sparse(x):
            return np.asarray(model.predict(x))
        # Sparse rows become dense a batch at a time, as in fit().
        parts = np.array_split(np.arange(x.shape[0]), -(-x.shape[0] // self.batch_size))
        return np.concatenate([model.predict(take(x, rows)) for rows in parts])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


def _sample_weights(sample_weight: object, x: object) -> Array | None:
    """Return weights that scikit-learn accepts, shape (n,), or None."""
    if sample_weight is None:
        return None
    weights: Array = _check_sample_weight(sample_weight, x)
    return weights


class ShardedClassifier(ClassifierMixin, _ShardedEstimator):  # type: ignore[misc]
    """A classifier that is trained on ranks.

    Targets may be any labels. The model's outputs are logits: one for each class, with
    `CrossEntropy`, or a single one for two classes, with `BinaryCrossEntropy`.

    Parameters
    ----------
    model : callable, optional
        Called on every rank as ``model(features, outputs, seed)``; returns a model of `mpishard`
        with a loss. To pickle the estimator it must be a function of a module. Default: an `MLP`.
    hidden : sequence of int
        Sizes of the hidden layers of the default model.
    optimizer : object, optional
        An update rule of `mpishard.optimizers`. Default: `AdamW` with ``learning_rate``.
    learning_rate : float
        Learning rate of the default rule.
    epochs : int
        Passes over the training data.
    batch_size : int
        Number of samples in a batch of all ranks, at most the number of samples.
    strategy : str
        As for `as_distributed`: "ddp", "zero1", "zero2", "fsdp" and so on.
    world_size : int
        Number of thread-ranks. Under a launcher its job is used, and if a rank calls ``fit``, the
        rank's world.
    random_state : int, RandomState or None
        Source of the first parameters and of the order of samples.
    class_weight : dict, "balanced" or None
        Weight of each label, 1 for labels that the dict lacks. "balanced": inversely proportional
        to the sum of the label's sample weights. They multiply the weights of samples.

    Attributes
    ----------
    model_ : object
        A plain model with the fitted parameters.
    parameters_ : array
        All parameters, shape (n,).
    loss_curve_ : list of float
        Mean training loss of each epoch.
    classes_ : array
        The labels, sorted, shape (classes,).
    n_features_in_, n_outputs_ : int
        Number of features, and of outputs of the model.

    Notes
    -----
    ``fit`` is collective under MPI: every rank calls it with the same data and settings, and gets
    the same estimator. ``predict`` is not: it runs in the process that calls it.

    The loss of a batch is the mean with weights. Samples of weight 0 are left out. A weight of 2
    counts as two samples, and equals them if all samples are in one batch.

    Examples
    --------
    >>> from sklearn.datasets import make_moons
    >>> x, y = make_moons(200, noise=0.1, random_state=0)
    >>> classifier = ShardedClassifier(epochs=200, random_state=0).fit(x, y)
    >>> classifier.score(x, y) > 0.95
    True
    """

    _loss = CrossEntropy

    def __init__(
        self,
        model: Callable[[int, int, int], Any] | None = None,
        *,
        hidden: Sequence[int] = (100,),
        optimizer: Any = None,
        learning_rate: float = 0.01,
        epochs: int = 100,
        batch_size: int = 200,
        strategy: str = "fsdp",
        world_size: int = 2,
        random_state: Any = None,
        class_weight: Any = None,
    ) -> None:
        super().__init__(
            model,
            hidden=hidden,
            optimizer=optimizer,
            learning_rate=learning_rate,
            epochs=epochs,
            batch_size=batch_size,
            strategy=strategy,
            world_size=world_size,
            random_state=random_state,
        )
        self.class_weight = class_weight

    def fit(self, X: object, y: object, sample_weight: object = None) -> Self:
        """Train on samples of shape (n, features) and n labels. Collective under MPI.

        Parameters
        ----------
        X : array or sparse matrix
            Samples. Rows of a sparse matrix become dense batch by batch.
        y : array-like
            Labels.
        sample_weight : array-like, optional
            Weight of each sample, shape (n,), 0 or more: see the notes. Default: 1 for all.

        Raises
        ------
        TypeError, ValueError
            For data that scikit-learn refuses, settings that mpishard refuses, and a model with
            another number of outputs than the classes need. For weights that are negative, not
            finite or all 0, and a loss that takes none.
        """
        x, labels = validate_data(self, X, y, accept_sparse="csr", dtype=_DTYPES)
        check_classification_targets(labels)
        self.classes_, targets = np.unique(labels, return_inverse=True)
        weights = self._weights(_sample_weights(sample_weight, x), labels, targets)
        self._design_for(len(self.classes_))
        # Any seed serves, because only the shape of the outputs is looked at.
        model = self._made(0)
        logits = self.n_outputs_
        if isinstance(getattr(model, "default_loss_function", None), BinaryCrossEntropy):
            logits = 1
            if self.n_outputs_ > 2:
                raise ValueError(f"{self.n_outputs_} classes need as many logits, not one")
            # This loss takes targets in the shape of its logits.
            targets = targets[:, None].astype(x.dtype)
        shape = np.shape(model.predict(take(x, np.arange(1))))
        if shape != (1, logits):
            raise ValueError(
                f"the model predicts an array of shape {shape} for one sample; {self.n_outputs_} "
                f"classes need {(1, logits)}"
            )
        return self._train(x, targets, weights)

    def _weights(self, weights: Array | None, labels: Array, places: Array) -> Array | None:
        """Return the weights of samples times those of their classes; None if all weigh 1.

        ``places`` are the indices of ``labels`` in ``classes_``.
        """
        if self.class_weight is None:
            return weights
        of_class = compute_class_weight(self.class_weight, classes=self.classes_, y=labels)
        if isinstance(self.class_weight, str):  # "balanced"
            # Older versions of scikit-learn count the samples here, and not their weights.
            counts = np.bincount(places, weights)
            is_here = counts > 0
            of_class[is_here] = counts.sum() / (is_here.sum() * counts[is_here])
        result: Array = of_class[places] if weights is None else of_class[places] * weights
        return result

    def predict_proba(self, X: object) -> Array:
        """Return the probability of each class, shape (n, classes), in order of ``classes_``."""
        logits = self._outputs(X).astype(np.float64)
        if logits.shape[1] < len(self.classes_):  # one logit is that of the second class
            logits = np.concatenate([np.zeros_like(logits), logits], axis=1)
        # Without the maximum, exp() of large logits would overflow.
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        result: Array = exponentials / exponentials.sum(axis=1, keepdims=True)
        return result

    def predict(self, X: object) -> Array:
        """Return the most probable class of each sample, shape (n,)."""
        probabilities = self.predict_proba(X)
        found: Array = self.classes_[probabilities.argmax(axis=1)]
        return found


class ShardedRegressor(RegressorMixin, _ShardedEstimator):  # type: ignore[misc]
    """A regressor that is trained on ranks.

    Targets have shape (n,), or (n, outputs) for several at once. They are not scaled:
    `sklearn.compose.TransformedTargetRegressor` does that.

    Parameters, attributes and notes are those of `ShardedClassifier`, without ``class_weight`` and
    ``classes_``.

    Examples
    --------
    >>> x = np.linspace(-1, 1, 200)[:, None]
    >>> regressor = ShardedRegressor(epochs=60, random_state=0).fit(x, x[:, 0] ** 2)
    >>> regressor.score(x, x[:, 0] ** 2) > 0.9
    True
    """

    _loss = MSE

    def fit(self, X: object, y: object, sample_weight: object = None) -> Self:
        """Train on samples of shape (n, features) and their targets. Collective under MPI.

        Parameters
        ----------
        X : array or sparse matrix
            Samples. Rows of a sparse matrix become dense batch by batch.
        y : array-like
            Targets, shape (n,) or (n, outputs).
        sample_weight : array-like, optional
            Weight of each sample, shape (n,), 0 or more: see the notes. Default: 1 for all.

        Raises
        ------
        TypeError, ValueError
            For data that scikit-learn refuses, and settings that mpishard refuses. For weights that
            are negative, not finite or all 0, and a loss that takes none.
        """
        x, targets = validate_data(
            self, X, y, accept_sparse="csr", dtype=_DTYPES, multi_output=True, y_numeric=True
        )
        self._is_flat = targets.ndim == 1
        # Targets of shape (n,) would be broadcast against outputs of shape (n, 1).
        columns = targets[:, None] if self._is_flat else targets
        self._design_for(columns.shape[1])
        weights = _sample_weights(sample_weight, x)
        return self._train(x, columns.astype(x.dtype, copy=False), weights)

    def predict(self, X: object) -> Array:
        """Return the predictions, in the shape of the targets: (n,) or (n, outputs)."""
        found = self._outputs(X)
        return found[:, 0] if self._is_flat else found

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags
