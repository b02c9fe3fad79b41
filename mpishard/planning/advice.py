"""Words about a plan: what fits a host, and otherwise what would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mpishard.contracts import ILayeredModel
from mpishard.planning.jobs import RECOMPUTATION, Job, UnplannableError
from mpishard.planning.rank_memory import MemoryRow, memory_of

_FACTORS = (1, 2, 4, 8, 16, 32, 64)  # times the given hosts


def gibibytes(nbytes: int) -> str:
    """Return bytes in GiB as text, with three digits."""
    return f"{nbytes / 2**30:.3g} GiB"


def advice_on(model: Any, rows: Sequence[MemoryRow], limit: int) -> Iterator[str]:
    """Yield sentences: the rows that fit ``limit`` bytes per host, or changes with which one does.

    Parameters
    ----------
    model : object
        The model.
    rows : sequence of MemoryRow
        Its rows.
    limit : int
        Bytes that a host has.
    """
    if fitting := [row.name for row in rows if row.host.total <= limit]:
        yield f"{gibibytes(limit)} per host suffice for {', '.join(fitting)}."
        return
    missing = (f"{row.name} {gibibytes(row.host.total - limit)}" for row in rows)
    yield f"Nothing fits {gibibytes(limit)} per host. Missing per host: {', '.join(missing)}."
    # Of equal rows the last, which shards most and gains most from more hosts.
    job = min(reversed(rows), key=lambda row: row.host.total).job
    yield from _on_more_hosts(model, job, limit, "")
    if not isinstance(model, ILayeredModel):
        return
    if job.checkpoint_config is None:
        again = replace(job, checkpoint_config=RECOMPUTATION).with_options()
        cost = (
            f" with recomputation, which costs {_cost_of_recomputation(model):.0%} more computing,"
        )
        yield from _on_more_hosts(model, again, limit, cost)
    if job.samples_of_rank > 1:
        one = replace(job, batch_size=job.sizes[2])
        yield from _on_more_hosts(model, one, limit, " with 1 sample per rank and step")


def _on_more_hosts(model: Any, job: Job, limit: int, change: str) -> Iterator[str]:
    """Yield the fewest hosts, with as many ranks each, on which the job fits."""
    most = _on(model, job, _FACTORS[-1])
    if most is None:
        return
    if most.host.total > limit:
        yield f"{most.name}{change} does not fit on up to {most.job.hosts} hosts."
        return
    fewer = (_on(model, job, factor) for factor in _FACTORS[:-1])
    row = next((each for each in fewer if each is not None and each.host.total <= limit), most)
    hosts = f"{row.job.hosts} host{'s' * (row.job.hosts > 1)}"
    yield (
        f"{row.name}{change} fits on {hosts} ({row.job.ranks} ranks): "
        f"{gibibytes(row.host.total)} per host."
    )


def _on(model: Any, job: Job, factor: int) -> MemoryRow | None:
    """Return the row with ``factor`` times the hosts; None if the run is not possible there."""
    mesh = (*job.mesh[:2], -1)
    try:
        more = replace(job, ranks=job.ranks * factor, hosts=job.hosts * factor, mesh=mesh)
        return memory_of(model, more)
    except UnplannableError:
        return None


def _cost_of_recomputation(model: ILayeredModel) -> float:
    """Return the operations that are done again, as a part of those of a step without them."""
    infos = model.get_all_layer_info()
    segments = RECOMPUTATION.segments(infos, model.dtype.itemsize, keeps_last=True)
    again = sum(infos[index].estimated_flops for segment in segments for index in segment)
    # Backward takes twice the operations of forward.
    return again / (3 * sum(info.estimated_flops for info in infos))
