"""A black box: one unit, one call."""

from __future__ import annotations

from collections import Counter
from typing import Any

from mpishard.base import (
    Array,
    Data,
    Device,
    MissingMemberError,
    adapter_hint,
    array_namespace,
    as_array,
    as_loss,
    beside,
    copy_into,
    name_of,
    require_plain,
)
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ILossFunction, Saved, UserModel
from mpishard.models.programs.program import Batch, Replica, WholeProgram
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.vector import ModelVector
from mpishard.sharding import ParameterEntry, Placement, build_units


class OpaqueProgram(WholeProgram):
    """A model known by its flat vector and its gradient alone: one unit, one call.

    The user's object keeps its full vector. Its gradient is that of a mean over samples, and is
    scaled by their number, so that uneven batches average as they should. If the object has the
    attribute ``loss_is_sum``, and it is True, the gradient is that of a sum.

    Parameters
    ----------
    model : object
        Has ``get_parameters``, ``set_parameters``, and ``compute_gradients`` or
        ``compute_loss_and_gradients``; may have a ``parameter_table``, which names parts of the
        vector.
    world : CommunicationBackend
        All ranks.
    """

    def __init__(self, model: UserModel, world: CommunicationBackend) -> None:
        for member in ("get_parameters", "set_parameters"):
            _member(model, member)
        if not hasattr(model, "compute_loss_and_gradients"):
            _member(model, "compute_gradients")
        vector = as_array(model.get_parameters())
        if getattr(vector, "ndim", None) != 1 or vector.dtype.kind != "f" or vector.size == 0:
            raise ValueError(
                f"{type(model).__name__}.get_parameters() must return a 1-D floating vector with "
                f"at least one element, got {getattr(vector, 'dtype', type(vector).__name__)} of "
                f"shape {getattr(vector, 'shape', '?')}"
            )
        self._use(model)
        self.dtype = vector.dtype
        self.device = Device.of(vector)
        # One unit: a single call returns the whole gradient.
        self.units = build_units([int(vector.size)], 1)
        self.kept = frozenset({0})
        table = getattr(model, "parameter_table", None)
        whole = (ParameterEntry("parameters", (int(vector.size),), 0),)
        self.entries = whole if table is None else tuple(table.entries)
        names = Counter(entry.name for entry in self.entries)
        # Checkpoints know parameters by their names.
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ValueError(f"{type(model).__name__} has two parameters named {twice[0]!r}")
        if sum(entry.size for entry in self.entries) != vector.size:
            raise ValueError(
                f"the parameter_table of {type(model).__name__} has "
                f"{sum(entry.size for entry in self.entries)} elements and get_parameters() "
                f"{vector.size}"
            )
        self.replica = Replica(world)
        self.vector = ModelVector(Placement.whole(self.entries))
        self.freeze(frozenset(entry.name for entry in self.entries if not entry.trainable))

    def check(self, x: Data) -> Data:
        require_plain(x)
        if not hasattr(x, "__len__"):
            raise TypeError(f"a batch needs a length, got {type(x).__name__}")
        return x

    @property
    def has_own_loss(self) -> bool:
        return hasattr(self._model, "compute_loss_and_gradients")

    def sums(self, loss: ILossFunction | None) -> bool:
        if loss is None or loss is self.default_loss:
            return bool(getattr(self._model, "loss_is_sum", False))
        return super().sums(loss)

    def fill(self, start: int, out: Array) -> None:
        copy_into(out, as_array(self._model.get_parameters())[start : start + int(out.size)])

    def take_over(self, parameters: ParameterStore, holder: str) -> str | None:
        self.changed(parameters)
        return (
            "because it is a black box. A model that implements ILayeredModel (mpishard.nn) has "
            "its parameters sharded too"
        )

    def changed(self, parameters: ParameterStore) -> None:
        (unit,) = self.units
        # A copy, because the model may keep or change the array, and the store reuses its memory.
        self._model.set_parameters(parameters.unshard(unit).copy())
        parameters.reshard(unit)

    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        prediction: Array = _member(self._model, "predict")(x)
        return prediction

    def forward(self, parameters: ParameterStore, batch: Batch) -> tuple[float, float, Saved]:
        x, y, loss = batch.x, batch.y, batch.loss
        # A black box is not given an empty batch, whose mean would be 0 / 0.
        if len(x) == 0:
            return 0.0, 0.0, None
        own_loss = loss is None or loss is self.default_loss
        if own_loss and self.has_own_loss:
            found = self._model.compute_loss_and_gradients(x, y)
            if not isinstance(found, tuple | list) or len(found) != 2:
                raise TypeError(
                    f"{name_of(self._model)}.compute_loss_and_gradients must return (loss, "
                    f"gradient), got a {type(found).__name__}"
                )
            mean, gradient = found
        else:
            # A loss is passed only if it is not the model's own, so that a black box need not take
            # that argument.
            compute = _member(self._model, "compute_gradients")
            gradient = compute(x, y) if own_loss else compute(x, y, loss)
            mean = loss(_member(self._model, "predict")(x), y) if loss is not None else 0.0
        gradient = as_array(gradient)
        shape = getattr(gradient, "shape", None)
        if shape != (self.units[0].length,):
            raise ValueError(
                f"{name_of(self._model)} returned "
                + (
                    f"a gradient of shape {shape}"
                    if shape is not None
                    else f"a {type(gradient).__name__} as its gradient"
                )
                + f" for {self.units[0].length} parameters"
            )
        # A cast to real numbers would drop the imaginary part without an error.
        if gradient.dtype.kind == "c":
            raise TypeError(
                f"{name_of(self._model)} returned a gradient of {gradient.dtype}; it must be real"
            )
        # The mean, or the sum, of the loss and its gradient: the factor makes sums of them.
        factor = 1 if self.sums(loss) else len(x)
        return as_loss(mean, self._model) * factor, float(len(x)), (gradient, factor)

    def measure(self, loss: ILossFunction, prediction: Array, y: Data) -> tuple[float, float]:
        """Do as `Program.measure`, also for a loss that is any function that returns a mean."""
        if hasattr(loss, "forward"):
            return super().measure(loss, prediction, y)
        samples = len(prediction if y is None else y)
        factor = 1 if self.sums(loss) else samples
        return as_loss(loss(prediction, y), self._model) * factor, float(samples)

    def backward(self, parameters: ParameterStore, gradients: GradientStore, saved: Saved) -> None:
        (unit,) = self.units
        # A target without values is written and not added to, which saves clearing and reading it.
        target, is_empty = gradients.target(unit)
        if saved is None:
            if is_empty:
                target.fill(0)
        elif is_empty:
            gradient, factor = saved
            array_namespace(target).multiply(beside(gradient, target), factor, out=target)
        else:
            gradient, factor = saved
            target += beside(gradient, target) * factor
        # Also without samples: other ranks wait in this reduction.
        gradients.reduce(unit)


def _member(model: object, name: str) -> Any:
    try:
        return getattr(model, name)
    except AttributeError:
        raise MissingMemberError(
            f"{type(model).__name__} has no member {name!r}, which is needed now; a black box "
            f"needs get_parameters, set_parameters and compute_gradients{adapter_hint(model)}"
        ) from None
