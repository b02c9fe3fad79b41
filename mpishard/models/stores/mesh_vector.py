"""The model's flat vector, of which each rank of a mesh holds a part."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

from mpishard.arrays import Array, to_host
from mpishard.communication import CommunicationBackend, ProcessMesh
from mpishard.devices import Device
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.sharding import ParameterEntry, Placement, Slice, Unit

__all__ = ["MeshVector"]


class MeshVector:
    """Deals the model's vector to the ranks, and puts it together again, layer by layer.

    Collective to make.

    Parameters
    ----------
    mesh : ProcessMesh
        The ranks.
    placement : Placement
        What this rank holds.
    """

    def __init__(self, mesh: ProcessMesh, placement: Placement) -> None:
        self._mesh = mesh
        self._placement = placement
        self._of_replica = _exchange(mesh.replica, placement)
        layers = groupby(placement.entries, key=lambda e: e.name.partition(".")[0])
        self._layers = [tuple(entries) for _, entries in layers]

    def deal(
        self,
        parameters: ParameterStore,
        world: CommunicationBackend,
        fill: Callable[[int, Array], None],
    ) -> None:
        """Give the ranks the values of world rank 0, one layer at a time. Collective.

        ``fill(start, out)`` writes the range of the model's vector that begins at ``start``.
        """
        layout = parameters.layout
        begins = self._mesh.data_rank == 0
        buffers: dict[int, Array] = {}
        missing = {unit.index: unit.length for unit in layout.units}
        for entries in self._layers:
            start, stop = entries[0].start, entries[-1].stop
            values = np.empty(stop - start, layout.dtype)
            if world.rank == 0:
                fill(start, values)
            world.broadcast(values, root=0)
            part = Placement(_moved(entries, -start), self._slices_of(entries))
            for held in part.slices:
                unit = _unit_of(layout.units, held.entry)
                if begins:
                    if unit.index not in buffers:
                        buffers[unit.index] = np.empty(unit.length, layout.dtype)
                    at = held.entry.start - unit.start
                    target = buffers[unit.index][at : at + held.entry.size]
                    part.take(values, held.entry.start, target)
                missing[unit.index] -= held.entry.size
                if not missing[unit.index]:
                    parameters.fill(unit, buffers.pop(unit.index, None))

    def gather(self, parameters: ParameterStore, device: Device, root: int | None) -> Array | None:
        """The model's vector on every rank, or on world rank ``root`` alone. Collective."""
        units = parameters.layout.units

        def read(held: Slice) -> Array:
            unit = _unit_of(units, held.entry)
            at = held.entry.start - unit.start
            values = parameters.unshard(unit)[at : at + held.entry.size].copy()
            parameters.reshard(unit)
            return values

        return self._collect(read, parameters.layout.dtype, device, root)

    def assemble(self, own: Array, device: Device) -> Array:
        """The model's vector, of what this replica's ranks have as their own. Collective."""
        full = self._collect(
            lambda held: own[held.entry.start : held.entry.stop], own.dtype, device, None
        )
        assert full is not None
        return full

    def _collect(
        self,
        read: Callable[[Slice], Array],
        dtype: np.dtype[Any],
        device: Device,
        root: int | None,
    ) -> Array | None:
        xp = device.namespace
        replica = self._mesh.replica
        wants = True
        local_root = 0
        if root is not None:
            pipeline, tensor, data = self._mesh.coordinates_of(root)
            wants = self._mesh.data_rank == data
            local_root = pipeline * self._mesh.tensor_size + tensor
        receives = wants and root in (None, self._mesh.world.rank)
        full = xp.empty(self._placement.length, dtype) if receives else None
        for entries in self._layers:
            # Every replica unshards, for that takes all of a data group.
            own = [read(held) for held in self._slices_of(entries) if held.is_counted]
            if not wants:
                continue
            mine = xp.concatenate(own) if own else xp.empty(0, dtype)
            if root is None:
                together = replica.all_gather(mine)
            else:
                together = replica.gather(mine, root=local_root)
            if full is None:
                continue
            position = 0
            for placement in self._of_replica:
                for held in _slices_in(placement, entries):
                    if held.is_counted:
                        values = together[position : position + held.entry.size]
                        placement.put(values, held.entry.start, full)
                        position += held.entry.size
        return full

    def _slices_of(self, entries: tuple[ParameterEntry, ...]) -> list[Slice]:
        return list(_slices_in(self._placement, entries))


def _slices_in(placement: Placement, entries: tuple[ParameterEntry, ...]) -> Iterator[Slice]:
    """What a rank holds of these parameters, in the model's order."""
    names = {entry.name: place for place, entry in enumerate(entries)}
    found = [held for held in placement.slices if held.entry.name in names]
    return iter(sorted(found, key=lambda held: names[held.entry.name]))


def _moved(entries: tuple[ParameterEntry, ...], by: int) -> list[ParameterEntry]:
    return [ParameterEntry(e.name, e.shape, e.start + by, e.trainable) for e in entries]


def _unit_of(units: tuple[Unit, ...], entry: ParameterEntry) -> Unit:
    return next(u for u in units if u.start <= entry.start and entry.stop <= u.stop)


def _exchange(replica: CommunicationBackend, placement: Placement) -> list[Placement]:
    """What each rank of the replica holds, by rank. Collective."""
    mine = [
        [held.entry.name, list(held.entry.shape), held.entry.start, held.boxes, held.is_counted]
        for held in placement.slices
    ]
    text = np.frombuffer(json.dumps(mine).encode(), np.uint8)
    lengths = replica.all_gather(np.array([len(text)])).tolist()
    raw = to_host(replica.all_gather(text.copy())).tobytes()
    found = []
    position = 0
    for length in lengths:
        slices = [
            Slice(
                ParameterEntry(name, tuple(shape), start),
                tuple(tuple((low, high) for low, high in box) for box in boxes),
                is_counted,
            )
            for name, shape, start, boxes, is_counted in json.loads(
                raw[position : position + length]
            )
        ]
        found.append(Placement(placement.entries, slices))
        position += length
    return found
