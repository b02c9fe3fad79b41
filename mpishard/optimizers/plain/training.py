"""A rule that trains on its own: updates of whole vectors and plain models, in this process."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace, require_plain
from mpishard.communication import InMemoryCommunicationBackend
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.optimizers.loop.data import OptimizationInputData
from mpishard.optimizers.loop.result import OptimizationResult
from mpishard.optimizers.plain.own_run import OwnRun
from mpishard.optimizers.rules.options import named_parameters
from mpishard.optimizers.rules.ranges import Segment
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.strategies import DDPOptimizer
from mpishard.sharding import ParameterEntry, ShardingConfiguration

__all__ = ["PlainTraining"]

_numbers = itertools.count()


class PlainTraining:
    """A rule, its own state and step count, and the model that they belong to.

    The members are those of `Optimizer` that train; each is documented there.

    Parameters
    ----------
    rule : Optimizer
        The rule.
    """

    def __init__(self, rule: Optimizer) -> None:
        self.rule = rule
        self.model: Any = None  # from `set_model`
        self.run = OwnRun()
        self._trained: Any = None  # the model that the state of `run` belongs to

    def reset(self) -> None:
        """Forget state and step count, and the model that they belong to."""
        self._trained = None
        self.run = OwnRun()

    def set_model(self, model: Any) -> None:
        """Name the model that `optimize` trains if its data has none."""
        if model is None:
            raise TypeError("set_model needs a model, got None")
        self._segments(named_parameters(model) or ())
        self.model = model

    def optimize(self, data: OptimizationInputData) -> OptimizationResult:
        """Train a plain model through the sharded engine, in a world of one rank."""
        if not isinstance(data, OptimizationInputData):
            raise TypeError(f"optimize needs an OptimizationInputData, got {type(data).__name__}")
        if data.model is None:
            data = replace(data, model=self.model)
        data.checked()  # before a world is made for it
        plain = data.model
        # Two such runs may go on in two threads, so each world has a name of its own.
        with InMemoryCommunicationBackend(0, 1, f"single-{next(_numbers)}") as backend:
            sharded = DDPOptimizer(self.rule, ShardingConfiguration(backend))
            model = DDPOptimizer.model_class(plain, sharded.sharding_configuration)
            try:
                result = sharded.optimize(replace(data, model=model))
            finally:
                model.release()
        result.best_solution = plain
        return result

    def step(self, model: Any, x: Array, y: Array) -> float:
        """Make one update of a plain model on one batch."""
        self._refuse_second_model(model)
        require_plain(x)
        require_plain(y)
        loss = None
        if hasattr(model, "compute_loss_and_gradients"):
            compute = model.compute_loss_and_gradients
            # Models of mpishard.nn draw dropout masks by the step; a user's function may not.
            takes_step = "step" in inspect.signature(compute).parameters
            counted = {"step": self.run.steps} if takes_step else {}
            loss, gradients = compute(x, y, **counted)
        else:
            gradients = model.compute_gradients(x, y)
        parameters = model.get_parameters()
        array_namespace(gradients)  # refuses values of no array library
        if not np.can_cast(gradients.dtype, parameters.dtype, "same_kind"):
            raise TypeError(
                f"gradients of parameters of {parameters.dtype} cannot be {gradients.dtype}"
            )
        with np.errstate(over="ignore"):  # it becomes infinite, which is refused
            gradients = gradients.astype(parameters.dtype, copy=False)
        are_finite = bool(array_namespace(gradients).isfinite(gradients).all())
        if not are_finite or (loss is not None and not math.isfinite(loss)):
            raise NonFiniteLossError(
                f"step {self.run.steps + 1}: the loss is {loss}, and the gradient is "
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

    def update_parameters(self, parameters: Any, gradients: Any) -> Any:
        """Return arrays after one update; the arguments stay as they are."""
        if isinstance(parameters, Sequence):
            arrays, given = list(parameters), list(gradients)
            if not arrays or [a.shape for a in arrays] != [g.shape for g in given]:
                raise ValueError(
                    f"parameters are {len(arrays)} arrays of shapes {[a.shape for a in arrays]}, "
                    f"gradients of {[g.shape for g in given]}; they must be the same, and not none"
                )
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
        is_models = named is not None and named[-1].stop == parameters.size
        return self._advance(parameters, gradients, named if is_models else None)

    def reverse_update(self, updated: Array, gradients: Array) -> Array:
        """Return the parameters before the last update."""
        require_plain(gradients)
        vectors = updated.reshape(-1), gradients.reshape(-1)
        return self.run.reverse(self.rule, *vectors).reshape(updated.shape)

    def deserialize(self, data: bytes) -> None:
        """Take settings, state and step count from bytes of `OwnRun.serialize`."""
        rule = self.rule
        run, settings = OwnRun.deserialize(data, type(rule).__name__)
        if settings.keys() != rule.get_options().keys():
            raise ValueError(
                f"these bytes have the settings {', '.join(settings)}; {type(rule).__name__} has "
                + ", ".join(rule.get_options())
            )
        held = dict(vars(rule))  # a refused setting must leave all others as they were
        try:
            for name, value in settings.items():
                setattr(rule, name, value)
        except (TypeError, ValueError):
            vars(rule).update(held)
            raise
        self._trained = None
        self.run = run

    def _refuse_second_model(self, model: Any) -> None:
        if self._trained is not None and model is not self._trained:
            raise ShardingError(
                f"this {type(self.rule).__name__} holds the state of another model; use an "
                "optimizer per model, or reset() to forget the state"
            )

    def _update(self, model: Any, parameters: Array, gradients: Array) -> None:
        updated = self._advance(parameters, gradients, named_parameters(model))
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
        segments = self._segments(entries)
        updated = xp.array(parameters, copy=True, order="C")
        self.run.advance(
            self.rule, updated.reshape(-1), xp.ascontiguousarray(gradients).reshape(-1), segments
        )
        return updated

    def _segments(self, entries: Sequence[ParameterEntry]) -> tuple[Segment, ...]:
        """Return the parameters that are trained, as ranges of the flat vector."""
        options = self.rule.checked_options
        if entries:
            options.check_patterns([entry.name for entry in entries])
        trainable = [entry for entry in entries if entry.trainable]
        frozen = options.frozen_among([entry.name for entry in trainable])
        return tuple(
            Segment(entry.name, entry.start, entry.stop)
            for entry in trainable
            if entry.name not in frozen
        )


def _end_to_end(arrays: Sequence[Array]) -> Array:
    for array in arrays:
        require_plain(array)
    return array_namespace(arrays[0]).concatenate([array.reshape(-1) for array in arrays])
