"""The mesh, the stages and the layouts of a job: each is made once for all jobs that have it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from mpishard.contracts import ILayeredModel
from mpishard.models import (
    MeshChoices,
    MeshOptions,
    StageLayout,
    checked_mesh_options,
    mesh_choices,
)
from mpishard.nn import Attention, Layer
from mpishard.planning.backend import PlannedBackend, PlannedMesh
from mpishard.planning.jobs import Job, UnplannableError

_T = TypeVar("_T")

Known = dict[Hashable, Any]
"""Things that jobs of one model have in common, by all that decides them."""


def once(known: Known, key: Hashable, make: Callable[[], _T]) -> _T:
    """Return what was made for this key before, or make it."""
    if key not in known:
        known[key] = make()
    found: _T = known[key]
    return found


def arrangement_of(job: Job) -> tuple[Hashable, ...]:
    """Return what decides the groups and the hosts of each rank."""
    return job.hosts, job.sizes, job.order


def mesh_of(job: Job, rank: int, known: Known) -> PlannedMesh:
    """Return the mesh of a job, as one rank has it."""

    def make() -> PlannedMesh:
        nodes = [each // job.ranks_per_host for each in range(job.ranks)]
        return PlannedMesh(PlannedBackend(rank, nodes), *job.sizes, order=job.order)

    return once(known, ("mesh", arrangement_of(job), rank), make)


def choices_of(model: ILayeredModel, job: Job, rank: int, known: Known) -> MeshChoices:
    """Return the choices by which a rank of a mesh computes the model, as a run makes them.

    Raises
    ------
    UnplannableError
        If the layers cannot be divided in this way.
    """
    mesh, options = mesh_of(job, rank, known), _mesh_options(job)

    def make() -> tuple[tuple[int, int], ...]:
        for info in model.get_all_layer_info():
            _check_heads(info.name, info.layer, job.sizes[1])
        try:
            return mesh_choices(model, mesh, options).stages
        except ValueError as error:
            raise UnplannableError(f"mesh {job.sizes}: {error}") from None

    return MeshChoices(
        mesh,
        options.schedule,
        options.micro_batch_count,
        once(known, ("stages", division_of(job)), make),
        options.sequence_parallel,
        options.checkpoint_config,
    )


def division_of(job: Job) -> tuple[Hashable, ...]:
    """Return what decides the layers of each stage, and the rank that has it."""
    schedule, size = job.used_schedule, job.sizes[0]
    virtual = range(schedule.virtual_stages_per_rank)
    placed = tuple(schedule.global_stage(r, v, size) for r in range(size) for v in virtual)
    return *arrangement_of(job), placed, job.sequence_parallel


def layout_of(model: ILayeredModel, job: Job, choices: MeshChoices, known: Known) -> StageLayout:
    """Return the layers of the rank whose ``choices`` these are."""
    size = job.minimum_parameter_group_size
    return once(
        known,
        ("layout", division_of(job), size, choices.mesh.world.rank),
        functools.partial(StageLayout, model, choices, size),
    )


def _mesh_options(job: Job) -> MeshOptions:
    """Return the options of a mesh model for the job."""
    names = ("micro_batch_count", "schedule", "checkpoint_config", "sequence_parallel")
    given = {name: getattr(job, name) for name in (*names, "data_parallel_strategy")}
    given |= {"partition_strategy": None, "order": job.order}
    return MeshOptions(**checked_mesh_options(given))


def _check_heads(name: str, layer: Layer, tensor: int) -> None:
    """Refuse attention with fewer heads than tensor ranks: each rank would compute all of it."""
    heads = min(layer.heads, layer.kv_heads) if isinstance(layer, Attention) else tensor
    if heads < tensor:
        raise UnplannableError(
            f"a tensor axis of {tensor} ranks does not divide the {heads} heads of {name}; give "
            f"at most {heads}"
        )
    for child, inner in layer.children.items():
        _check_heads(f"{name}.{child}", inner, tensor)
