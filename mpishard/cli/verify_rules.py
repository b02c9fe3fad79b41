"""Update rules twice: mpishard's, and as the textbooks have them on a whole vector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpishard.arrays import Array
from mpishard.optimizers import SGD, AdamW, Optimizer

__all__ = ["RULES", "VerifiedRule"]

State = dict[str, Array]

_MOMENTUM, _BETA1, _BETA2, _EPSILON, _DECAY = 0.9, 0.9, 0.999, 1e-8, 0.01


@dataclass(frozen=True, slots=True)
class VerifiedRule:
    """One rule, made of mpishard's class and as a function that knows nothing of it.

    Parameters
    ----------
    make : callable
        ``make(learning_rate)`` is the optimizer.
    direction : callable
        ``direction(theta, gradient, state, step)``, what the textbook subtracts from theta after
        multiplication with the learning rate; ``step`` counts from 1.
    """

    make: Callable[[float], Optimizer]
    direction: Callable[[Array, Array, State, int], Array]


def _sgd(_theta: Array, g: Array, state: State, _step: int) -> Array:
    state["v"] = _MOMENTUM * state.get("v", 0) + g
    return state["v"]


def _adamw(theta: Array, g: Array, state: State, step: int) -> Array:
    state["m"] = _BETA1 * state.get("m", 0) + (1 - _BETA1) * g
    state["v"] = _BETA2 * state.get("v", 0) + (1 - _BETA2) * g**2
    m, v = state["m"] / (1 - _BETA1**step), state["v"] / (1 - _BETA2**step)
    return m / (np.sqrt(v) + _EPSILON) + _DECAY * theta


RULES = {
    "sgd": VerifiedRule(lambda rate: SGD(rate, _MOMENTUM), _sgd),
    "adamw": VerifiedRule(
        lambda rate: AdamW(rate, _BETA1, _BETA2, _EPSILON, weight_decay=_DECAY), _adamw
    ),
}
"""What ``--optimizer`` may be."""
