"""The layout of a model's flat vector over the ranks: dividing and gathering it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np

from mpishard.arrays import Array, copy_into
from mpishard.checkpoint.format.consensus import all_texts
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.layout import ShardLayout
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.pipeline import IPipelinePartitionStrategy, UniformPartitionStrategy
from mpishard.pipeline.layers import stage_ranges
from mpishard.sharding import ParameterEntry, Placement, Slice, Unit, unit_at, whole_box
from mpishard.sharding.regions import Region, blocks_of

Fill = Callable[[int, Array], None]
"""``fill(start, out)`` writes the range of the model's vector that begins at ``start``."""


class ModelVector:
    """The flat vector of a model that every rank computes whole: all ranks divide each unit.

    Parameters
    ----------
    placement : Placement
        Part of the model's vector that is this rank's own flat vector: here all of it.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement

    def deal(self, parameters: ParameterStore, world: CommunicationBackend, fill: Fill) -> None:
        """Distribute the values of world rank 0. Collective. No rank holds two full units."""
        units = parameters.layout.units
        is_root = world.rank == 0
        # One buffer for all units: rank 0 never holds two of them.
        full = np.empty(max(u.length for u in units) if is_root else 0, parameters.layout.dtype)
        for unit in units:
            values = None
            if is_root:
                values = full[: unit.length]
                fill(unit.start, values)
            parameters.fill(unit, values)

    def gather(self, parameters: ParameterStore) -> Array:
        """Return the model's vector, a new array on every rank. Collective."""
        layout = parameters.layout
        full = layout.device.namespace.empty(layout.length, layout.dtype)
        for unit in layout.units:
            parameters.read(unit, full[unit.start : unit.stop])
        return full

    def gather_on(self, parameters: ParameterStore, root: int, *, is_sharded: bool) -> Array | None:
        """As `gather`, on world rank ``root`` alone: each unit's pieces travel to it."""
        layout = parameters.layout
        full = None
        if layout.backend.rank == root:
            full = layout.device.namespace.empty(layout.length, layout.dtype)
        # In mixed precision only the owners have float32 parameters, whatever the policy says.
        is_sharded |= parameters.owners_only
        pieces = layout.pieces(sharded=is_sharded)
        for piece, owned in zip(pieces, parameters.owned(pieces), strict=True):
            values = (
                layout.backend.gather(owned, root=root, subject=layout.subject_of(piece.unit))
                if is_sharded
                else owned
            )
            if full is not None:
                copy_into(full[piece.unit.start : piece.unit.stop], values)
        return full

    def assemble(self, own: Array, layout: StoreLayout) -> Array:
        """Return the model's vector, if ``own`` is each rank's part of it. Collective."""
        return own

    def held_alike(self) -> list[tuple[int, int]]:
        """Return this rank's ranges of the vector that other ranks of one batch hold too."""
        return []


