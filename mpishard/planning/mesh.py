"""The fastest way to train a model on given ranks that fits the memory of their hosts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mpishard.contracts import ILayeredModel
from mpishard.planning.jobs import RECOMPUTATION, Job, UnplannableError, planned_model
from mpishard.planning.machine import Machine
from mpishard.planning.memory import DATA_STRATEGIES
from mpishard.planning.rank_memory import memory_of
from mpishard.planning.step import StepPlan, plan_step

_SCHEDULES = ("1f1b", "zb-h1")
"""Schedules that are tried: gpipe is never faster than 1f1b, and needs more memory."""

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_CERTAIN = 1.1  # another number of micro-batches may need a little less than the largest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job that was considered.

    Parameters
    ----------
    step : StepPlan
        Time of its step.
    host_bytes : int or None
        Memory of a host; None if a faster job was chosen before it was planned. If no micro-batch
        count fits, with recomputation or without, it is that of the one that needs least.
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
    """

    chosen: Candidate | None
    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]


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
        Ranks, hosts, batch and rule; its other choices are replaced.
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
    # One batch for all, because a mesh with fewer data ranks would otherwise do less work.
    job = replace(job, batch_size=job.batch_size or 8 * job.ranks)
    for candidate in _jobs(model, job, precisions):
        words = "x".join(map(str, candidate.sizes))
        if words in refused:
            continue
        try:
            steps.append(plan_step(model, candidate, machine))
        except UnplannableError as error:
            # Too many micro-batches for this batch say nothing about the mesh.
            if candidate.micro_batch_count == 1:
                refused[words] = str(error)
    if not steps:
        raise UnplannableError(next(iter(refused.values())))
    steps.sort(key=lambda step: step.seconds)
    found: list[Candidate] = []
    chosen = None
    least: dict[object, int] = {}
    jobs = [step.job for step in steps]
    for step in steps:
        if chosen is None:
            nbytes = _bytes_needed(model, step.job, jobs, least, host_memory)
            found.append(Candidate(step, nbytes, max(0, nbytes - host_memory)))
            chosen = found[-1] if nbytes <= host_memory else None
        else:
            found.append(Candidate(step))
    return MeshPlan(chosen, tuple(found), tuple(refused.items()))


def _bytes_needed(
    model: Any, job: Job, jobs: Sequence[Job], least: dict[object, int], limit: int
) -> int:
    """Return the memory of a host, or that of the job on the same mesh that needs least.

    If that one is far from fitting, the others need not be planned, each of which takes a tenth of
    a second.
    """

    def key(one: Job) -> object:
        return one.precision, one.sizes, one.strategy, one.data_parallel_strategy

    wanted = key(job)
    if wanted not in least:
        like = [one for one in jobs if key(one) == wanted]
        most = max(one.micro_batch_count for one in like)
        least[wanted] = min(
            memory_of(model, one).host.total for one in like if one.micro_batch_count == most
        )
    if least[wanted] > _CERTAIN * limit:
        return least[wanted]
    return memory_of(model, job).host.total


def _jobs(model: Any, job: Job, precisions: Sequence[str | None]) -> Iterator[Job]:
    """Yield all jobs to consider; those without a mesh first."""
    layers = len(model.layers) if isinstance(model, ILayeredModel) else 1
    for precision in precisions:
        own = replace(job, precision=precision, micro_batch_count=1, checkpoint_config=None)
        for strategy in DATA_STRATEGIES:
            yield replace(own, strategy=strategy)
        # Ranks of a tensor axis are neighbours, so that they are on one host.
        own = replace(own, order=("pipeline", "data", "tensor"))
        for pipeline, tensor in _meshes(job, layers):
            mesh = (pipeline, tensor, job.ranks // (pipeline * tensor))
            strategies = DATA_STRATEGIES if mesh[2] > 1 else ("ddp",)
            for again in (None, RECOMPUTATION):
                for strategy in strategies:
                    for count in _MICRO_BATCHES:
                        if pipeline * tensor * count == 1 and again is None:
                            continue  # the strategy itself, above
                        for schedule in _SCHEDULES if pipeline > 1 else (None,):
                            yield replace(
                                own,
                                strategy="hybrid",
                                mesh=mesh,
                                data_parallel_strategy=strategy,
                                micro_batch_count=count,
                                schedule=schedule,
                                checkpoint_config=again,
                            )


def _meshes(job: Job, layers: int) -> Iterator[tuple[int, int]]:
    """Yield pipeline and tensor sizes that divide the ranks; tensor groups stay on a host."""
    for tensor in _divisors(job.ranks_per_host):
        for pipeline in _divisors(job.ranks // tensor):
            if pipeline <= layers:
                yield pipeline, tensor


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
