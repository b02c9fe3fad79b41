"""The memory of one run: bytes of each rank and host, by category."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpishard.base import BFLOAT16
from mpishard.contracts import ILayeredModel
from mpishard.distributed import DistributedStrategy
from mpishard.models import (
    DATA_POLICIES,
    BackwardPass,
    Engine,
    IPlaceableModel,
    LayeredProgram,
    OpaqueProgram,
    PlacedProgram,
    Policy,
    Program,
    build_engine,
    require_precision,
)
from mpishard.observe import MemoryCategory
from mpishard.planning.backend import PlannedMesh
from mpishard.planning.jobs import Job, UnplannableError
from mpishard.planning.layouts import Known, arrangement_of, choices_of, layout_of, mesh_of, once
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
        Buffers in which messages and rounded gradients travel.
    messages : int
        Memory of the groups of a mesh in which ranks of a host exchange private arrays.
    black_box : int
        The parameters that a black box keeps itself, and the gradient that it or a module returns.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    unsharded_units: int = 0
    activations: int | None = 0
    buffers: int = 0
    messages: int = 0
    black_box: int = 0

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
        """What a table calls the run."""
        return self.job.name


def memory_of(model: Any, job: Job, known: Known | None = None) -> MemoryRow:
    """Return the memory of one run of ``model``, which the call does not change.

    Parameters
    ----------
    model : object
        As `planned_model` returns it.
    job : Job
        The run.
    known : dict, optional
        What was found for other jobs of this model; the call adds to it.

    Raises
    ------
    UnplannableError
        If the model cannot be run in this way, with the reason that a run would give.
    """
    job, size = job.with_options(), job.ranks_per_host
    known = {} if known is None else known
    try:
        if not _is_mesh(job):
            use = _memory_of_rank(model, job, 0, known)
            return MemoryRow(job, (use,), sum([use] * size, MemoryUse()))
        mesh = mesh_of(job, 0, known)
        # Tensor rank 0 and data rank 0 have the largest slices and pieces. Stages of equal layers
        # and orders need equal memory.
        found: dict[Hashable, MemoryUse] = {}
        stages = []
        for stage, key in enumerate(_kinds_of_stages(model, job, known)):
            if key not in found:
                found[key] = _memory_of_rank(model, job, mesh.rank_of(stage, 0, 0), known)
            stages.append(found[key])
    except (ValueError, TypeError, NotImplementedError) as error:
        if isinstance(error, UnplannableError):
            raise
        raise UnplannableError(
            f"{job.strategy} {job.sizes} of {job.ranks} ranks: {error}"
        ) from error
    hosts = once(known, ("hosts", arrangement_of(job)), lambda: _stages_of_hosts(job, mesh))
    sums = (sum((stages[stage] for stage in host), MemoryUse()) for host in hosts)
    return MemoryRow(job, tuple(stages), max(sums, key=lambda use: use.total))


def _stages_of_hosts(job: Job, mesh: PlannedMesh) -> set[tuple[int, ...]]:
    """Return the stages that ranks of one host have, of all different hosts."""
    stage_of = [mesh.coordinates_of(rank)[0] for rank in range(job.ranks)]
    size = job.ranks_per_host
    return {tuple(sorted(stage_of[at : at + size])) for at in range(0, job.ranks, size)}


def _kinds_of_stages(model: Any, job: Job, known: Known) -> Iterator[Hashable]:
    """Yield what decides the memory of the ranks of each stage: its layers and its order."""
    if not isinstance(model, ILayeredModel):
        raise UnplannableError(
            f"{type(model).__name__} is a black box, which a mesh does not divide: plan ddp, "
            "zero1, zero2 or fsdp"
        )
    infos = model.get_all_layer_info()
    choices = choices_of(model, job, 0, known)
    count, size = choices.micro_batch_count, job.sizes[0]
    for rank in range(size):
        layers = [infos[slice(*choices.stages[stage])] for stage in choices.stages_of(rank)]
        kinds = [
            # A parameter of another layer, which stages that use it hold, has the other's name.
            (type(info.layer), info.input_shape, info.estimated_flops, info.parameter_count)
            for stage in layers
            for info in stage
        ]
        order = choices.schedule.get_schedule(rank, size, count)
        # The ends have the model's input, its loss, and layers that share parameters.
        ends = rank in (0, size - 1) and rank
        yield tuple(kinds), tuple(map(len, layers)), tuple(order), ends


def _is_mesh(job: Job) -> bool:
    return job.strategy in (
        DistributedStrategy.HYBRID,
        DistributedStrategy.TENSOR_PARALLEL,
        DistributedStrategy.PIPELINE_PARALLEL,
    )


def _memory_of_rank(model: Any, job: Job, rank: int, known: Known) -> MemoryUse:
    config = ShardingConfiguration(
        mesh_of(job, rank, known).world,
        precision=job.precision,
        minimum_parameter_group_size=job.minimum_parameter_group_size,
    )
    if job.precision is not None:
        require_precision(model, job.precision)
    activations = Activations()
    program, policy = _program(model, job, config, activations, known)
    ledger = ReservedLedger()
    engine = build_engine(program, policy, config, type(model).__name__, ledger=ledger)
    loss = PlannedLoss(getattr(model, "default_loss_function", None), activations)
    _train(engine, job, loss)
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
        messages=_bytes_of_messages(program),
        black_box=_bytes_of_a_box(program, job),
    )
    del state
    return use


def _program(
    model: Any, job: Job, config: ShardingConfiguration, activations: Activations, known: Known
) -> tuple[Program, Policy]:
    """Return the program of a rank, and the policy of its strategy."""
    if not _is_mesh(job):
        policy = DATA_POLICIES[job.strategy]
        if isinstance(model, ILayeredModel):
            return PlannedProgram(model, config, activations), policy
        if isinstance(model, IPlaceableModel):
            return PlacedProgram(model, config), policy
        return OpaqueProgram(model, config.communication_backend), policy
    choices = choices_of(model, job, config.communication_backend.rank, known)
    layout = layout_of(model, job, choices, known)
    policy = DATA_POLICIES[job.data_parallel_strategy if job.sizes[2] > 1 else "ddp"]
    return PlannedMeshProgram(model, config, choices, activations, layout), policy


def _bytes_of_messages(program: Program) -> int:
    if not isinstance(program, PlannedMeshProgram):
        return 0
    mesh = program.choices.mesh
    # Stages of a pipeline exchange messages of MPI. The world has its memory before a model.
    groups = {mesh.tensor, mesh.data, mesh.model} - {mesh.world}
    return sum(group.scratch_bytes for group in groups)


def _bytes_of_a_box(program: Program, job: Job) -> int:
    """Return the bytes that a program which is not ours takes beside the ledger."""
    if isinstance(program, LayeredProgram):  # a stage of it may have no parameters
        return 0
    gradient = BFLOAT16.itemsize if job.precision == "bfloat16" else program.dtype.itemsize
    # A module computes with the ledger's parameters. Its gradients live one by one, but PyTorch
    # asks for aligned memory, for which glibc does not use that of the last gradient.
    own = 0 if isinstance(program, PlacedProgram) else program.dtype.itemsize
    return program.units[-1].stop * (own + gradient)


def _train(engine: Engine, job: Job, loss: PlannedLoss) -> None:
    """Run one pass that computes nothing."""
    program, gradients = engine.program, engine.gradients
    this = BackwardPass(is_first=True, is_last=True)
    if isinstance(program, PlannedProgram | PlannedMeshProgram):
        shape = program.input_shape
        dtype = np.dtype(np.int64) if program.takes_integers else program.dtype
        x = ReservedArray((job.samples_of_rank, *shape), dtype)
        engine.run_pass(x, x, gradients, this=this, loss=loss)
        return
    gradients.begin(this)
    for unit in reversed(program.units):
        if unit.index not in program.frozen_units:
            gradients.target(unit)
            gradients.reduce(unit)
    gradients.await_reductions()
