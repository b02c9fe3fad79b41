"""Adam."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.optimizers.rules.compiled import ElementLoop
from mpishard.optimizers.rules.options import ParameterOptions
from mpishard.optimizers.rules.ranges import UpdateContext
from mpishard.optimizers.rules.rule import Optimizer, check_epsilon, check_fraction
from mpishard.optimizers.rules.schedules import Schedule

__all__ = ["Adam"]


class Adam(Optimizer):
    """Moments of the gradient by element.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1. Weight
    decay adds ``weight_decay * theta`` to the gradient, so that the moments see it, as in
    PyTorch; `AdamW` keeps the two apart.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size.
    beta1, beta2 : float
        Decay rates of the first and second moment, in [0, 1).
    epsilon : float
        Added to the root of the second moment; above 0.
    weight_decay, clip_global_norm, clip_value, parameter_options
        See `Optimizer`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
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
        self.beta1 = check_fraction("beta1", beta1)
        self.beta2 = check_fraction("beta2", beta2)
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
        scale = context.gradient_scale
        if weight_decay:
            decayed, spare = self._temporary(p, 2, "decay")
            xp.multiply(g, scale, out=decayed)
            xp.multiply(p, weight_decay, out=spare)
            decayed += spare
            g, scale = decayed, 1.0
        self._descend(p, g, state, self._factors(learning_rate, scale, context.step))

    def _descend(
        self, p: Array, g: Array, state: Mapping[str, Array], factors: tuple[float, ...]
    ) -> None:
        """Moments of ``g``, and a step along them."""
        xp = array_namespace(p)
        m, v = state["first_moment"], state["second_moment"]
        beta1, beta2, to_m, to_v, epsilon, rate = factors
        (spare,) = self._temporary(p, 1)
        m *= beta1
        xp.multiply(g, to_m, out=spare)
        m += spare
        v *= beta2
        xp.multiply(g, to_v, out=spare)
        spare *= spare
        v += spare
        xp.sqrt(v, out=spare)
        spare += epsilon
        xp.divide(m, spare, out=spare)
        spare *= rate
        p -= spare

    def _element_loop(
        self, learning_rate: float, weight_decay: float, context: UpdateContext
    ) -> ElementLoop:
        scale = context.gradient_scale
        factors = self._factors(learning_rate, 1.0 if weight_decay else scale, context.step)
        return ElementLoop(_adam, (*factors, scale, weight_decay))

    def _factors(self, learning_rate: float, scale: float, step: int) -> tuple[float, ...]:
        # Scalars are joined so that few passes are left: with c1 = 1 - beta1^t and
        # c2 = 1 - beta2^t, m/c1 / (sqrt(v/c2) + eps) = sqrt(c2)/c1 m / (sqrt(v) + sqrt(c2) eps).
        root = math.sqrt(1 - self.beta2**step)
        return (
            self.beta1,
            self.beta2,
            (1 - self.beta1) * scale,
            math.sqrt(1 - self.beta2) * scale,
            root * self.epsilon,
            learning_rate * root / (1 - self.beta1**step),
        )


def _adam(
    p: Array,
    g: Array,
    m: Array,
    v: Array,
    beta1: float,
    beta2: float,
    to_m: float,
    to_v: float,
    epsilon: float,
    rate: float,
    scale: float,
    decay: float,
) -> None:
    """`Adam._update_chunk`, element by element."""
    for i in range(p.size):
        gradient = g[i]
        if decay != 0:
            gradient = gradient * scale + p[i] * decay
        first = m[i] * beta1 + gradient * to_m
        root = gradient * to_v
        second = v[i] * beta2 + root * root
        # All reads come before the first write, which makes it a third faster.
        p[i] -= first / (np.sqrt(second) + epsilon) * rate
        m[i] = first
        v[i] = second
