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
from mpishard.planning.layouts import Known
from mpishard.planning.machine import Machine
from mpishard.planning.rank_memory import memory_of
from mpishard.planning.step import StepPlan, plan_step

_SCHEDULES = ("1f1b", "zb-h1")
"""Schedules that are tried: gpipe is never faster than 1f1b, and needs more memory."""

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)

_NEAREST = 12  # meshes and strategies that are planned to the byte if none fits


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that was considered.

    Parameters
    ----------
    step : StepPlan
        Time of its step.
    host_bytes : int or None
        Memory of a host; None if the job itself was not planned: a faster one was chosen before, or
        a job that needs less does not fit.
    missing : int
        Bytes that a host lacks, at least these if ``host_bytes`` is None; 0 if the job fits, or a
        faster one was chosen.
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
        If none fits: jobs that need least of their mesh and strategy, the nearest first.
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
    known: Known = {}
    for way in _ways(model, job, precisions):
        mesh = "x".join(map(str, way["mesh"]))
        if mesh in refused:
            continue
        try:
            steps.append(plan_step(model, replace(job, **way), machine, known))
        except UnplannableError as error:
            # Too many micro-batches for this batch say nothing about the mesh.
            if way["micro_batch_count"] == 1:
                refused[mesh] = str(error)
    if not steps:
        raise UnplannableError(next(iter(refused.values())))
    steps.sort(key=lambda step: step.seconds)
    found, nearest = _until_one_fits(model, steps, host_memory, known)
    chosen = found[-1] if found[-1].missing == 0 else None
    advice = [] if chosen else changes_of(model, nearest[0].step.job, host_memory)
    found += map(Candidate, steps[len(found) :])
    return MeshPlan(chosen, tuple(found), tuple(refused.items()), tuple(nearest), tuple(advice))


def _until_one_fits(
    model: Any, steps: Sequence[StepPlan], limit: int, known: Known
) -> tuple[list[Candidate], list[Candidate]]:
    """Return candidates up to the first that fits; if none does, the nearest to it, too."""
    # Of each group and kind the one that needs least.
    smallest: dict[Hashable, StepPlan] = {}
    for step in sorted(steps, key=_needs_more):
        smallest.setdefault(_group(step.job), step)
        smallest.setdefault(_kind(step.job), step)
    lacking: dict[Hashable, int] = {}
    least: dict[Hashable, Candidate] = {}
    found = list[Candidate]()
    for step in steps:
        group, kind = _group(step.job), _kind(step.job)
        if group not in lacking:
            lacking[group] = max(0, _floor(model, smallest[group].job, known) - limit)
        if lacking[group]:
            found.append(Candidate(step, missing=lacking[group]))
            continue
        if kind not in least:
            least[kind] = _candidate(model, smallest[kind], limit, known)
        this = least[kind]
        if this.step is not step:
            # If the smallest of a kind does not fit, the others need not be planned.
            this = replace(this, step=step, host_bytes=None)
            if not this.missing:
                this = _candidate(model, step, limit, known)
        found.append(this)
        if not this.missing:
            return found, []
    first = sorted((group for group in lacking if lacking[group]), key=lacking.__getitem__)
    nearest = [_candidate(model, smallest[group], limit, known) for group in first[:_NEAREST]]
    return found, sorted((*least.values(), *nearest), key=lambda each: each.missing)


def _group(job: Job) -> Hashable:
    """Return what jobs of one mesh and strategy have in common."""
    return job.precision, job.sizes, job.axis_strategy


def _kind(job: Job) -> Hashable:
    """Return what jobs of a group have in common of which the last by `_needs_more` needs least.

    The second and the third micro-batch each take a buffer in which gradients are added. So more
    micro-batches than these need less memory only if they are compared with each other.
    """
    return _group(job), job.checkpoint_config is not None, min(job.micro_batch_count, 3)


def _needs_more(step: StepPlan) -> tuple[Any, ...]:
    """Return a key that sorts jobs of a kind by memory; ZB-H1 never needs less than 1F1B."""
    job = step.job
    return -job.micro_batch_count, job.checkpoint_config is None, job.schedule == "zb-h1"


def _floor(model: Any, job: Job, known: Known) -> int:
    """Return bytes of a host below which no job of the group fits: of one smallest micro-batch.

    ``job`` has the most micro-batches of its group. Recomputation needs more if it saves nothing.
    More micro-batches gather one unit less, which is not counted.
    """
    size = -(-job.samples_of_rank // job.micro_batch_count)
    one = replace(job, micro_batch_count=1, batch_size=size * job.sizes[2])
    uses = (
        memory_of(model, replace(one, checkpoint_config=again), known).host
        for again in (RECOMPUTATION, None)
    )
    return min(use.total - use.unsharded_units for use in uses)


def _candidate(model: Any, step: StepPlan, limit: int, known: Known) -> Candidate:
    nbytes = memory_of(model, _shortened(step.job), known).host.total
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
