"""State and step count of a rule that trains on its own, and their bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, to_host
from mpishard.checkpoint.format.tensor_file import bytes_of, tensors_and_document
from mpishard.models.stores.gradient_store import squared_norm
from mpishard.optimizers.rules import schedules
from mpishard.optimizers.rules.algorithm_options import (
    AdamOptimizerOptions,
    OptimizationAlgorithmOptions,
)
from mpishard.optimizers.rules.ranges import OwnedRange, Segment, UpdateContext
from mpishard.optimizers.rules.rule import Optimizer

__all__ = ["OwnRun"]

_KEY = "mpishard_optimizer"
_REVERSE_ROUNDS = 100
_REVERSE_ROUNDINGS = 16  # of the largest element: error allowed after the last round


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
        """Update ``vector`` in place, within the segments; both vectors have shape (n,).

        Raises
        ------
        ValueError
            For another length, dtype or segments than at the last update; nothing has changed.
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
        # `reverse` starts from the state before the update, and checks its gradient.
        before = {name: state.copy() for name, state in self.state.items()}
        self._segments = segments
        self._update(rule, vector, gradients, self.state, self.steps)
        self._before, self.gradients = before, gradients.copy()
        self.steps += 1

    def reverse(self, rule: Optimizer, updated: Array, gradients: Array) -> Array:
        """Return the parameters before the last update, whose result is ``updated``.

        State and steps go back with them. It is a fixed-point iteration: the rule is applied to a
        guess, with the state from before the update, and the guess moved by the difference.

        Raises
        ------
        RuntimeError
            Without an update to reverse, or if the iteration does not converge.
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

    def serialize(self, rule: Optimizer) -> bytes:
        """Return settings, state, steps and segments in safetensors format.

        Raises
        ------
        ValueError
            For a setting that cannot be written.
        """
        document = {
            "rule": type(rule).__name__,
            "settings": {name: _encoded(name, v) for name, v in rule.get_options().items()},
            "steps": self.steps,
            "segments": [[s.name, s.start, s.stop] for s in self._segments],
        }
        state = {name: to_host(vector) for name, vector in self.state.items()}
        return bytes_of(state, {_KEY: json.dumps(document)})

    @classmethod
    def deserialize(cls, data: bytes, rule: str) -> tuple[OwnRun, dict[str, Any]]:
        """Return the state in bytes from `serialize`, and the settings.

        Raises
        ------
        TypeError
            For an argument that is no bytes.
        ValueError
            For other bytes, or those of another rule.
        """
        state, document = tensors_and_document(data, _KEY, "an optimizer's ")
        if document["rule"] != rule:
            raise ValueError(f"these bytes are of {document['rule']}, not of {rule}")
        segments = tuple(Segment(*values) for values in document["segments"])
        settings = {name: _decoded(value) for name, value in document["settings"].items()}
        return cls(state, document["steps"], _segments=segments), settings

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
        context = UpdateContext(step + 1, rule.rate_of_step(step), rule.clip_factor(norm))
        rule.update_all(ranges, context)


def _runs(segments: Sequence[Segment]) -> list[tuple[slice, list[Segment]]]:
    """Return groups of segments that lie end to end, with the range that each fills."""
    runs: list[tuple[slice, list[Segment]]] = []
    for segment in segments:
        if runs and runs[-1][0].stop == segment.start:
            run, members = runs[-1]
            runs[-1] = slice(run.start, segment.stop), [*members, segment]
        else:
            runs.append((slice(segment.start, segment.stop), [segment]))
    return runs


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        schedules.Constant,
        schedules.Cosine,
        schedules.Exponential,
        schedules.OneCycle,
        schedules.StepDecay,
        schedules.WarmUp,
        OptimizationAlgorithmOptions,
        AdamOptimizerOptions,
    )
}


def _encoded(name: str, value: Any) -> Any:
    """Return a setting, with schedules and options, as JSON can hold it.

    Raises
    ------
    ValueError
        Naming the setting, for a function that is no schedule of `mpishard.optimizers`.
    """
    if isinstance(value, Mapping):
        return {key: _encoded(f"{name}[{key!r}]", inner) for key, inner in value.items()}
    kind = type(value).__name__
    if _KINDS.get(kind) is type(value):
        inner = {
            f.name: _encoded(f"{name}.{f.name}", getattr(value, f.name)) for f in fields(value)
        }
        return [kind, inner]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{name} is {value!r}, which cannot be written; schedules that can are "
        + ", ".join(name for name in _KINDS if not name.endswith("Options"))
    )


def _decoded(value: Any) -> Any:
    """Return the setting that `_encoded` was given.

    Raises
    ------
    ValueError
        For a kind of schedule that this release does not have.
    """
    if isinstance(value, Mapping):
        return {key: _decoded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        kind, inner = value
        if kind not in _KINDS:
            raise ValueError(f"unknown kind of setting {kind!r}; known are {', '.join(_KINDS)}")
        return _KINDS[kind](**_decoded(inner))
    return value
