"""An optimizer on its own: updates of whole vectors and plain models, in this process."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from mpishard.arguments import check_path
from mpishard.arrays import Array, array_namespace, require_plain
from mpishard.checkpoint.format.disk import replace_file
from mpishard.contracts import ICheckpointableModel, IGradientBasedOptimizer, PathLike
from mpishard.errors import NonFiniteLossError, ShardingError
from mpishard.optimizers.plain.own_run import OwnRun
from mpishard.optimizers.rules.options import named_parameters
from mpishard.optimizers.rules.ranges import Segment
from mpishard.optimizers.rules.settings_bytes import decoded, encoded
from mpishard.sharding import ParameterEntry

if TYPE_CHECKING:
    from mpishard.optimizers.rules.rule import Optimizer

__all__ = ["PlainOptimizer"]


class PlainOptimizer(ICheckpointableModel, IGradientBasedOptimizer):
    """What a rule does where nobody else runs it: it keeps state and step count itself.

    They are made at the first update and kept until `reset`; until then one model is trained. A
    sharded optimizer has its own beside them, and `optimize` one of those. One instance serves one
    thread.
    """

    def __init__(self) -> None:
        self._model: Any = None
        self._trained: Any = None
        self._run = OwnRun()

    @property
    def _rule(self) -> Optimizer:
        return cast("Optimizer", self)  # the one class that derives from this one

    def reset(self) -> None:
        """Forget the own state and step count, and which model they are of."""
        self._trained = None
        self._run = OwnRun()

    def set_model(self, model: Any) -> None:
        """Name the model that `optimize` trains where its data has none.

        `update_parameters` takes a vector of its length for its parameters, with their names.

        Raises
        ------
        TypeError
            For None.
        ValueError
            For a pattern of ``parameter_options`` that matches none of its parameters.
        """
        if model is None:
            raise TypeError("set_model needs a model, got None")
        self._segments(named_parameters(model) or ())
        self._model = model

    @property
    def model(self) -> Any:
        """What `set_model` was given; None before."""
        return self._model

    @property
    def last_computed_gradients(self) -> Array | None:
        """The gradient of the last own update, shape (n,), before clipping; None before one."""
        return self._run.gradients

    def get_current_learning_rate(self) -> float:
        """The rate of the next own update; a sharded optimizer counts its own."""
        return self._rule.rate(self._run.steps)

    # ----------------------------------------------------------------------------------- updates

    def update_parameters(self, parameters: Any, gradients: Any) -> Any:
        """One update with the own state; the arguments stay as they are.

        Parameters
        ----------
        parameters : Array or sequence of Array
            Of any shapes. In ``parameter_options`` a single array is called "parameters", those
            of a sequence, such as one per layer, "0", "1", ...; a vector as long as `model` has
            its names.
        gradients : Array or sequence of Array
            The mean gradient, of the same shapes and dtype.

        Returns
        -------
        Array or list of Array
            The updated parameters.

        Raises
        ------
        TypeError
            For other dtypes than one of float16, float32 and float64.
        ValueError
            For shapes that differ from each other's or the last own update's, or a pattern of
            ``parameter_options`` that matches nothing.
        """
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
        named = named_parameters(self._model) if parameters.ndim == 1 else None
        is_models = named is not None and named[-1].stop == parameters.size
        return self._advance(parameters, gradients, named if is_models else None)

    @overload
    def apply_gradients(self, gradients: Array, model: Any, /) -> Any: ...
    @overload
    def apply_gradients(
        self, original_parameters: Array, gradients: Array, model: Any, /
    ) -> Any: ...
    def apply_gradients(self, *given: Any) -> Any:
        """One update of a model with the own state; gives the model.

        ``apply_gradients(gradients, model)`` begins at the model's parameters,
        ``apply_gradients(original_parameters, gradients, model)`` at those from before a step
        that the model has made meanwhile.

        Parameters
        ----------
        original_parameters, gradients : Array, shape (parameter_count,)
            Where to begin, and the mean gradient.
        model : object
            With ``get_parameters`` and ``set_parameters``. Of a sharded model they are
            collective, and every rank keeps the whole state; wrap the optimizer instead.

        Raises
        ------
        TypeError, ValueError
            As `update_parameters`; the model is as it was.
        ShardingError
            For another model than that of the own state.
        """
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

    def _update(self, model: Any, parameters: Array, gradients: Array) -> None:
        updated = self._advance(parameters, gradients, named_parameters(model))
        self._trained = model
        model.set_parameters(updated)

    def _refuse_second_model(self, model: Any) -> None:
        if self._trained is not None and model is not self._trained:
            raise ShardingError(
                f"this {type(self).__name__} holds the state of another model; use an optimizer "
                "per model, or reset() to forget the state"
            )

    def step(self, model: Any, x: Array, y: Array) -> float:
        """One update of a plain model on one batch, as a sharded optimizer's ``step``.

        Parameters
        ----------
        model : object
            With ``get_parameters``, ``set_parameters``, and ``compute_loss_and_gradients`` or
            ``compute_gradients``.
            Gradients of another dtype than the parameters' are converted. A
            ``compute_loss_and_gradients`` that takes ``step``, as those of `mpishard.nn`, is told
            the number of the update, from 0, which random layers go by.
        x, y : Array
            Inputs and targets, shape (samples, ...).

        Returns
        -------
        float
            The mean loss before the update; NaN where the model tells only gradients.

        Raises
        ------
        NonFiniteLossError
            Where the loss or the gradient is not finite; nothing has changed then.
        ShardingError
            For another model than that of the own state.
        """
        self._refuse_second_model(model)
        require_plain(x)
        require_plain(y)
        loss = None
        if hasattr(model, "compute_loss_and_gradients"):
            compute = model.compute_loss_and_gradients
            takes_step = "step" in inspect.signature(compute).parameters
            counted = {"step": self._run.steps} if takes_step else {}
            loss, gradients = compute(x, y, **counted)
        else:
            gradients = model.compute_gradients(x, y)
        parameters = model.get_parameters()
        gradients = _converted(gradients, parameters.dtype)
        are_finite = bool(array_namespace(gradients).isfinite(gradients).all())
        if not are_finite or (loss is not None and not math.isfinite(loss)):
            raise NonFiniteLossError(
                f"step {self._run.steps + 1}: the loss is {loss}, and the gradient is "
                f"{'' if are_finite else 'not '}finite. The parameters are those of before the "
                "step. Lower the learning rate, or look at the data"
            )
        self._update(model, parameters, gradients)
        return math.nan if loss is None else float(loss)

    def reverse_update(self, updated: Array, gradients: Array) -> Array:
        """The parameters before the last own update; state and step count go back with them.

        Parameters
        ----------
        updated, gradients : Array
            What that update gave and was given, single arrays of one shape.

        Returns
        -------
        Array
            What it was given as parameters, but for rounding.

        Raises
        ------
        RuntimeError
            Without an update to reverse, or where it cannot be: the updated parameters must
            still tell where they come from, so learning rate times weight decay is below 1.
        ValueError
            For other gradients than that update's.
        """
        require_plain(gradients)
        vectors = updated.reshape(-1), gradients.reshape(-1)
        return self._run.reverse(self._rule, *vectors).reshape(updated.shape)

    # ------------------------------------------------------------------------------------- bytes

    def serialize(self) -> bytes:
        """Settings, own state and step count, in safetensors format.

        Raises
        ------
        ValueError
            Where a learning rate is a function that is no schedule of `mpishard.optimizers`.
        """
        settings = {name: encoded(name, value) for name, value in self.get_options().items()}
        return self._run.serialize({"rule": type(self).__name__, "settings": settings})

    def deserialize(self, data: bytes) -> None:
        """Take settings, own state and step count from what `serialize` gave.

        Raises
        ------
        ValueError
            For bytes that are something else, or of another rule; nothing has changed then.
        """
        run, description = OwnRun.deserialize(data)
        if description["rule"] != type(self).__name__:
            raise ValueError(
                f"these bytes are of {description['rule']}, not of {type(self).__name__}"
            )
        settings = {name: decoded(value) for name, value in description["settings"].items()}
        if settings.keys() != self.get_options().keys():
            raise ValueError(
                f"these bytes have the settings {', '.join(settings)}; {type(self).__name__} has "
                + ", ".join(self.get_options())
            )
        held = dict(vars(self))
        try:
            for name, value in settings.items():
                setattr(self, name, value)
        except (TypeError, ValueError):
            vars(self).update(held)
            raise
        self._trained = None
        self._run = run

    def save_model(self, path: PathLike) -> None:
        """Write what `serialize` gives to a file; a sharded optimizer's is a directory.

        Raises
        ------
        TypeError, ValueError
            For what is no path, or a schedule that cannot be written.
        OSError
            Where it cannot be written; what was there is as it was.
        """
        check_path("path", path)
        replace_file(Path(path), self.serialize())

    def load_model(self, path: PathLike) -> None:
        """Take settings, own state and step count from the file that `save_model` wrote.

        Raises
        ------
        TypeError, ValueError
            For what is no path, or a file that holds something else; nothing has changed then.
        FileNotFoundError
            Where nothing is there.
        """
        check_path("path", path)
        self.deserialize(Path(path).read_bytes())

    def _advance(
        self, parameters: Array, gradients: Array, entries: Sequence[ParameterEntry] | None
    ) -> Array:
        """A new array with the parameters after one update."""
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
        self._run.advance(
            self._rule, updated.reshape(-1), xp.ascontiguousarray(gradients).reshape(-1), segments
        )
        return updated

    def _segments(self, entries: Sequence[ParameterEntry]) -> tuple[Segment, ...]:
        """The parameters that are trained, as ranges of the flat vector."""
        if entries:
            self._rule.checked_options.check_patterns([entry.name for entry in entries])
        trainable = [entry for entry in entries if entry.trainable]
        frozen = self._rule.checked_options.frozen_among([entry.name for entry in trainable])
        return tuple(
            Segment(entry.name, entry.start, entry.stop)
            for entry in trainable
            if entry.name not in frozen
        )


def _end_to_end(arrays: Sequence[Array]) -> Array:
    for array in arrays:
        require_plain(array)
    return array_namespace(arrays[0]).concatenate([array.reshape(-1) for array in arrays])


def _converted(gradients: Array, dtype: np.dtype[Any]) -> Array:
    """A model's gradient in the dtype of its parameters."""
    array_namespace(gradients)
    if not np.can_cast(gradients.dtype, dtype, "same_kind"):
        raise TypeError(f"gradients of parameters of {dtype} cannot be {gradients.dtype}")
    with np.errstate(over="ignore"):  # it becomes infinite, which is refused
        return gradients.astype(dtype, copy=False)
