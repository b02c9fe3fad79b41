"""``mpishard plan memory``: bytes of each rank and host, for each strategy and mesh."""

from __future__ import annotations

import json

import typer

from mpishard.base import available_memory
from mpishard.cli.plan.options import (
    USUAL_ORDER,
    Batch,
    DataStrategy,
    HostMemory,
    Hosts,
    Json,
    Meshes,
    MicroBatches,
    Order,
    Precisions,
    Ranks,
    Recompute,
    Rule,
    Schedules,
    SequenceParallel,
    Strategies,
    Target,
    choices_of,
    factory_of,
)
from mpishard.cli.tables import figures_table, show
from mpishard.cli.wording import parse_bytes, refusing
from mpishard.planning import MemoryPlan, plan_memory

_HEADS = ("", "param.", "grad.", "state", "units", "activ.", "buffers", "rank", "host")


def memory(
    target: Target,
    ranks: Ranks,
    hosts: Hosts = 1,
    strategy: Strategies = None,
    mesh: Meshes = None,
    order: Order = USUAL_ORDER,
    data_strategy: DataStrategy = "zero1",
    batch: Batch = None,
    micro_batches: MicroBatches = None,
    schedule: Schedules = None,
    precision: Precisions = None,
    optimizer: Rule = "adamw",
    recompute: Recompute = False,
    sequence_parallel: SequenceParallel = False,
    host_memory: HostMemory = None,
    as_json: Json = False,
) -> None:
    """Print the memory of FACTORY's model per rank and host, without allocating it.

    factory() or factory(seed) returns a model of mpishard.nn, a PyTorch module on the device
    "meta", or a black box. One row for each strategy, and for each --mesh, or for some meshes that
    the model can have. The advice is for the memory of this machine, unless --host-memory gives
    another.
    """
    with refusing("plan", errors=(OSError, ValueError, MemoryError)):
        limit = available_memory()[0] if host_memory is None else parse_bytes(host_memory)
        choices = choices_of(
            mesh,
            micro_batches,
            schedule,
            precision,
            data_strategy,
            order,
            batch,
            optimizer,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
        )
        plan = plan_memory(
            factory_of(target), ranks, hosts, strategies=strategy, host_memory=limit, **choices
        )
    if as_json:
        typer.echo(json.dumps(plan.as_dict(), indent=1))
        return
    _show(plan)


def _show(plan: MemoryPlan) -> None:
    table = figures_table("", _HEADS, ("",), gap=1)
    table.columns[0].no_wrap = False
    table.columns[0].max_width = 20  # a long name is folded, and not the figures beside it
    for cells in plan.cells():
        table.add_row(*cells)
    table.caption = (
        f"{plan.unit} of the rank that needs most, and of the host. units: gathered parameters and "
        "gradients of units in use; activ.: activations. A process without a model is not counted."
    )
    typer.echo(plan.title)
    show(table)
    typer.echo("\n".join(plan.advice))
