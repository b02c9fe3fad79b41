"""The options of a mesh, checked alike for models and optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpishard.base import as_count, as_flag, as_integer
from mpishard.communication import ProcessMesh, mesh_order, mesh_sizes
from mpishard.contracts import ILayeredModel
from mpishard.models.engine.update import Policy
from mpishard.models.programs.stage_layout import MeshChoices
from mpishard.models.strategies.data_parallel import DDPModel, FSDPModel, ZeRO1Model, ZeRO2Model
from mpishard.pipeline import (
    ActivationCheckpointConfig,
    Costs,
    GPipeSchedule,
    IPipelinePartitionStrategy,
    IPipelineSchedule,
    partition_layers,
    schedule_by_name,
)
from mpishard.sharding import ShardingConfiguration, refuse_several_replicas
from mpishard.tensor import SplitKind, check_sequence, partition_chain

Partition = IPipelinePartitionStrategy | Costs
"""A strategy that assigns layers to stages, or the layers' costs."""

DATA_POLICIES: dict[str, Policy] = {
    "ddp": DDPModel.policy,
    "zero1": ZeRO1Model.policy,
    "zero2": ZeRO2Model.policy,
    "zero3": FSDPModel.policy,
    "fsdp": FSDPModel.policy,
}


@dataclass(frozen=True, slots=True)
class MeshOptions:
    """The options of a mesh model besides the sizes, checked: see `HybridShardedModel`."""

    micro_batch_count: int
    schedule: IPipelineSchedule
    partition_strategy: Partition | None
    checkpoint_config: ActivationCheckpointConfig | None
    sequence_parallel: bool
    data_parallel_strategy: str
    order: tuple[str, ...]


def checked_mesh_options(given: Mapping[str, object]) -> dict[str, Any]:
    """Return the options as a mesh model keeps them. Communicates nothing.

    Parameters
    ----------
    given : mapping of str to object
        Keyword arguments of `HybridShardedModel` besides the sizes, all or some.

    Returns
    -------
    dict of str to object
        The same names; a schedule's name is replaced by the schedule, and None by the default one.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, for a value that no mesh model takes.
    """
    return {name: _checked(name, value) for name, value in given.items()}


def axis_sizes(
    config: ShardingConfiguration, pipeline: int, tensor: int, data: int
) -> tuple[int, int, int]:
    """Return the sizes of a replica's axes; ``data`` may be -1, for the rest of the ranks.

    Raises
    ------
    TypeError
        For a size that is not an integer.
    ValueError
        If they do not make up the world, or the ``replica_size`` of the configuration.
    """
    for name, size in (("pipeline_parallel_size", pipeline), ("tensor_parallel_size", tensor)):
        as_count(name, size)
    if as_integer("data_parallel_size", data) < 1 and data != -1:
        raise ValueError(
            f"data_parallel_size must be 1 or more, or -1 for what is left, got {data}"
        )
    world_size, replicas = config.communication_backend.world_size, replica_count(config)
    # The strategies "tensor" and "pipeline" have such an axis.
    if replicas > 1 and world_size in (pipeline, tensor):
        refuse_several_replicas(
            replicas,
            f"a pipeline or tensor axis of {world_size} ranks",
            f"use strategy='hybrid' with axes that make up {config.replica_size} ranks",
        )
    return mesh_sizes(world_size, pipeline, tensor, data, replicas)


def replica_count(config: ShardingConfiguration) -> int:
    """Return the number of replicas that are trained apart; 1 if all ranks are one replica."""
    world_size = config.communication_backend.world_size
    return world_size // (config.replica_size or world_size)


def _checked(name: str, given: Any) -> Any:
    match name:
        case "micro_batch_count":
            return as_count(name, given)
        case "sequence_parallel":
            return as_flag(name, given)
        case "order":
            return mesh_order(given)
        case "schedule":
            return _schedule(given)
        case "partition_strategy":
            return _partition_strategy(given)
        case "checkpoint_config":
            if not isinstance(given, ActivationCheckpointConfig | None):
                raise TypeError(f"{name} must be an ActivationCheckpointConfig{_but(given)}")
            return given
        case "data_parallel_strategy":
            # "ZeRO-1" is how papers spell it.
            known = str(given).lower().replace("-", "")
            if known not in DATA_POLICIES:
                raise ValueError(f"unknown {name} {given!r}; there are {', '.join(DATA_POLICIES)}")
            return known
    raise KeyError(name)


def _schedule(given: object) -> IPipelineSchedule:
    if given is None:
        return GPipeSchedule()
    if isinstance(given, str):
        return schedule_by_name(given)
    if not isinstance(given, IPipelineSchedule):
        raise TypeError(f"schedule must be an IPipelineSchedule or its name{_but(given)}")
    return given


