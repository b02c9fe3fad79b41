"""``mpishard plan memory``: bytes of each rank and host, for each strategy and mesh."""

from __future__ import annotations

import json
from typing import Annotated, Literal

import typer

from mpishard.base import available_memory
from mpishard.cli.factories import load_factory
from mpishard.cli.plan.options import (
    RETURNS,
    USUAL_ORDER,
    HostMemory,
    Hosts,
    Json,
    Meshes,
    Order,
    Ranks,
    Target,
    sizes_of_mesh,
)
from mpishard.cli.tables import figures_table, show
from mpishard.cli.wording import choice, parse_bytes, refusing
from mpishard.optimizers import LAMB, SGD, Adagrad, Adam, AdamW, Lion, Optimizer, RMSprop
from mpishard.pipeline import SCHEDULE_NAMES
from mpishard.planning import DATA_STRATEGIES, RECOMPUTATION, MemoryPlan, plan_memory

_RULES: dict[str, Optimizer] = {
    "adamw": AdamW(),
    "adam": Adam(),
    "sgd": SGD(),
    "momentum": SGD(momentum=0.9),
    "adagrad": Adagrad(),
    "rmsprop": RMSprop(),
    "lion": Lion(),
    "lamb": LAMB(),
}
_HEADS = ("", "param.", "grad.", "state", "units", "activ.", "buffers", "rank", "host")


def memory(
    target: Target,
    ranks: Ranks,
    hosts: Hosts = 1,
    mesh: Meshes = None,
    order: Order = USUAL_ORDER,
    data_strategy: Annotated[
        str, choice("plan", DATA_STRATEGIES, "Data axis of a mesh: {}.")
    ] = "zero1",
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of a step, of all ranks; default 8 per data rank."),
    ] = None,
    micro_batches: Annotated[
        int, typer.Option("-m", "--micro-batches", min=1, help="Micro-batches of a rank.")
    ] = 1,
    schedule: Annotated[
        str, choice("plan", SCHEDULE_NAMES, "Schedule of a pipeline: {}.")
    ] = "gpipe",
    precision: Annotated[
        Literal["bfloat16"] | None, typer.Option(help="Mixed precision.", show_default=False)
    ] = None,
    optimizer: Annotated[str, choice("plan", _RULES, "Update rule: {}.")] = "adamw",
    recompute: Annotated[
        bool, typer.Option(help="Compute activations again, in segments of sqrt(layers) layers.")
    ] = False,
    sequence_parallel: Annotated[
        bool, typer.Option(help="Divide norms and dropout over the tensor axis, too.")
    ] = False,
    host_memory: HostMemory = None,
    as_json: Json = False,
) -> None:
    """Print the memory of FACTORY's model per rank and host, without allocating it.

    factory() or factory(seed) returns a model of mpishard.nn, a PyTorch module on the device
    "meta", or a black box. One row for each strategy, and for each --mesh, or for some meshes that
    the model can have. Without --host-memory the advice is for the memory of this machine.
    """
    with refusing("plan", errors=(OSError, ValueError, MemoryError)):
        limit = available_memory()[0] if host_memory is None else parse_bytes(host_memory)
        plan = plan_memory(
            load_factory(target, RETURNS),
            ranks,
            hosts,
            meshes=None if mesh is None else [sizes_of_mesh(text) for text in mesh],
            host_memory=limit,
            data_parallel_strategy=data_strategy,
            batch_size=batch,
            micro_batch_count=micro_batches,
            schedule=schedule,
            precision=precision,
            optimizer=_RULES[optimizer],
            checkpoint_config=RECOMPUTATION if recompute else None,
            sequence_parallel=sequence_parallel,
            order=tuple(order.split(",")),
        )
    if as_json:
        typer.echo(json.dumps(plan.as_dict(), indent=1))
        return
    _show(plan)


def _show(plan: MemoryPlan) -> None:
    table = figures_table(plan.title, _HEADS, ("",), gap=1)
    for cells in plan.cells():
        table.add_row(*(cell.removesuffix(" GiB") for cell in cells))
    table.caption = (
        "GiB of the rank that needs most, and of the host. units: gathered parameters and "
        "gradients of units in use; activ.: activations. A process without a model is not counted."
    )
    show(table)
    typer.echo("\n".join(plan.advice))
