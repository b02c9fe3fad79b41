"""Lion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from mpishard.arrays import Array, array_namespace
from mpishard.optimizers.rules.compiled import ElementLoop
from mpishard.optimizers.rules.options import ParameterOptions
from mpishard.optimizers.rules.ranges import UpdateContext
from mpishard.optimizers.rules.rule import Optimizer, check_fraction
from mpishard.optimizers.rules.schedules import Schedule

__all__ = ["Lion"]


class Lion(Optimizer):
    """Steps of one length along the sign of the interpolated momentum.

    Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2:
    ``theta -= learning_rate * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * theta)``, then
    ``m = beta2 * m + (1 - beta2) * g``. It wants a learning rate 3 to 10 times lower than AdamW,
    and a weight decay as much higher (section 5).

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size.
    beta1, beta2 : float
        Share of the momentum in the step, and its decay rate; in [0, 1).
    weight_decay, clip_global_norm, clip_value, parameter_options
        See `Optimizer`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("momentum",)

    def __init__(
        self,
        learning_rate: float | Schedule = 1e-4,
        beta1: float = 0.9,
        beta2: float = 0.99,
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
        m = state["momentum"]
        beta1, beta2, to_step, to_m, rate, keep = self._factors(
            learning_rate, weight_decay, context
        )
        step, spare = self._temporary(p, 2)
        xp.multiply(m, beta1, out=step)
        xp.multiply(g, to_step, out=spare)
        step += spare
        xp.sign(step, out=step)
        step *= rate
        if keep != 1:
            p *= keep
        p -= step
        m *= beta2
        xp.multiply(g, to_m, out=spare)
        m += spare

    def _element_loop(
        self, learning_rate: float, weight_decay: float, context: UpdateContext
    ) -> ElementLoop:
        return ElementLoop(_lion, self._factors(learning_rate, weight_decay, context))

    def _factors(
        self, learning_rate: float, weight_decay: float, context: UpdateContext
    ) -> tuple[float, ...]:
        return (
            self.beta1,
            self.beta2,
            (1 - self.beta1) * context.gradient_scale,
            (1 - self.beta2) * context.gradient_scale,
            learning_rate,
            1 - learning_rate * weight_decay,
        )


def _lion(
    p: Array,
    g: Array,
    m: Array,
    beta1: float,
    beta2: float,
    to_step: float,
    to_m: float,
    rate: float,
    keep: float,
) -> None:
    """`Lion._update_chunk`, element by element; without decay ``keep`` is 1 and changes no bit."""
    for i in range(p.size):
        step = m[i] * beta1 + g[i] * to_step
        if step > 0:
            change = rate
        elif step < 0:
            change = -rate
        else:
            change = step - step  # +0, or NaN
        p[i] = p[i] * keep - change
        m[i] = m[i] * beta2 + g[i] * to_m
