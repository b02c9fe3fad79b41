"""Layers that run one after the other, their parameters unsharded unit by unit."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple, TypeVar, cast

from mpishard.base import Array, DType
from mpishard.models.stores.gradient_store import GradientStore
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.nn import Context, GradientTargets, Layer, Parameters, output_and_saved, products_in
from mpishard.sharding import ParameterEntry, Unit, nested_views, unit_at

Reduce = Callable[[Unit], None]
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _in_precision(method: _Method) -> _Method:
    """Let a method of a `LayerChain` compute products on a GPU in the chain's precision."""

    @functools.wraps(method)
    def run(chain: LayerChain, *args: Any, **kwargs: Any) -> Any:
        # A context and no argument, because layers of users know nothing of precisions.
        with products_in(chain.precision):
            return method(chain, *args, **kwargs)

    return cast("_Method", run)


@dataclass(frozen=True, slots=True)
class LocalLayer:
    """A layer that a rank computes.

    Parameters
    ----------
    name : str
        Name in the model.
    layer : Layer
        The description.
    entries : mapping of str to ParameterEntry
        Dotted name inside the layer -> entry in the rank's flat vector.
    is_random : bool
        Whether the layer's output in training depends on seed, step and sample.
    """

    name: str
    layer: Layer
    entries: Mapping[str, ParameterEntry]
    is_random: bool


@dataclass(frozen=True, slots=True)
class LocalLayers:
    """The layers that a rank computes, and the ranges of their parameters in its flat vector.

    Parameters
    ----------
    layers : sequence of LocalLayer
        In the model's order.
    entries : sequence of ParameterEntry
        All parameters, each once, in flat order.
    units : tuple of Unit
        Ranges that are gathered and reduced as one; their layers count from 0 in ``layers``.
    dtype : numpy.dtype
        Dtype of parameters and gradients.
    """

    layers: Sequence[LocalLayer]
    entries: Sequence[ParameterEntry]
    units: tuple[Unit, ...]
    dtype: DType

    def units_of(self, layer: int) -> tuple[Unit, ...]:
        """Return the units that a layer uses, in order: also those of parameters it is tied to."""
        entries = self.layers[layer].entries.values()
        # A parameter without elements may lie at a unit's end, which would look like the next unit.
        units = {unit_at(self.units, entry.start) for entry in entries if entry.size}
        # In flat order on every rank: gathers must be called in one order.
        return tuple(sorted(units, key=lambda unit: unit.start))

    @property
    def reused(self) -> frozenset[int]:
        """Indices of the units that a layer outside of them uses, too."""
        return frozenset(
            unit.index
            for layer in range(len(self.layers))
            for unit in self.units_of(layer)
            if not unit.first_layer <= layer <= unit.last_layer
        )


@dataclass(frozen=True, slots=True)
class _SegmentInput:
    """Layers that have saved only the input of the first of them in a forward pass."""

    layers: range
    x: Array
    context: Context


@dataclass(slots=True, eq=False)
class _Group:
    """Consecutive layers that use the same units, with the values that are equal in every pass.

    Layers without parameters belong to it if those on both sides do. Otherwise they are a group of
    their own, so that a unit is fetched as late and released as early as possible.
    """

    layers: range
    units: tuple[Unit, ...]
    ranges: dict[ParameterEntry, tuple[int, slice]]
    """Parameter -> index of its unit, and its range in the unit's buffer."""
    segment: range | None
    """The segment that these layers belong to, if it is computed again in backward."""
    begun: tuple[Unit, ...]
    """Units that no earlier group uses: backward has finished with them after this group."""
    buffers: list[Array] = field(default_factory=list)
    views: dict[int, Parameters] = field(default_factory=dict)
    """Parameters of each layer, as views of ``buffers``; made again when the buffers change."""

    def arrays(self, buffers: Mapping[int, Array]) -> dict[ParameterEntry, Array]:
        """Return the array of each parameter in ``buffers``, by index of their unit."""
        return {
            entry: buffers[unit][in_unit]
            for entry, (unit, in_unit) in self.ranges.items()
            if unit in buffers
        }


class _Visit(NamedTuple):
    """A group's turn in a forward pass: the unit to fetch meanwhile, and those to release after."""

    group: _Group
    following: Unit | None
    done: tuple[Unit, ...]


