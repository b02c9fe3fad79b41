"""Words about a plan: what fits a host, and otherwise what would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mpishard.contracts import ILayeredModel
from mpishard.planning.jobs import RECOMPUTATION, Job, UnplannableError
from mpishard.planning.rank_memory import MemoryRow, memory_of

_FACTORS = (1, 2, 4, 8, 16, 32, 64)  # times the given hosts


def bytes_text(nbytes: int) -> str:
    """Return bytes as text, in GiB or a smaller unit, with three digits."""
    unit, size = unit_of(nbytes)
    return f"{digits(nbytes / size)} {unit}"


def digits(amount: float) -> str:
    """Return an amount as text, with three digits; without an exponent."""
    if 0 < amount < 0.001:
        return "<0.001"
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"


def unit_of(nbytes: int) -> tuple[str, int]:
    """Return the unit in which such a number is written, and its bytes."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((each for each in units if nbytes >= each[1]), ("B", 1))


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
        yield f"{bytes_text(limit)} per host suffice for {', '.join(fitting)}."
        return
    missing = (f"{row.name} {bytes_text(row.host.total - limit)}" for row in rows)
    yield f"Nothing fits {bytes_text(limit)} per host. Missing per host: {', '.join(missing)}."
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
    row, reason = None, ""
    for factor in _FACTORS:
        try:
            row = memory_of(model, _on(job, factor))
        except UnplannableError as error:
            reason = f"; with more ranks {error}"
            break
        if row.host.total <= limit:
            hosts = f"{row.job.hosts} host{'s' * (row.job.hosts > 1)}"
            return (
                f"{row.name}{change} fits on {hosts} ({row.job.ranks} ranks): "
                f"{bytes_text(row.host.total)} per host."
            )
    assert row is not None, "the job itself is possible"
    most = f"{row.job.hosts} host{'s' * (row.job.hosts > 1)}"
    least = bytes_text(row.host.total)
    return f"{row.name}{change} does not fit on up to {most}, where it needs {least} each{reason}."


def _on(job: Job, factor: int) -> Job:
    """Return the job with ``factor`` times the hosts and the same batch; the data axis grows.

    It has fewer micro-batches if a rank has fewer samples than these.
    """
    more = replace(
        job,
        ranks=job.ranks * factor,
        hosts=job.hosts * factor,
        mesh=(*job.mesh[:2], -1),
        batch_size=job.samples,
    )
    most = max(1, more.samples // more.sizes[2])
    return replace(more, micro_batch_count=min(job.micro_batch_count, most))


def _cost_of_recomputation(model: ILayeredModel) -> float:
    """Return the operations that are done again, as a part of those of a step without them."""
    infos = model.get_all_layer_info()
    segments = RECOMPUTATION.segments(infos, model.dtype.itemsize, keeps_last=True)
    again = sum(infos[index].estimated_flops for segment in segments for index in segment)
    # Backward takes twice the operations of forward.
    return again / (3 * sum(info.estimated_flops for info in infos))
