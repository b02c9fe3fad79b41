"""Rules on one process, as documented: given gradients, reversal of an update, and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from mpishard.base import Array, array_namespace, require_plain, to_host
from mpishard.checkpoint import bytes_of, tensors_and_document
from mpishard.mirror.optimizer_options import AdamOptimizerOptions, OptimizationAlgorithmOptions
from mpishard.optimizers import (
    Constant,
    Cosine,
    Exponential,
    OneCycle,
    PlainTraining,
    Segment,
    StepDecay,
    WarmUp,
)

_KEY = "mpishard_optimizer"
# One round is exact but for rounding, unless the update depends on the parameters: each round of a
# decay leaves about rate times decay of the error.
_REVERSE_ROUNDS = 100
_REVERSE_ROUNDINGS = 16  # of the largest element: error allowed after the last round


def apply_gradients(own: PlainTraining, *given: Any) -> Any:
    """Make one update of a model with a given gradient, and return the model."""
    if len(given) not in (2, 3):
        raise TypeError(
            "apply_gradients takes (gradients, model) or (original_parameters, gradients, "
            f"model), got {len(given)} arguments"
        )
    *original, gradients, model = given
    if not hasattr(model, "set_parameters"):
        raise TypeError(f"apply_gradients needs a model last, got {type(model).__name__}")
    own.refuse_second_model(model)
    own.update_model(model, original[0] if original else model.get_parameters(), gradients)
    return model


def reverse_update(own: PlainTraining, updated: Array, gradients: Array) -> Array:
    """Return the parameters before the last update; state and steps go back with them.

    It is a fixed-point iteration: the rule is applied to a guess, with the state from before
    the update, and the guess moved by the difference.
    """
    require_plain(gradients)
    if own.before is None or own.gradients is None:
        raise RuntimeError("there is no update to reverse; only the last one can be, once")
    vector, given = updated.reshape(-1), gradients.reshape(-1)
    # With another gradient the iteration would end too, at wrong parameters.
    if given.shape != own.gradients.shape or bool((given != own.gradients).any()):
        raise ValueError("reverse_update needs the gradients of the last update, got others")
    xp = array_namespace(updated)
    guess = vector.copy()
    allowed = _REVERSE_ROUNDINGS * float(np.finfo(updated.dtype).eps)
    for _ in range(_REVERSE_ROUNDS):
        # Parameters and state are copied in each round, because an update overwrites them.
        trial = guess.copy()
        state = {name: before.copy() for name, before in own.before.items()}
        own.update_range(trial, given, state, own.steps - 1)
        missing = vector - trial
        guess += missing
        if float(xp.abs(missing).max()) <= allowed * float(xp.abs(guess).max()):
            # One update only: the state from before it is used up.
            own.state, own.before = own.before, None
            own.steps -= 1
            return guess.reshape(updated.shape)
    raise RuntimeError(
        f"the last update cannot be reversed: {_REVERSE_ROUNDS} rounds did not find the "
        "parameters from before it; learning rate times weight decay may be too large"
    )


def serialize(own: PlainTraining) -> bytes:
    """Return settings, state, steps and segments in safetensors format."""
    document = {
        "rule": type(own.rule).__name__,
        "settings": {name: _encoded(name, v) for name, v in own.rule.get_options().items()},
        "steps": own.steps,
        "segments": [[s.name, s.start, s.stop] for s in own.segments],
    }
    state = {name: to_host(vector) for name, vector in own.state.items()}
    return bytes_of(state, {_KEY: json.dumps(document)})


def deserialize(own: PlainTraining, data: bytes) -> None:
    """Take settings, state and step count from bytes of `serialize`."""
    rule = own.rule
    state, document = tensors_and_document(data, _KEY)
    if document["rule"] != type(rule).__name__:
        raise ValueError(f"these bytes are of {document['rule']}, not of {type(rule).__name__}")
    steps, segments = document["steps"], tuple(Segment(*s) for s in document["segments"])
    settings = {name: _decoded(value) for name, value in document["settings"].items()}
    # Another release may have other settings: nothing is guessed for those.
    if settings.keys() != rule.get_options().keys():
        raise ValueError(
            f"these bytes have the settings {', '.join(settings)}; {type(rule).__name__} has "
            + ", ".join(rule.get_options())
        )
    before = dict(vars(rule))  # a refused setting must leave all others as they were
    try:
        for name, value in settings.items():
            setattr(rule, name, value)
    except (TypeError, ValueError):
        vars(rule).update(before)
        raise
    own.reset()
    own.state, own.segments, own.steps = state, segments, steps


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Constant, StepDecay, Exponential, Cosine, WarmUp, OneCycle, OptimizationAlgorithmOptions,
        AdamOptimizerOptions,
    )
}  # fmt: skip


def _encoded(name: str, value: Any) -> object:
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
        # A list marks a dataclass: no setting is a list.
        return [kind, inner]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(
        f"{name} is {value!r}, which cannot be written; schedules that can are "
        + ", ".join(name for name in _KINDS if not name.endswith("Options"))
    )


def _decoded(value: object) -> Any:
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
