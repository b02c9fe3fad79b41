"""The fastest way to train a model on given ranks that fits the memory of their hosts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from mpishard.contracts import ILayeredModel
from mpishard.planning.advice import changes_of
from mpishard.planning.jobs import (
    DATA_STRATEGIES,
    RECOMPUTATION,
    Job,
    UnplannableError,
    planned_model,
)
from mpishard.planning.machine import Machine
from mpishard.planning.rank_memory import memory_of
from mpishard.planning.step import StepPlan, plan_step

_SCHEDULES = ("1f1b", "zb-h1")
"""Schedules that are tried: gpipe is never faster than 1f1b, and needs more memory."""

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that was considered.

    Parameters
    ----------
    step : StepPlan
        Time of its step.
    host_bytes : int or None
        Memory of a host; None if a faster job was chosen before it was planned. If no number of
        micro-batches fits, it is that of the largest number, which needs least.
    missing : int
        Bytes that a host lacks; 0 if it fits, or was not planned.
    """

    step: StepPlan
    host_bytes: int | None = None
    missing: int = 0


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """The choice among all jobs that were considered.

    Parameters
    ----------
    chosen : Candidate or None
        The fastest that fits; None if none does.
    candidates : tuple of Candidate
        All of them, the fastest first.
    refused : tuple of (str, str)
        Meshes on which the model cannot be computed, and why.
    nearest : tuple of Candidate
        If none fits: of each mesh, strategy and schedule the one that needs least, the nearest
        first.
    advice : tuple of str
        If none fits: changes with which the nearest does.
    """

    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]
    nearest: tuple[Candidate, ...]
    advice: tuple[str, ...]


def plan_mesh(
    model: Callable[..., Any] | object,
    job: Job,
    machine: Machine,
    host_memory: int,
    *,
    precisions: Sequence[str | None] = (None,),
) -> MeshPlan:
    """Choose mesh, strategy, schedule, micro-batches and recomputation. Allocates nothing.

    Parameters
    ----------
    model : model or callable
        A model of layers, or a factory of one.
    job : Job
        Ranks, hosts, batch and rule; the others are chosen.
    machine : Machine
        Speeds.
    host_memory : int
        Bytes that a host has.
    precisions : sequence of str or None
        Precisions that are tried.

    Raises
    ------
    UnplannableError
        If the model has no layers, or no mesh is possible; with the reason of the first one.
    MachineError
        If the machine file lacks a speed that is needed.
    """
    model = planned_model(model)
    steps: list[StepPlan] = []
    refused: dict[str, str] = {}
    stages: dict[Hashable, Any] = {}
    for way in _ways(model, job, precisions):
        mesh = "x".join(map(str, way["mesh"]))
        if mesh in refused:
            continue
        try:
            steps.append(plan_step(model, replace(job, **way), machine, stages))
        except UnplannableError as error:
            # Too many micro-batches for this batch say nothing about the mesh.
            if way["micro_batch_count"] == 1:
                refused[mesh] = str(error)
    if not steps:
        raise UnplannableError(next(iter(refused.values())))
    steps.sort(key=lambda step: step.seconds)
    smallest: dict[Hashable, StepPlan] = {}
    for step in sorted(steps, key=lambda step: -step.job.micro_batch_count):
        smallest.setdefault(_kind(step.job), step)
    least: dict[Hashable, Candidate] = {}
    found: list[Candidate] = []
    for step in steps:
        kind = _kind(step.job)
        if kind not in least:
            least[kind] = _candidate(model, smallest[kind], host_memory)
        # If the smallest micro-batches do not fit, larger ones need not be planned.
        this = least[kind]
        if this.missing == 0 and this.step is not step:
            this = _candidate(model, step, host_memory)
        found.append(replace(this, step=step))
        if this.missing == 0:
            break
    chosen = found[-1] if found[-1].missing == 0 else None
    nearest = sorted(least.values(), key=lambda each: each.missing) if chosen is None else []
    advice = [] if chosen else changes_of(model, nearest[0].step.job, host_memory)
    found += map(Candidate, steps[len(found) :])
    return MeshPlan(chosen, tuple(found), tuple(refused.items()), tuple(nearest), tuple(advice))


def _kind(job: Job) -> Hashable:
    """Return what jobs have in common that differ in the number of micro-batches alone."""
    again = job.checkpoint_config is not None
    return job.precision, job.sizes, job.axis_strategy, job.schedule, again


def _candidate(model: Any, step: StepPlan, limit: int) -> Candidate:
    nbytes = memory_of(model, _shortened(step.job)).host.total
    return Candidate(step, nbytes, max(0, nbytes - limit))


def _shortened(job: Job) -> Job:
    """Return a job that needs the same memory, with fewer micro-batches of the same size.

    1F1B and ZB-H1 hold as many activations at once as the pipeline has ranks, or twice as many.
    """
    count, full = 2 * job.sizes[0] + 1, job.micro_batch_count
    size, rest = divmod(job.samples, job.sizes[2] * full)
    if rest or full <= count:
        return job
    return replace(job, micro_batch_count=count, batch_size=size * job.sizes[2] * count)


def _ways(model: Any, job: Job, precisions: Sequence[str | None]) -> Iterator[dict[str, Any]]:
    """Yield the choices of all jobs to consider; those without a mesh first."""
    layers = len(model.layers) if isinstance(model, ILayeredModel) else 1
    none = {"micro_batch_count": 1, "checkpoint_config": None, "schedule": None}
    for precision in precisions:
        for strategy in DATA_STRATEGIES:
            mesh = (1, 1, job.ranks)
            yield none | {"precision": precision, "strategy": strategy, "mesh": mesh}
        for (pipeline, tensor), again in product(_meshes(job, layers), (None, RECOMPUTATION)):
            mesh = (pipeline, tensor, job.ranks // (pipeline * tensor))
            strategies = DATA_STRATEGIES if mesh[2] > 1 else ("ddp",)
            for strategy, count in product(strategies, _MICRO_BATCHES):
                if pipeline * tensor * count == 1 and again is None:
                    continue  # the strategy itself, above
                schedules: tuple[str | None, ...] = _SCHEDULES
                if pipeline == 1:
                    schedules = ("1f1b",) if count > 1 else (None,)
                for schedule in schedules:
                    yield {
                        "precision": precision,
                        "strategy": "hybrid",
                        "mesh": mesh,
                        "data_parallel_strategy": strategy,
                        "micro_batch_count": count,
                        "schedule": schedule,
                        "checkpoint_config": again,
                    }


def _meshes(job: Job, layers: int) -> Iterator[tuple[int, int]]:
    """Yield pipeline and tensor sizes that divide the ranks; tensor groups stay on a host."""
    for tensor in _divisors(job.ranks_per_host):
        for pipeline in _divisors(job.ranks // tensor):
            if pipeline <= layers:
                yield pipeline, tensor


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
