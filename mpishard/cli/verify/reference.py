"""The reference of ``mpishard verify``: sequential training, in a process of its own.

It uses no engine, store or update rule of mpishard. The user's model computes its gradient on the
whole batch, and the textbook's rule, written here once more, updates the whole vector.
`mpishard.optimizers` cites the papers. Only the trial steps of a line search come from
`StrongWolfe`, which handles numbers alone and is tested against SciPy.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.cli.verify.job import (
    MESH_FLAGS,
    Problem,
    TargetError,
    VerifyJob,
    build_problem,
    load_factory,
)
from mpishard.cli.wording import say
from mpishard.contracts import ILayeredModel
from mpishard.data import take
from mpishard.nn import Model
from mpishard.optimizers import LAMB, LBFGS, SGD, Adagrad, Adam, AdamW, Lion, Optimizer, RMSprop
from mpishard.optimizers.rules.strong_wolfe import StrongWolfe
from mpishard.tensor import check_sequence

_MOMENTUM, _BETA1, _BETA2, _EPSILON, _DECAY = 0.9, 0.9, 0.99, 1e-8, 0.01
_ADAM = (_BETA1, _BETA2, _EPSILON)
# So few pairs that five steps discard the oldest.
_PAIRS, _TRIALS, _LONGEST, _C1, _C2 = 3, 20, 1e10, 1e-3, 0.9

RULES: dict[str, Callable[[float], Optimizer]] = {
    "sgd": lambda rate: SGD(rate, _MOMENTUM),
    "adagrad": lambda rate: Adagrad(rate, _EPSILON),
    "rmsprop": lambda rate: RMSprop(rate, _BETA2, _EPSILON),
    "adam": lambda rate: Adam(rate, *_ADAM),
    "adamw": lambda rate: AdamW(rate, *_ADAM, weight_decay=_DECAY),
    "lion": lambda rate: Lion(rate, _BETA1, _BETA2, weight_decay=_DECAY),
    "lamb": lambda rate: LAMB(rate, *_ADAM, weight_decay=_DECAY),
    "descent": SGD,
    "lbfgs": lambda rate: LBFGS(rate, c1=_C1, c2=_C2, max_line_search=_TRIALS, memory=_PAIRS),
}
"""Choices of ``--optimizer``, and the function that makes mpishard's rule at a learning rate."""


def textbook_direction(
    rule: str, theta: Array, gradient: Array, state: dict[str, Array], number: int,
    parts: Sequence[slice],
) -> Array:  # fmt: skip
    """Return the vector that a step subtracts from ``theta``, divided by the learning rate.

    Parameters
    ----------
    rule : str
        One of `RULES`.
    theta, gradient : Array
        Shape (length,).
    state : dict
        Values that the rule keeps from step to step; changed here.
    number : int
        Number of the step, from 1.
    parts : sequence of slice
        The range of each parameter.
    """

    def mean(name: str, value: Array, beta: float) -> Array:
        state[name] = beta * state.get(name, 0) + (1 - beta) * value
        return state[name]

    if rule == "sgd":
        state["v"] = _MOMENTUM * state.get("v", 0) + gradient
        return state["v"]
    if rule == "descent":
        return gradient
    if rule == "adagrad":
        state["s"] = state.get("s", 0) + gradient**2
        return gradient / (np.sqrt(state["s"]) + _EPSILON)
    if rule == "rmsprop":
        return gradient / (np.sqrt(mean("v", gradient**2, _BETA2)) + _EPSILON)
    if rule == "lion":
        before = state.get("m", 0)
        mean("m", gradient, _BETA2)
        return np.sign(_BETA1 * before + (1 - _BETA1) * gradient) + _DECAY * theta
    # Adam, AdamW and LAMB share the moments, which are corrected for their start at 0.
    m = mean("m", gradient, _BETA1) / (1 - _BETA1**number)
    v = mean("v", gradient**2, _BETA2) / (1 - _BETA2**number)
    direction = m / (np.sqrt(v) + _EPSILON)
    if rule != "adam":
        direction = direction + _DECAY * theta
    if rule == "lamb":
        for part in parts:
            length, own = np.linalg.norm(theta[part]), np.linalg.norm(direction[part])
            if length > 0 and own > 0:
                direction[part] *= length / own
    return direction


