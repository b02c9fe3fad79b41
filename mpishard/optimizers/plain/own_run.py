"""State and step count of a rule that nobody else runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.arrays import Array, array_namespace, to_host
from mpishard.checkpoint.format.tensor_bytes import bytes_of, tensors_and_document
from mpishard.models.stores.gradient_store import squared_norm
from mpishard.optimizers.rules.ranges import OwnedRange, Segment, UpdateContext

if TYPE_CHECKING:
    from mpishard.optimizers.rules.rule import Optimizer

__all__ = ["OwnRun"]

_KEY = "mpishard_optimizer"
_REVERSE_ROUNDS = 100
_REVERSE_ROUNDINGS = 16  # of the largest element: what the last round may still be off


@dataclass
class OwnRun:
    """Updates of one flat vector, whole, in this process.

    Attributes
    ----------
    state : dict of str to Array
        The rule's state, each vector as long as the flat one.
    steps : int
        Updates made.
    gradients : Array or None
        The gradient of the last update, shape (n,).
    """

    state: dict[str, Array] = field(default_factory=dict)
    steps: int = 0
    gradients: Array | None = None
    _before: dict[str, Array] | None = None
    _segments: tuple[Segment, ...] = ()

    def advance(
        self, rule: Optimizer, vector: Array, gradients: Array, segments: tuple[Segment, ...]
    ) -> None:
        """Update ``vector`` in place where the segments are; both vectors have shape (n,).

        Raises
        ------
        ValueError
            For another length, dtype or division than at the last update; nothing has changed.
        """
        rule.checked_rate(self.steps)
        xp = array_namespace(vector)
        self.state = {name: xp.asarray(state) for name, state in self.state.items()}
        if not self._segments:
            self.state = {name: xp.zeros_like(vector) for name in rule.needed_state()}
        elif segments != self._segments or any(
            (state.shape, state.dtype) != (vector.shape, vector.dtype)
            for state in self.state.values()
        ):
            raise ValueError(
                f"{type(rule).__name__} holds the state of other parameters than these "
                f"{vector.size} of {vector.dtype}; use an optimizer per model, or reset() to "
                "forget the state"
            )
        before = {name: state.copy() for name, state in self.state.items()}
        self._segments = segments
        self._update(rule, vector, gradients, self.state, self.steps)
        self._before, self.gradients = before, gradients.copy()
        self.steps += 1

    def reverse(self, rule: Optimizer, updated: Array, gradients: Array) -> Array:
        """What the last update was given, where it gave ``updated``; state and steps go back.

        By fixed-point iteration: the rule is applied to a guess, with the state from before the
        update, and the guess moved by what is then missing.

        Raises
        ------
        RuntimeError
            Without an update to reverse, or where the iteration does not converge.
        ValueError
            For other gradients than those of the last update.
        """
        if self._before is None or self.gradients is None:
            raise RuntimeError("there is no update to reverse; only the last one can be, once")
        if not np.array_equal(gradients.shape, self.gradients.shape) or bool(
            (gradients != self.gradients).any()
        ):
            raise ValueError("reverse_update needs the gradients of the last update, got others")
        xp = array_namespace(updated)
        guess = updated.copy()
        allowed = _REVERSE_ROUNDINGS * float(np.finfo(updated.dtype).eps)
        for _ in range(_REVERSE_ROUNDS):
            trial = guess.copy()
            state = {name: vector.copy() for name, vector in self._before.items()}
            self._update(rule, trial, gradients, state, self.steps - 1)
            missing = updated - trial
            guess += missing
            if float(xp.abs(missing).max()) <= allowed * float(xp.abs(guess).max()):
                self.state, self._before = self._before, None
                self.steps -= 1
                return guess
        raise RuntimeError(
            f"the last update cannot be reversed: {_REVERSE_ROUNDS} rounds found no parameters "
            "that it leads from to these; learning rate times weight decay may be too large"
        )

    def serialize(self, description: Mapping[str, Any]) -> bytes:
        """State, steps and division in safetensors format, and a description beside them."""
        layout = [[s.name, s.start, s.stop] for s in self._segments]
        text = json.dumps({**description, "steps": self.steps, "segments": layout})
        state = {name: to_host(vector) for name, vector in self.state.items()}
        return bytes_of(state, {_KEY: text})

    @classmethod
    def deserialize(cls, data: bytes) -> tuple[OwnRun, dict[str, Any]]:
        """What `serialize` wrote, and the description.

        Raises
        ------
        TypeError
            For what are no bytes.
        ValueError
            For bytes that are something else.
        """
        state, description = tensors_and_document(data, _KEY, "an optimizer's ")
        segments = tuple(Segment(*values) for values in description.pop("segments"))
        return cls(state, description.pop("steps"), _segments=segments), description

    def _update(
        self,
        rule: Optimizer,
        vector: Array,
        gradients: Array,
        state: dict[str, Array],
        step: int,
    ) -> None:
        """Make update ``step``, from 0, of ``vector`` and ``state`` in place."""
        ranges = [
            OwnedRange(
                vector[run.start : run.stop],
                gradients[run.start : run.stop],
                {name: whole[run.start : run.stop] for name, whole in state.items()},
                tuple(Segment(s.name, s.start - run.start, s.stop - run.start) for s in segments),
            )
            for run, segments in _runs(self._segments)
        ]
        norm = math.sqrt(squared_norm([owned.gradients for owned in ranges]))
        context = UpdateContext(step + 1, rule.rate(step), rule.clip_factor(norm))
        rule.update_all(ranges, context)


def _runs(segments: Sequence[Segment]) -> list[tuple[slice, list[Segment]]]:
    """Segments that lie end to end, with the range that they fill."""
    runs: list[tuple[slice, list[Segment]]] = []
    for segment in segments:
        if runs and runs[-1][0].stop == segment.start:
            run, members = runs[-1]
            runs[-1] = slice(run.start, segment.stop), [*members, segment]
        else:
            runs.append((slice(segment.start, segment.stop), [segment]))
    return runs
