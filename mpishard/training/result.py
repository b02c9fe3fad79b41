"""The results of a training run, and of `minimize`."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from mpishard.base import Array
from mpishard.training.evaluation import DatasetResult

_OVERFIT_GAP = 0.2  # of the training loss
_STILL_FALLING = 0.05  # of the training loss, in one epoch


class FitType(StrEnum):
    """Kinds of fit: good, underfitting, overfitting and others."""

    GOOD = "good"
    OVERFIT = "overfit"
    UNDERFIT = "underfit"


@dataclass(frozen=True, slots=True)
class FitDetectionResult:
    """A rule of thumb for a model that has learned too little, or its training data by heart.

    ``overfit``
        the validation loss lies more than 20 % above the training loss;
    ``underfit``
        otherwise, if the training loss fell by more than 5 % in the last epoch: there is more to
        learn;
    ``good``
        otherwise.

    Attributes
    ----------
    fit_type : FitType
        One of these three.
    training_loss, validation_loss : float
        Losses of the solution. The training loss is the mean over its epoch, taken while
        training, unless ``training_statistics`` were asked for.
    """

    fit_type: FitType
    training_loss: float
    validation_loss: float

    @classmethod
    def detect(
        cls, training_loss: float, validation_loss: float, history: Sequence[float]
    ) -> Self | None:
        """Judge by the losses of a solution, and by the training losses of the epochs up to it.

        The result is None if a loss is not finite.
        """
        if not (math.isfinite(training_loss) and math.isfinite(validation_loss)):
            return None
        # One epoch alone has no fall.
        falls = len(history) > 1 and history[-2] - history[-1] > _STILL_FALLING * abs(history[-2])
        # Judged first: a training loss that still falls is no sign of underfitting then.
        if validation_loss - training_loss > _OVERFIT_GAP * abs(training_loss):
            kind = FitType.OVERFIT
        else:
            kind = FitType.UNDERFIT if falls else FitType.GOOD
        return cls(kind, training_loss, validation_loss)


@dataclass(repr=False)
class OptimizationResult:
    """The result of a training run; the same on every rank, except for predictions.

    Attributes
    ----------
    best_solution : object
        The model that was trained. It has the parameters of the evaluation with the lowest loss
        if the run kept them (``patience`` or ``keep_best``), and otherwise the last ones.
    best_fitness_score : float
        Lowest validation loss; without validation data the lowest epoch mean of the training
        loss. It is the score of ``best_solution`` if the run kept the best.
    best_iteration : int or None
        Number of updates when the score was lowest; None if nothing was evaluated.
    iterations : int
        Updates made, those before a resumed checkpoint included.
    stopped_early : bool
        Whether early stopping ended the run.
    fitness_history : list of float
        Mean training loss of each epoch; the last one may be a part.
    loss_history : list of float
        Training loss of each step of *this* run, before its update.
    validation_history : list of (int, float)
        (steps made, validation loss).
    training_result, validation_result, test_result : DatasetResult or None
        The data, and how well the solution does on them; None for data that were not given. The
        training data are measured only if ``training_statistics`` asks for it.
    test_loss : float or None
        Loss of the test data at the end.
    fit_detection_result : FitDetectionResult or None
        Whether the solution over- or underfits; None without validation data.
    selected_feature_indices : list of int or None
        The input features in use, of a model that knows them (a linear one); else None.
    selected_features : list of str or None
        Their names, as in the model's feature importance.
    best_intercept : Array or None
        The intercept of a linear model, a copy; else None.
    coefficient_lower_bounds, coefficient_upper_bounds : None
        No rule of mpishard bounds coefficients.
    seconds : float
        Wall time of this run's training.
    weight : float
        Loss weights (samples, or tokens) that this run went through.
    """

    best_solution: Any
    best_fitness_score: float = math.inf
    best_iteration: int | None = None
    iterations: int = 0
    stopped_early: bool = False
    fitness_history: list[float] = field(default_factory=list)
    loss_history: list[float] = field(default_factory=list)
    validation_history: list[tuple[int, float]] = field(default_factory=list)
    training_result: DatasetResult | None = None
    validation_result: DatasetResult | None = None
    test_result: DatasetResult | None = None
    fit_detection_result: FitDetectionResult | None = None
    selected_feature_indices: list[int] | None = None
    selected_features: list[str] | None = None
    best_intercept: Array | None = None
    coefficient_lower_bounds: None = None
    coefficient_upper_bounds: None = None
    seconds: float = 0.0
    weight: float = 0.0

    def __repr__(self) -> str:
        words = [repr(self.best_solution), f"{self.iterations} step{'s' * (self.iterations != 1)}"]
        if self.best_iteration is not None:
            words.append(
                f"best loss {self.best_fitness_score:.4g} after step {self.best_iteration}"
            )
        words += ["stopped early"] * self.stopped_early
        return f"{type(self).__name__}({', '.join(words)}, {self.seconds:.3g} s)"

    @property
    def model(self) -> Any:
        """`best_solution`."""
        return self.best_solution

    @property
    def test_loss(self) -> float | None:
        """The loss in ``test_result.stats``; None if no test data were measured."""
        return None if self.test_result is None else self.test_result.stats.get("loss")

    def deep_copy(self) -> Self:
        """Return a result with a model and histories of its own; data sets are shared.

        Communicates nothing.
        """
        model = self.best_solution
        solution = model.deep_copy() if hasattr(model, "deep_copy") else copy.deepcopy(model)
        return self._with(solution)

    def with_parameters(self, parameters: Array) -> Self:
        """Return a result whose solution is a copy with ``parameters``, shape (parameter_count,).

        Histories are kept; measurements of other parameters are not:
        ``best_fitness_score`` is NaN, and data sets have neither ``stats`` nor predictions.
        Collective if the model is sharded.

        Raises
        ------
        ValueError
            For a vector of another length.
        """
        model = self.best_solution
        if hasattr(model, "with_parameters"):
            solution = model.with_parameters(parameters)
        else:
            solution = copy.deepcopy(model)
            solution.set_parameters(parameters)
        found = self._with(solution)
        # These figures were measured at the old parameters.
        found.best_fitness_score = math.nan
        found.best_iteration = found.fit_detection_result = found.best_intercept = None
        for part in ("training_result", "validation_result", "test_result"):
            measured = getattr(found, part)
            if measured is not None:
                setattr(found, part, DatasetResult(measured.x, measured.y))
        return found

    def _with(self, solution: object) -> Self:
        """Return a copy with another solution, which shares the data sets."""
        # deepcopy returns what the memo holds: data sets may be large, and open files cannot be
        # copied.
        memo: dict[int, object] = {
            id(value): value
            for result in (self.training_result, self.validation_result, self.test_result)
            if result is not None
            for value in (result.x, result.y)
        }
        memo[id(self.best_solution)] = solution
        return copy.deepcopy(self, memo)


class OptimizeResult(dict[str, Any]):
    """The fields of ``scipy.optimize.OptimizeResult``, by key and by attribute.

    It is a class of its own because SciPy is no dependency of this package.

    Attributes
    ----------
    x : Array
        The solution, shape (n,), whole on every rank.
    fun : float
        The mean loss there.
    jac : Array
        Its gradient, shape (n,).
    nit, nfev, njev : int
        Iterations; evaluations of loss and gradient, of this run and those it went on from.
    success : bool
        Whether a tolerance was reached.
    status : int
        0 for success, 1 if a limit was reached, 2 if no lower value was found, 99 if the callback
        raised StopIteration.
    message : str
        The reason in words.

    Examples
    --------
    >>> OptimizeResult(fun=0.5, nit=3).fun
    0.5
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the result has no {name!r}, but {', '.join(self)}") from None

    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__

    def __dir__(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:>{width}}: {value!r}" for name, value in self.items())
