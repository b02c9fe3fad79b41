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
    yield from changes_of(model, min(reversed(rows), key=lambda row: row.host.total).job, limit)


def changes_of(model: Any, job: Job, limit: int) -> Iterator[str]:
    """Yield changes of a job with which it fits: more hosts, recomputation, fewer samples."""
    yield _on_more_hosts(model, job, limit, "")
    if not isinstance(model, ILayeredModel):
        return
    if job.checkpoint_config is None:
        again = replace(job, checkpoint_config=RECOMPUTATION).with_options()
        cost = f", which costs {_cost_of_recomputation(model):.0%} more computing,"
        yield _on_more_hosts(model, again, limit, cost)
    least = job.sizes[2] * job.micro_batch_count  # a micro-batch has a sample at least
    if job.samples > least:
        fewer = replace(job, batch_size=least)
        yield _on_more_hosts(model, fewer, limit, f" with {least} samples a step")


def _on_more_hosts(model: Any, job: Job, limit: int, change: str) -> str:
    """Return the fewest hosts, with as many ranks each, on which the job fits."""
    row = None
    for factor in _FACTORS:
        try:
            row = memory_of(model, _on(job, factor))
        except UnplannableError:  # the batch is too small for so many ranks, for one
            break
        if row.host.total <= limit:
            hosts = f"{row.job.hosts} host{'s' * (row.job.hosts > 1)}"
            return (
                f"{row.name}{change} fits on {hosts} ({row.job.ranks} ranks): "
                f"{gibibytes(row.host.total)} per host."
            )
    assert row is not None, "the job itself is possible"
    most = f"{row.job.hosts} host{'s' * (row.job.hosts > 1)}"
    least = gibibytes(row.host.total)
    return f"{row.name}{change} does not fit on up to {most}, where it needs {least} each."


def _on(job: Job, factor: int) -> Job:
    """Return the job with ``factor`` times the hosts and the same batch; the data axis grows."""
    return replace(
        job,
        ranks=job.ranks * factor,
        hosts=job.hosts * factor,
        mesh=(*job.mesh[:2], -1),
        batch_size=job.samples,
    )


def _cost_of_recomputation(model: ILayeredModel) -> float:
    """Return the operations that are done again, as a part of those of a step without them."""
    infos = model.get_all_layer_info()
    segments = RECOMPUTATION.segments(infos, model.dtype.itemsize, keeps_last=True)
    again = sum(infos[index].estimated_flops for segment in segments for index in segment)
    # Backward takes twice the operations of forward.
    return again / (3 * sum(info.estimated_flops for info in infos))
