"""The layout of a model's flat vector over the ranks: dividing and gathering it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby

import numpy as np

from mpishard.base import Array, copy_into
from mpishard.communication import CommunicationBackend, ProcessMesh, all_texts
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.models.stores.store_layout import StoreLayout
from mpishard.sharding import LocalParameter, ParameterEntry, Placement, Unit, unit_at

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

    def distribute(
        self, parameters: ParameterStore, world: CommunicationBackend, fill: Fill
    ) -> None:
        """Distribute the values of world rank 0. Collective. No rank holds two full units."""
        units, begins = parameters.layout.units, parameters.backend.rank == 0
        # Several groups of ranks may hold all parameters, each in a store of its own.
        is_one_store = parameters.backend.world_size == world.world_size
        # One buffer for all units: no rank ever holds two of them.
        length = max(u.length for u in units) if begins or not is_one_store else 0
        # On the host: initial values are drawn there, for every device the same.
        full = np.empty(length, parameters.layout.dtype)
        for unit in units:
            values = full[: unit.length]
            if world.rank == 0:
                fill(unit.start, values)
            if not is_one_store:
                world.broadcast(values, root=0)
            parameters.fill(unit, values if begins else None)

    def gather(self, parameters: ParameterStore) -> Array:
        """Return the model's vector, a new array on every rank. Collective."""
        layout = parameters.layout
        full = layout.device.namespace.empty(layout.length, layout.dtype)
        for unit in layout.units:
            parameters.read(unit, full[unit.start : unit.stop])
        return full

    def gather_on(
        self,
        parameters: ParameterStore,
        world: CommunicationBackend,
        root: int,
        *,
        is_sharded: bool,
    ) -> Array | None:
        """As `gather`, on rank ``root`` of ``world`` alone: each unit's pieces travel to it."""
        layout, is_root = parameters.layout, world.rank == root
        # In mixed precision only the owners have float32 parameters, whatever the policy says.
        is_sharded |= parameters.owners_only
        # Several groups of ranks may hold all parameters: each gathers, and root's result is kept.
        if is_sharded and layout.backend.world_size < world.world_size:
            whole = self.gather(parameters)
            return whole if is_root else None
        full: Array | None = None
        if is_root:
            full = layout.device.namespace.empty(layout.length, layout.dtype)
        pieces = layout.pieces(sharded=is_sharded)
        for piece, owned in zip(pieces, parameters.owned(pieces), strict=True):
            values: Array | None = (
                layout.backend.gather(owned, root=root, subject=layout.subjects[piece.unit.index])
                if is_sharded
                else owned
            )
            if full is not None and values is not None:
                copy_into(full[piece.unit.start : piece.unit.stop], values)
        return full

    def assemble(self, own: Array, layout: StoreLayout) -> Array:
        """Return the model's vector, if ``own`` is each rank's part of it. Collective."""
        return own

    def replicated_ranges(self) -> list[tuple[int, int]]:
        """Return this rank's ranges of the vector that other ranks of one batch hold too."""
        return []


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

    def distribute(
        self, parameters: ParameterStore, world: CommunicationBackend, fill: Fill
    ) -> None:
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
            part = Placement(moved, _local_in(self.placement, entries))
            for local in part.local_parameters:
                unit, in_unit = _unit_of(layout.units, local)
                if begins:
                    if unit.index not in buffers:
                        buffers[unit.index] = np.empty(unit.length, layout.dtype)
                    part.take(values, local.entry.start, buffers[unit.index][in_unit])
                missing[unit.index] -= local.entry.size
                if not missing[unit.index]:
                    parameters.fill(unit, buffers.pop(unit.index, None))

    def gather(self, parameters: ParameterStore) -> Array:
        full = self._collect(self._reader(parameters), parameters.layout, None)
        assert full is not None
        return full

    def gather_on(
        self,
        parameters: ParameterStore,
        world: CommunicationBackend,
        root: int,
        *,
        is_sharded: bool,
    ) -> Array | None:
        return self._collect(self._reader(parameters), parameters.layout, root)

    def assemble(self, own: Array, layout: StoreLayout) -> Array:
        full = self._collect(lambda s: own[s.entry.start : s.entry.stop], layout, None)
        assert full is not None
        return full

    def replicated_ranges(self) -> list[tuple[int, int]]:
        others = [p for rank, p in enumerate(self._placements) if rank != self._mesh.model.rank]
        # By name and box: tensor ranks hold other boxes of the parameters that are split.
        theirs = {
            (s.entry.name, box) for p in others for s in p.local_parameters for box in s.boxes
        }
        return [
            (local.entry.start, local.entry.stop)
            for local in self.placement.local_parameters
            if any((local.entry.name, box) in theirs for box in local.boxes)
        ]

    def _reader(self, parameters: ParameterStore) -> Callable[[LocalParameter], Array]:
        layout = parameters.layout
        last: dict[int, Array] = {}  # a unit is read once, because its parameters come in sequence

        def read(local: LocalParameter) -> Array:
            unit, in_unit = _unit_of(layout.units, local)
            if unit.index not in last:
                last.clear()
                last[unit.index] = layout.device.namespace.empty(unit.length, layout.dtype)
                parameters.read(unit, last[unit.index])
            return last[unit.index][in_unit]

        return read

    def _collect(
        self, read: Callable[[LocalParameter], Array], layout: StoreLayout, root: int | None
    ) -> Array | None:
        xp = layout.device.namespace
        takes_part, local_root = True, 0
        if root is not None:
            pipeline, tensor, data = self._mesh.coordinates_of(root)
            # Other data groups hold the same values, and need not send them.
            takes_part = self._mesh.data_rank == data
            local_root = pipeline * self._mesh.tensor_size + tensor
        receives = takes_part and root in (None, self._mesh.world.rank)
        full = xp.empty(self.placement.length, layout.dtype) if receives else None
        for entries in self._layers:
            # Every rank reads, even if it sends nothing: a gather needs its whole data group.
            found = _local_in(self.placement, entries)
            own = [read(local) for local in found if local.is_counted]
            if not takes_part:
                continue
            # One message for each layer, however many parameters it has.
            mine = xp.concatenate(own) if own else xp.empty(0, layout.dtype)
            everyone: Array | None
            if root is None:
                everyone = self._mesh.model.all_gather(mine, subject=layout.subject)
            else:
                everyone = self._mesh.model.gather(mine, root=local_root, subject=layout.subject)
            if full is None or everyone is None:
                continue
            position = 0
            for placement in self._placements:
                for local in _local_in(placement, entries):
                    if local.is_counted:
                        values = everyone[position : position + local.entry.size]
                        placement.put(values, local.entry.start, full)
                        position += local.entry.size
        return full


