"""What is computed in a step, and how a chain of layers is: unit by unit."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from mpishard.arrays import Array, array_namespace, beside
from mpishard.checkpoint.plain import PlainModelFiles
from mpishard.communication import CommunicationBackend
from mpishard.contracts import ICloneable, ILayeredModel, ILossFunction
from mpishard.devices import HOST, Device
from mpishard.errors import MissingLossError
from mpishard.models.gradient_store import GradientStore
from mpishard.models.parameter_store import ParameterStore
from mpishard.nn.layer import Context
from mpishard.nn.targets import GradientTargets
from mpishard.sharding import (
    ParameterEntry,
    ParameterTable,
    Placement,
    Unit,
    build_units,
    nested_views,
)

__all__ = ["LayeredProgram", "Program"]


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
    entries : tuple of ParameterEntry
        Name, shape and start of each parameter.
    device : Device
        Where it computes.
    needs_whole_parameters : bool
        Whether all parameters must be readable at any time, whatever the policy says.
    is_random : bool
        Whether what is computed in training depends on seed, step and sample.
    seed : int
        Of that randomness; rank 0's on every rank.
    frozen : frozenset of str
        Names of the parameters that training leaves as they are.
    default_loss : ILossFunction or None
        The model's own loss, which a model may make anew whenever it is asked.
    """

    units: tuple[Unit, ...]
    kept: frozenset[int]
    dtype: np.dtype[Any]
    entries: tuple[ParameterEntry, ...]
    device: Device = HOST
    needs_whole_parameters: ClassVar[bool] = False
    is_random: bool = False
    seed: int = 0
    frozen: frozenset[str] = frozenset()
    default_loss: ILossFunction | None = None

    def freeze(self, names: frozenset[str]) -> None:
        """Leave the parameters of these names as they are from now on."""
        self.frozen = names

    @property
    def frozen_units(self) -> frozenset[int]:
        """Indices of the units of which nothing is trained."""
        if not self.frozen:
            return frozenset()
        trained = {
            unit.index
            for unit in self.units
            for entry in self.entries
            if unit.start <= entry.start < unit.stop and entry.name not in self.frozen
        }
        return frozenset(unit.index for unit in self.units) - trained

    def description(self) -> str:
        """What must be the same on all ranks beside units, entries and dtype."""
        return repr(sorted(self.frozen))

    def knows_loss(self, loss: ILossFunction | None) -> bool:
        """Whether `forward` can tell the loss; a black box need only know its gradient."""
        return loss is not None

    @property
    def placement(self) -> Placement:
        """Which part of the model this rank's own flat vector is; all of it, unless told."""
        return Placement.whole(self.entries)

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

    def deal_constants(self, backend: CommunicationBackend) -> None:
        """Give every rank what rank 0's model holds beside parameters. Collective."""

    def take_over(self, parameters: ParameterStore, holder: str) -> str | None:
        """Hear that the store has the parameters now, for ``holder``.

        Returns
        -------
        str or None
            Why, nonetheless, they stand whole on every rank, and what would shard them; None
            where they do not.
        """
        self.changed(parameters)
        return None

    def changed(self, parameters: ParameterStore) -> None:
        """Hear that parameters have changed."""

    def give_back(self, gather: Callable[[], Array]) -> None:
        """Let the model have its parameters again, as ``gather`` gives them. Collective."""

    @abstractmethod
    def copy(self) -> tuple[Program, Any]:
        """A program of a model that shares nothing that changes with this one's, and the model."""

    def _copied(self, program: Program) -> Program:
        """``program``, of a copy of the model, with what this one was told."""
        program.freeze(self.frozen)
        program.seed = self.seed
        return program

    @abstractmethod
    def predict(self, parameters: ParameterStore, x: Array) -> Array:
        """Outputs. Makes the same calls of the store for any number of samples, 0 included."""

    def measure(self, loss: ILossFunction, prediction: Array, y: Array) -> tuple[float, float]:
        """Sum and weight of ``loss``, without a gradient."""
        total, weight, _ = loss.forward(prediction, beside(y, prediction), training=False)
        return total, weight

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
        self._minimum_unit_size = minimum_unit_size
        self._layers: Sequence[Any] = model.layers
        self._names = [info.name for info in infos]
        self._table: ParameterTable = model.parameter_table
        self._input_shape = infos[0].input_shape
        self.dtype = model.dtype
        self.device = getattr(model, "device", HOST)
        self.entries = self._table.entries
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
        self.is_random = any(layer.is_random for layer in self._layers)
        self.seed = int(getattr(model, "seed", 0))
        self._first_trained = 0
        self.freeze(frozenset(entry.name for entry in self.entries if not entry.trainable))

    def freeze(self, names: frozenset[str]) -> None:
        super().freeze(names)
        self._without_gradient = self.frozen_units
        # Of a layer: whether it has parameters and training changes none of them.
        self._is_frozen = [
            bool(entries) and all(entry.name in names for entry in entries.values())
            for entries in self._entries
        ]
        self._first_trained = next(
            i for i, entries in enumerate(self._entries)
            if any(entry.name not in names for entry in entries.values())
        )  # fmt: skip

    def description(self) -> str:
        layers = [type(layer).__name__ for layer in self._layers]
        choices = self._model.choices() if isinstance(self._model, PlainModelFiles) else {}
        return f"{super().description()} {layers} {json.dumps(choices, sort_keys=True)}"

    def deal_constants(self, backend: CommunicationBackend) -> None:
        if self.is_random:
            self.seed = int(backend.broadcast(np.array([self.seed]))[0])

    def _units_of(self, entries: dict[str, ParameterEntry]) -> tuple[Unit, ...]:
        indices = {self._places[entry.name][0] for entry in entries.values()}
        return tuple(self.units[index] for index in sorted(indices))

    def check(self, x: Any) -> None:
        self._output_shape(x)

    def check_pair(self, x: Any, y: Any, loss: ILossFunction | None) -> None:
        shape = self._output_shape(x)
        if loss is None:
            raise MissingLossError(
                f"{type(self._model).__name__} has no default loss; pass loss_function"
            )
        if not isinstance(loss, ILossFunction):
            raise TypeError(f"loss_function must be an ILossFunction, got {type(loss).__name__}")
        if getattr(y, "shape", None) is None:
            raise TypeError(f"targets must be an array, got {type(y).__name__}")
        if len(y) != len(x):
            raise ValueError(f"x has {len(x)} samples and y has {len(y)}")
        loss.check_target((len(x), *shape), y)

    def _output_shape(self, x: Any) -> tuple[int, ...]:
        """Shape of a sample's output; the layers refuse what they cannot take."""
        shape = getattr(x, "shape", None)
        expected = f"expected an array of shape (samples, {_dims(self._input_shape)}), got "
        if shape is None:
            raise TypeError(expected + type(x).__name__)
        if len(shape) != 1 + len(self._input_shape):
            raise ValueError(f"{expected}shape {tuple(shape)}")
        self._model.check_input(x)
        output = tuple(shape[1:])
        for layer in self._layers:
            output = layer.output_shape(output)
        return output

    def fill(self, unit: Unit, out: Array) -> None:
        self._model.fill_parameters(unit.start, out)

    def take_over(self, parameters: ParameterStore, holder: str) -> str | None:
        self._model.release_parameters(holder)
        return None

    def give_back(self, gather: Callable[[], Array]) -> None:
        self._model.reclaim_parameters(gather())

    def copy(self) -> tuple[Program, Any]:
        # What layers choose, such as the features in use, is the copy's own.
        model = (
            self._model.deep_copy()
            if isinstance(self._model, ICloneable)
            else (copy.deepcopy(self._model))
        )
        return self._copied(LayeredProgram(model, self._minimum_unit_size)), model

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
        total, weight, saved = loss.forward(prediction, self.device.put(y))
        tape.append((loss, saved))
        return total, weight, tape

    def backward(self, parameters: ParameterStore, gradients: GradientStore, tape: Any) -> None:
        loss, saved = tape.pop()
        dy = loss.backward(saved)
        unwritten: set[str] = set()
        xp = array_namespace(dy)
        first = self._first_trained
        for index in reversed(range(len(self._layers))):
            layer_saved = tape.pop()
            if index >= first:
                following = self._own_unit[index].index - 1
                if following < self._own_unit[first].index:
                    following = -1  # backward ends before
                views = self._views(index, parameters, following)
                targets = self._targets(index, gradients, unwritten, xp)
                if self._is_frozen[index]:
                    dy, _ = self._layers[index].backward_input(views, layer_saved, dy)
                else:
                    dy = self._layers[index].backward(
                        views, layer_saved, dy, targets, needs_input_gradient=index > first
                    )
                targets.clear_unwritten()
                del views, targets
            del layer_saved
            for unit in self._ending[index]:
                parameters.reshard(unit)
                if unit.index not in self._without_gradient:
                    gradients.reduce(unit)

    def _run(self, parameters: ParameterStore, x: Array, context: Context) -> tuple[Array, Any]:
        tape: list[Any] = []
        for index, layer in enumerate(self._layers):
            own = self._own_unit[index]
            views = self._views(index, parameters, following=own.index + 1)
            x, saved = layer.forward(views, x, context.enter(self._names[index], layer))
            tape.append(saved)
            del views
            if index == own.last_layer and own.index not in self.kept:
                parameters.reshard(own)
        return x, tape

    def _views(self, index: int, parameters: ParameterStore, following: int) -> dict[str, Any]:
        """The parameters of one layer; starts to fetch the unit that is needed after its own."""
        parameters.backend.progress()  # what was begun before may have something to send now
        buffers = {unit.index: parameters.unshard(unit) for unit in self._uses[index]}
        if self._own_unit[index].index in buffers and 0 <= following < len(self.units):
            parameters.prefetch(self.units[following])
        return nested_views(self._entries[index], self._finder(buffers))

    def _targets(
        self, index: int, gradients: GradientStore, unwritten: set[str], xp: ModuleType
    ) -> GradientTargets:
        buffers: dict[int, Array] = {}
        for unit in self._uses[index]:
            if unit.index in self._without_gradient:
                continue
            buffers[unit.index], is_empty = gradients.target(unit)
            if is_empty:
                unwritten.update(entry.name for entry in self._of_unit[unit.index])

        def find(entry: ParameterEntry) -> Array:
            unit, place = self._places[entry.name]
            if unit in buffers:
                return buffers[unit][place]
            # Frozen, and another layer's beside: what is added here nobody reads.
            return xp.zeros(entry.size, self.dtype)

        return GradientTargets(self._entries[index], find, unwritten)

    def _finder(self, buffers: dict[int, Array]) -> Callable[[ParameterEntry], Array]:
        def find(entry: ParameterEntry) -> Array:
            unit, place = self._places[entry.name]
            return buffers[unit][place]

        return find


def _dims(shape: tuple[int, ...]) -> str:
    return ", ".join(str(dim) for dim in shape)
