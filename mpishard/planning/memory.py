"""The memory of a model on a number of ranks, for each strategy and mesh."""

from __future__ import annotations

import contextlib
import functools
import html
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from mpishard.contracts import ILayeredModel
from mpishard.planning.advice import advice_on, bytes_text, digits, unit_of
from mpishard.planning.jobs import (
    DATA_STRATEGIES,
    UnplannableError,
    identity_of,
    jobs_of,
    planned_model,
    title_of,
)
from mpishard.planning.rank_memory import MemoryRow, MemoryUse, memory_of


@dataclass(frozen=True, slots=True, repr=False)
class MemoryPlan:
    """The memory of a model on a number of ranks, for each strategy and mesh.

    Parameters
    ----------
    model : str
        Class of the model.
    parameter_count : int
        Number of its parameters.
    rows : tuple of MemoryRow
        One for each strategy and mesh.
    host_memory : int or None
        Bytes that a host has for the run; None if no limit was given.
    advice : tuple of str
        Sentences: what fits, or what would.
    """

    model: str
    parameter_count: int
    rows: tuple[MemoryRow, ...]
    host_memory: int | None
    advice: tuple[str, ...]

    def __repr__(self) -> str:
        job = self.rows[0].job
        least = min(self.rows, key=lambda row: row.host.total)
        hosts = f"{job.hosts} host{'s' * (job.hosts > 1)}"
        return (
            f"{type(self).__name__}({self.model}, {self.parameter_count:,} parameters, {job.ranks} "
            f"ranks on {hosts}: {least.name} needs least, {bytes_text(least.host.total)} per host)"
        )

    @property
    def title(self) -> str:
        """Model, ranks and batch in words."""
        return title_of(self.model, self.parameter_count, self.rows[0].job)

    @property
    def unit(self) -> str:
        """Unit of all amounts in the table."""
        return unit_of(self._most)[0]

    @property
    def _most(self) -> int:
        return max(row.host.total for row in self.rows)

    def cells(self) -> Iterator[tuple[str, ...]]:
        """Yield the cells of the table's rows: name, categories, rank, host; in `unit`."""
        _, size = unit_of(self._most)
        for row in self.rows:
            values = asdict(row.rank).values()
            total = row.rank.total, row.host.total
            shown = (None if value is None else value / size for value in (*values, *total))
            yield row.name, *("not known" if v is None else digits(v) for v in shown)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in COLUMNS)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
            for cells in self.cells()
        )
        advice = "".join(f"<p>{html.escape(line)}</p>" for line in self.advice)
        caption = f"<caption>{html.escape(self.title)}; in {self.unit}</caption>"
        return f"<table>{caption}<tr>{head}</tr>{body}</table>{advice}"

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON; amounts in bytes."""
        return {
            "model": self.model,
            "parameter_count": self.parameter_count,
            "host_memory": self.host_memory,
            "rows": [
                {
                    **row.job.as_dict(),
                    "rank": {**asdict(row.rank), "total": row.rank.total},
                    "host": {**asdict(row.host), "total": row.host.total},
                    "stages": [asdict(use) for use in row.stages],
                }
                for row in self.rows
            ],
            "advice": list(self.advice),
        }


COLUMNS = ("", *(f.name.replace("_", " ") for f in fields(MemoryUse)), "rank", "host")
"""Heads of the columns of a plan's table."""


def plan_memory(
    factory: Callable[..., Any] | Any,
    ranks: int,
    hosts: int = 1,
    *,
    strategies: Sequence[str] | None = None,
    meshes: Sequence[tuple[int, int, int]] | None = None,
    micro_batch_counts: Sequence[int] = (1,),
    schedules: Sequence[str | None] = (None,),
    precisions: Sequence[str | None] = (None,),
    host_memory: int | None = None,
    **choices: Any,
) -> MemoryPlan:
    """Plan the memory of a run, and allocate nothing of the model.

    Parameters
    ----------
    factory : callable or model
        A model of `mpishard.nn`, a PyTorch module on the device "meta", a black box; or a function
        that returns one, see `planned_model`.
    ranks, hosts : int
        Numbers of ranks and of hosts.
    strategies : sequence of str, optional
        Strategies to plan: "ddp", "zero1", "zero2" and "fsdp". Default: all.
    meshes : sequence of (int, int, int), optional
        Meshes (pipeline, tensor, data) to plan. Default: some that fit the model; for a black box
        none.
    micro_batch_counts, schedules, precisions : sequence
        Numbers of micro-batches, schedules of pipelines, and precisions to plan.
    host_memory : int, optional
        Bytes that a host has for the run. The advice then says what fits.
    **choices
        Of `Job`: ``batch_size``, ``sequence_parallel``, ``checkpoint_config``, ``optimizer``,
        ``data_parallel_strategy``, ``minimum_parameter_group_size``, ``order``.

    Returns
    -------
    MemoryPlan
        A row for each strategy and mesh. A notebook shows it as a table.

    Raises
    ------
    UnplannableError
        If the factory returns no model or has allocated it; if a given mesh does not fit the ranks
        or the model.

    Examples
    --------
    >>> import mpishard as ms
    >>> model = ms.nn.MLP([512, 512, 512], dtype="float32")
    >>> plan = ms.plan_memory(model, ranks=4, strategies=["ddp", "fsdp"], meshes=[])
    >>> plan
    MemoryPlan(MLP, 525,312 parameters, 4 ranks on 1 host: fsdp needs least, 16.3 MiB per host)
    >>> [(row.name, row.rank.optimizer_state) for row in plan.rows]
    [('ddp', 4202496), ('fsdp', 1050624)]
    """
    model = planned_model(factory)
    jobs = functools.partial(
        jobs_of,
        ranks,
        hosts,
        micro_batch_counts=micro_batch_counts,
        schedules=schedules,
        precisions=precisions,
        **choices,
    )
    names = DATA_STRATEGIES if strategies is None else strategies
    rows = [memory_of(model, job) for job in jobs(strategies=names, meshes=meshes or ())]
    for mesh in _usual_meshes(model, ranks, hosts) if meshes is None else ():
        # One that was not asked for is left out if it is not possible.
        with contextlib.suppress(UnplannableError):
            rows += [memory_of(model, job) for job in jobs(strategies=(), meshes=[mesh])]
    if not rows:
        raise UnplannableError("there is nothing to plan: give a strategy or a mesh")
    advice = () if host_memory is None else tuple(advice_on(model, rows, host_memory))
    return MemoryPlan(*identity_of(model), tuple(rows), host_memory, advice)


def _usual_meshes(model: Any, ranks: int, hosts: int) -> Iterator[tuple[int, int, int]]:
    """Yield meshes whose tensor groups stay on a host, and whose stages have layers."""
    if not isinstance(model, ILayeredModel) or ranks == 1:
        return
    on_host = ranks // hosts
    sizes = dict.fromkeys((1, 2, on_host)), dict.fromkeys((1, 2, hosts))
    for tensor in sizes[0]:
        for pipeline in sizes[1]:
            product = tensor * pipeline
            fits = on_host % tensor == 0 and ranks % product == 0
            if fits and product > 1 and pipeline <= len(model.layers):
                yield pipeline, tensor, ranks // product