def _local_in(placement: Placement, entries: Sequence[ParameterEntry]) -> list[LocalParameter]:
    """Return the rank's local parameters of these entries, in the model's order."""
    order = {entry.name: index for index, entry in enumerate(entries)}
    found = [local for local in placement.local_parameters if local.entry.name in order]
    return sorted(found, key=lambda local: order[local.entry.name])


def _unit_of(units: Sequence[Unit], local: LocalParameter) -> tuple[Unit, slice]:
    """Return the unit of a local parameter, and the parameter's range in it."""
    start, stop = local.entry.start, local.entry.stop
    unit = unit_at(units, start)
    return unit, slice(start - unit.start, stop - unit.start)


def _exchange(group: CommunicationBackend, placement: Placement) -> list[Placement]:
    """Return the placement of each rank of the group, by rank. Collective."""
    mine = [
        [
            local.entry.name,
            list(local.entry.shape),
            local.entry.start,
            local.boxes,
            local.is_counted,
        ]
        for local in placement.local_parameters
    ]
    return [
        Placement(
            placement.entries,
            [
                LocalParameter(
                    ParameterEntry(name, tuple(shape), start),
                    tuple(tuple((low, high) for low, high in box) for box in boxes),
                    is_counted,
                )
                for name, shape, start, boxes, is_counted in json.loads(text)
            ],
        )
        for text in all_texts(group, json.dumps(mine))
    ]
