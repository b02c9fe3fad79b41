"""What is computed in a step: a chain of layers unit by unit, or one call of a black box."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.contracts import ILayeredModel, ILossFunction
from mpishard.errors import MissingMemberError, ShardingError
from mpishard.models.gradient_store import GradientStore
from mpishard.models.parameter_store import ParameterStore
from mpishard.nn.layer import Context
from mpishard.nn.targets import GradientTargets
from mpishard.sharding import (
    ParameterEntry,
    ParameterTable,
    Unit,
    build_units,
    nested_views,
)

__all__ = ["LayeredProgram", "OpaqueProgram", "Program"]


class Program(ABC):
    """Forward and backward through stores that may have to gather and reduce.

    Attributes
    ----------
    units : tuple of Unit
        What is gathered and reduced as one.
    kept : frozenset of int
        Indices of the units that stay unsharded from forward to backward.
    dtype : numpy.dtype
        Of parameters and gradients.
    """

    units: tuple[Unit, ...]
    kept: frozenset[int]
    dtype: np.dtype[Any]

    def knows_loss(self, loss: ILossFunction | None) -> bool:
        """Whether `forward` can tell the loss; a black box need only know its gradient."""
        return loss is not None

    @property
    def length(self) -> int:
        """Length of the flat vector."""
        return self.units[-1].stop

    @abstractmethod
    def check(self, x: Any) -> None:
        """Refuse inputs that cannot be computed with; communicates nothing."""

    @abstractmethod
    def check_pair(self, x: Any, y: Any, loss: ILossFunction | None) -> None:
        """Refuse inputs and targets that do not fit each other or the loss, as `check`."""

    @abstractmethod
    def fill(self, unit: Unit, out: Array) -> None:
        """Write the model's own values of ``unit`` into ``out``."""

    def changed(self, parameters: ParameterStore) -> None:
        """Hear that parameters have changed."""

    @abstractmethod
    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        """Outputs. Makes the same calls of the store for any number of samples, 0 included."""

    @abstractmethod
    def forward(
        self,
        parameters: ParameterStore,
        x: Array,
        y: Array,
        loss: ILossFunction | None,
        context: Context,
    ) -> tuple[float, float, Any]:
        """Sum and weight of the loss, and the tape that `backward` needs."""

    @abstractmethod
    def backward(self, parameters: ParameterStore, gradients: GradientStore, tape: Any) -> None:
        """Add the gradient of the loss's *sum* to every unit, and reduce each as it is done."""


