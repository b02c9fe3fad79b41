"""Adam with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpishard.arrays import Array
from mpishard.optimizers.rules.adam import Adam
from mpishard.optimizers.rules.compiled import ElementLoop
from mpishard.optimizers.rules.ranges import UpdateContext

__all__ = ["AdamW"]


class AdamW(Adam):
    """Adam, with a decay that acts on the parameters and not on the moments.

    Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1, with the
    decay of Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm
    2, scaled by the learning rate.

    Parameters are those of `Adam`.
    """

    def _update_chunk(
        self,
        p: Array,
        g: Array,
        state: Mapping[str, Array],
        learning_rate: float,
        weight_decay: float,
        context: UpdateContext,
    ) -> None:
        keep = 1 - learning_rate * weight_decay
        if keep != 1:
            p *= keep
        factors = self._factors(learning_rate, context.gradient_scale, context.step)
        self._descend(p, g, state, factors)

    def _element_loop(
        self, learning_rate: float, weight_decay: float, context: UpdateContext
    ) -> ElementLoop:
        factors = self._factors(learning_rate, context.gradient_scale, context.step)
        return ElementLoop(_adamw, (*factors, 1 - learning_rate * weight_decay))


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
