"""The part of a layered model on one rank of a mesh: its stages' layers, its slices of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpishard.communication import ProcessMesh
from mpishard.contracts import ILayeredModel
from mpishard.models.programs.chain import LocalLayer, LocalLayers
from mpishard.nn import ParameterSpec
from mpishard.pipeline import ActivationCheckpointConfig, IPipelineSchedule
from mpishard.sharding import (
    Box,
    LocalParameter,
    ParameterEntry,
    ParameterTable,
    Placement,
    Unit,
    build_units,
    range_to_write,
    whole_box,
)
from mpishard.tensor import TensorPartition, check_sequence, partition_chain


@dataclass(frozen=True, slots=True)
class MeshChoices:
    """The choices by which a layered model is computed on a mesh.

    Parameters
    ----------
    mesh : ProcessMesh
        The ranks.
    schedule : IPipelineSchedule
        Order of each rank's operations.
    micro_batch_count : int
        M, the number of parts into which a rank's batch is cut along the batch dim.
    stages : tuple of (int, int)
        The layers of each of the model's stages, half open.
    sequence_parallel : bool
        Whether norms and dropout, too, are divided over the tensor axis, along the sequence.
    checkpoint_config : ActivationCheckpointConfig, optional
        Activations that are computed again.
    """

    mesh: ProcessMesh
    schedule: IPipelineSchedule
    micro_batch_count: int
    stages: tuple[tuple[int, int], ...]
    sequence_parallel: bool = False
    checkpoint_config: ActivationCheckpointConfig | None = None

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Return the model's stages that a pipeline rank has, by virtual index."""
        ranks = self.mesh.pipeline_size
        virtual = range(self.schedule.virtual_stages_per_rank)
        return tuple(self.schedule.global_stage(pipeline_rank, v, ranks) for v in virtual)


