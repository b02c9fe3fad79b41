"""LAMB."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpishard.arrays import (
    SQUARES_BLOCK,
    Array,
    array_namespace,
    block_squares,
    to_host,
)
from mpishard.optimizers.rules.compiled import in_chunks
from mpishard.optimizers.rules.elementwise import Adam
from mpishard.optimizers.rules.options import OptionRange
from mpishard.optimizers.rules.ranges import Cell, OwnedRange, UpdateContext, places_of
from mpishard.optimizers.rules.rule import JointRule


@dataclass(eq=False)
class LAMB(Adam, JointRule):
    """Adam's direction, scaled for each parameter to the length of the parameter itself.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR
    2020, algorithm 2, with phi the identity and each named parameter a layer: with r Adam's step
    with bias correction and u = r + weight_decay * theta, ``theta -= learning_rate * |theta| / |u|
    * u``. The ratio is 1 if a norm is 0, which the paper does not treat: a parameter that is 0 at
    first would stay 0. The norms are over the whole parameter, of which each rank may own a part;
    they travel once per update, all together.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size, as a share of each parameter's norm.
    beta1, beta2, epsilon, weight_decay, clip_global_norm, clip_value, parameter_options
        See `Adam`.
    """

    epsilon: float = 1e-6

    _merges_segments = False

    def update_all(self, ranges: Sequence[OwnedRange], context: UpdateContext) -> None:
        """Update in two passes: moments and norms first; then, with summed norms, the steps.

        The second pass computes each chunk's direction again, which needs no memory between them.
        """
        places = places_of(ranges, context)
        xp = array_namespace(ranges[0].parameters) if ranges else np
        squares = xp.zeros((len(places), 2))
        for owned, cell, span in self._parameters_in(ranges):
            blocks = []
            for p, g, m, v in self._chunks(owned, span):
                self._update_moments(g, m, v, context.gradient_scale)
                direction = self._direction(p, m, v, span.weight_decay, context.step - owned.missed)
                # In float64, because the squares of small float32 numbers are 0.
                blocks.append(
                    xp.stack([block_squares(a.astype(np.float64)) for a in (p, direction)])
                )
            squares[places[cell]] += xp.concatenate(blocks, axis=1).sum(axis=1)
        squares = context.sum_over_owners(to_host(squares))
        for owned, cell, span in self._parameters_in(ranges):
            length, step_length = np.sqrt(squares[places[cell]]).tolist()
            ratio = length / step_length if length > 0 and step_length > 0 else 1.0
            rate = self._rate_in(span, context) * ratio
            for p, _g, m, v in self._chunks(owned, span):
                direction = self._direction(p, m, v, span.weight_decay, context.step - owned.missed)
                direction *= rate
                p[...] -= direction

    def _parameters_in(
        self, ranges: Sequence[OwnedRange]
    ) -> Iterator[tuple[OwnedRange, Cell, OptionRange]]:
        for owned in ranges:
            spans = self._option_ranges(owned.segments)
            for segment, span in zip(owned.segments, spans, strict=True):
                yield owned, (segment.name, segment.cell), span

    def _chunks(self, owned: OwnedRange, span: OptionRange) -> Iterator[list[Array]]:
        """Return parameters, gradients and moments of one chunk after the other."""
        arrays = [owned.parameters, owned.gradients, *(owned.state[n] for n in self.state_names)]
        # Whole blocks, so that the sums of squares do not depend on the size of the cache.
        return in_chunks([array[span.start : span.stop] for array in arrays], SQUARES_BLOCK)

    def _update_moments(self, g: Array, m: Array, v: Array, scale: float) -> None:
        if self.clip_value is not None:
            g = g * scale
            g, scale = array_namespace(g).clip(g, -self.clip_value, self.clip_value, out=g), 1.0
        m *= self.beta1
        m += g * ((1 - self.beta1) * scale)
        v *= self.beta2
        root = g * (math.sqrt(1 - self.beta2) * scale)
        root *= root
        v += root

    def _direction(self, p: Array, m: Array, v: Array, weight_decay: float, step: int) -> Array:
        """Return ``r + weight_decay * theta`` in a new array."""
        # As in Adam: m/c1 / (sqrt(v/c2) + eps) = sqrt(c2)/c1 m / (sqrt(v) + sqrt(c2) eps).
        root = math.sqrt(1 - self.beta2**step)
        divisor = np.sqrt(v)
        divisor += root * self.epsilon
        direction: Array = m / divisor
        direction *= root / (1 - self.beta1**step)
        if weight_decay:
            direction += p * weight_decay
        return direction
