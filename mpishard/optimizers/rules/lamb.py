"""LAMB."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mpishard.base import (
    SQUARES_BLOCK,
    Array,
    array_namespace,
    block_squares,
    to_host,
)
from mpishard.models import squared_norm
from mpishard.optimizers.rules.compiled import Body, elements, in_chunks, run
from mpishard.optimizers.rules.elementwise import Adam
from mpishard.optimizers.rules.options import SegmentOptions
from mpishard.optimizers.rules.pieces import PieceViews, SegmentKey, UpdateContext, rows_of
from mpishard.optimizers.rules.rule import JointRule


@dataclass(eq=False)
class LAMB(Adam, JointRule):
    """Adam's direction, scaled for each parameter to the length of the parameter itself.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR
    2020, algorithm 2, with phi the identity and each named parameter a layer: with r Adam's step
    with bias correction and u = r + weight_decay * theta, ``theta -= learning_rate * |theta| / |u|
    * u``. The ratio is 1 if a norm is 0, which the paper does not treat: a parameter that is 0 at
    first would stay 0. The norms are over the whole parameter, of which each rank may own a part;
    they travel in one message per update.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size, as a share of each parameter's norm.
    beta1, beta2, epsilon, weight_decay, clip_global_norm, clip_value, parameter_options
        See `Adam`.
    """

    epsilon: float = 1e-6

    _merges_segments = False

    def update_all(self, pieces: Sequence[PieceViews], context: UpdateContext) -> None:
        """Update in two passes: moments and norms first; then, with summed norms, the steps.

        The second pass computes each chunk's direction again, which needs no memory between them.
        """
        rows = rows_of(pieces, context)
        # A rank without pieces still takes part in the sum: the others wait for it.
        xp = array_namespace(pieces[0].parameters) if pieces else np
        squares = xp.zeros((len(rows), 2))
        square = self._add_squares if xp is np else self._add_squares_on_device
        for owned, key, options in self._parameters_in(pieces):
            square(squares[rows[key]], owned, options, context)
        # The norms of all parameters travel in one message, not in one for each parameter.
        squares = context.sum_over_owners(to_host(squares))
        for owned, key, options in self._parameters_in(pieces):
            length, step_length = np.sqrt(squares[rows[key]]).tolist()
            ratio = length / step_length if length > 0 and step_length > 0 else 1.0
            rate = self._rate_in(options, context) * ratio
            p, _g, m, v = self._arrays(owned, options)
            # Bias corrections count the updates of these parameters alone.
            step = context.step - owned.missed
            run(Body(_step, (*self._of_direction(options, step), rate)), [p, m, v])

    def _parameters_in(
        self, pieces: Sequence[PieceViews]
    ) -> Iterator[tuple[PieceViews, SegmentKey, SegmentOptions]]:
        for owned in pieces:
            # One set of options for each segment: LAMB merges none.
            found = self._options_of(owned.segments)
            for segment, options in zip(owned.segments, found, strict=True):
                yield owned, (segment.name, segment.number), options

    def _arrays(self, owned: PieceViews, options: SegmentOptions) -> list[Array]:
        """Return parameters, gradients and moments of one parameter."""
        arrays = [owned.parameters, owned.gradients, *(owned.state[n] for n in self.state_names)]
        return [array[options.start : options.stop] for array in arrays]

    def _add_squares(
        self, squares: Array, owned: PieceViews, options: SegmentOptions, context: UpdateContext
    ) -> None:
        """Update the moments of one parameter, and add the squares of it and of its direction."""
        blocks = []
        # Whole blocks, so that the sums of squares do not depend on the size of the cache.
        arrays = self._arrays(owned, options)
        for chunk in in_chunks(arrays[0], SQUARES_BLOCK):
            p, g, m, v = (array[chunk] for array in arrays)
            direction = self._direction(p, g, m, v, options, context, owned.missed)
            # In float64, because the squares of small float32 numbers are 0.
            blocks.append(np.stack([block_squares(a.astype(np.float64)) for a in (p, direction)]))
        squares += np.concatenate(blocks, axis=1).sum(axis=1)

    def _add_squares_on_device(
        self, squares: Array, owned: PieceViews, options: SegmentOptions, context: UpdateContext
    ) -> None:
        """As `_add_squares`; the host waits for nothing."""
        p, g, m, v = self._arrays(owned, options)
        direction = self._direction(p, g, m, v, options, context, owned.missed)
        for column, array in enumerate((p, direction)):
            squares[column : column + 1] += squared_norm([array])

    def _direction(
        self,
        p: Array,
        g: Array,
        m: Array,
        v: Array,
        options: SegmentOptions,
        context: UpdateContext,
        missed: int,
    ) -> Array:
        """Update the moments, and return ``r + weight_decay * theta`` in a new array."""
        # `run` scales before it clips, so that the factors below must not scale again.
        scale, clip = context.gradient_scale, None
        if self.clip_value is not None:
            scale, clip = 1.0, (scale, self.clip_value)
        to_m, to_v = (1 - self.beta1) * scale, math.sqrt(1 - self.beta2) * scale
        run(Body(_moments, (self.beta1, self.beta2, to_m, to_v)), [m, g, v], clip)
        direction: Array = array_namespace(p).empty_like(p)
        numbers = self._of_direction(options, context.step - missed)
        run(Body(_directions, numbers), [direction, p, m, v])
        return direction

    def _of_direction(self, options: SegmentOptions, step: int) -> tuple[float, ...]:
        # As in Adam: m/c1 / (sqrt(v/c2) + eps) = sqrt(c2)/c1 m / (sqrt(v) + sqrt(c2) eps).
        root = math.sqrt(1 - self.beta2**step)
        correction = root / (1 - self.beta1**step)
        return root * self.epsilon, correction, options.weight_decay


def _moments(
    m: Array, g: Array, v: Array, beta1: float, beta2: float, to_m: float, to_v: float
) -> None:
    for i in elements(m.size):
        first, second = m[i], v[i]
        first *= beta1
        first += g[i] * to_m
        root = g[i] * to_v
        root *= root
        second *= beta2
        second += root
        m[i], v[i] = first, second


def _directions(
    d: Array, p: Array, m: Array, v: Array, epsilon: float, correction: float, decay: float
) -> None:
    for i in elements(d.size):
        divisor = np.sqrt(v[i])
        divisor += epsilon
        direction = m[i] / divisor
        direction *= correction
        if decay != 0:
            direction += p[i] * decay
        d[i] = direction


# The direction once more: to keep it from the first pass would take a vector of all parameters.
def _step(
    p: Array, m: Array, v: Array, epsilon: float, correction: float, decay: float, rate: float
) -> None:
    for i in elements(p.size):
        theta = p[i]
        divisor = np.sqrt(v[i])
        divisor += epsilon
        direction = m[i] / divisor
        direction *= correction
        if decay != 0:
            direction += theta * decay
        direction *= rate
        theta -= direction
        p[i] = theta
