"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.optimizers.rules.compiled import ElementLoop
from mpishard.optimizers.rules.options import ParameterOptions
from mpishard.optimizers.rules.ranges import UpdateContext
from mpishard.optimizers.rules.rule import Optimizer, check_epsilon
from mpishard.optimizers.rules.schedules import Schedule

__all__ = ["Adagrad"]


class Adagrad(Optimizer):
    """``theta -= learning_rate * g / (sqrt(sum of g**2 so far) + epsilon)``.

    Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and Stochastic
    Optimization", JMLR 12, 2011, figure 1 with diagonal matrices, no regulariser and epsilon for
    delta. The paper names no defaults; these are PyTorch's. Weight decay adds
    ``weight_decay * theta`` to ``g``.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size.
    epsilon : float
        Added to the root; above 0.
    weight_decay, clip_global_norm, clip_value, parameter_options
        See `Optimizer`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("sum_of_squares",)

    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        epsilon: float = 1e-10,
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
        self.epsilon = check_epsilon(epsilon)

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
        total = state["sum_of_squares"]
        step, spare = self._temporary(p, 2)
        xp.multiply(g, context.gradient_scale, out=step)
        if weight_decay:
            xp.multiply(p, weight_decay, out=spare)
            step += spare
        xp.multiply(step, step, out=spare)
        total += spare
        xp.sqrt(total, out=spare)
        spare += self.epsilon
        step /= spare
        step *= learning_rate
        p -= step

    def _element_loop(
        self, learning_rate: float, weight_decay: float, context: UpdateContext
    ) -> ElementLoop:
        factors = (context.gradient_scale, weight_decay, learning_rate, self.epsilon)
        return ElementLoop(_adagrad, factors)


def _adagrad(
    p: Array, g: Array, total: Array, scale: float, decay: float, rate: float, epsilon: float
) -> None:
    """`Adagrad._update_chunk`, element by element."""
    for i in range(p.size):
        step = g[i] * scale
        if decay != 0:  # to add 0 would make +0 of -0
            step += p[i] * decay
        squares = total[i] + step * step
        p[i] -= step / (np.sqrt(squares) + epsilon) * rate
        total[i] = squares
