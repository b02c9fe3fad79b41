"""The textbook's update rules, written here once more, for whole vectors in one process.

They use no update rule of mpishard, but the settings of the user's one. `mpishard.optimizers` cites
the papers. Only the trial steps of a line search come from `StrongWolfe`, which handles numbers
alone and is tested against SciPy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from mpishard.base import Array
from mpishard.cli.factories import TargetError
from mpishard.optimizers import LAMB, SGD, Adagrad, Adam, Lion, RMSprop, StrongWolfe
from mpishard.sharding import ParameterEntry

_LONGEST = 1e10  # of all steps of a line search


class Textbook:
    """Training of one vector with the settings of a rule.

    Parameters
    ----------
    rule : Optimizer
        One of `RULES`, whose settings are read; it updates nothing.
    entries : sequence of ParameterEntry
        Name and range of each parameter.
    """

    def __init__(self, rule: Any, entries: Sequence[ParameterEntry]) -> None:
        self._rule, self._entries = rule, entries
        self._state: dict[str, Array] = {}
        self._pairs: list[tuple[Array, Array]] = []
        self._own = [
            {
                # In the order of the patterns, so that a later one overrides an earlier one.
                name: value
                for pattern, values in rule.parameter_options.items()
                if fnmatchcase(entry.name, pattern)
                for name, value in values.items()
            }
            for entry in entries
        ]
        trained = [
            entry.trainable and not own.get("frozen")
            for entry, own in zip(entries, self._own, strict=True)
        ]
        self.trained = self._spread(trained)
        """True for each element that is trained."""

    def _spread(self, values: Sequence[float]) -> Array:
        """Return one value for each element, from one for each parameter."""
        return np.repeat(values, [entry.size for entry in self._entries])

    def update(
        self,
        theta: Array,
        loss: float,
        gradient: Array,
        step: int,
        evaluate: Callable[[Array], tuple[float, Array]],
    ) -> Array:
        """Return the parameters after ``step``, which counts from 0.

        Parameters
        ----------
        theta, gradient : Array
            Parameters and mean gradient, shape (length,).
        loss : float
            The loss at ``theta``.
        evaluate : callable
            Returns loss and gradient at another point.
        """
        rule = self._rule
        if rule.searches:
            return self._search(theta, loss, gradient, rule.learning_rate(step), evaluate)
        if rule.clip_global_norm is not None:
            norm = float(np.linalg.norm(gradient))
            # A gradient that is shorter than the limit keeps its length.
            gradient = gradient * (rule.clip_global_norm / max(norm, rule.clip_global_norm))
        if rule.clip_value is not None:
            gradient = np.clip(gradient, -rule.clip_value, rule.clip_value)
        rates = [
            own.get("learning_rate", rule.learning_rate)(step) * own.get("learning_rate_scale", 1.0)
            for own in self._own
        ]
        decay = self._spread([own.get("weight_decay", rule.weight_decay) for own in self._own])
        moved = self._spread(rates) * self._direction(theta, gradient, decay, step + 1)
        # Not even weight decay moves frozen elements.
        after: Array = theta - self.trained * moved
        return after.astype(theta.dtype)

    def _direction(self, theta: Array, gradient: Array, decay: Array, number: int) -> Array:
        """Return the vector that step ``number``, from 1, subtracts, divided by the rate."""
        rule, state, kind = self._rule, self._state, type(self._rule)
        direction: Array

        def mean(name: str, value: Array, beta: float) -> Array:
            state[name] = beta * state.get(name, 0) + (1 - beta) * value
            return state[name]

        if kind is Lion:
            # Lion's direction has the momentum of before the step, mixed with another factor.
            before = state.get("m", 0)
            mean("m", gradient, rule.beta2)
            direction = np.sign(rule.beta1 * before + (1 - rule.beta1) * gradient) + decay * theta
            return direction
        if kind in (SGD, Adagrad, RMSprop, Adam):  # the others add it to the direction
            gradient = gradient + decay * theta
        if kind is SGD:
            state["v"] = rule.momentum * state.get("v", 0) + gradient
            return gradient + rule.momentum * state["v"] if rule.nesterov else state["v"]
        if kind is Adagrad:
            state["s"] = state.get("s", 0) + gradient**2
            direction = gradient / (np.sqrt(state["s"]) + rule.epsilon)
            return direction
        if kind is RMSprop:
            square = mean("s", gradient**2, rule.beta2)
            if rule.centered:
                # Roundings can make this variance negative, and its root NaN.
                square = np.maximum(square - mean("m", gradient, rule.beta2) ** 2, 0)
            direction = gradient / (np.sqrt(square) + rule.epsilon)
            state["v"] = rule.momentum * state.get("v", 0) + direction
            return state["v"]
        # Adam, AdamW and LAMB share the moments, which are corrected for their start at 0.
        m = mean("m", gradient, rule.beta1) / (1 - rule.beta1**number)
        v = mean("v", gradient**2, rule.beta2) / (1 - rule.beta2**number)
        direction = m / (np.sqrt(v) + rule.epsilon)
        if kind is not Adam:
            direction = direction + decay * theta
        if kind is LAMB:
            for part in (slice(entry.start, entry.stop) for entry in self._entries):
                length, own = np.linalg.norm(theta[part]), np.linalg.norm(direction[part])
                # With a ratio of 0 a parameter that begins at 0 would never leave it.
                if length > 0 and own > 0:
                    direction[part] *= length / own
        return direction

    def _search(
        self,
        theta: Array,
        value: float,
        gradient: Array,
        rate: float,
        evaluate: Callable[[Array], tuple[float, Array]],
    ) -> Array:
        """Return the next point of L-BFGS: Nocedal and Wright, algorithms 7.4 and 7.5.

        Raises
        ------
        TargetError
            If the model returns no loss, or no trial is accepted.
        """
        rule, pairs = self._rule, self._pairs
        if math.isnan(value):
            text = "give it compute_loss_and_gradients, or return a loss from factory(seed)"
            raise TargetError(f"LBFGS compares losses, and the model returns none\n{text}")
        found, alphas = -gradient, []
        for step, change in reversed(pairs):
            alphas.append(step @ found / (step @ change))
            found -= alphas[-1] * change
        if pairs:
            step, change = pairs[-1]
            # The scale of the first Hessian, equation 7.20.
            found *= step @ change / (change @ change)
        for (step, change), alpha in zip(pairs, reversed(alphas), strict=True):
            found += (alpha - change @ found / (step @ change)) * step
        # Without pairs the direction is the gradient, whose length is no good first step.
        first = rate if pairs else 1 / (float(np.linalg.norm(found)) or 1.0)
        search = StrongWolfe(value, float(gradient @ found), first, _LONGEST, rule.c1, rule.c2)
        for _ in range(rule.max_line_search if search.slope < 0 else 0):
            moved = (theta + search.step * found).astype(theta.dtype)
            other, slope = evaluate(moved)
            if search.judge(other, float(slope @ found)):
                pairs[:] = [*pairs, (moved - theta, slope - gradient)][-rule.memory :]
                return moved
        trials = f"{rule.max_line_search} trials"
        text = f"training alone: L-BFGS finds no lower loss than {value:.6g} in {trials}"
        fix = "give fewer --steps, if it is near a minimum, or look at the gradient"
        raise TargetError(f"{text}\n{fix}")