class RangeVector(ModelVector):
    """The vector of a black box on a mesh: each rank owns a range, as one unit.

    Ranks that differ only in replica and data coordinates own the same range. The ranges of those
    that compute one batch, a tensor rank's part of its pipeline rank's part, lie end to end.

    Parameters
    ----------
    entries : sequence of ParameterEntry
        The model's parameters.
    mesh : ProcessMesh
        The ranks.
    strategy : IPipelinePartitionStrategy, optional
        Divides the vector among pipeline stages. Default: evenly, one element more to the first.

    Raises
    ------
    TypeError, ValueError
        As `stage_ranges`.

    Attributes
    ----------
    start, stop : int
        This rank's range.
    dealt : Array or None
        All values that `deal` has sent, until `DividedProgram.take_over` takes them.
    """

    def __init__(
        self,
        entries: Sequence[ParameterEntry],
        mesh: ProcessMesh,
        strategy: IPipelinePartitionStrategy | None = None,
    ) -> None:
        length = entries[-1].stop
        stages = stage_ranges(strategy or UniformPartitionStrategy(), length, mesh.pipeline_size)
        first, size = stages[mesh.pipeline_rank]
        part = ShardLayout(size, mesh.tensor_size)
        self.start = first + part.start(mesh.tensor_rank)
        self.stop = self.start + part.size(mesh.tensor_rank)
        super().__init__(placed_range(entries, self.start, self.stop))
        self.dealt: Array | None = None
        self._mesh = mesh

    def deal(self, parameters: ParameterStore, world: CommunicationBackend, fill: Fill) -> None:
        full = np.empty(self.placement.length, parameters.layout.dtype)
        if world.rank == 0:
            fill(0, full)
        world.broadcast(full, root=0)
        for unit in parameters.layout.units:  # one, or none
            own = full[self.start : self.stop]
            # The ranks of the store have the same range: their first one gives its values.
            parameters.fill(unit, own if parameters.backend.rank == 0 else None)
        self.dealt = full

    def gather(self, parameters: ParameterStore, out: Array | None = None) -> Array:
        with self._own_values(parameters) as own:
            return self._mesh.model.all_gather(own, out=out)

    def gather_on(self, parameters: ParameterStore, root: int, *, is_sharded: bool) -> Array | None:
        pipeline, tensor, data = self._mesh.coordinates_of(root)
        if data != self._mesh.data_rank:
            return None
        with self._own_values(parameters) as own:
            return self._mesh.model.gather(own, root=pipeline * self._mesh.tensor_size + tensor)

    def assemble(self, own: Array, layout: StoreLayout) -> Array:
        return self._mesh.model.all_gather(own)

    @contextmanager
    def _own_values(self, parameters: ParameterStore) -> Iterator[Array]:
        layout = parameters.layout
        # A rank may own nothing, and takes part in the collective nonetheless.
        if not layout.units:
            yield layout.device.namespace.empty(0, layout.dtype)
        for unit in layout.units:
            yield parameters.unshard(unit)
            parameters.reshard(unit)


def placed_range(entries: Sequence[ParameterEntry], start: int, stop: int) -> Placement:
    """The placement of a rank whose own flat vector is the range ``[start, stop)`` of the model's.

    Examples
    --------
    >>> entries = [ParameterEntry("w", (2, 3), 0), ParameterEntry("b", (3,), 6)]
    >>> slices = placed_range(entries, 2, 7).slices
    >>> [(held.entry.name, held.entry.start, held.boxes) for held in slices]
    [('w', 0, (((0, 1), (2, 3)), ((1, 2), (0, 3)))), ('b', 4, (((0, 1),),))]
    """
    slices = []
    for entry in entries:
        low, high = max(start, entry.start), min(stop, entry.stop)
        if low < high:
            own = ParameterEntry(entry.name, (high - low,), low - start, entry.trainable)
            part = Region(entry.name, whole_box(entry.shape), low - entry.start, high - entry.start)
            slices.append(Slice(own, tuple(box for box, _ in blocks_of(part))))
    return Placement(entries, slices)