def textbook_search(
    theta: Array, value: float, gradient: Array, pairs: list[tuple[Array, Array]], rate: float,
    evaluate: Callable[[Array], tuple[float, Array]],
) -> Array:  # fmt: skip
    """Return the next point of L-BFGS: Nocedal and Wright, algorithms 7.4 and 7.5.

    Parameters
    ----------
    theta, gradient : Array
        The point and its gradient, shape (length,).
    value : float
        The loss there.
    pairs : list of (Array, Array)
        Steps and changes of the gradient, the oldest first; changed here.
    rate : float
        First trial, in units of the direction.
    evaluate : callable
        Returns loss and gradient at another point.

    Raises
    ------
    TargetError
        If the model returns no loss, or no trial is accepted.
    """
    if math.isnan(value):
        text = "give it compute_loss_and_gradients, or return a loss from factory(seed)"
        raise TargetError(f"--optimizer lbfgs compares losses, and the model returns none\n{text}")
    found, alphas = -gradient, []
    for step, change in reversed(pairs):
        alphas.append(step @ found / (step @ change))
        found -= alphas[-1] * change
    if pairs:
        step, change = pairs[-1]
        found *= step @ change / (change @ change)
    for (step, change), alpha in zip(pairs, reversed(alphas), strict=True):
        found += (alpha - change @ found / (step @ change)) * step
    first = rate if pairs else 1 / (float(np.linalg.norm(found)) or 1.0)
    search = StrongWolfe(value, float(gradient @ found), first, _LONGEST, _C1, _C2)
    for _ in range(_TRIALS if search.slope < 0 else 0):
        moved = (theta + search.step * found).astype(theta.dtype)
        other, slope = evaluate(moved)
        if search.judge(other, float(slope @ found)):
            pairs[:] = [*pairs, (moved - theta, slope - gradient)][-_PAIRS:]
            return moved
    text = f"{_TRIALS} trials\ngive fewer --steps, if it is near a minimum, or look at the gradient"
    raise TargetError(f"training alone: L-BFGS finds no lower loss than {value:.6g} in {text}")


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
    """

    parameters: Array
    losses: Array
    gradients: Array
    inputs: Array
    predictions: Array

    def write(self, folder: Path) -> None:
        """Write the arrays to ``folder``, for `read`."""
        for name in self.__slots__:
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
    theta = model.get_parameters().copy()
    entries = problem.entries(theta.size)
    parts = [slice(entry.start, entry.stop) for entry in entries]
    trained = np.concatenate([np.full(entry.size, entry.trainable) for entry in entries])
    state: dict[str, Array] = {}
    pairs: list[tuple[Array, Array]] = []
    parameters, losses, gradients, inputs = [theta], [], [], []
    under_way: list[Array] = []
    for step in range(job.steps):
        shares = [job.read_share(problem, step, rank)[:2] for rank in range(job.data_size)]
        # They detect a factory that gives the ranks other data.
        inputs.append([job.checksum(*share) for share in shares])
        if step < job.gradient_steps(theta):
            gradients.append([_gradient(problem, step, *share)[1] for share in shares])
        indices = job.batch(step, len(problem.x))
        x, y = take(problem.x, indices), take(problem.y, indices)

        def evaluate(theta: Array, step: int = step, x: Array = x, y: Array = y) -> Any:
            model.set_parameters(theta.copy())  # a copy, because a model may keep and change it
            loss, gradient = _gradient(problem, step, x, y)
            return loss, gradient * trained

        loss, g = evaluate(theta)
        if not np.isfinite(g).all() or math.isinf(loss):
            text = "is not finite\nlower --learning-rate, or look at the data"
            raise TargetError(f"step {step + 1} of training alone: the loss or its gradient {text}")
        # With a delay each update has the gradient of an earlier step.
        under_way.append(g)
        late, number = under_way.pop(0) if step >= job.delay else None, step + 1 - job.delay
        if job.optimizer == "lbfgs":
            theta = textbook_search(theta, loss, g, pairs, job.learning_rate, evaluate)
        elif late is not None:
            direction = textbook_direction(job.optimizer, theta, late, state, number, parts)
            theta = (theta - trained * (job.learning_rate * direction)).astype(theta.dtype)
        model.set_parameters(theta.copy())
        parameters.append(theta)
        losses.append(loss)
    last = take(problem.x, job.batch(job.steps - 1, len(problem.x)))
    return Reference(*map(np.array, (parameters, losses, gradients, inputs, _predict(model, last))))


def fitted(job: VerifyJob, problem: Problem) -> VerifyJob:
    """Return the job; for a black box, which has no stages, with one comparison of whole batches.

    Raises
    ------
    TargetError
        For options that do not fit the model or its data: ``--optimizer lbfgs`` with dropout,
        ``--recompute`` and ``--sequence-parallel`` with a black box, and sequences that cannot be
        cut into equal parts.
    """
    model, options, name = problem.model, job.mesh.options, type(problem.model).__name__
    infos = model.get_all_layer_info() if isinstance(model, ILayeredModel) else []
    layers = {info.name: info.layer for info in infos}
    if job.optimizer == "lbfgs" and any(layer.is_random for layer in layers.values()):
        text = "with dropout --optimizer lbfgs would evaluate another function at each point"
        raise TargetError(f"{text}\nleave dropout out of the model")
    if not layers:
        for flag in ("--recompute", "--sequence-parallel"):
            if MESH_FLAGS[flag] in options:
                text = f"{flag} is for models of layers, and {name} is a black box"
                fix = "leave it out, or return a model that implements ILayeredModel (mpishard.nn)"
                raise TargetError(f"{text}\n{fix}")
        if (count := len(job.mesh.schedules)) > 1:
            text = f"{name} is a black box, which has no stages to schedule"
            say("verify", f"once for all {count} schedules: {text}")
        kept = {name: options[name] for name in options if name != "micro_batch_count"}
        return replace(job, mesh=replace(job.mesh, options=kept, schedules=("",)))
    ranks = job.mesh.sizes[1]
    if "sequence_parallel" in options and ranks > 1:
        try:
            check_sequence(layers, infos[0].input_shape)
        except ValueError as error:
            text = f"--sequence-parallel is for models of sequences: leave it out\n{error}"
            raise TargetError(text) from None
        lengths = problem.x.shape[1:2]  # an x of one dim is refused by training alone
        if lengths and lengths[0] % ranks:
            raise TargetError(
                f"--sequence-parallel cuts sequences into {ranks} equal parts, one for each tensor "
                f"rank, and {lengths[0]} positions are no multiple of {ranks}\n"
                "leave it out, take another number of tensor ranks, or pad x and y of factory(seed)"
            )
    return job


def _gradient(problem: Problem, step: int, x: Array, y: Array) -> tuple[float, Array]:
    """Return the mean loss, NaN if the model returns none, and its gradient; 0 without samples."""
    model = problem.model
    length = model.get_parameters().size
    if len(x) == 0:
        return 0.0, np.zeros(length)
    loss = problem.loss or getattr(model, "default_loss_function", None)
    if isinstance(model, Model):  # its random layers depend on the step
        value, gradient = model.compute_loss_and_gradients(x, y, problem.loss, step=step)
    elif problem.loss is None and hasattr(model, "compute_loss_and_gradients"):
        value, gradient = model.compute_loss_and_gradients(x, y)
    else:
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
    return np.zeros(0) if found is None or found.dtype.kind not in "fiub" else found


def main() -> None:
    """Train the job in FOLDER alone, and write the reference. Exit code 2 if it cannot train."""
    job: VerifyJob = VerifyJob.read(Path(sys.argv[1]))
    try:
        problem = build_problem(load_factory(job.target), job.seed, job.dtype_alone)
        job = fitted(job, problem)
        job.write(job)
        train_alone(job, problem).write(job.folder)
    except TargetError as error:
        say("verify", error)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
