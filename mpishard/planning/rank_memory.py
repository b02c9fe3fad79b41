"""The memory of one run: bytes of each rank and host, by category."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpishard.contracts import ILayeredModel
from mpishard.distributed import DistributedStrategy
from mpishard.models import (
    DATA_POLICIES,
    BackwardPass,
    Engine,
    IPlaceableModel,
    MeshOptions,
    OpaqueProgram,
    PlacedProgram,
    Policy,
    Program,
    build_engine,
    checked_mesh_options,
    mesh_choices,
    require_precision,
)
from mpishard.observe import MemoryCategory
from mpishard.planning.backend import PlannedBackend, PlannedMesh
from mpishard.planning.jobs import Job, UnplannableError
from mpishard.planning.passes import Activations, PlannedLoss, PlannedMeshProgram, PlannedProgram
from mpishard.planning.reserved import ReservedArray, ReservedLedger
from mpishard.sharding import ShardingConfiguration


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes by category.

    Parameters
    ----------
    parameters : int
        Parameters that are owned or replicated, and rounded copies of them.
    gradients : int
        Reduced gradients, or whole ones if the strategy keeps them.
    optimizer_state : int
        State of the update rule.
    unsharded_units : int
        Gathered parameters of units in use, and gradients of units before they are reduced.
    activations : int or None
        The most bytes of activations, their gradients and messages between stages that live at
        once; None if a black box makes them, so that they are not known.
    buffers : int
        Buffers that the backend keeps for its messages.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    unsharded_units: int = 0
    activations: int | None = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        """The sum; without activations if they are not known."""
        return sum(value or 0 for value in asdict(self).values())

    def __add__(self, other: MemoryUse) -> MemoryUse:
        sums: dict[str, Any] = {
            name: None if None in (nbytes, getattr(other, name)) else nbytes + getattr(other, name)
            for name, nbytes in asdict(self).items()
        }
        return MemoryUse(**sums)


@dataclass(frozen=True, slots=True)
class MemoryRow:
    """The memory of one strategy or mesh.

    Parameters
    ----------
    job : Job
        The run.
    stages : tuple of MemoryUse
        Memory of the rank of each pipeline stage that needs most.
    host : MemoryUse
        Sum over the ranks of the host that needs most.
    """

    job: Job
    stages: tuple[MemoryUse, ...]
    host: MemoryUse

    @property
    def rank(self) -> MemoryUse:
        """Memory of the rank that needs most."""
        return max(self.stages, key=lambda use: use.total)

    @property
    def name(self) -> str:
        """The strategy, and the mesh if it is one: pipeline x tensor x data."""
        job = self.job
        if job.strategy != DistributedStrategy.HYBRID:
            return job.strategy
        if job.sizes[:2] == (1, 1):
            return job.data_parallel_strategy
        mesh = "x".join(map(str, job.sizes))
        return f"{mesh} {job.data_parallel_strategy}" if job.sizes[2] > 1 else mesh


def memory_of(model: Any, job: Job) -> MemoryRow:
    """Return the memory of one run of ``model``, which the call does not change.

    Raises
    ------
    UnplannableError
        If the model cannot be run in this way, with the reason that a run would give.
    """
    pipeline, tensor, data = job.sizes
    ranks = [0]
    mesh_of = None
    if _is_mesh(job):
        mesh_of = PlannedMesh(_backend(job, 0), pipeline, tensor, data)
        # Tensor rank 0 and data rank 0 have the largest slices and pieces.
        ranks = [mesh_of.rank_of(stage, 0, 0) for stage in range(pipeline)]
    try:
        stages = tuple(_memory_of_rank(model, job, rank) for rank in ranks)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UnplannableError(f"{job.strategy} of {job.ranks} ranks: {error}") from error
    stage_of = [0 if mesh_of is None else mesh_of.coordinates_of(r)[0] for r in range(job.ranks)]
    size = job.ranks_per_host
    hosts = {tuple(sorted(stage_of[at : at + size])) for at in range(0, job.ranks, size)}
    sums = (sum((stages[stage] for stage in host), MemoryUse()) for host in hosts)
    return MemoryRow(job, stages, max(sums, key=lambda use: use.total))


def parameter_count(model: Any) -> int:
    """Return the number of parameters of any model that can be planned."""
    if isinstance(model, ILayeredModel):
        return model.parameter_table.length
    if isinstance(model, IPlaceableModel):
        return sum(entry.size for entry in model.parameter_entries)
    return int(model.get_parameters().size)


def _is_mesh(job: Job) -> bool:
    return job.strategy in (
        DistributedStrategy.HYBRID,
        DistributedStrategy.TENSOR_PARALLEL,
        DistributedStrategy.PIPELINE_PARALLEL,
    )


def _backend(job: Job, rank: int) -> PlannedBackend:
    return PlannedBackend(rank, [r // job.ranks_per_host for r in range(job.ranks)])


def _memory_of_rank(model: Any, job: Job, rank: int) -> MemoryUse:
    backend = _backend(job, rank)
    config = ShardingConfiguration(
        backend,
        precision=job.precision,
        minimum_parameter_group_size=job.minimum_parameter_group_size,
    )
    if job.precision is not None:
        require_precision(model, job.precision)
    activations = Activations()
    program, policy = _program(model, job, config, activations)
    ledger = ReservedLedger()
    engine = build_engine(program, policy, config, type(model).__name__, ledger=ledger)
    _train(engine, job, activations)
    frozen = job.optimizer.checked_options.untrained(program.vector.placement.entries)
    if frozen != program.frozen:
        engine.freeze(frozen)
    state = [engine.allocate_state(engine.pieces.updated) for _ in job.optimizer.needed_state()]
    peak = ledger.peak
    use = MemoryUse(
        parameters=peak(MemoryCategory.PARAMETERS),
        gradients=peak(MemoryCategory.GRADIENTS),
        optimizer_state=peak(MemoryCategory.OPTIMIZER_STATE),
        unsharded_units=peak(MemoryCategory.GATHERED) + peak(MemoryCategory.FULL_GRADIENTS),
        activations=activations.peak if isinstance(model, ILayeredModel) else None,
        buffers=peak(MemoryCategory.SCRATCH),
    )
    del state
    return use


def _program(
    model: Any, job: Job, config: ShardingConfiguration, activations: Activations
) -> tuple[Program, Policy]:
    """Return the program of a rank, and the policy of its strategy."""
    if not _is_mesh(job):
        policy = DATA_POLICIES[job.strategy]
        if isinstance(model, ILayeredModel):
            return PlannedProgram(model, config, activations), policy
        if isinstance(model, IPlaceableModel):
            return PlacedProgram(model, config), policy
        return OpaqueProgram(model, config.communication_backend), policy
    if not isinstance(model, ILayeredModel):
        raise UnplannableError(
            f"{type(model).__name__} is a black box, which a mesh does not divide: plan ddp, "
            "zero1, zero2 or fsdp"
        )
    pipeline, tensor, data = job.sizes
    mesh = PlannedMesh(config.communication_backend, pipeline, tensor, data, order=job.order)
    names = ("micro_batch_count", "schedule", "checkpoint_config", "sequence_parallel")
    given = {name: getattr(job, name) for name in (*names, "data_parallel_strategy")}
    options = MeshOptions(
        **checked_mesh_options({**given, "partition_strategy": None, "order": job.order})
    )
    policy = DATA_POLICIES[options.data_parallel_strategy if data > 1 else "ddp"]
    choices = mesh_choices(model, mesh, options)
    return PlannedMeshProgram(model, config, choices, activations), policy


def _train(engine: Engine, job: Job, activations: Activations) -> None:
    """Run one pass that computes nothing."""
    program, gradients = engine.program, engine.gradients
    this = BackwardPass(is_first=True, is_last=True)
    if isinstance(program, PlannedProgram | PlannedMeshProgram):
        shape = program.input_shape
        dtype = np.dtype(np.int64) if program.takes_integers else program.dtype
        x = ReservedArray((job.samples_of_rank, *shape), dtype)
        engine.run_pass(x, x, gradients, this=this, loss=PlannedLoss(activations))
        return
    gradients.begin(this)
    for unit in reversed(program.units):
        if unit.index not in program.frozen_units:
            gradients.target(unit)
            gradients.reduce(unit)
    gradients.await_reductions()
