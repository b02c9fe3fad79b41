"""Layers that run one after the other, their parameters unsharded unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from mpishard.arrays import Array, array_namespace
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.nn.layers.layer import Context
from mpishard.nn.layers.targets import GradientTargets
from mpishard.sharding import ParameterEntry, Unit, nested_views

__all__ = ["HeldLayers", "LayerChain"]

Reduce = Callable[[Unit], None]


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Layers that left nothing of a forward pass but the input of the first of them."""

    layers: range
    x: Array
    context: Context


@dataclass(frozen=True, slots=True)
class HeldLayers:
    """The layers that a rank computes, and where their parameters lie in its flat vector.

    Parameters
    ----------
    names, layers : sequence
        Of each layer, in the model's order.
    of_layer : sequence of mapping
        Of each layer: name inside the layer -> entry.
    entries : sequence of ParameterEntry
        All of them, each once, in flat order.
    units : tuple of Unit
        What is gathered and reduced as one; their layers count from 0 in ``layers``.
    dtype : numpy.dtype
        Of parameters and gradients.
    """

    names: Sequence[str]
    layers: Sequence[Any]
    of_layer: Sequence[Mapping[str, ParameterEntry]]
    entries: Sequence[ParameterEntry]
    units: tuple[Unit, ...]
    dtype: np.dtype[Any]

    def entries_of(self, unit: Unit) -> list[ParameterEntry]:
        """The parameters of a unit."""
        return [e for e in self.entries if unit.start <= e.start and e.stop <= unit.stop]

    def units_of(self, layer: int) -> tuple[Unit, ...]:
        """The units that a layer uses, in order: its own, and those of parameters it is tied to."""
        starts = {entry.start for entry in self.of_layer[layer].values() if entry.size}
        return tuple(u for u in self.units if any(u.start <= s < u.stop for s in starts))

    @property
    def reused(self) -> frozenset[int]:
        """Indices of the units that a layer outside of them uses too."""
        return frozenset(
            unit.index
            for layer in range(len(self.layers))
            for unit in self.units_of(layer)
            if not unit.first_layer <= layer <= unit.last_layer
        )


