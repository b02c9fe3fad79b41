"""The part of a layered model on one rank of a mesh: its stages' layers, its slices of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpishard.communication import ProcessMesh
from mpishard.contracts import ILayeredModel
from mpishard.models.programs.chain import HeldLayer, HeldLayers
from mpishard.sharding import (
    ParameterEntry,
    Placement,
    Slice,
    Unit,
    build_units,
    whole_box,
    written_part,
)
from mpishard.tensor import TensorPartition, check_sequence, partition_chain


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The layers that a rank computes.

    Parameters
    ----------
    held : HeldLayers
        The rank's layers, stage after stage.
    ranges : tuple of (int, int)
        Layers in ``held`` of each of its stages, by virtual index, half open.
    placement : Placement
        Places of the rank's own flat vector in the model's.
    shared : mapping of str to tuple of int
        Name of each parameter that several stages use -> the pipeline ranks that hold it.
    splits_output : bool
        Whether the output of the model's last layer is a slice of its last dim.
    log : tuple of str
        Decision of the tensor axis on each layer of this rank's stages, and the reason.
    """

    held: HeldLayers
    ranges: tuple[tuple[int, int], ...]
    placement: Placement
    shared: dict[str, tuple[int, ...]]
    splits_output: bool
    log: tuple[str, ...]

    def shared_units(self) -> dict[int, str]:
        """Return the units of parameters that several stages use: index -> parameter's name."""
        return {
            unit.index: entry.name
            for unit in self.held.units
            for entry in unit.entries_of(self.held.entries)
            if entry.name in self.shared
        }


def lay_out(
    model: ILayeredModel,
    mesh: ProcessMesh,
    stages: Sequence[tuple[int, int]],
    stages_of_rank: Sequence[Sequence[int]],
    minimum_unit_size: int,
    *,
    sequence_parallel: bool,
) -> StageLayout:
    """Assign layers to this rank. Communicate nothing.

    Parameters
    ----------
    model : ILayeredModel
        The model.
    mesh : ProcessMesh
        The ranks.
    stages : sequence of (int, int)
        The layers of each of the model's stages, half open.
    stages_of_rank : sequence of sequence of int
        The model's stages that each pipeline rank has, by virtual index.
    minimum_unit_size : int
        See `mpishard.sharding.build_units`.
    sequence_parallel : bool
        Whether activations between the split layers are divided along the sequence.
    """
    infos = model.get_all_layer_info()
    table = model.parameter_table
    names = [info.name for info in infos]
    own = stages_of_rank[mesh.pipeline_rank]
    shared = _shared(table, names, stages, stages_of_rank)
    builder = _Builder(table, shared, mesh, minimum_unit_size)
    log: list[str] = []
    splits_output = False
    ranges: dict[int, tuple[int, int]] = {}
    model_layers = dict(zip(names, model.layers, strict=True))
    if sequence_parallel and mesh.tensor_size > 1:
        check_sequence(model_layers, infos[0].input_shape)
    # The stage with the model's last layer. Stages after it have none, and pass its output on.
    ending = max(stage for stage, (first, stop) in enumerate(stages) if stop > first)
    for stage in sorted({*own, ending}):
        first, stop = stages[stage]
        layers = {name: model_layers[name] for name in names[first:stop]}
        if layers and mesh.tensor_size > 1:
            part = partition_chain(
                layers, mesh.tensor, model_layers=model_layers,
                sequence_parallel=sequence_parallel, split_output=stage == ending,
            )  # fmt: skip
        else:
            part = TensorPartition(layers, {}, splits_output=False, decisions=())
        splits_output |= part.splits_output
        if stage in own:
            ranges[stage] = builder.add(part)
            log += part.log
    held = HeldLayers(
        layers=builder.layers,
        entries=tuple(builder.entries.values()),
        units=tuple(builder.units),
        dtype=model.dtype,
    )
    return StageLayout(
        held,
        tuple(ranges[stage] for stage in own),
        Placement(table.entries, builder.slices),
        shared,
        splits_output,
        tuple(log),
    )


