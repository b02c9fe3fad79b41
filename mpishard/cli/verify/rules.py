"""Update rules twice: mpishard's, and as the textbooks have them on a whole vector.

The papers are cited where mpishard's rules are; nothing else of those is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mpishard.arrays import Array
from mpishard.optimizers import LAMB, SGD, Adagrad, Adam, AdamW, Lion, Optimizer, RMSprop

__all__ = ["RULES", "TextbookStep", "VerifiedRule"]

_MOMENTUM, _BETA1, _BETA2, _EPSILON, _DECAY = 0.9, 0.9, 0.99, 1e-8, 0.01


@dataclass
class TextbookStep:
    """One step of one rule, on whole vectors.

    Parameters
    ----------
    theta, gradient : Array
        Shape (length,).
    state : dict
        What the rule keeps from step to step.
    number : int
        Counts from 1.
    parts : sequence of slice
        Where each parameter lies.
    """

    theta: Array
    gradient: Array
    state: dict[str, Array]
    number: int
    parts: Sequence[slice]

    def average(self, name: str, value: Array, beta: float) -> Array:
        """Update the running mean ``name`` with ``value``; it starts at 0."""
        self.state[name] = beta * self.state.get(name, 0) + (1 - beta) * value
        return self.state[name]


Direction = Callable[[TextbookStep], Array]


@dataclass(frozen=True, slots=True)
class VerifiedRule:
    """One rule, made of mpishard's class and as a function that knows nothing of it.

    Parameters
    ----------
    make : callable
        ``make(learning_rate)`` is the optimizer.
    direction : callable
        ``direction(step)``, what is subtracted from theta after multiplication with the learning
        rate.
    """

    make: Callable[[float], Optimizer]
    direction: Direction


def _sgd(step: TextbookStep) -> Array:
    step.state["v"] = _MOMENTUM * step.state.get("v", 0) + step.gradient
    return step.state["v"]


def _adagrad(step: TextbookStep) -> Array:
    step.state["s"] = step.state.get("s", 0) + step.gradient**2
    return step.gradient / (np.sqrt(step.state["s"]) + _EPSILON)


def _rmsprop(step: TextbookStep) -> Array:
    return step.gradient / (np.sqrt(step.average("v", step.gradient**2, _BETA2)) + _EPSILON)


def _adam(step: TextbookStep) -> Array:
    m = step.average("m", step.gradient, _BETA1) / (1 - _BETA1**step.number)
    v = step.average("v", step.gradient**2, _BETA2) / (1 - _BETA2**step.number)
    return m / (np.sqrt(v) + _EPSILON)


def _adamw(step: TextbookStep) -> Array:
    return _adam(step) + _DECAY * step.theta


def _lion(step: TextbookStep) -> Array:
    before = step.state.get("m", 0)
    step.average("m", step.gradient, _BETA2)
    return np.sign(_BETA1 * before + (1 - _BETA1) * step.gradient) + _DECAY * step.theta


def _lamb(step: TextbookStep) -> Array:
    direction = _adamw(step)
    for part in step.parts:
        length, own = np.linalg.norm(step.theta[part]), np.linalg.norm(direction[part])
        if length > 0 and own > 0:
            direction[part] *= length / own
    return direction


RULES = {
    "sgd": VerifiedRule(lambda rate: SGD(rate, _MOMENTUM), _sgd),
    "adagrad": VerifiedRule(lambda rate: Adagrad(rate, _EPSILON), _adagrad),
    "rmsprop": VerifiedRule(lambda rate: RMSprop(rate, _BETA2, _EPSILON), _rmsprop),
    "adam": VerifiedRule(lambda rate: Adam(rate, _BETA1, _BETA2, _EPSILON), _adam),
    "adamw": VerifiedRule(
        lambda rate: AdamW(rate, _BETA1, _BETA2, _EPSILON, weight_decay=_DECAY), _adamw
    ),
    "lion": VerifiedRule(lambda rate: Lion(rate, _BETA1, _BETA2, weight_decay=_DECAY), _lion),
    "lamb": VerifiedRule(
        lambda rate: LAMB(rate, _BETA1, _BETA2, _EPSILON, weight_decay=_DECAY), _lamb
    ),
}
"""What ``--optimizer`` may be."""