class LayerChain:
    """Consecutive layers. A unit is unsharded when its first layer begins, let go after its last.

    The units in ``kept`` stay unsharded from their first use in forward to their last in backward.
    What is saved and what is pending belongs to the caller, so that micro-batches may overlap.

    A segment of layers may save its input alone. Backward then computes it again, for which its
    units are unsharded once more, one after the other; the last stays for backward.

    Parameters
    ----------
    held : HeldLayers
        What the rank holds.
    first, stop : int
        The chain's layers among them, half open.
    kept : frozenset of int
        Indices of units.
    recomputed : sequence of range
        Segments of the chain's layers that are computed again in backward.
    """

    def __init__(
        self, held: HeldLayers, first: int, stop: int, kept: frozenset[int],
        recomputed: Sequence[range] = (),
    ) -> None:  # fmt: skip
        self._held = held
        self._range = range(first, stop)
        self._kept = kept
        self._segment_of = {index: segment for segment in recomputed for index in segment}
        self._uses = {i: held.units_of(i) for i in self._range}
        self._of_unit = {u.index: held.entries_of(u) for u in held.units}
        # Where each parameter lies: its unit, and its range in the unit's buffer.
        self._places = {
            entry.name: (index, slice(entry.start - start, entry.stop - start))
            for index, entries in self._of_unit.items()
            for start in [held.units[index].start]
            for entry in entries
        }
        own = [u for i in self._range for u in self._uses[i]]
        self.units = tuple(u for u in held.units if u in own)
        # Forward is through with a unit at the last layer that uses it, backward at the first.
        self._first_use = self._ends(self._range)
        self._last_use = self._ends(reversed(self._range))
        self._is_frozen: dict[int, bool] = {}
        self._without_gradient: frozenset[int] = frozenset()
        self._first_trained: int | None = first
        self.freeze(frozenset(), frozenset())

    @property
    def names(self) -> Sequence[str]:
        """The layers' names, in order."""
        return self._held.names[self._range.start : self._range.stop]

    def _ends(self, order: Any) -> dict[int, list[Unit]]:
        seen: set[int] = set()
        ends: dict[int, list[Unit]] = {}
        for index in order:
            ends[index] = [unit for unit in self._uses[index] if unit.index not in seen]
            seen |= {unit.index for unit in ends[index]}
        return ends

    def freeze(self, names: frozenset[str], frozen_units: frozenset[int]) -> None:
        """Leave the parameters of these names as they are, and give these units no gradient."""
        self._without_gradient = frozen_units
        # Of a layer: whether it has parameters and training changes none of them.
        of_layer = self._held.of_layer
        self._is_frozen = {
            i: bool(of_layer[i]) and all(e.name in names for e in of_layer[i].values())
            for i in self._range
        }
        self._first_trained = next(
            (i for i in self._range if any(e.name not in names for e in of_layer[i].values())),
            None,
        )

    def forward(
        self, parameters: ParameterStore, x: Array, context: Context
    ) -> tuple[Array, list[Any]]:
        """The output, and what each layer saves."""
        tape: list[Any] = []
        for index in self._range:
            segment = self._segment_of.get(index) if context.training else None
            if segment is not None and index == segment.start:
                tape.append(Forgotten(segment, x, context))
            upcoming = range(index + 1, self._range.stop)
            x, saved = self._forward_layer(index, parameters, x, context, upcoming)
            if segment is None:
                tape.append(saved)
            del saved
            for unit in self._last_use[index]:
                if unit.index not in self._kept:
                    parameters.reshard(unit)
        return x, tape

    def _forward_layer(
        self, index: int, parameters: ParameterStore, x: Array, context: Context,
        upcoming: Iterable[int],
    ) -> tuple[Array, Any]:  # fmt: skip
        layer = self._held.layers[index]
        views = self._views(index, parameters, upcoming)
        y, saved = layer.forward(views, x, context.enter(self._held.names[index], layer))
        return y, saved

    def let_go(self, parameters: ParameterStore) -> None:
        """Reshard what a forward pass has kept for a backward pass that will not be."""
        for unit in self.units:
            if unit.index in self._kept:
                parameters.reshard(unit)

    def backward(
        self,
        parameters: ParameterStore,
        gradients: GradientStore,
        tape: list[Any],
        dy: Array,
        reduce: Reduce,
        *,
        needs_input_gradient: bool,
    ) -> Array:
        """Both halves, layer by layer; ``reduce`` is called with each unit that is complete."""
        unwritten: set[str] = set()
        xp = array_namespace(dy)
        first = self._first_needed(needs_input_gradient)
        for index in reversed(self._range):
            saved = self._take(index, parameters, tape, first)
            if index >= first:
                layer = self._held.layers[index]
                views = self._views(index, parameters, self._back_from(index, tape, first))
                targets = self._targets(index, gradients, unwritten, xp)
                if self._is_frozen[index]:
                    dy, _ = layer.backward_input(views, saved, dy)
                else:
                    dy = layer.backward(
                        views, saved, dy, targets,
                        needs_input_gradient=needs_input_gradient or index > first,
                    )  # fmt: skip
                targets.clear_unwritten()
                del views, targets
            del saved
            for unit in self._first_use[index]:
                parameters.reshard(unit)
                if unit.index not in self._without_gradient:
                    reduce(unit)
        return dy

    def backward_input(
        self, parameters: ParameterStore, tape: list[Any], dy: Array, *, needs_input_gradient: bool
    ) -> tuple[Array, list[Any]]:
        """The input's gradient, and what `backward_weight` needs, last layer first."""
        pending: list[Any] = []
        first = self._first_needed(needs_input_gradient)
        for index in reversed(self._range):
            saved = self._take(index, parameters, tape, first)
            if index >= first:
                views = self._views(index, parameters, self._back_from(index, tape, first))
                dy, waits = self._held.layers[index].backward_input(views, saved, dy)
                pending.append(None if self._is_frozen[index] else waits)
                del views, waits
            del saved
            for unit in self._first_use[index]:
                parameters.reshard(unit)
        return dy, pending

    def backward_weight(
        self, gradients: GradientStore, pending: list[Any], reduce: Reduce, xp: ModuleType
    ) -> None:
        """The other half, last layer first; ``reduce`` as in `backward`."""
        unwritten: set[str] = set()
        waiting = list(reversed(pending))
        pending.clear()
        for index in reversed(self._range):
            if waiting:
                own = waiting.pop()
                targets = self._targets(index, gradients, unwritten, xp)
                if not self._is_frozen[index]:
                    self._held.layers[index].backward_weight(own, targets)
                targets.clear_unwritten()
                del own, targets
            for unit in self._first_use[index]:
                if unit.index not in self._without_gradient:
                    reduce(unit)

    def _first_needed(self, needs_input_gradient: bool) -> int:
        """The layer at which backward ends."""
        if needs_input_gradient or self._first_trained is None:
            return self._range.start if needs_input_gradient else self._range.stop
        return self._first_trained

    # ----------------------------------------------------------------------- computing once more

    def _take(self, index: int, parameters: ParameterStore, tape: list[Any], first: int) -> Any:
        """What a layer saved, off the tape; computes its segment again where that is forgotten."""
        if index < first:
            tape.clear()  # nothing more is needed
            return None
        if isinstance(tape[-1], Forgotten):
            self._recompute(tape.pop(), parameters, tape, first)
        return tape.pop()

    def _recompute(
        self, forgotten: Forgotten, parameters: ParameterStore, tape: list[Any], first: int
    ) -> None:
        """Run a segment's forward again, and put on the tape what its layers save."""
        layers, x = forgotten.layers, forgotten.x
        used = {index: set(self._uses[index]) for index in layers}
        # Units that layers behind the segment use too are here: backward is not through with them.
        behind = set[Unit]().union(*(self._uses[i] for i in range(layers.stop, self._range.stop)))
        held = behind & set[Unit]().union(*used.values())
        # Backward begins with those of the last layer that has any.
        stay = held | next((used[index] for index in reversed(layers) if used[index]), set())
        then = [*range(layers[-1] - 1, max(layers.start, first) - 1, -1)]
        then += self._back_from(layers.start, tape, first)
        for index in layers:
            # No third buffer where one waits already for its turn in backward.
            waits = any(unit.index not in self._kept for unit in held - used[index])
            upcoming = [] if waits else [*range(index + 1, layers.stop), *then]
            x, saved = self._forward_layer(index, parameters, x, forgotten.context, upcoming)
            tape.append(saved)
            later = set[Unit]().union(*(used[i] for i in range(index + 1, layers.stop)))
            for unit in used[index] - stay - later:
                if unit.index not in self._kept:
                    parameters.reshard(unit)

    def _back_from(self, index: int, tape: Sequence[Any], first: int) -> Iterator[int]:
        """The layers in the order in which they are computed in backward, before ``index``.

        Those of a segment that is computed again come as they do then; what follows is its
        business.
        """
        for entry in reversed(tape):
            if isinstance(entry, Forgotten):
                if entry.layers.stop > first:
                    yield from entry.layers
                return
            index -= 1
            if index < first:
                return
            yield index

    # -------------------------------------------------------------------------------- parameters

    def _views(
        self, index: int, parameters: ParameterStore, upcoming: Iterable[int]
    ) -> dict[str, Any]:
        """The parameters of one layer; starts to fetch the unit that ``upcoming`` needs next."""
        parameters.backend.progress()  # what was begun before may have something to send now
        uses = self._uses[index]
        buffers = {unit.index: parameters.unshard(unit) for unit in uses}
        if uses:
            following = self._following(index, upcoming)
            if following is not None:
                parameters.prefetch(following)
        return nested_views(self._held.of_layer[index], self._finder(buffers))

    def _following(self, index: int, upcoming: Iterable[int]) -> Unit | None:
        """The next unit that is not in use by this layer."""
        current = {unit.index for unit in self._uses[index]}
        for other in upcoming:
            for unit in self._uses[other]:
                if unit.index not in current:
                    return unit
        return None

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
            return xp.zeros(entry.size, self._held.dtype)

        return GradientTargets(self._held.of_layer[index], find, unwritten)

    def _finder(self, buffers: dict[int, Array]) -> Callable[[ParameterEntry], Array]:
        def find(entry: ParameterEntry) -> Array:
            unit, place = self._places[entry.name]
            return buffers[unit][place]

        return find