def _shared(
    table: Any,
    names: Sequence[str],
    stages: Sequence[tuple[int, int]],
    stages_of_rank: Sequence[Sequence[int]],
) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages use: name -> pipeline ranks that hold it."""
    users: dict[str, set[int]] = {}
    for stage, (first, stop) in enumerate(stages):
        for name in names[first:stop]:
            for entry in table.layer_entries(name).values():
                users.setdefault(entry.name, set()).add(stage)
    return {
        entry.name: tuple(
            rank for rank, own in enumerate(stages_of_rank) if users[entry.name] & set(own)
        )
        for entry in table.entries
        if len(users.get(entry.name, ())) > 1
    }


class _Builder:
    """Builder of a rank's flat vector: its stages end to end, cut into units."""

    def __init__(
        self,
        table: Any,
        shared: dict[str, tuple[int, ...]],
        mesh: ProcessMesh,
        minimum_unit_size: int,
    ) -> None:
        self._table = table
        self._shared = shared
        self._mesh = mesh
        self._minimum_unit_size = minimum_unit_size
        self._position = 0
        self._turns = 0  # number of parameters so far that all tensor ranks of the stage hold
        self.layers: list[HeldLayer] = []
        self.entries: dict[str, ParameterEntry] = {}
        self.slices: list[Slice] = []
        self.units: list[Unit] = []

    def add(self, part: TensorPartition) -> tuple[int, int]:
        """Add a stage; return the range of its layers, half open."""
        first = len(self.layers)
        found = [
            (first + i, f"{name}.", dict(layer.walk_parameters(f"{name}.")))
            for i, (name, layer) in enumerate(part.layers.items())
        ]
        # A parameter that other stages use too is a unit of its own, cut alike on all of them.
        for index, _, specs in found:
            for name, spec in specs.items():
                origin = spec.tied_to or name
                if origin in self._shared and origin not in self.entries:
                    start = self._position
                    self._hold(origin, spec, part.boxes.get(name))
                    unit = Unit(len(self.units), start, self._position, index, index)
                    self.units.append(unit)
        sizes = []
        for _, _, specs in found:
            before = self._position
            for name, spec in specs.items():
                if spec.tied_to is None and name not in self.entries:
                    self._hold(name, spec, part.boxes.get(name))
            sizes.append(self._position - before)
        start = self.units[-1].stop if self.units else 0
        for unit in build_units(sizes, self._minimum_unit_size) if sum(sizes) else ():
            self.units.append(
                Unit(len(self.units), start + unit.start, start + unit.stop,
                     first + unit.first_layer, first + unit.last_layer)
            )  # fmt: skip
        for (_, prefix, specs), (name, layer) in zip(found, part.layers.items(), strict=True):
            entries = {
                full.removeprefix(prefix): self.entries[spec.tied_to or full]
                for full, spec in specs.items()
            }
            self.layers.append(HeldLayer(name, layer, entries, layer.is_random))
        return first, len(self.layers)

    def _hold(self, name: str, spec: Any, boxes: Any) -> None:
        origin: ParameterEntry = self._table[name]
        entry = ParameterEntry(name, tuple(spec.shape), self._position, origin.trainable)
        self._position = entry.stop
        self.entries[name] = entry
        mesh = self._mesh
        stages = self._shared.get(name, (mesh.pipeline_rank,))
        is_counted = mesh.pipeline_rank == stages[0]
        holder, holder_count = stages.index(mesh.pipeline_rank), len(stages)
        # All ranks that hold the parameter must compute the same turn.
        turn = [*self._shared].index(name) if name in self._shared else self._turns
        if boxes is None:
            boxes = (whole_box(origin.shape),)
            is_counted &= mesh.tensor_rank == 0
            holder = holder * mesh.tensor_size + mesh.tensor_rank
            holder_count *= mesh.tensor_size
            self._turns += name not in self._shared
        written = written_part(entry.size, turn, holder, holder_count)
        self.slices.append(Slice(entry, tuple(boxes), is_counted, written))