class StageLayout:
    """The layers that a rank computes, and their parameters: stage after stage in its flat vector.

    Communicates nothing.

    Parameters
    ----------
    model : ILayeredModel
        The model.
    choices : MeshChoices
        Mesh, schedule and stages.
    minimum_unit_size : int
        See `mpishard.sharding.build_units`.

    Attributes
    ----------
    layers : LocalLayers
        The rank's layers, stage after stage.
    ranges : tuple of (int, int)
        Layers in ``layers`` of each of its stages, by virtual index, half open.
    placement : Placement
        Where the rank's own flat vector lies in the model's.
    shared : mapping of str to tuple of int
        Name of each parameter that several stages use -> the pipeline ranks that hold it.
    shared_units : mapping of int to str
        Index of the unit of each such parameter -> the parameter's name.
    splits_output : bool
        Whether the output of the model's last layer is a slice of its last dim.
    log : tuple of str
        Decision of the tensor axis on each layer of this rank's stages, and the reason.
    """

    def __init__(self, model: ILayeredModel, choices: MeshChoices, minimum_unit_size: int) -> None:
        self._table: ParameterTable = model.parameter_table
        self._mesh = mesh = choices.mesh
        self._minimum_unit_size = minimum_unit_size
        self._position = 0
        self._turns = 0  # number of parameters so far that all tensor ranks of the stage hold
        self._layers: list[LocalLayer] = []
        self._entries: dict[str, ParameterEntry] = {}
        self._local_parameters: list[LocalParameter] = []
        self._units: list[Unit] = []
        infos = model.get_all_layer_info()
        names = [info.name for info in infos]
        stages_of_rank = [choices.stages_of(rank) for rank in range(mesh.pipeline_size)]
        own = stages_of_rank[mesh.pipeline_rank]
        self.shared = _shared(self._table, names, choices.stages, stages_of_rank)
        self.splits_output = False
        log: list[str] = []
        ranges: dict[int, tuple[int, int]] = {}
        model_layers = dict(zip(names, model.layers, strict=True))
        if choices.sequence_parallel and mesh.tensor_size > 1:
            check_sequence(model_layers, infos[0].input_shape)
        # The stage with the model's last layer. Stages after it have none, and pass its output on.
        ending = max(stage for stage, (first, stop) in enumerate(choices.stages) if stop > first)
        # The ending stage on every rank: all must know whether the logits are split.
        for stage in sorted({*own, ending}):
            first, stop = choices.stages[stage]
            layers = {name: model_layers[name] for name in names[first:stop]}
            if layers and mesh.tensor_size > 1:
                part = partition_chain(
                    layers,
                    mesh.tensor,
                    model_layers=model_layers,
                    sequence_parallel=choices.sequence_parallel,
                    split_output=stage == ending,
                )
            else:
                part = TensorPartition(layers, {}, splits_output=False, decisions=())
            self.splits_output |= part.splits_output
            if stage in own:
                ranges[stage] = self._add(part)
                log += part.log
        self.log = tuple(log)
        self.ranges = tuple(ranges[stage] for stage in own)
        self.placement = Placement(self._table.entries, self._local_parameters)
        entries = tuple(self._entries.values())
        self.layers = LocalLayers(self._layers, entries, tuple(self._units), model.dtype)
        self.shared_units = {
            unit.index: entry.name
            for unit in self._units
            for entry in unit.entries_of(entries)
            if entry.name in self.shared
        }

    def _add(self, part: TensorPartition) -> tuple[int, int]:
        """Add a stage; return the range of its layers, half open."""
        first = len(self._layers)
        found = [
            (first + i, f"{name}.", dict(layer.walk_parameters(f"{name}.")))
            for i, (name, layer) in enumerate(part.layers.items())
        ]
        # A parameter that other stages use too is a unit of its own, cut alike on all of them.
        for index, _, specs in found:
            for name, spec in specs.items():
                origin = spec.tied_to or name
                if origin in self.shared and origin not in self._entries:
                    start = self._position
                    self._add_parameter(origin, spec, part.boxes.get(name))
                    unit = Unit(len(self._units), start, self._position, index, index)
                    self._units.append(unit)
        sizes = []
        for _, _, specs in found:
            before = self._position
            for name, spec in specs.items():
                if spec.tied_to is None and name not in self._entries:
                    self._add_parameter(name, spec, part.boxes.get(name))
            sizes.append(self._position - before)
        # Shared parameters come first, so that the other layers' units have no gaps.
        start = self._units[-1].stop if self._units else 0
        for unit in build_units(sizes, self._minimum_unit_size) if sum(sizes) else ():
            self._units.append(
                Unit(
                    len(self._units),
                    start + unit.start,
                    start + unit.stop,
                    first + unit.first_layer,
                    first + unit.last_layer,
                )
            )
        for (_, prefix, specs), (name, layer) in zip(found, part.layers.items(), strict=True):
            entries = {
                full.removeprefix(prefix): self._entries[spec.tied_to or full]
                for full, spec in specs.items()
            }
            self._layers.append(LocalLayer(name, layer, entries, layer.is_random))
        return first, len(self._layers)

    def _add_parameter(self, name: str, spec: ParameterSpec, boxes: Sequence[Box] | None) -> None:
        origin: ParameterEntry = self._table[name]
        entry = ParameterEntry(name, tuple(spec.shape), self._position, origin.trainable)
        self._position = entry.stop
        self._entries[name] = entry
        mesh = self._mesh
        stages = self.shared.get(name, (mesh.pipeline_rank,))
        is_counted = mesh.pipeline_rank == stages[0]
        holder, holder_count = stages.index(mesh.pipeline_rank), len(stages)
        # All ranks that hold the parameter must compute the same turn.
        turn = [*self.shared].index(name) if name in self.shared else self._turns
        # Parameters that no rule splits are whole on all tensor ranks: the first counts them.
        if boxes is None:
            boxes = (whole_box(origin.shape),)
            is_counted &= mesh.tensor_rank == 0
            holder = holder * mesh.tensor_size + mesh.tensor_rank
            holder_count *= mesh.tensor_size
            self._turns += name not in self.shared
        written = range_to_write(entry.size, turn, holder, holder_count)
        self._local_parameters.append(LocalParameter(entry, tuple(boxes), is_counted, written))


def _shared(
    table: ParameterTable,
    names: Sequence[str],
    stages: Sequence[tuple[int, int]],
    stages_of_rank: Sequence[Sequence[int]],
) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several stages use: name -> pipeline ranks that hold it."""
    # By stages first: two stages of one rank share a copy, and only ranks exchange.
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
