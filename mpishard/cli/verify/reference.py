"""Sequential training that ``mpishard verify`` compares with, in a process of its own.

Nothing here comes from mpishard's engine, stores or update rules: the user's model computes its
gradient on the whole batch, and the textbook's rule moves the whole vector.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mpishard.arrays import Array
from mpishard.cli.verify.job import VerifyJob, checksum
from mpishard.cli.verify.rules import RULES, TextbookStep
from mpishard.cli.verify.target import Problem, TargetError, build_problem, load_factory
from mpishard.contracts import ILayeredModel
from mpishard.data import take
from mpishard.nn import Model
from mpishard.tensor import check_sequence

__all__ = ["Reference", "main", "require_layers", "settle_schedules", "train_alone"]

_FILES = ("parameters", "losses", "gradients", "inputs", "predictions")


@dataclass(frozen=True, slots=True)
class Reference:
    """What sequential training gave.

    Parameters
    ----------
    parameters : Array
        Before the first step and after each, shape (steps + 1, length).
    losses : Array
        Mean over the batch before each update, shape (steps,); NaN where the model tells none.
    gradients : Array
        Of each data rank's part of a batch alone, shape (steps compared, data ranks, length).
    inputs : Array
        Checksums of each data rank's samples, shape (steps, data ranks).
    predictions : Array
        For the last batch, after training; of size 0 where the model has no ``predict``.
    """

    parameters: Array
    losses: Array
    gradients: Array
    inputs: Array
    predictions: Array

    def write(self, folder: Path) -> None:
        """Leave it for `read`."""
        for name in _FILES:
            np.save(folder / f"{name}.npy", getattr(self, name))

    @classmethod
    def read(cls, folder: Path) -> Reference:
        """What was written to ``folder``; nothing is loaded before it is looked at."""
        return cls(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in _FILES))


def train_alone(job: VerifyJob, problem: Problem) -> Reference:
    """Train ``problem`` in this process, one step after the other.

    Raises
    ------
    TargetError
        Where the loss or a gradient is not finite, or a gradient is no vector of that length.
    """
    model = problem.model
    theta = model.get_parameters().copy()
    rule = RULES[job.optimizer]
    entries = problem.entries(theta.size)
    parts = [slice(entry.start, entry.stop) for entry in entries]
    trained = np.concatenate([np.full(entry.size, entry.trainable) for entry in entries])
    state: dict[str, Array] = {}
    parameters, losses, gradients, inputs = [theta], [], [], []
    for step in range(job.steps):
        shares = [job.read_share(problem, step, rank)[:2] for rank in range(job.data_size)]
        inputs.append([checksum(*share) for share in shares])
        if step < job.gradient_steps(theta):
            gradients.append([_gradient(problem, step, *share)[1] for share in shares])
        indices = job.batch(step, problem.samples)
        x, y = take(problem.x, indices), take(problem.y, indices)
        loss, g = _gradient(problem, step, x, y)
        if not np.isfinite(g).all() or math.isinf(loss):
            raise TargetError(
                f"step {step + 1} of training alone: the loss or its gradient is not finite\n"
                "lower --learning-rate, or look at the data"
            )
        direction = rule.direction(TextbookStep(theta, g, state, step + 1, parts))
        theta = (theta - trained * (job.learning_rate * direction)).astype(theta.dtype)
        model.set_parameters(theta.copy())
        parameters.append(theta)
        losses.append(loss)
    last = take(problem.x, job.batch(job.steps - 1, problem.samples))
    return Reference(*map(np.array, (parameters, losses, gradients, inputs, _predict(model, last))))


def require_layers(job: VerifyJob, problem: Problem) -> None:
    """Refuse what needs layers of a black box, and sequence parallelism without a sequence.

    Raises
    ------
    TargetError
        Where ``--recompute`` or ``--sequence-parallel`` is asked of such a model, or sequences
        cannot be cut into equal parts.
    """
    model, options = problem.model, job.mesh.options
    flags = {"recompute": "--recompute", "sequence_parallel": "--sequence-parallel"}
    for option, flag in flags.items():
        if option in options and not isinstance(model, ILayeredModel):
            raise TargetError(
                f"{flag} is for models of layers, and {type(model).__name__} is a black box\n"
                "leave it out, or return a model that implements ILayeredModel (mpishard.nn)"
            )
    ranks = job.mesh.sizes[1]
    if "sequence_parallel" in options and ranks > 1:
        _require_sequences(problem, ranks)


def _require_sequences(problem: Problem, ranks: int) -> None:
    infos = problem.model.get_all_layer_info()
    layers = {i.name: layer for i, layer in zip(infos, problem.model.layers, strict=True)}
    try:
        check_sequence(layers, infos[0].input_shape)
    except ValueError as error:
        raise TargetError(
            f"--sequence-parallel is for models of sequences: leave it out\n{error}"
        ) from None
    for length in problem.x.shape[1:2]:  # training alone refuses an x without
        if length % ranks:
            raise TargetError(
                f"--sequence-parallel cuts sequences into {ranks} equal parts, one for each tensor "
                f"rank, and {length} positions are no multiple of {ranks}\n"
                "leave it out, take another number of tensor ranks, or pad x and y of factory(seed)"
            )


def settle_schedules(job: VerifyJob, problem: Problem) -> VerifyJob:
    """The job, with one comparison and no schedule for a black box: nothing is scheduled of it."""
    if isinstance(problem.model, ILayeredModel):
        return job
    return replace(job, mesh=replace(job.mesh, schedules=("",)))


def _gradient(problem: Problem, step: int, x: Array, y: Array) -> tuple[float, Array]:
    """Mean loss, NaN where it is not told, and its gradient; 0 without samples."""
    model = problem.model
    length = model.get_parameters().size
    if len(x) == 0:
        return 0.0, np.zeros(length)
    loss = problem.loss or getattr(model, "default_loss_function", None)
    if isinstance(model, Model):  # random layers go by the step
        value, gradient = model.compute_loss_and_gradients(x, y, problem.loss, step=step)
    elif problem.loss is None and hasattr(model, "compute_loss_and_gradients"):
        value, gradient = model.compute_loss_and_gradients(x, y)
    else:
        gradient = model.compute_gradients(x, y, *[problem.loss] * (problem.loss is not None))
        value = loss(model.predict(x), y) if loss is not None else math.nan
    if np.shape(gradient) != (length,):
        raise TargetError(
            f"the gradient of {type(model).__name__} must have the shape ({length},) of its "
            f"parameters\nit is a {type(gradient).__name__} of shape {np.shape(gradient)}"
        )
    return float(value), np.array(gradient)


def _predict(model: object, x: Array) -> Array:
    predict = getattr(model, "predict", None)
    if predict is None:
        return np.zeros(0)
    try:
        found = np.asarray(predict(x))
    except NotImplementedError:  # it was made without
        return np.zeros(0)
    return found if found.dtype.kind in "fiub" else np.zeros(0)


def main() -> None:
    """Train alone, in the process that was started for it; exit code 2 for what is no target."""
    job = VerifyJob.read(Path(sys.argv[1]))
    try:
        problem = build_problem(load_factory(job.target), job.seed, job.dtype)
        require_layers(job, problem)
        settled = settle_schedules(job, problem)
        if len(settled.mesh.schedules) < len(job.mesh.schedules):
            name = type(problem.model).__name__
            sys.stderr.write(
                f"mpishard verify: once for all {len(job.mesh.schedules)} schedules: {name} is a "
                "black box, of which nothing is scheduled\n"
            )
        settled.write()
        train_alone(settled, problem).write(job.folder)
    except TargetError as error:
        sys.stderr.write(f"mpishard verify: {error}\n")
        raise SystemExit(2) from None