def _partition_strategy(given: Any) -> Partition | None:
    if given is None or isinstance(given, IPipelinePartitionStrategy):
        return given
    # A class can be called and a text is a sequence, but neither gives costs of layers.
    is_class_or_name = isinstance(given, type | str | bytes)
    is_costs = isinstance(given, Sequence) or (isinstance(given, np.ndarray) and given.ndim == 1)
    if is_class_or_name or not (callable(given) or is_costs):
        what = f", got an array of shape {given.shape}" if isinstance(given, np.ndarray) else None
        raise TypeError(
            "partition_strategy must be an IPipelinePartitionStrategy, a function of a "
            f"LayerInfo, or one cost for each layer{what or _but(given)}"
        )
    costs: Costs = given
    return costs


def _but(given: object) -> str:
    """Return the end of an error message: the value that was given instead."""
    if isinstance(given, type):
        return f": pass {given.__name__}(), not the class"
    return f", got {given!r}"


def mesh_choices(model: ILayeredModel, mesh: ProcessMesh, options: MeshOptions) -> MeshChoices:
    """Return the choices by which ``model`` is computed on ``mesh``. Collective.

    Raises
    ------
    ValueError
        If the layers cannot be divided in this way.
    """
    infos = model.get_all_layer_info()
    if options.sequence_parallel and mesh.tensor_size > 1:
        layers = {info.name: layer for info, layer in zip(infos, model.layers, strict=True)}
        check_sequence(layers, infos[0].input_shape)
    count = mesh.pipeline_size * options.schedule.virtual_stages_per_rank

    def can_cut(after: int) -> bool:
        """True if shapes fit, and values of the model's dtype travel between the stages."""
        takes_integers = getattr(model.layers[after + 1], "takes_integers", False)
        return model.validate_partition_point(after) and not takes_integers

    given = options.partition_strategy
    stages = partition_layers(
        infos,
        count,
        given if isinstance(given, IPipelinePartitionStrategy) else None,
        costs=None if isinstance(given, IPipelinePartitionStrategy) else given,
        can_cut=can_cut,
    )
    # Rank 0 decides, because costs may be times that its clock has measured.
    agreed = mesh.world.broadcast(np.array(stages, np.int64).reshape(count, 2))
    return MeshChoices(
        mesh,
        options.schedule,
        options.micro_batch_count,
        tuple((int(first), int(stop)) for first, stop in agreed),
        options.sequence_parallel,
        options.checkpoint_config,
    )


def idle_axes(model: ILayeredModel, choices: MeshChoices) -> list[str]:
    """Describe the axes on which ranks wait or repeat others' work. Communicates nothing.

    Parameters
    ----------
    model : ILayeredModel
        The model.
    choices : MeshChoices
        Mesh, schedule and stages.

    Returns
    -------
    list of str
        A clause for each such axis; empty if there is none.
    """
    mesh = choices.mesh
    found = []
    if mesh.pipeline_size > 1 and choices.micro_batch_count == 1:
        bubble = choices.schedule.estimate_bubble_fraction(mesh.pipeline_size, 1)
        found.append(
            f"with micro_batch_count 1 ranks of the pipeline compute one after the other: bubble "
            f"{100 * bubble:.0f} %; give micro_batch_count, about {4 * mesh.pipeline_size}"
        )
    count, layers = len(choices.stages), len(model.layers)
    empty = sum(first == stop for first, stop in choices.stages)
    if empty:
        uncut = "" if layers < count else ", and cannot be cut behind each of them"
        found.append(
            f"{empty} of {count} stages {'has' if empty == 1 else 'have'} no layers: the model "
            f"has {layers}{uncut}"
        )
    if mesh.tensor_size > 1:
        names = [info.name for info in model.get_all_layer_info()]
        layers_by_name = dict(zip(names, model.layers, strict=True))
        # Stage by stage, as long as nothing is split: one split layer keeps the axis busy.
        decisions = (
            decision
            for first, stop in choices.stages
            if first < stop
            for decision in partition_chain(
                {name: layers_by_name[name] for name in names[first:stop]},
                mesh.tensor,
                model_layers=layers_by_name,
                sequence_parallel=choices.sequence_parallel,
                split_output=stop == len(names),
            ).decisions
        )
        reasons = []
        for decision in decisions:
            if decision.kind is not SplitKind.WHOLE:
                break
            reasons.append(str(decision))
        else:
            more = f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
            found.append(
                f"every layer is whole on every rank of the tensor axis: "
                f"{'; '.join(reasons[:3])}{more}"
            )
    return found