class LayeredProgram(Program):
    """A chain of layers. A unit is gathered when its first layer begins, let go after its last.

    The last unit, and any unit that a layer outside it uses too, is kept from its first use in
    forward to its last in backward.

    Parameters
    ----------
    model : ILayeredModel
        Structure, first parameters and loss.
    minimum_unit_size : int
        See `mpishard.sharding.build_units`.
    """

    def __init__(self, model: ILayeredModel, minimum_unit_size: int) -> None:
        infos = model.get_all_layer_info()
        self._model = model
        self._layers: Sequence[Any] = model.layers
        self._table: ParameterTable = model.parameter_table
        self._input_shape = infos[0].input_shape
        self.dtype = model.dtype
        self.units = build_units([info.parameter_count for info in infos], minimum_unit_size)
        self._own_unit = [
            next(u for u in self.units if u.first_layer <= i <= u.last_layer)
            for i in range(len(infos))
        ]
        self._entries = [self._table.layer_entries(info.name) for info in infos]
        self._of_unit = [
            [e for e in self._table.entries if unit.start <= e.start and e.stop <= unit.stop]
            for unit in self.units
        ]
        # Where each parameter lies: its unit, and its range in the unit's buffer.
        self._places = {
            entry.name: (unit.index, slice(entry.start - unit.start, entry.stop - unit.start))
            for unit, entries in zip(self.units, self._of_unit, strict=True)
            for entry in entries
        }
        self._uses = [self._units_of(entries) for entries in self._entries]
        reused = {
            unit.index
            for layer, uses in enumerate(self._uses)
            for unit in uses
            if unit is not self._own_unit[layer]
        }
        self.kept = frozenset(reused | {self.units[-1].index})
        # Backward is through with a unit at the first layer that uses it, tied or its own.
        self._ending: list[list[Unit]] = [[] for _ in infos]
        for unit in self.units:
            first_use = next(i for i, uses in enumerate(self._uses) if unit in uses)
            self._ending[first_use].append(unit)

    def _units_of(self, entries: dict[str, ParameterEntry]) -> tuple[Unit, ...]:
        indices = {self._places[entry.name][0] for entry in entries.values()}
        return tuple(self.units[index] for index in sorted(indices))

    def check(self, x: Any) -> None:
        self._output_shape(x)

    def check_pair(self, x: Any, y: Any, loss: ILossFunction | None) -> None:
        shape = self._output_shape(x)
        if loss is None:
            raise ShardingError(
                f"{type(self._model).__name__} has no default loss; pass loss_function"
            )
        if getattr(y, "shape", None) is None:
            raise TypeError(f"targets must be an array, got {type(y).__name__}")
        if len(y) != len(x):
            raise ValueError(f"x has {len(x)} samples and y has {len(y)}")
        loss.check_target((len(x), *shape), y)

    def _output_shape(self, x: Any) -> tuple[int, ...]:
        """Shape of a sample's output; the layers refuse what they cannot take."""
        shape = getattr(x, "shape", None)
        if shape is None or len(shape) != 1 + len(self._input_shape):
            raise ValueError(
                f"expected an array of shape (samples, {_dims(self._input_shape)}), got "
                + (f"shape {tuple(shape)}" if shape is not None else type(x).__name__)
            )
        self._model.as_input(x)
        output = tuple(shape[1:])
        for layer in self._layers:
            output = layer.output_shape(output)
        return output

    def fill(self, unit: Unit, out: Array) -> None:
        self._model.fill_parameters(unit.start, out)

    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        y, _ = self._run(parameters, self._model.as_input(x), Context(training=False))
        for unit in self.units:
            if unit.index in self.kept:
                parameters.reshard(unit)
        return y

    def forward(
        self,
        parameters: ParameterStore,
        x: Array,
        y: Array,
        loss: ILossFunction | None,
        context: Context,
    ) -> tuple[float, float, Any]:
        assert loss is not None
        prediction, tape = self._run(parameters, self._model.as_input(x), context)
        total, weight, saved = loss.forward(prediction, y)
        tape.append((loss, saved))
        return total, weight, tape

    def backward(self, parameters: ParameterStore, gradients: GradientStore, tape: Any) -> None:
        loss, saved = tape.pop()
        dy = loss.backward(saved)
        unwritten: set[str] = set()
        for index in reversed(range(len(self._layers))):
            views = self._views(index, parameters, following=self._own_unit[index].index - 1)
            targets = self._targets(index, gradients, unwritten)
            dy = self._layers[index].backward(
                views, tape.pop(), dy, targets, needs_input_gradient=index > 0
            )
            targets.clear_unwritten()
            del views, targets
            for unit in self._ending[index]:
                parameters.reshard(unit)
                gradients.reduce(unit)

    def _run(self, parameters: ParameterStore, x: Array, context: Context) -> tuple[Array, Any]:
        tape: list[Any] = []
        for index, layer in enumerate(self._layers):
            own = self._own_unit[index]
            views = self._views(index, parameters, following=own.index + 1)
            x, saved = layer.forward(views, x, context)
            tape.append(saved)
            del views
            if index == own.last_layer and own.index not in self.kept:
                parameters.reshard(own)
        return x, tape

    def _views(self, index: int, parameters: ParameterStore, following: int) -> dict[str, Any]:
        """The parameters of one layer; starts to fetch the unit that is needed after its own."""
        buffers = {unit.index: parameters.unshard(unit) for unit in self._uses[index]}
        if self._own_unit[index].index in buffers and 0 <= following < len(self.units):
            parameters.prefetch(self.units[following])
        return self._nested(index, buffers)

    def _targets(
        self, index: int, gradients: GradientStore, unwritten: set[str]
    ) -> GradientTargets:
        buffers: dict[int, Array] = {}
        for unit in self._uses[index]:
            buffers[unit.index], is_empty = gradients.target(unit)
            if is_empty:
                unwritten.update(entry.name for entry in self._of_unit[unit.index])
        return GradientTargets(self._entries[index], self._finder(buffers), unwritten)

    def _nested(self, index: int, buffers: dict[int, Array]) -> dict[str, Any]:
        return nested_views(self._entries[index], self._finder(buffers))

    def _finder(self, buffers: dict[int, Array]) -> Callable[[ParameterEntry], Array]:
        def find(entry: ParameterEntry) -> Array:
            unit, place = self._places[entry.name]
            return buffers[unit][place]

        return find


