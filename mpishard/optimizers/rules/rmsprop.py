"""RMSprop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from mpishard.arguments import as_flag
from mpishard.arrays import Array, array_namespace
from mpishard.optimizers.rules.compiled import ElementLoop
from mpishard.optimizers.rules.options import ParameterOptions
from mpishard.optimizers.rules.ranges import UpdateContext
from mpishard.optimizers.rules.rule import Optimizer, check_epsilon, check_fraction
from mpishard.optimizers.rules.schedules import Schedule

__all__ = ["RMSprop"]


class RMSprop(Optimizer):
    """The gradient divided by the root of the running mean of its squares.

    Tieleman and Hinton, "Lecture 6.5 - rmsprop", COURSERA: Neural Networks for Machine Learning,
    2012, whose rates are the defaults (PyTorch's are 0.01 and 0.99). ``centered`` and
    ``momentum`` are those of Graves, "Generating Sequences With Recurrent Neural Networks", 2013
    (arXiv:1308.0850), equations 38 to 41. The lecture has no epsilon, and Graves has it below the
    root; it is added to the root here, as in PyTorch and in Adam. Weight decay adds
    ``weight_decay * theta`` to the gradient.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size.
    beta2 : float
        Decay rate of the mean of squares, in [0, 1); PyTorch's ``alpha``.
    epsilon : float
        Added to the root; above 0.
    momentum : float
        In [0, 1): of a running sum of the steps. 0 keeps none.
    centered : bool
        Divide by the running standard deviation: less the square of the running mean.
    weight_decay, clip_global_norm, clip_value, parameter_options
        See `Optimizer`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("mean_square", "velocity", "mean")

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        beta2: float = 0.9,
        epsilon: float = 1e-8,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        weight_decay: float = 0.0,
        clip_global_norm: float | None = None,
        clip_value: float | None = None,
        parameter_options: ParameterOptions | None = None,
    ) -> None:
        super().__init__(
            learning_rate,
            weight_decay=weight_decay,
            clip_global_norm=clip_global_norm,
            clip_value=clip_value,
            parameter_options=parameter_options,
        )
        self.beta2 = check_fraction("beta2", beta2)
        self.epsilon = check_epsilon(epsilon)
        self.momentum = check_fraction("momentum", momentum)
        self.centered = as_flag("centered", centered)

    def needed_state(self) -> tuple[str, ...]:
        is_needed = {"mean_square": True, "velocity": self.momentum > 0, "mean": self.centered}
        return tuple(name for name in self.state_names if is_needed[name])

    def _update_chunk(
        self,
        p: Array,
        g: Array,
        state: Mapping[str, Array],
        learning_rate: float,
        weight_decay: float,
        context: UpdateContext,
    ) -> None:
        xp = array_namespace(p)
        square = state["mean_square"]
        step, spare = self._temporary(p, 2)
        xp.multiply(g, context.gradient_scale, out=step)
        if weight_decay:
            xp.multiply(p, weight_decay, out=spare)
            step += spare
        square *= self.beta2
        xp.multiply(step, math.sqrt(1 - self.beta2), out=spare)
        spare *= spare
        square += spare
        if self.centered:
            mean = state["mean"]
            mean *= self.beta2
            xp.multiply(step, 1 - self.beta2, out=spare)
            mean += spare
            xp.multiply(mean, mean, out=spare)
            xp.subtract(square, spare, out=spare)
            xp.maximum(spare, 0, out=spare)  # a constant gradient has none but for rounding
            xp.sqrt(spare, out=spare)
        else:
            xp.sqrt(square, out=spare)
        spare += self.epsilon
        step /= spare
        if self.momentum:
            v = state["velocity"]
            v *= self.momentum
            v += step
            xp.multiply(v, learning_rate, out=step)
        else:
            step *= learning_rate
        p -= step

    def _element_loop(
        self, learning_rate: float, weight_decay: float, context: UpdateContext
    ) -> ElementLoop | None:
        if self.centered:
            return None
        factors = (
            context.gradient_scale, weight_decay, learning_rate,
            self.beta2, math.sqrt(1 - self.beta2), self.epsilon,
        )  # fmt: skip
        if not self.momentum:
            return ElementLoop(_rmsprop, factors)
        return ElementLoop(_rmsprop_momentum, (*factors, self.momentum))


def _rmsprop(
    p: Array,
    g: Array,
    square: Array,
    scale: float,
    decay: float,
    rate: float,
    beta2: float,
    to_square: float,
    epsilon: float,
) -> None:
    """`RMSprop._update_chunk` without momentum, element by element."""
    for i in range(p.size):
        step = g[i] * scale
        if decay != 0:  # to add 0 would make +0 of -0
            step += p[i] * decay
        root = step * to_square
        mean = square[i] * beta2 + root * root
        p[i] -= step / (np.sqrt(mean) + epsilon) * rate
        square[i] = mean


def _rmsprop_momentum(
    p: Array,
    g: Array,
    square: Array,
    v: Array,
    scale: float,
    decay: float,
    rate: float,
    beta2: float,
    to_square: float,
    epsilon: float,
    momentum: float,
) -> None:
    """`RMSprop._update_chunk` with momentum, element by element."""
    for i in range(p.size):
        step = g[i] * scale
        if decay != 0:
            step += p[i] * decay
        root = step * to_square
        mean = square[i] * beta2 + root * root
        velocity = v[i] * momentum + step / (np.sqrt(mean) + epsilon)
        p[i] -= velocity * rate
        square[i] = mean
        v[i] = velocity