class MeshVector(ModelVector):
    """The vector of a layered model on a mesh: divided and gathered layer by layer.

    Collective to make: the ranks that compute one batch exchange their placements.

    Parameters
    ----------
    placement : Placement
        This rank's part.
    mesh : ProcessMesh
        The ranks.
    """

    def __init__(self, placement: Placement, mesh: ProcessMesh) -> None:
        super().__init__(placement)
        self._mesh = mesh
        self._placements = _exchange(mesh.model, placement)
        # Layer by layer, so that no rank ever holds more than one layer besides its own part.
        layers = groupby(placement.entries, key=lambda e: e.name.partition(".")[0])
        self._layers = [tuple(entries) for _, entries in layers]

    def deal(self, parameters: ParameterStore, world: CommunicationBackend, fill: Fill) -> None:
        layout = parameters.layout
        # The first rank of a data group gives the others their pieces, when a unit is filled.
        begins = parameters.backend.rank == 0
        buffers: dict[int, Array] = {}
        # A unit may have parts of several layers: it is filled when the last of them has arrived.
        missing = {unit.index: unit.length for unit in layout.units}
        for entries in self._layers:
            start, stop = entries[0].start, entries[-1].stop
            values = np.empty(stop - start, layout.dtype)
            if world.rank == 0:
                fill(start, values)
            world.broadcast(values, root=0)
            moved = [ParameterEntry(e.name, e.shape, e.start - start, e.trainable) for e in entries]
            part = Placement(moved, _slices_in(self.placement, entries))
            for held in part.slices:
                unit, place = _place_of(layout.units, held)
                if begins:
                    if unit.index not in buffers:
                        buffers[unit.index] = np.empty(unit.length, layout.dtype)
                    part.take(values, held.entry.start, buffers[unit.index][place])
                missing[unit.index] -= held.entry.size
                if not missing[unit.index]:
                    parameters.fill(unit, buffers.pop(unit.index, None))

    def gather(self, parameters: ParameterStore) -> Array:
        full = self._collect(self._reader(parameters), parameters.layout, None)
        assert full is not None
        return full

    def gather_on(self, parameters: ParameterStore, root: int, *, is_sharded: bool) -> Array | None:
        return self._collect(self._reader(parameters), parameters.layout, root)

    def assemble(self, own: Array, layout: StoreLayout) -> Array:
        full = self._collect(lambda s: own[s.entry.start : s.entry.stop], layout, None)
        assert full is not None
        return full

    def held_alike(self) -> list[tuple[int, int]]:
        others = [p for rank, p in enumerate(self._placements) if rank != self._mesh.model.rank]
        theirs = {(s.entry.name, box) for p in others for s in p.slices for box in s.boxes}
        return [
            (held.entry.start, held.entry.stop) for held in self.placement.slices
            if any((held.entry.name, box) in theirs for box in held.boxes)
        ]  # fmt: skip

    def _reader(self, parameters: ParameterStore) -> Callable[[Slice], Array]:
        layout = parameters.layout
        last: dict[int, Array] = {}  # a unit is read once, because its slices come in sequence

        def read(held: Slice) -> Array:
            unit, place = _place_of(layout.units, held)
            if unit.index not in last:
                last.clear()
                last[unit.index] = layout.device.namespace.empty(unit.length, layout.dtype)
                parameters.read(unit, last[unit.index])
            return last[unit.index][place]

        return read

    def _collect(
        self, read: Callable[[Slice], Array], layout: StoreLayout, root: int | None
    ) -> Array | None:
        xp = layout.device.namespace
        wants, local_root = True, 0
        if root is not None:
            pipeline, tensor, data = self._mesh.coordinates_of(root)
            wants = self._mesh.data_rank == data
            local_root = pipeline * self._mesh.tensor_size + tensor
        receives = wants and root in (None, self._mesh.world.rank)
        full = xp.empty(self.placement.length, layout.dtype) if receives else None
        for entries in self._layers:
            # Every rank reads, even if it wants no result: a gather needs its whole data group.
            held_here = _slices_in(self.placement, entries)
            own = [read(held) for held in held_here if held.is_counted]
            if not wants:
                continue
            mine = xp.concatenate(own) if own else xp.empty(0, layout.dtype)
            if root is None:
                together = self._mesh.model.all_gather(mine)
            else:
                together = self._mesh.model.gather(mine, root=local_root)
            if full is None:
                continue
            position = 0
            for placement in self._placements:
                for held in _slices_in(placement, entries):
                    if held.is_counted:
                        values = together[position : position + held.entry.size]
                        placement.put(values, held.entry.start, full)
                        position += held.entry.size
        return full


def _slices_in(placement: Placement, entries: Sequence[ParameterEntry]) -> list[Slice]:
    """Return the rank's slices of these parameters, in the model's order."""
    places = {entry.name: place for place, entry in enumerate(entries)}
    found = [held for held in placement.slices if held.entry.name in places]
    return sorted(found, key=lambda held: places[held.entry.name])


def _place_of(units: Sequence[Unit], held: Slice) -> tuple[Unit, slice]:
    """Return the unit of a slice, and the slice's range in it."""
    start, stop = held.entry.start, held.entry.stop
    unit = unit_at(units, start)
    return unit, slice(start - unit.start, stop - unit.start)


def _exchange(group: CommunicationBackend, placement: Placement) -> list[Placement]:
    """Return the placement of each rank of the group, by rank. Collective."""
    mine = [
        [held.entry.name, list(held.entry.shape), held.entry.start, held.boxes, held.is_counted]
        for held in placement.slices
    ]
    return [
        Placement(placement.entries, [
            Slice(
                ParameterEntry(name, tuple(shape), start),
                tuple(tuple((low, high) for low, high in box) for box in boxes),
                is_counted,
            )
            for name, shape, start, boxes, is_counted in json.loads(text)
        ])
        for text in all_texts(group, json.dumps(mine))
    ]  # fmt: skip
