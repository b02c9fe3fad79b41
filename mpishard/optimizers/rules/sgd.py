"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from mpishard.arguments import as_flag
from mpishard.arrays import Array, array_namespace
from mpishard.optimizers.rules.compiled import ElementLoop
from mpishard.optimizers.rules.options import ParameterOptions
from mpishard.optimizers.rules.ranges import UpdateContext
from mpishard.optimizers.rules.rule import Optimizer, check_fraction
from mpishard.optimizers.rules.schedules import Schedule

__all__ = ["SGD"]


class SGD(Optimizer):
    """``v = momentum * v + g``; ``theta -= learning_rate * v``.

    The heavy ball of Polyak, "Some methods of speeding up the convergence of iteration methods",
    1964, in the form of Sutskever et al., "On the importance of initialization and momentum in
    deep learning", ICML 2013, whose equation 3 ``nesterov`` follows: the step is then
    ``learning_rate * (g + momentum * v)``. Weight decay adds ``weight_decay * theta`` to ``g``.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size.
    momentum : float
        In [0, 1). 0 keeps no state.
    nesterov : bool
        Look ahead along the momentum.
    weight_decay, clip_global_norm, clip_value, parameter_options
        See `Optimizer`.
    """

    state_names: ClassVar[tuple[str, ...]] = ("velocity",)

    def __init__(
        self,
        learning_rate: float | Schedule = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
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
        self.momentum = check_fraction("momentum", momentum)
        self.nesterov = as_flag("nesterov", nesterov)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")

    def needed_state(self) -> tuple[str, ...]:
        return self.state_names if self.momentum else ()

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
        step, spare = self._temporary(p, 2)
        xp.multiply(g, context.gradient_scale, out=step)
        if weight_decay:
            xp.multiply(p, weight_decay, out=spare)
            step += spare
        direction = step
        if self.momentum:
            v = state["velocity"]
            v *= self.momentum
            v += step
            if self.nesterov:
                xp.multiply(v, self.momentum, out=spare)
                step += spare
            else:
                direction = v
        xp.multiply(direction, learning_rate, out=step)
        p -= step

    def _element_loop(
        self, learning_rate: float, weight_decay: float, context: UpdateContext
    ) -> ElementLoop:
        factors = (context.gradient_scale, weight_decay, learning_rate)
        if not self.momentum:
            return ElementLoop(_sgd, factors)
        return ElementLoop(_sgd_momentum, (*factors, self.momentum, float(self.nesterov)))


def _sgd(p: Array, g: Array, scale: float, decay: float, rate: float) -> None:
    """`SGD._update_chunk` without momentum, element by element."""
    for i in range(p.size):
        step = g[i] * scale
        if decay != 0:  # to add 0 would make +0 of -0
            step += p[i] * decay
        p[i] -= step * rate


def _sgd_momentum(
    p: Array,
    g: Array,
    v: Array,
    scale: float,
    decay: float,
    rate: float,
    momentum: float,
    nesterov: float,
) -> None:
    """`SGD._update_chunk` with momentum, element by element."""
    for i in range(p.size):
        step = g[i] * scale
        if decay != 0:
            step += p[i] * decay
        v[i] = v[i] * momentum + step
        if nesterov != 0:
            step += v[i] * momentum
        else:
            step = v[i]
        p[i] -= step * rate
