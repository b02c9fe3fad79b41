"""The reference of ``mpishard verify``: sequential training, in a process of its own.

It uses no engine, store or update rule of mpishard. The user's model computes its gradient on the
whole batch, and the `Textbook`'s rule updates the whole vector.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mpishard.base import Array
from mpishard.cli.factories import TargetError, load_factory
from mpishard.cli.verify.comparison import relative_error
from mpishard.cli.verify.job import VerifyJob
from mpishard.cli.verify.problem import RETURNS, Problem, build_problem
from mpishard.cli.verify.textbook import Textbook
from mpishard.cli.wording import say
from mpishard.data import take
from mpishard.distributed import STRATEGY_OPTIONS
from mpishard.nn import Layer, Model
from mpishard.tensor import check_sequence

_OF_LAYERS = (
    "schedule", "micro_batch_count", "partition_strategy", "checkpoint_config", "sequence_parallel",
)  # fmt: skip
"""Options of models of layers."""
_ROUNDING = 1e-4  # of float32, in sums of gradients


@dataclass(frozen=True, slots=True)
class Reference:
    """Results of sequential training.

    Parameters
    ----------
    parameters : Array
        Before the first step and after each, shape (steps + 1, length).
    losses : Array
        Mean over the batch before each update, shape (steps,); NaN if the model returns none.
    gradients : Array
        Gradients of each data rank's part of a batch alone, shape (steps compared, data ranks,
        length).
    inputs : Array
        Checksums of each data rank's samples, shape (steps, data ranks).
    predictions : Array
        For the last batch, after training; of size 0 if the model has no ``predict``.
    trained : Array
        False for elements of frozen parameters, shape (length,); their gradients do not count.
    adds_up : Array
        True if the first gradient is the sum of those of the data ranks' parts, as that of a loss
        that is a sum; shape ().
    """

    parameters: Array
    losses: Array
    gradients: Array
    inputs: Array
    predictions: Array
    trained: Array
    adds_up: Array

    def write(self, folder: Path) -> None:
        """Write the arrays to ``folder``, for `read`."""
        for name in self.__slots__:
            # A file for each array, so that a rank maps only what it reads.
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def read(cls, folder: Path) -> Reference:
        """Return the reference in ``folder``. Its arrays are mapped, and read when used."""
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in cls.__slots__))


def train_alone(job: VerifyJob, problem: Problem) -> Reference:
    """Train ``problem`` in this process, one step after the other.

    Raises
    ------
    TargetError
        If the loss or a gradient is not finite, or a gradient is no vector of that length.
    """
    model = problem.model
    # A model may return its own vector, which training changes.
    theta = model.get_parameters().copy()
    textbook = Textbook(problem.optimizer, problem.entries(theta.size))
    parameters, losses, gradients, inputs = [theta], [], [], []
    adds_up = False
    for step in range(job.steps):
        shares = [job.read_share(problem, step, rank)[:2] for rank in range(job.data_size)]
        # They detect a factory that gives the ranks other data.
        inputs.append([job.checksum(*share) for share in shares])
        # They tell a wrong model from a wrong update. All steps of a large model would fill a disk.
        if step < job.gradient_steps(theta):
            gradients.append([_gradient(problem, step, *share)[1] for share in shares])
        indices = job.batch(step, len(problem.x))
        x, y = take(problem.x, indices), take(problem.y, indices)

        def evaluate(
            theta: Array, step: int = step, x: Array = x, y: Array = y
        ) -> tuple[float, Array]:
            model.set_parameters(theta.copy())  # a copy, because a model may keep and change it
            loss, gradient = _gradient(problem, step, x, y)
            return loss, gradient * textbook.trained

        loss, g = evaluate(theta)
        if not np.isfinite(g).all() or math.isinf(loss):
            text = "is not finite\nlower the learning rate, or look at the data"
            raise TargetError(f"step {step + 1} of training alone: the loss or its gradient {text}")
        if step == 0 and job.data_size > 1:
            error = relative_error(np.sum(gradients[0], axis=0) * textbook.trained, g, 0.0)
            adds_up = bool(g.any()) and error < _ROUNDING
        theta = textbook.update(theta, loss, g, step, evaluate)
        # A line search has left the model at its last trial.
        model.set_parameters(theta.copy())
        parameters.append(theta)
        losses.append(loss)
    last = take(problem.x, job.batch(job.steps - 1, len(problem.x)))
    found = (parameters, losses, gradients, inputs, _predict(model, last), textbook.trained)
    return Reference(*map(np.array, (*found, adds_up)))


def fitted(job: VerifyJob, problem: Problem) -> VerifyJob:
    """Return the job with the settings that the factory has returned.

    Options that another strategy takes are left out, and a message says so.

    Raises
    ------
    TargetError
        For options that do not fit the model, its data or ``--precision``.
    """
    model, rule, options = problem.model, problem.optimizer, job.options(problem)
    taken = STRATEGY_OPTIONS.get(job.strategy, ())
    if left := [name for name in problem.options if name not in taken]:
        text = f"leaves out {', '.join(left)} of factory(seed)"
        say("verify", f"{text}, which --strategy {job.strategy} does not take")
    infos = model.get_all_layer_info() if problem.is_layered else []
    layers = {info.name: info.layer for info in infos}
    if rule.searches and job.precision:
        text = "LBFGS compares losses of one function, and roundings change it"
        raise TargetError(f"{text}\nleave out --precision, or return another optimizer")
    if rule.searches and any(layer.is_random for layer in layers.values()):
        text = "with dropout LBFGS would evaluate another function at each point"
        raise TargetError(f"{text}\nleave dropout out of the model")
    if not layers and (wrong := [name for name in options if name in _OF_LAYERS]):
        name = type(model).__name__
        text = f"{name} is a black box, and {', '.join(wrong)} is for models of layers"
        fix = "leave it out, or return a model that implements ILayeredModel (mpishard.nn)"
        raise TargetError(f"{text}\n{fix}")
    if options.get("sequence_parallel") and job.sizes[1] > 1:
        _check_sequence(job, problem, layers, infos[0].input_shape)
    return replace(
        job,
        batch_size=problem.batch_size or 8 * job.world_size,
        has_one_batch=rule.searches,
        mesh=job.describe(problem),
        rule=type(rule).__name__,
    )


def _check_sequence(
    job: VerifyJob, problem: Problem, layers: Mapping[str, Layer], input_shape: tuple[int, ...]
) -> None:
    """Refuse sequence parallelism without sequences, or whose parts would be unequal."""
    try:
        check_sequence(layers, input_shape)
    except ValueError as error:
        text = f"sequence_parallel is for models of sequences: leave it out\n{error}"
        raise TargetError(text) from None
    ranks, lengths = job.sizes[1], problem.x.shape[1:2]
    if lengths and lengths[0] % ranks:  # an x of one dim is refused by training alone
        raise TargetError(
            f"sequence_parallel cuts sequences into {ranks} equal parts, one for each tensor rank, "
            f"and {lengths[0]} positions are no multiple of {ranks}\n"
            "leave it out, take another number of tensor ranks, or pad x and y of factory(seed)"
        )


def _gradient(problem: Problem, step: int, x: Array, y: Array) -> tuple[float, Array]:
    """Return the mean loss, NaN if the model returns none, and its gradient; 0 without samples."""
    model = problem.model
    length = model.get_parameters().size
    # Models need not accept an empty batch, and each third step has an empty share.
    if len(x) == 0:
        return 0.0, np.zeros(length)
    loss = problem.loss or getattr(model, "default_loss_function", None)
    if isinstance(model, Model):  # its random layers depend on the step
        value, gradient = model.compute_loss_and_gradients(x, y, problem.loss, step=step)
    elif problem.loss is None and hasattr(model, "compute_loss_and_gradients"):
        value, gradient = model.compute_loss_and_gradients(x, y)
    else:
        # Without a loss no argument for it, because a black box need not take one.
        gradient = model.compute_gradients(x, y, *[problem.loss] * (problem.loss is not None))
        value = loss(model.predict(x), y) if loss is not None else math.nan
    if np.shape(gradient) != (length,):
        text = f"it is a {type(gradient).__name__} of shape {np.shape(gradient)}"
        shape = f"the shape ({length},) of its parameters"
        raise TargetError(f"the gradient of {type(model).__name__} must have {shape}\n{text}")
    return float(value), np.array(gradient)


def _predict(model: object, x: Array) -> Array:
    found = None
    if hasattr(model, "predict"):
        with suppress(NotImplementedError):  # such as a FunctionModel without predict
            found = np.asarray(model.predict(x))
    # Text and objects have no relative error.
    return np.zeros(0) if found is None or found.dtype.kind not in "fiub" else found


def main() -> None:
    """Train the job in FOLDER alone, and write the reference. Exit code 2 if it cannot train."""
    job: VerifyJob = VerifyJob.read(Path(sys.argv[1]))
    try:
        problem = build_problem(
            load_factory(job.target, RETURNS), job.seed, "float64" if job.precision else None
        )
        job = fitted(job, problem)
        # For the ranks: now it has the settings that the factory has returned.
        job.write(job)
        train_alone(job, problem).write(job.folder)
    except TargetError as error:
        say("verify", error)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
