"""``mpishard plan memory``: bytes of each rank and host, for each strategy and mesh."""

from __future__ import annotations

import json
import re
from typing import Annotated, Literal

import typer

from mpishard.base import available_memory
from mpishard.cli.factories import load_factory
from mpishard.cli.tables import figures_table, show
from mpishard.cli.wording import choice, parse_bytes, refusing
from mpishard.optimizers import LAMB, SGD, Adagrad, Adam, AdamW, Lion, Optimizer, RMSprop
from mpishard.pipeline import SCHEDULE_NAMES, ActivationCheckpointConfig
from mpishard.planning import MemoryPlan, UnplannableError, plan_memory

RETURNS = "factory() or factory(seed) is a function that returns a model, or a tuple that begins so"
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
    target: Annotated[
        str,
        typer.Argument(
            metavar="FACTORY",
            help="package.module:factory or file.py:factory, a function that returns a model.",
        ),
    ],
    ranks: Annotated[
        int, typer.Option("-n", "-np", min=1, metavar="N", help="Number of ranks.")
    ] = 8,
    hosts: Annotated[
        int, typer.Option(min=1, help="Number of hosts, with N / hosts ranks each.")
    ] = 1,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PxTxD",
            help="A mesh, pipeline x tensor x data, as 4x2x8; may be repeated. Default: some.",
        ),
    ] = None,
    data_strategy: Annotated[
        str, choice("plan", ("ddp", "zero1", "zero2", "fsdp"), "Data axis of a mesh: {}.")
    ] = "zero1",
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of a step, of all ranks; default 8 per data rank."),
    ] = None,
    micro_batches: Annotated[int, typer.Option("-m", min=1, help="Micro-batches of a rank.")] = 1,
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
    host_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of a host, as 64GiB; default: of this machine."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of the table.")
    ] = False,
) -> None:
    """Print the memory of FACTORY's model per rank and host, without allocating it.

    factory() or factory(seed) returns a model of mpishard.nn, a TorchModel of a module on the
    device "meta", or a black box. One row for each strategy, and for meshes that fit.
    """
    with refusing("plan", errors=(OSError, ValueError, MemoryError)):
        limit = available_memory()[0] if host_memory is None else parse_bytes(host_memory)
        config = ActivationCheckpointConfig(enabled=True, checkpoint_every_n_layers="sqrt")
        plan = plan_memory(
            load_factory(target, RETURNS),
            ranks,
            hosts,
            meshes=None if mesh is None else [sizes_of_mesh(text) for text in mesh],
            host_memory=limit,
            data_parallel_strategy=data_strategy,
            batch_size=batch_size,
            micro_batch_count=micro_batches,
            schedule=schedule,
            precision=precision,
            optimizer=_RULES[optimizer],
            checkpoint_config=config if recompute else None,
            sequence_parallel=sequence_parallel,
        )
    if as_json:
        typer.echo(json.dumps(plan.as_dict(), indent=1))
        return
    _show(plan)


def sizes_of_mesh(text: str) -> tuple[int, int, int]:
    """Return the sizes that ``4x2x8`` names: pipeline, tensor, data."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if found is None:
        raise UnplannableError(f"--mesh is pipeline x tensor x data, as 4x2x8, got {text!r}")
    pipeline, tensor, data = map(int, found.groups())
    return pipeline, tensor, data


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
