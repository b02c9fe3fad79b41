"""What a training run is given, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from mpishard.contracts import PathLike
from mpishard.data import GlobalBatchSampler, check_dataset

__all__ = ["OptimizationInputData", "OptimizationResult"]


@dataclass(kw_only=True)
class OptimizationInputData:
    """A model, data and how to go through them.

    Parameters
    ----------
    model : object
        Sharded, or plain: then the optimizer's strategy wraps it.
    x_train, y_train : array or data set
        The *same* data set on every rank: arrays, or anything with ``len()`` and integer-array
        indexing. Each rank reads its own samples only.
    x_validation, y_validation : array or data set, optional
        Evaluated every ``validate_every`` steps and at the end.
    x_test, y_test : array or data set, optional
        Evaluated once, at the end.
    batch_size : int
        Samples of the *global* batch, dealt over the ranks; they need not divide.
    epochs : int
        Passes over the training data.
    max_steps : int, optional
        End after so many updates, if the epochs do not end before.
    seed : int
        Of the shuffles; the order is a function of (seed, epoch) alone.
    shuffle, drop_last : bool
        Shuffle each epoch; leave out a last batch that is not full.
    validate_every : int, optional
        Steps between evaluations; default once per epoch.
    checkpoint : path, optional
        Directory that always holds the newest complete checkpoint.
    checkpoint_every : int, optional
        Steps between checkpoints; default at the end only.
    resume : path, optional
        Checkpoint to go on from, of any world size and strategy.
    progress : bool
        Show progress on rank 0.
    throughput_unit : str
        What a loss weighs: "samples", or "tokens" where each token has a loss.
    metrics : path, optional
        File of JSON lines, one per step and evaluation, written by rank 0.
    """

    model: Any = None
    x_train: Any
    y_train: Any
    x_validation: Any = None
    y_validation: Any = None
    x_test: Any = None
    y_test: Any = None
    batch_size: int = 32
    epochs: int = 1
    max_steps: int | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    validate_every: int | None = None
    checkpoint: PathLike | None = None
    checkpoint_every: int | None = None
    resume: PathLike | None = None
    progress: bool = True
    throughput_unit: str = "samples"
    metrics: PathLike | None = None

    @property
    def initial_solution(self) -> Any:
        """The model."""
        return self.model

    def check(self) -> None:
        """Refuse what cannot be trained; communicates and writes nothing.

        Raises
        ------
        TypeError
            Without a model or training data.
        ValueError
            For a count below 1, inputs without targets, or a checkpoint interval without a path.
        """
        if self.model is None:
            raise TypeError("OptimizationInputData needs a model")
        for part in ("train", "validation", "test"):
            x, y = getattr(self, f"x_{part}"), getattr(self, f"y_{part}")
            if (x is None) != (y is None) or (part == "train" and x is None):
                raise TypeError(f"x_{part} and y_{part} must both be given")
            if x is None:
                continue
            samples = check_dataset(x, f"x_{part}"), check_dataset(y, f"y_{part}")
            if samples[0] != samples[1]:
                raise ValueError(f"x_{part} has {samples[0]} samples and y_{part} has {samples[1]}")
        for name in ("batch_size", "epochs", "max_steps", "validate_every", "checkpoint_every"):
            value = getattr(self, name)
            if value is None and name not in ("batch_size", "epochs"):
                continue
            if not isinstance(value, Integral):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise ValueError("checkpoint_every needs checkpoint, the directory to write to")
        if self.validate_every is not None and self.x_validation is None:
            raise ValueError("validate_every needs x_validation and y_validation")
        self.sampler()

    def sampler(self) -> GlobalBatchSampler:
        """The order in which training goes through the samples."""
        return GlobalBatchSampler(
            len(self.x_train), self.batch_size,
            seed=self.seed, shuffle=self.shuffle, drop_last=self.drop_last,
        )  # fmt: skip


@dataclass
class OptimizationResult:
    """What a training run found; the same on every rank.

    Attributes
    ----------
    best_solution : object
        The model that was trained.
    best_fitness_score : float
        Lowest validation loss; without validation data the lowest epoch mean of the training
        loss.
    iterations : int
        Updates made, those before a resumed checkpoint included.
    fitness_history : list of float
        Mean training loss of each epoch; the last one may be a part.
    loss_history : list of float
        Training loss of each step of *this* run, before its update.
    validation_history : list of (int, float)
        (steps made, validation loss).
    test_loss : float or None
        Loss of the test data at the end.
    seconds : float
        Wall time of this run's training.
    weight : float
        Loss weights (samples, or tokens) that this run went through.
    """

    best_solution: Any
    best_fitness_score: float = float("inf")
    iterations: int = 0
    fitness_history: list[float] = field(default_factory=list)
    loss_history: list[float] = field(default_factory=list)
    validation_history: list[tuple[int, float]] = field(default_factory=list)
    test_loss: float | None = None
    seconds: float = 0.0
    weight: float = 0.0

    @property
    def model(self) -> Any:
        """`best_solution`."""
        return self.best_solution