class LayerChain:
    """Consecutive layers. A unit is unsharded for its first layer, and released after its last.

    The units in ``kept`` stay unsharded from their first use in forward to their last in backward.
    Saved activations and pending gradients belong to the caller, so that micro-batches may overlap.

    A segment of layers may save its input alone. Backward then computes the segment again: its
    units are unsharded once more, one after the other, and the last one stays for backward.

    Parameters
    ----------
    local : LocalLayers
        The rank's layers.
    first, stop : int
        The chain's layers among them, half open.
    kept : frozenset of int
        Indices of units.
    recomputed : sequence of range
        Segments of the chain's layers that are computed again in backward.
    precision : {"tf32", "bfloat16"}, optional
        Numbers to which a GPU rounds the operands of products. Default: the model's dtype.
    """

    def __init__(
        self,
        local: LocalLayers,
        first: int,
        stop: int,
        kept: frozenset[int],
        recomputed: Sequence[range] = (),
        *,
        precision: str | None = None,
    ) -> None:
        self.precision = precision
        self._local = local
        self._layers = local.layers
        self._range = range(first, stop)
        self._kept = kept
        # Computed once: each step walks through thousands of layers.
        self._uses = {i: local.units_of(i) for i in self._range}
        self._names_in = {
            u.index: [e.name for e in u.entries_of(local.entries)] for u in local.units
        }
        self._groups = self._laid_out(recomputed)
        # Only the units that this chain's layers use: in a pipeline the rank may have other stages,
        # too.
        own = {unit for uses in self._uses.values() for unit in uses}
        self.units = tuple(unit for unit in local.units if unit in own)
        # The units to fetch and to release do not depend on a batch.
        self._forward_plan = self._plan(self._groups)
        self._without_gradient: frozenset[int] = frozenset()
        self._frozen_layers: frozenset[int] = frozenset()
        self._first_trained = first
        self.freeze(frozenset(), frozenset())

    def use_layers(self, make: Callable[[Layer], Layer]) -> None:
        """Compute with other layers, of the same parameters and shapes: ``make`` of each."""
        self._layers = [replace(local, layer=make(local.layer)) for local in self._layers]

    @property
    def names(self) -> list[str]:
        """The layers' names, in order."""
        return [self._layers[index].name for index in self._range]

    def _laid_out(self, recomputed: Sequence[range]) -> list[_Group]:
        segment_of = {index: segment for segment in recomputed for index in segment}

        # Layers without parameters join a group that has the same units on both sides of them.
        def key(index: int) -> tuple[range | None, tuple[Unit, ...]]:
            sides = range(index, self._range.start - 1, -1), range(index, self._range.stop)
            before, after = (next(filter(None, map(self._uses.get, side)), ()) for side in sides)
            return segment_of.get(index), before if before == after else ()

        groups, seen = [], set[Unit]()
        for (segment, units), indices in groupby(self._range, key):
            layers = [*indices]
            ranges = {
                entry: (unit.index, slice(entry.start - unit.start, entry.stop - unit.start))
                for index in layers
                for entry in self._layers[index].entries.values()
                for unit in [unit_at(self._local.units, entry.start)]
            }
            # The first group that uses a unit is the last one of backward to add to its gradient.
            begun = tuple(unit for unit in units if unit not in seen)
            seen.update(units)
            groups.append(_Group(range(layers[0], layers[-1] + 1), units, ranges, segment, begun))
        return groups

    def _plan(
        self,
        groups: Sequence[_Group],
        upcoming: Sequence[int] = (),
        already_unsharded: Collection[Unit] = (),
        keep_unsharded: Collection[Unit] = (),
    ) -> list[_Visit]:
        """Plan a forward pass over ``groups``: what each fetches meanwhile, and releases after.

        Parameters
        ----------
        groups : sequence of _Group
            The groups, in order.
        upcoming : sequence of int
            Indices of the layers that are computed after the pass, whose units may be prefetched.
        already_unsharded : collection of Unit
            Units that are unsharded before the pass.
        keep_unsharded : collection of Unit
            Units that stay unsharded after it.
        """
        plan, later = list[_Visit](), set[Unit]()
        # From the last group to the first: a unit is released after the last group that uses it.
        for group in reversed(groups):
            later_layers = [*range(group.layers.stop, groups[-1].layers.stop), *upcoming]
            # Nothing is prefetched if a unit of backward holds a buffer already: a third one would
            # be needed.
            waits = any(
                unit.index not in self._kept and unit not in group.units
                for unit in already_unsharded
            )
            following = None if waits else self._following(group, later_layers)
            # Kept units stay unsharded until backward, which needs them first.
            done = (u for u in group.units if u not in later and u.index not in self._kept)
            plan.append(_Visit(group, following, tuple(u for u in done if u not in keep_unsharded)))
            later.update(group.units)
        return plan[::-1]

    def freeze(self, names: frozenset[str], frozen_units: frozenset[int]) -> None:
        """Do not train the parameters of these names, and give these units no gradient."""
        self._without_gradient = frozen_units
        entries = {i: self._layers[i].entries.values() for i in self._range}
        trained = [i for i in self._range if any(e.name not in names for e in entries[i])]
        self._frozen_layers = frozenset(i for i in self._range if entries[i]) - {*trained}
        self._first_trained = trained[0] if trained else self._range.stop

    # --------------------------------------------------------------------------------- computing

    @_in_precision
    def forward(
        self, parameters: ParameterStore, x: Array, context: Context
    ) -> tuple[Array, list[object]]:
        """Return the output, and the saved activations: one for each layer, or for a segment."""
        activations: list[object] = []
        return self._forward(self._forward_plan, parameters, x, context, activations), activations

    def _forward(
        self,
        plan: Iterable[_Visit],
        parameters: ParameterStore,
        x: Array,
        context: Context,
        activations: list[object],
        *,
        again: bool = False,
    ) -> Array:
        for group, following, done in plan:
            # Prediction saves nothing, and the second forward saves what the first did not.
            segment = group.segment if context.training and not again else None
            if segment is not None and segment.start == group.layers.start:
                # Backward needs no more than the segment's input; the context makes the same
                # dropout masks again.
                activations.append(_SegmentInput(segment, x, context))
            views = self._open(group, parameters, following)
            for index in group.layers:
                # MPI moves data only while it is called: here for a gather that is under way.
                if parameters.in_flight:
                    parameters.backend.progress()
                layer = self._layers[index]
                # The other layers read neither name nor cache, and share one context.
                is_keyed = layer.is_random or context.cache is not None
                own = context.enter(layer.name, layer.layer) if is_keyed else context
                result = layer.layer.forward(views[index], x, own)
                x, saved = output_and_saved(result, layer.layer)
                if segment is None:
                    activations.append(saved)
                # Otherwise this activation would live until the next layer's is saved.
                del saved, result
            for unit in done:
                parameters.reshard(unit)
        return x

    def release_kept(self, parameters: ParameterStore) -> None:
        """Reshard the units that a forward pass has kept, if no backward pass follows."""
        for unit in self.units:
            if unit.index in self._kept:
                parameters.reshard(unit)

    @_in_precision
    def backward(
        self,
        parameters: ParameterStore,
        gradients: GradientStore,
        activations: list[object],
        dy: Array,
        reduce: Reduce,
        *,
        needs_input_gradient: bool,
        pending: list[object] | None = None,
    ) -> Array | None:
        """Run both halves of backward by layer; call ``reduce`` with each unit that is complete.

        With ``pending`` it runs the first half alone, which adds to no gradient, and appends the
        values for `backward_weight`, last layer first.
        """
        dx: Array | None = dy
        del dy  # held no longer than a layer needs it
        is_whole = pending is None
        targets: dict[int, GradientTargets] = {}
        unwritten: set[str] = set()
        # An earlier stage waits for the gradient of this one's input, also through frozen layers.
        first = self._range.start if needs_input_gradient else self._first_trained
        for group in reversed(self._groups):
            views: dict[int, Parameters] = {}
            for index in reversed(range(max(first, group.layers.start), group.layers.stop)):
                if isinstance(activations[-1], _SegmentInput):
                    self._recompute(activations, parameters, first)
                saved = activations.pop()
                if not views:
                    upcoming = self._back_from(index, activations, first)
                    following = None if parameters.is_whole else self._following(group, upcoming)
                    views = self._open(group, parameters, following)
                    if is_whole:
                        targets = self._targets(group, gradients, unwritten)
                if parameters.in_flight or gradients.in_flight:
                    parameters.backend.progress()
                layer, is_frozen = self._layers[index].layer, index in self._frozen_layers
                assert dx is not None, "only the model's first layer has no input gradient"
                if is_whole and not is_frozen:
                    dx = layer.backward(
                        views[index],
                        saved,
                        dx,
                        targets[index],
                        needs_input_gradient=needs_input_gradient or index > first,
                    )
                else:
                    dx, waits = layer.backward_input(views[index], saved, dx)
                    if pending is not None:
                        pending.append(None if is_frozen else waits)
                    del waits
                if is_whole:
                    targets.pop(index).clear_unwritten()
                del saved  # before the reduction, which may need the memory
            # No earlier group adds to these units' gradients: they can travel now.
            for unit in group.begun:
                parameters.reshard(unit)
                if is_whole and unit.index not in self._without_gradient:
                    reduce(unit)
        activations.clear()  # layers before the first trained one need no gradient
        return dx

    @_in_precision
    def backward_weight(
        self, gradients: GradientStore, pending: list[object], reduce: Reduce
    ) -> None:
        """Run the other half, last layer first; ``reduce`` as in `backward`."""
        unwritten: set[str] = set()
        # Reversed, so that `pop` returns them in the order of backward, last layer first.
        waiting = pending[::-1]
        pending.clear()
        for group in reversed(self._groups):
            targets = self._targets(group, gradients, unwritten) if waiting else {}
            for index in reversed(group.layers):
                if not waiting:
                    break
                # Popped and not indexed, so that each layer's arrays are freed as soon as they are
                # used.
                own = waiting.pop()
                if index not in self._frozen_layers:
                    self._layers[index].layer.backward_weight(own, targets[index])
                targets.pop(index).clear_unwritten()
                del own
            for unit in group.begun:
                if unit.index not in self._without_gradient:
                    reduce(unit)

    def _recompute(self, activations: list[object], parameters: ParameterStore, first: int) -> None:
        """Run the last segment's forward again, and save in its place what its layers save."""
        saved = activations.pop()
        assert isinstance(saved, _SegmentInput)
        layers = saved.layers
        # A segment consists of whole groups, because its range is part of their key.
        groups = [group for group in self._groups if group.segment == layers]
        # Units that later layers use too are unsharded still: backward has not finished with them.
        behind = set[Unit]().union(*(self._uses[i] for i in range(layers.stop, self._range.stop)))
        unsharded = behind & {unit for group in groups for unit in group.units}
        # Backward begins with the units of the last group that has any.
        keep = unsharded | next((set(g.units) for g in reversed(groups) if g.units), set())
        upcoming = [*range(layers[-1] - 1, max(layers.start, first) - 1, -1)]
        upcoming += self._back_from(layers.start, activations, first)
        plan = self._plan(groups, upcoming, unsharded, keep)
        self._forward(plan, parameters, saved.x, saved.context, activations, again=True)

    def _back_from(self, index: int, activations: Sequence[object], first: int) -> Iterator[int]:
        """Yield the layers that backward computes after ``index``, in its order.

        A segment that is computed again yields its layers in forward order, and is the last:
        `_recompute` plans the layers after it.
        """
        for entry in reversed(activations):
            if isinstance(entry, _SegmentInput):
                if entry.layers.stop > first:
                    yield from entry.layers
                return
            index -= 1
            if index < first:
                return
            yield index

    # -------------------------------------------------------------------------------- parameters

    def _open(
        self, group: _Group, parameters: ParameterStore, following: Unit | None
    ) -> dict[int, Parameters]:
        """Return the parameters of a group's layers, and begin to fetch the next unit."""
        # The arrays are always the same: views made in the first pass hold for all.
        if group.views and parameters.is_whole:
            return group.views
        buffers = [parameters.unshard(unit) for unit in group.units]
        if following is not None and buffers:
            # After this group's own units, which its layers wait for.
            parameters.prefetch(following)
        # A unit that is gathered again may be in another of the pooled buffers.
        if not group.views or any(map(operator.is_not, buffers, group.buffers)):
            arrays = group.arrays({u.index: b for u, b in zip(group.units, buffers, strict=True)})
            group.buffers = buffers
            group.views = {
                i: nested_views(self._layers[i].entries, arrays.__getitem__) for i in group.layers
            }
        return group.views

    def _following(self, group: _Group, upcoming: Iterable[int]) -> Unit | None:
        """Return the next unit that this group does not use."""
        units = (unit for index in upcoming for unit in self._uses[index])
        return next((unit for unit in units if unit not in group.units), None)

    def _targets(
        self, group: _Group, gradients: GradientStore, unwritten: set[str]
    ) -> dict[int, GradientTargets]:
        """Return gradients of a group's layers; add names of unwritten ones to ``unwritten``."""
        buffers: dict[int, Array] = {}
        for unit in group.units:
            if unit.index not in self._without_gradient:
                buffers[unit.index], is_empty = gradients.target(unit)
                if is_empty:
                    unwritten.update(self._names_in[unit.index])
        arrays = group.arrays(buffers)
        for index in group.layers:
            if index not in self._frozen_layers:
                for entry in self._layers[index].entries.values():
                    if entry not in arrays:  # in a frozen unit: its gradient is never read
                        xp = gradients.layout.device.namespace
                        arrays[entry] = xp.zeros(entry.size, self._local.dtype)
        return {
            index: GradientTargets(self._layers[index].entries, arrays.__getitem__, unwritten)
            for index in group.layers
        }
