"""Rules without ranks: updates of whole vectors and plain models, in this process.

`Optimizer` delegates its own `step` and `update_parameters` to `PlainTraining`, which holds the
rule's state for one flat vector.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
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
)
from mpishard.contracts import UserModel
from mpishard.models import ShardedModelBase, squared_norm
from mpishard.optimizers.rules.options import named_parameters
from mpishard.optimizers.rules.pieces import PieceViews, Segment, UpdateContext
from mpishard.sharding import ParameterEntry

if TYPE_CHECKING:
    from mpishard.optimizers.rules.rule import Optimizer


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
        self.state: dict[str, Array] = {}  # each vector is as long as the flat one
        self.segments: tuple[Segment, ...] = ()
        self.steps = 0
        self.gradients: Array | None = None
        self.before: dict[str, Array] | None = None

    def set_model(self, model: object) -> None:
        """Name the model that `optimize` trains if its data has none."""
        if model is None:
            raise TypeError("set_model needs a model, got None")
        self._trained_segments(named_parameters(model) or ())
        self.model = model

    def step(self, model: UserModel, x: Array, y: Array) -> float:
        """Make one update of a plain model on one batch."""
        refuse_sharded(self.rule, model)
        self.refuse_second_model(model)
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
                "step. Look for NaN and infinity in the data, as by np.isfinite(x).all(); if there "
                "is none, lower the learning rate"
            )
        self.update_model(model, parameters, gradients)
        return math.nan if loss is None else float(loss)

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

    def refuse_second_model(self, model: object) -> None:
        """Refuse another model than that of the state."""
        if self._trained is not None and model is not self._trained:
            raise ShardingError(
                f"this {type(self.rule).__name__} holds the state of another model; use an "
                "optimizer per model, or reset() to forget the state"
            )

    def update_model(self, model: UserModel, parameters: Array, gradients: Array) -> None:
        """Make one update of a model, which begins at ``parameters``."""
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
        state = {name: xp.asarray(kept) for name, kept in self.state.items()}
        if not self.segments:
            state = {name: xp.zeros_like(vector) for name in self.rule.needed_state()}
        elif segments != self.segments or any(
            (kept.shape, kept.dtype) != (vector.shape, vector.dtype) for kept in state.values()
        ):
            raise ValueError(
                f"{type(self.rule).__name__} holds the state of other parameters than these "
                f"{vector.size} of {vector.dtype}; use an optimizer per model, or reset() to "
                "forget the state"
            )
        # `reverse_update` starts from the state before the update, and checks its gradient.
        before = {name: kept.copy() for name, kept in state.items()}
        self.state, self.segments = state, segments
        self.update_range(vector, own, state, self.steps)
        # A copy, because the caller may change its array, and `reverse_update` compares it.
        self.before, self.gradients = before, own.copy()
        self.steps += 1
        return updated

    def _trained_segments(self, entries: Sequence[ParameterEntry]) -> tuple[Segment, ...]:
        """Return the parameters that are trained, as ranges of the flat vector."""
        frozen = self.rule.checked_options.untrained(entries)
        return tuple(Segment(e.name, e.start, e.stop) for e in entries if e.name not in frozen)

    def update_range(
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
            for run, segments in _adjacent(self.segments)
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


def _adjacent(segments: Sequence[Segment]) -> list[tuple[slice, list[Segment]]]:
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


def refuse_sharded(rule: Optimizer, model: object) -> None:
    """Refuse a sharded model: the rule would update with each rank's own gradient."""
    if isinstance(model, ShardedModelBase):
        name = type(rule).__name__
        raise TypeError(
            f"an unwrapped {name} trains plain models, but the model is a "
            f"{type(model).__name__}: wrap the rule too, "
            f"mpishard.as_distributed({name}(...), backend, strategy)"
        )
