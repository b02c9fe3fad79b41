"""Rules without ranks: updates of whole vectors and plain models, in this process.

`Optimizer` delegates its own `step` and `update_parameters` to `PlainTraining`, which holds the
rule's state for one flat vector.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mpishard.base import (
    Array,
    NonFiniteLossError,
    ShardingError,
    array_namespace,
    read_numbers,
    require_plain,
    to_host,
)
from mpishard.checkpoint import bytes_of, tensors_and_document
from mpishard.contracts import IShardedModel, UserModel
from mpishard.models import squared_norm
from mpishard.optimizers.rules import schedules
from mpishard.optimizers.rules.options import (
    AdamOptimizerOptions,
    OptimizationAlgorithmOptions,
    named_parameters,
)
from mpishard.optimizers.rules.pieces import PieceViews, Segment, UpdateContext
from mpishard.sharding import ParameterEntry

if TYPE_CHECKING:
    from mpishard.optimizers.rules.rule import Optimizer

_KEY = "mpishard_optimizer"
# One round is exact but for rounding, unless the update depends on the parameters: each round of a
# decay leaves about rate times decay of the error.
_REVERSE_ROUNDS = 100
_REVERSE_ROUNDINGS = 16  # of the largest element: error allowed after the last round


class PlainTraining:
    """A rule, its own state and step count, and the model that they belong to.

    The members are those of `Optimizer` that train; each is documented there.

    Parameters
    ----------
    rule : Optimizer
        The rule.

    Attributes
    ----------
    steps : int
        Updates made.
    gradients : Array or None
        The gradient of the last update, shape (n,).
    """

    def __init__(self, rule: Optimizer) -> None:
        self.rule = rule
        self.model: UserModel = None  # from `set_model`
        self.reset()

    def reset(self) -> None:
        """Forget state and step count, and the model that they belong to."""
        self._trained: object = None  # the model that the state belongs to
        self._state: dict[str, Array] = {}  # each vector is as long as the flat one
        self._segments: tuple[Segment, ...] = ()
        self.steps = 0
        self.gradients: Array | None = None
        self._before: dict[str, Array] | None = None

    def set_model(self, model: object) -> None:
        """Name the model that `optimize` trains if its data has none."""
        if model is None:
            raise TypeError("set_model needs a model, got None")
        self._trained_segments(named_parameters(model) or ())
        self.model = model

    def step(self, model: UserModel, x: Array, y: Array) -> float:
        """Make one update of a plain model on one batch."""
        refuse_sharded(self.rule, model)
        self._refuse_second_model(model)
        require_plain(x)
        require_plain(y)
        # A black box may compute only gradients; the result is NaN then.
        loss = None
        if hasattr(model, "compute_loss_and_gradients"):
            compute = model.compute_loss_and_gradients
            # Models of mpishard.nn draw dropout masks by the step; a user's may have no such
            # argument.
            takes_step = "step" in inspect.signature(compute).parameters
            counted = {"step": self.steps} if takes_step else {}
            loss, gradients = compute(x, y, **counted)
        else:
            gradients = model.compute_gradients(x, y)
        parameters = model.get_parameters()
        array_namespace(gradients)  # refuses values of no array library
        # Another precision is fine: frameworks compute in float32. A complex gradient is a mistake.
        if not np.can_cast(gradients.dtype, parameters.dtype, "same_kind"):
            raise TypeError(
                f"gradients of parameters of {parameters.dtype} cannot be {gradients.dtype}"
            )
        with np.errstate(over="ignore"):  # an overflow becomes infinite, which is refused below
            gradients = gradients.astype(parameters.dtype, copy=False)
        # Tested before the update, so that an error leaves model and state as they were.
        are_finite = bool(array_namespace(gradients).isfinite(gradients).all())
        if not are_finite or (loss is not None and not math.isfinite(loss)):
            raise NonFiniteLossError(
                f"step {self.steps + 1}: the loss is {loss}, and the gradient is "
                f"{'' if are_finite else 'not '}finite. The parameters are those of before the "
                "step. Lower the learning rate, or look at the data"
            )
        self._update(model, parameters, gradients)
        return math.nan if loss is None else float(loss)

    def apply_gradients(self, *given: Any) -> Any:
        """Make one update of a model with a given gradient, and return the model."""
        if len(given) not in (2, 3):
            raise TypeError(
                "apply_gradients takes (gradients, model) or (original_parameters, gradients, "
                f"model), got {len(given)} arguments"
            )
        *original, gradients, model = given
        if not hasattr(model, "set_parameters"):
            raise TypeError(f"apply_gradients needs a model last, got {type(model).__name__}")
        self._refuse_second_model(model)
        self._update(model, original[0] if original else model.get_parameters(), gradients)
        return model

    def update_parameters(
        self, parameters: Array | Sequence[Array], gradients: Any
    ) -> Array | list[Array]:
        """Return arrays after one update; the arguments stay as they are."""
        if isinstance(parameters, Sequence):
            arrays, given = list(parameters), list(gradients)
            if not arrays or [a.shape for a in arrays] != [g.shape for g in given]:
                raise ValueError(
                    f"parameters are {len(arrays)} arrays of shapes {[a.shape for a in arrays]}, "
                    f"gradients of {[g.shape for g in given]}; they must be the same, and not none"
                )
            # The arrays are updated as one vector, so that clipping takes the norm of all.
            ends = [0, *np.cumsum([array.size for array in arrays]).tolist()]
            entries = [
                ParameterEntry(str(index), array.shape, start)
                for index, (array, start) in enumerate(zip(arrays, ends, strict=False))
            ]
            vector = self._advance(_end_to_end(arrays), _end_to_end(given), entries)
            return [
                vector[start:stop].reshape(array.shape)
                for array, (start, stop) in zip(arrays, pairwise(ends), strict=True)
            ]
        named = named_parameters(self.model) if parameters.ndim == 1 else None
        # A vector of another length is not the model's, and has one name.
        is_models = named is not None and named[-1].stop == parameters.size
        return self._advance(parameters, gradients, named if is_models else None)

    def reverse_update(self, updated: Array, gradients: Array) -> Array:
        """Return the parameters before the last update; state and steps go back with them.

        It is a fixed-point iteration: the rule is applied to a guess, with the state from before
        the update, and the guess moved by the difference.
        """
        require_plain(gradients)
        if self._before is None or self.gradients is None:
            raise RuntimeError("there is no update to reverse; only the last one can be, once")
        vector, own = updated.reshape(-1), gradients.reshape(-1)
        # With another gradient the iteration would end too, at wrong parameters.
        if own.shape != self.gradients.shape or bool((own != self.gradients).any()):
            raise ValueError("reverse_update needs the gradients of the last update, got others")
        xp = array_namespace(updated)
        guess = vector.copy()
        allowed = _REVERSE_ROUNDINGS * float(np.finfo(updated.dtype).eps)
        for _ in range(_REVERSE_ROUNDS):
            # Parameters and state are copied in each round, because an update overwrites them.
            trial = guess.copy()
            state = {name: before.copy() for name, before in self._before.items()}
            self._update_range(trial, own, state, self.steps - 1)
            missing = vector - trial
            guess += missing
            if float(xp.abs(missing).max()) <= allowed * float(xp.abs(guess).max()):
                # One update only: the state from before it is used up.
                self._state, self._before = self._before, None
                self.steps -= 1
                return guess.reshape(updated.shape)
        raise RuntimeError(
            f"the last update cannot be reversed: {_REVERSE_ROUNDS} rounds did not find the "
            "parameters from before it; learning rate times weight decay may be too large"
        )

    def serialize(self) -> bytes:
        """Return settings, state, steps and segments in safetensors format."""
        document = {
            "rule": type(self.rule).__name__,
            "settings": {name: _encoded(name, v) for name, v in self.rule.get_options().items()},
            "steps": self.steps,
            "segments": [[s.name, s.start, s.stop] for s in self._segments],
        }
        state = {name: to_host(vector) for name, vector in self._state.items()}
        return bytes_of(state, {_KEY: json.dumps(document)})

    def deserialize(self, data: bytes) -> None:
        """Take settings, state and step count from bytes of `serialize`."""
        rule = self.rule
        state, document = tensors_and_document(data, _KEY, "an optimizer's ")
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
        self.reset()
        self._state, self._segments, self.steps = state, segments, steps

    def _refuse_second_model(self, model: object) -> None:
        if self._trained is not None and model is not self._trained:
            raise ShardingError(
                f"this {type(self.rule).__name__} holds the state of another model; use an "
                "optimizer per model, or reset() to forget the state"
            )

    def _update(self, model: UserModel, parameters: Array, gradients: Array) -> None:
        updated = self._advance(parameters, gradients, named_parameters(model))
        # After the update, which may refuse the arrays.
        self._trained = model
        model.set_parameters(updated)

    def _advance(
        self, parameters: Array, gradients: Array, entries: Sequence[ParameterEntry] | None
    ) -> Array:
        """Return a new array with the parameters after one update."""
        xp = array_namespace(parameters)
        require_plain(gradients)
        if parameters.dtype.kind != "f" or parameters.dtype != gradients.dtype:
            raise TypeError(
                "parameters and gradients must have one float dtype, got "
                f"{parameters.dtype} and {gradients.dtype}"
            )
        if parameters.shape != gradients.shape or parameters.size == 0:
            raise ValueError(
                f"parameters have shape {parameters.shape}, gradients {gradients.shape}; they must "
                "have the same, and elements"
            )
        if entries is None:
            entries = [ParameterEntry("parameters", parameters.shape, 0)]
        elif entries[-1].stop != parameters.size:
            raise ValueError(
                f"the model has {entries[-1].stop} parameters, and the gradient {gradients.size}"
            )
        segments = self._trained_segments(entries)
        updated = xp.array(parameters, copy=True, order="C")
        vector, own = updated.reshape(-1), xp.ascontiguousarray(gradients).reshape(-1)
        # Before anything is changed: a schedule may end, or fail.
        self.rule.checked_rate(self.steps)
        state = {name: xp.asarray(kept) for name, kept in self._state.items()}
        if not self._segments:
            state = {name: xp.zeros_like(vector) for name in self.rule.needed_state()}
        elif segments != self._segments or any(
            (kept.shape, kept.dtype) != (vector.shape, vector.dtype) for kept in state.values()
        ):
            raise ValueError(
                f"{type(self.rule).__name__} holds the state of other parameters than these "
                f"{vector.size} of {vector.dtype}; use an optimizer per model, or reset() to "
                "forget the state"
            )
        # `reverse_update` starts from the state before the update, and checks its gradient.
        before = {name: kept.copy() for name, kept in state.items()}
        self._state, self._segments = state, segments
        self._update_range(vector, own, state, self.steps)
        # A copy, because the caller may change its array, and `reverse_update` compares it.
        self._before, self.gradients = before, own.copy()
        self.steps += 1
        return updated

    def _trained_segments(self, entries: Sequence[ParameterEntry]) -> tuple[Segment, ...]:
        """Return the parameters that are trained, as ranges of the flat vector."""
        frozen = self.rule.checked_options.untrained(entries)
        return tuple(Segment(e.name, e.start, e.stop) for e in entries if e.name not in frozen)

    def _update_range(
        self, vector: Array, gradients: Array, state: dict[str, Array], step: int
    ) -> None:
        """Make update ``step``, from 0, of ``vector`` and ``state`` in place."""
        # Frozen parameters are left out, so that the vector falls into several ranges.
        pieces = [
            PieceViews(
                vector[run.start : run.stop],
                gradients[run.start : run.stop],
                {name: whole[run.start : run.stop] for name, whole in state.items()},
                tuple(Segment(s.name, s.start - run.start, s.stop - run.start) for s in segments),
            )
            for run, segments in _runs(self._segments)
        ]
        # Of the trained parameters alone, as in a sharded optimizer.
        squares = squared_norm([owned.gradients for owned in pieces])
        norm = math.sqrt(*read_numbers([squares]))
        rate = self.rule.rate_of_step(step)
        context = UpdateContext(step + 1, rate, self.rule.clip_factor(norm))
        self.rule.update_all(pieces, context)


def _end_to_end(arrays: Sequence[Array]) -> Array:
    for array in arrays:
        require_plain(array)
    return array_namespace(arrays[0]).concatenate([array.reshape(-1) for array in arrays])


def _runs(segments: Sequence[Segment]) -> list[tuple[slice, list[Segment]]]:
    """Return groups of segments that lie end to end, with the range that each fills."""
    runs: list[tuple[slice, list[Segment]]] = []
    for segment in segments:
        # A frozen parameter between two others ends the run.
        if runs and runs[-1][0].stop == segment.start:
            run, members = runs[-1]
            runs[-1] = slice(run.start, segment.stop), [*members, segment]
        else:
            runs.append((slice(segment.start, segment.stop), [segment]))
    return runs


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (*vars(schedules).values(), OptimizationAlgorithmOptions, AdamOptimizerOptions)
    if isinstance(kind, type) and is_dataclass(kind)
}


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


def refuse_sharded(rule: Optimizer, model: object) -> None:
    """Refuse a sharded model: the rule would update with each rank's own gradient."""
    if isinstance(model, IShardedModel):
        name = type(rule).__name__
        raise TypeError(
            f"an unwrapped {name} trains plain models, but the model is a "
            f"{type(model).__name__}: wrap the rule too, "
            f"mpishard.as_distributed({name}(...), backend, strategy)"
        )
