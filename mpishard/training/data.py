"""The input of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np

from mpishard.base import (
    Document,
    as_amount,
    as_count,
    as_flag,
    as_integer,
    check_path,
    require_attribute,
    require_type,
)
from mpishard.callbacks import check_callbacks
from mpishard.contracts import PathLike
from mpishard.data import (
    Dataset,
    GlobalBatchSampler,
    LocalBatchSampler,
    check_dataset,
    count_samples,
)
from mpishard.training.run_state import Stateful, check_user_state

# Type of a field -> its check. Numbers are counts, except the seed and the tolerance.
_CHECKS: dict[str, Callable[[str, Any], float]] = {
    "bool": as_flag, "bool | None": as_flag, "int": as_count, "int | None": as_count,
    "float": as_amount,
}  # fmt: skip

_PURPOSES = {"x_train": "train", "x_validation": "validate", "x_test": "test"}


@dataclass(kw_only=True, repr=False)
class OptimizationInputData:
    """A model, its data, and the choices of a training run.

    Parameters
    ----------
    model : object
        A sharded model, or a plain one, which is wrapped in the optimizer's strategy.
    x_train, y_train : array or data set
        The *same* data set on every rank: arrays, or anything with ``len()`` or ``shape[0]`` and
        integer-array indexing, such as a memory map or an ``h5py`` data set, which is not loaded.
        Each rank reads only its own samples, and the first one to check that it fits the model. A
        thread reads ahead from data sets that are not in memory, unless there is a
        ``user_state``, from which a data set may draw. ``y_train`` may be left out if the model
        needs no targets; a black box's ``y`` is None then. Targets with weights are
        ``mpishard.data.Samples((y, weights))``. A sparse CSR matrix becomes dense by batches.
    x_validation, y_validation : array or data set, optional
        Evaluated every ``validate_every`` steps and at the end.
    x_test, y_test : array or data set, optional
        Evaluated once, at the end, with the best solution.
    local_data : bool
        Every data set above is this rank's own, of any length. The rank contributes its share,
        ``ShardLayout(batch_size, world_size)``, to each global batch until its samples are used up;
        then the other ranks continue. Every sample of every rank is seen once an epoch. Such a run
        resumes only with the same number of ranks. On a mesh these are the data ranks, and all
        ranks that compute one batch need the same data.
    batch_size : int
        Number of samples of the *global* batch, which the ranks divide; they need not divide it
        evenly.
    epochs : int, optional
        Passes over the training data; default: 1 if there is no ``max_steps`` either, otherwise as
        many as that needs.
    max_steps : int, optional
        Number of updates after which training ends, unless ``epochs`` end it before.
    seed : int
        Seed of the shuffles; the order is a function of (seed, epoch) alone.
    shuffle, drop_last : bool
        Shuffle each epoch; leave out a last batch that is not full.
    shuffle_block_size : int, optional
        For files: shuffle blocks of this number of consecutive samples, and the samples of at least
        16 blocks with each other, so that files are read in runs (see `GlobalBatchSampler`). The
        best size is that of a chunk or row group of the file. Default: shuffle all samples.
    validate_every : int, optional
        Steps between evaluations; default once per epoch.
    patience : int, optional
        Stop after this number of evaluations in a row without improvement; by default nothing stops
        a run early. Without validation data an evaluation is the end of an epoch, and its score the
        epoch's mean training loss.
    tolerance : float
        Least fall of the loss that is an improvement.
    keep_best : bool, optional
        Put the parameters of the best evaluation back at the end; default: if ``patience`` is
        given. Meanwhile each rank holds a copy of its own shard, 1/N of the parameters.
    training_statistics : bool
        Measure the solution on the training data, too: one more forward pass over all of them.
    predictions : bool
        Keep each rank's own predictions of all that is measured at the end.
    checkpoint : path, optional
        Folder of the run's checkpoints (`mpishard.checkpoint.CheckpointFolder`), which also have
        the best parameters so far. If it has some, the run continues from the newest one that
        verifies, at any world size and under any strategy.
    checkpoint_every : int, optional
        Steps between checkpoints; default at the end only.
    keep_last, keep_every : int, optional
        Number of the newest checkpoints that are kept; those of multiples of ``keep_every`` steps
        are kept for ever.
    checkpoint_async : bool
        Copy the state, and write it while training continues. Each rank needs memory for the copy.
        If a rank cannot write, all raise at their next step.
    resume : path or bool, optional
        A checkpoint, or a folder of them, to continue from instead of those in ``checkpoint``.
        False: begin anew in any case. True: there must be one.
    user_state : mapping of str to object, optional
        Generators and counters of the script itself, saved in checkpoints and restored on
        resume: names -> `numpy.random.Generator`, or an object with ``state_dict()``, which JSON
        can hold, and ``load_state_dict(state)``. Every rank gives the same names. If states differ
        between ranks, the run resumes with the same number of ranks only.
    digest_every : int, optional
        Steps between comparisons of the ranks' replicas, `ShardedModelBase.check_replicas`, which
        a `LocalSGDOptimizer` makes equal before. Default: never.
    progress : bool
        Show progress on rank 0.
    throughput_unit : str
        Unit of a loss's weight: "samples", or "tokens" if each token has a loss.
    metrics : path, optional
        File of JSON lines, one per step and evaluation, written by rank 0.
    callbacks : list
        Objects that are called at the run's start, steps, evaluations, checkpoints and end, in
        this order, on every rank (`mpishard.callbacks`). The state of those with ``state_dict``
        and ``load_state_dict`` is saved and restored, as that of ``user_state``.
    """

    model: Any = None
    x_train: Dataset
    y_train: Dataset | None = None
    x_validation: Dataset | None = None
    y_validation: Dataset | None = None
    x_test: Dataset | None = None
    y_test: Dataset | None = None
    local_data: bool = False
    batch_size: int = 32
    epochs: int | None = None
    max_steps: int | None = None
    seed: int = 0
    shuffle: bool = True
    drop_last: bool = False
    shuffle_block_size: int | None = None
    validate_every: int | None = None
    patience: int | None = None
    tolerance: float = 0.0
    keep_best: bool | None = None
    training_statistics: bool = False
    predictions: bool = False
    checkpoint: PathLike | None = None
    checkpoint_every: int | None = None
    keep_last: int = 2
    keep_every: int | None = None
    checkpoint_async: bool = False
    resume: PathLike | bool | None = None
    user_state: Mapping[str, np.random.Generator | Stateful] | None = None
    digest_every: int | None = None
    progress: bool = True
    throughput_unit: str = "samples"
    metrics: PathLike | None = None
    callbacks: Sequence[object] = ()

    def __setattr__(self, name: str, value: object) -> None:
        # A misspelled argument would otherwise be set, and have no effect.
        require_attribute(self, name, self.__dataclass_fields__)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        """The number of samples of each data set, and the choices that are not the defaults."""
        words = []
        for each in fields(self):
            value = getattr(self, each.name)
            # The number of samples alone: the repr of a data set may be pages long.
            if each.name.startswith("x_") and value is not None:
                words.append(f"{count_samples(value)} samples to {_PURPOSES[each.name]}")
            elif each.name.startswith("y_") or value is each.default or value == each.default:
                continue
            else:
                words.append(f"{each.name}={value!r}")
        return f"{type(self).__name__}({', '.join(words)})"

    @property
    def initial_solution(self) -> Any:
        """The model."""
        return self.model

    @property
    def keeps_best(self) -> bool:
        """True if the best parameters are put back at the end."""
        return self.patience is not None if self.keep_best is None else self.keep_best

    def checked(self, model: object = None) -> Self:
        """Return a copy with Python's own numbers and flags, if it can be trained.

        ``model`` is trained if these data name none. Communicates and writes nothing.

        Raises
        ------
        TypeError
            Without a model or training data, or for a count or seed that is no integer, or a flag
            that is neither True nor False.
        ValueError
            For a count below 1, inputs without targets, a tolerance that is negative or without
            patience, options of checkpoints without their folder, or a blank path.
        """
        model = model if self.model is None else self.model
        if model is None:
            raise TypeError("OptimizationInputData needs a model")
        for part in ("train", "validation", "test"):
            self._check_pair(part)
        # As Python's numbers: a checkpoint saves them as JSON.
        numbers = self._plain_numbers()
        # A blank path would be the working directory.
        for name in ("checkpoint", "resume", "metrics"):
            value = getattr(self, name)
            if value is not None and not (name == "resume" and isinstance(value, bool)):
                check_path(name, value)
        if self.tolerance and self.patience is None:
            raise ValueError(f"tolerance {self.tolerance} has no effect without patience: set both")
        if self.user_state is not None:
            check_user_state(self.user_state)
        check_callbacks(self.callbacks)
        require_type("throughput_unit", self.throughput_unit, str)
        if self.checkpoint is None:
            self._refuse_without_checkpoint()
        if self.shuffle_block_size is not None and not numbers["shuffle"]:
            raise ValueError("shuffle_block_size needs shuffle=True")
        if self.validate_every is not None and self.x_validation is None:
            raise ValueError("validate_every needs x_validation and y_validation")
        plain = replace(self, model=model, **numbers)
        if not plain.local_data:
            plain.sampler()  # refuses a batch that the data cannot fill
        return plain

    def _refuse_without_checkpoint(self) -> None:
        for name in ("checkpoint_every", "keep_every", "keep_last", "checkpoint_async"):
            value = getattr(self, name)
            # An option without effect is a mistake of the user, mostly a forgotten folder.
            if value != getattr(type(self), name):  # the default
                raise ValueError(
                    f"{name} needs checkpoint, the folder to write to; got {name}={value} "
                    "without it"
                )
        if self.user_state is not None and self.resume is None:
            raise ValueError("user_state needs checkpoint or resume: it is saved and restored")
        if self.resume is True:
            raise ValueError("resume=True needs checkpoint, the folder to resume from")

    def _plain_numbers(self) -> Document:
        numbers: Document = {"seed": as_integer("seed", self.seed)}
        for each in fields(self):
            # By the annotation, so that a new field is checked without a line here.
            kind, value = str(each.type), getattr(self, each.name)
            is_left_out = value is None and kind.endswith("None")
            if kind in _CHECKS and each.name != "seed" and not is_left_out:
                numbers[each.name] = _CHECKS[kind](each.name, value)
        return numbers

    def _check_pair(self, part: str) -> None:
        x, y = getattr(self, f"x_{part}"), getattr(self, f"y_{part}")
        if part == "train" and x is None:
            raise TypeError("x_train must be given")
        # Only if there are targets to train with: a black box may need none.
        targets_are_missing = x is not None and y is None and self.y_train is not None
        if targets_are_missing or (y is not None and x is None):
            raise TypeError(f"x_{part} and y_{part} must both be given")
        if x is None:
            return
        samples = [
            check_dataset(dataset, f"{letter}_{part}", allow_empty=self.local_data)
            for letter, dataset in (("x", x), ("y", y))
            if dataset is not None
        ]
        if samples[0] != samples[-1]:
            raise ValueError(f"x_{part} has {samples[0]} samples and y_{part} has {samples[1]}")

    def sampler(
        self, lengths: Sequence[int] = (), leaves: int | None = None, part: str = "train"
    ) -> GlobalBatchSampler | LocalBatchSampler:
        """Return the order in which training, or an evaluation, goes through the samples.

        ``lengths`` are all ranks' numbers of samples, if each brings its own; ``leaves`` is the
        model's ``gradient_leaves``.
        """
        # An evaluation in another order would differ only by rounding.
        choices = self._shuffling() if part == "train" else {"shuffle": False}
        if self.local_data:
            return LocalBatchSampler(lengths, self.batch_size, **choices)
        length = count_samples(getattr(self, f"x_{part}"))
        return GlobalBatchSampler(length, self.batch_size, leaves=leaves, **choices)

    def order_of_samples(self, lengths: Sequence[int]) -> dict[str, object]:
        """Return the choices that determine the order of the training samples, for JSON."""
        return {
            # Saved, and compared at a resume: in another order samples would be seen twice, or
            # never.
            "local_data": self.local_data,
            "samples": list(lengths) if self.local_data else count_samples(self.x_train),
            "batch_size": self.batch_size,
            **self._shuffling(),
        }

    def _shuffling(self) -> Document:
        names = "seed", "shuffle", "drop_last", "shuffle_block_size"
        return {name: getattr(self, name) for name in names}
