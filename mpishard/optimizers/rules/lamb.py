"""LAMB."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np

from mpishard.arrays import (
    SQUARES_BLOCK,
    Array,
    array_namespace,
    block_squares,
    chunk_length,
    to_host,
)
from mpishard.optimizers.rules.options import (
    OptionRange,
    ParameterOptions,
    Segment,
    segment_options,
)
from mpishard.optimizers.rules.ranges import OwnedRange, UpdateContext
from mpishard.optimizers.rules.rule import Optimizer, check_epsilon, check_fraction
from mpishard.optimizers.rules.schedules import Schedule

__all__ = ["LAMB"]

Cell = tuple[str, int]  # name of a parameter, and which of its cells


class LAMB(Optimizer):
    """Adam's direction, scaled for each parameter to the length of the parameter itself.

    You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR
    2020, algorithm 2, with phi the identity and each named parameter a layer: with r Adam's step
    with bias correction and u = r + weight_decay * theta, ``theta -= learning_rate * |theta| / |u|
    * u``. The ratio is 1 where a norm is 0, on which the paper is silent: a parameter that is
    first 0 would stay so. The norms are over the whole parameter, of which each rank may own a
    part; they travel once per update, all together.

    Parameters
    ----------
    learning_rate : float or Schedule
        Step size, as a share of each parameter's norm.
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
        epsilon: float = 1e-6,
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

    def update(
        self,
        parameters: Array,
        gradients: Array,
        state: Mapping[str, Array],
        segments: Sequence[Segment],
        context: UpdateContext,
    ) -> None:
        self.update_all([OwnedRange(parameters, gradients, state, segments)], context)

    def update_all(self, ranges: Sequence[OwnedRange], context: UpdateContext) -> None:
        """Two passes: moments and norms; then, the norms being summed over ranks, the steps.

        The second pass computes each chunk's direction anew, which no memory is kept for.
        """
        places = _places(ranges, context)
        xp = array_namespace(ranges[0].parameters) if ranges else np
        squares = xp.zeros((len(places), 2))
        for owned, cell, span in self._parameters_in(ranges):
            blocks = [
                self._look(owned, part, span.weight_decay, context)
                for part in self._slices(owned, span)
            ]
            squares[places[cell]] += xp.concatenate(blocks, axis=1).sum(axis=1)
        squares = context.sum_over_owners(to_host(squares))
        for owned, cell, span in self._parameters_in(ranges):
            length, step_length = np.sqrt(squares[places[cell]]).tolist()
            ratio = length / step_length if length > 0 and step_length > 0 else 1.0
            rate = span.rate(context.step - 1, context.learning_rate)
            for part in self._slices(owned, span):
                p, g = owned.parameters[part], owned.gradients[part]
                state = {key: vector[part] for key, vector in owned.state.items()}
                self._update_chunk(p, g, state, rate * ratio, span.weight_decay, context)

    def _parameters_in(
        self, ranges: Sequence[OwnedRange]
    ) -> Iterator[tuple[OwnedRange, Cell, OptionRange]]:
        for owned in ranges:
            spans = self._option_ranges(owned.segments)
            for segment, span in zip(owned.segments, spans, strict=True):
                yield owned, (segment.name, segment.cell), span

    def _slices(self, owned: OwnedRange, span: OptionRange) -> Iterator[slice]:
        # Of whole blocks, so that the size of the cache does not show in the sums.
        blocks = max(1, chunk_length(owned.parameters) // 2 // SQUARES_BLOCK)
        starts = range(span.start, span.stop, blocks * SQUARES_BLOCK)
        return (slice(start, min(start + starts.step, span.stop)) for start in starts)

    def _find_ranges(self, segments: Sequence[Segment]) -> list[OptionRange]:
        return segment_options(segments, self.weight_decay, self.parameter_options)

    def _look(
        self, owned: OwnedRange, part: slice, weight_decay: float, context: UpdateContext
    ) -> Array:
        """Update a chunk's moments; its squares and those of its direction, in float64.

        Shape (2, blocks), as `mpishard.arrays.block_squares`.
        """
        p, g, scale = owned.parameters[part], owned.gradients[part], context.gradient_scale
        xp = array_namespace(p)
        m, v = owned.state["first_moment"][part], owned.state["second_moment"][part]
        if self.clip_value is not None:
            g, scale = self._clipped(g, scale), 1.0
        (spare,) = self._temporary(p, 1)
        m *= self.beta1
        xp.multiply(g, (1 - self.beta1) * scale, out=spare)
        m += spare
        v *= self.beta2
        xp.multiply(g, math.sqrt(1 - self.beta2) * scale, out=spare)
        spare *= spare
        v += spare
        (wide,) = self._temporary(p, 1, "squares", np.float64)
        direction = self._direction(p, m, v, weight_decay, context.step)
        squares = []
        for vector in (p, direction):
            wide[...] = vector
            squares.append(block_squares(wide))
        return xp.stack(squares)

    def _update_chunk(
        self,
        p: Array,
        g: Array,
        state: Mapping[str, Array],
        learning_rate: float,
        weight_decay: float,
        context: UpdateContext,
    ) -> None:
        m, v = state["first_moment"], state["second_moment"]
        direction = self._direction(p, m, v, weight_decay, context.step)
        direction *= learning_rate
        p -= direction

    def _direction(self, p: Array, m: Array, v: Array, weight_decay: float, step: int) -> Array:
        """``r + weight_decay * theta``, in scratch memory."""
        xp = array_namespace(p)
        direction, spare = self._temporary(p, 2, "direction")
        # As in Adam: m/c1 / (sqrt(v/c2) + eps) = sqrt(c2)/c1 m / (sqrt(v) + sqrt(c2) eps).
        root = math.sqrt(1 - self.beta2**step)
        xp.sqrt(v, out=spare)
        spare += root * self.epsilon
        xp.divide(m, spare, out=direction)
        direction *= root / (1 - self.beta1**step)
        if weight_decay:
            xp.multiply(p, weight_decay, out=spare)
            direction += spare
        return direction


def _places(ranges: Sequence[OwnedRange], context: UpdateContext) -> dict[Cell, int]:
    """Where in a vector that is summed over ranks each cell of the parameters has its place."""
    if not context.parameter_names:
        cells = dict.fromkeys((s.name, s.cell) for owned in ranges for s in owned.segments)
    else:
        seen: Counter[str] = Counter()
        cells = {}
        for name in context.parameter_names:
            cells[name, seen[name]] = None
            seen[name] += 1
    return {cell: place for place, cell in enumerate(cells)}
