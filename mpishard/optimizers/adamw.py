"""Adam with decoupled weight decay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.optimizers.compiled import ElementLoop
from mpishard.optimizers.optimizer import Optimizer, UpdateContext, check_fraction
from mpishard.optimizers.options import ParameterOptions
from mpishard.optimizers.schedules import Schedule

__all__ = ["AdamW"]


class AdamW(Optimizer):
    """Moments of the gradient by element; decay acts on the parameters and not on the moments.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1, with the
    decay of Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm
    2, scaled by the learning rate.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size.
    beta1, beta2 : float
        Decay rates of the first and second moment, in [0, 1).
    epsilon : float
        Added to the root of the second moment; above 0.
    weight_decay, clip_global_norm, parameter_options
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
        parameter_options: ParameterOptions | None = None,
    ) -> None:
        super().__init__(
            learning_rate,
            weight_decay=weight_decay,
            clip_global_norm=clip_global_norm,
            parameter_options=parameter_options,
        )
        self.beta1 = check_fraction("beta1", beta1)
        self.beta2 = check_fraction("beta2", beta2)
        if not epsilon > 0:
            raise ValueError(f"epsilon must be above 0, got {epsilon}")
        self.epsilon = epsilon

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
        m, v = state["first_moment"], state["second_moment"]
        beta1, beta2, to_m, to_v, epsilon, rate, keep = self._factors(
            learning_rate, weight_decay, context
        )
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
        if keep != 1:
            p *= keep
        p -= spare

    def _element_loop(
        self, learning_rate: float, weight_decay: float, context: UpdateContext
    ) -> ElementLoop:
        return ElementLoop(_adamw, self._factors(learning_rate, weight_decay, context))

    def _factors(
        self, learning_rate: float, weight_decay: float, context: UpdateContext
    ) -> tuple[float, ...]:
        # Scalars are joined so that few passes are left: with c1 = 1 - beta1^t and
        # c2 = 1 - beta2^t, m/c1 / (sqrt(v/c2) + eps) = sqrt(c2)/c1 m / (sqrt(v) + sqrt(c2) eps).
        root = math.sqrt(1 - self.beta2**context.step)
        return (
            self.beta1,
            self.beta2,
            (1 - self.beta1) * context.gradient_scale,
            math.sqrt(1 - self.beta2) * context.gradient_scale,
            root * self.epsilon,
            learning_rate * root / (1 - self.beta1**context.step),
            1 - learning_rate * weight_decay,
        )


def _adamw(
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
    keep: float,
) -> None:
    """`AdamW._update_chunk`, element by element; without decay ``keep`` is 1 and changes no bit."""
    for i in range(p.size):
        gradient = g[i]
        first = m[i] * beta1 + gradient * to_m
        root = gradient * to_v
        second = v[i] * beta2 + root * root
        # All reads come before the first write, which makes it a third faster.
        change = first / (np.sqrt(second) + epsilon) * rate
        p[i] = p[i] * keep - change
        m[i] = first
        v[i] = second