class OpaqueProgram(Program):
    """A model of which only the flat vector and its gradient are known: one unit, one call.

    The user's object keeps its full vector. Its gradient is that of a mean over samples, and is
    scaled by their number, so that uneven batches average as they should.

    Parameters
    ----------
    model : object
        Has ``get_parameters``, ``set_parameters``, and ``compute_gradients`` or
        ``compute_loss_and_gradients``.
    """

    def __init__(self, model: Any) -> None:
        for member in ("get_parameters", "set_parameters"):
            _member(model, member)
        if not hasattr(model, "compute_loss_and_gradients"):
            _member(model, "compute_gradients")
        vector = model.get_parameters()
        if getattr(vector, "ndim", None) != 1 or vector.dtype.kind != "f" or vector.size == 0:
            raise ValueError(
                f"{type(model).__name__}.get_parameters() must return a 1-D floating vector with "
                f"at least one element, got {getattr(vector, 'dtype', type(vector).__name__)} of "
                f"shape {getattr(vector, 'shape', '?')}"
            )
        self._model = model
        self.dtype = vector.dtype
        self.units = build_units([int(vector.size)], 1)
        self.kept = frozenset({0})

    def check(self, x: Any) -> None:
        if not hasattr(x, "__len__"):
            raise TypeError(f"a batch needs a length, got {type(x).__name__}")

    def check_pair(self, x: Any, y: Any, loss: ILossFunction | None) -> None:
        self.check(x)
        if y is not None and len(x) != len(y):
            raise ValueError(f"x has {len(x)} samples and y has {len(y)}")

    def knows_loss(self, loss: ILossFunction | None) -> bool:
        return loss is not None or hasattr(self._model, "compute_loss_and_gradients")

    def fill(self, unit: Unit, out: Array) -> None:
        out[...] = self._model.get_parameters()

    def changed(self, parameters: ParameterStore) -> None:
        (unit,) = self.units
        self._model.set_parameters(parameters.unshard(unit).copy())

    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        return _member(self._model, "predict")(x)

    def forward(
        self,
        parameters: ParameterStore,
        x: Array,
        y: Array,
        loss: ILossFunction | None,
        context: Context,
    ) -> tuple[float, float, Any]:
        if len(x) == 0:
            return 0.0, 0.0, None
        own_loss = loss is getattr(self._model, "default_loss_function", None)
        if own_loss and hasattr(self._model, "compute_loss_and_gradients"):
            mean, gradient = self._model.compute_loss_and_gradients(x, y)
        else:
            # A loss is named only where it is not the model's own, so that a black box may do
            # without that argument.
            compute = _member(self._model, "compute_gradients")
            gradient = compute(x, y) if own_loss else compute(x, y, loss)
            mean = loss(_member(self._model, "predict")(x), y) if loss is not None else 0.0
        shape = getattr(gradient, "shape", None)
        if shape != (self.length,):
            raise ValueError(
                f"{type(self._model).__name__} returned "
                + (f"a gradient of shape {shape}" if shape is not None
                   else f"a {type(gradient).__name__} as its gradient")
                + f" for {self.length} parameters"
            )  # fmt: skip
        return float(mean) * len(x), float(len(x)), (gradient, len(x))

    def backward(self, parameters: ParameterStore, gradients: GradientStore, tape: Any) -> None:
        (unit,) = self.units
        target, is_empty = gradients.target(unit)
        if tape is None:
            if is_empty:
                target.fill(0)
        elif is_empty:
            gradient, samples = tape
            array_namespace(target).multiply(gradient, samples, out=target)
        else:
            gradient, samples = tape
            target += gradient * samples
        gradients.reduce(unit)


def _member(model: Any, name: str) -> Any:
    try:
        return getattr(model, name)
    except AttributeError:
        raise MissingMemberError(
            f"{type(model).__name__} has no member {name!r}, which is needed now; a black box "
            "needs get_parameters, set_parameters and compute_gradients"
        ) from None


def _dims(shape: tuple[int, ...]) -> str:
    return ", ".join(str(dim) for dim in shape)
