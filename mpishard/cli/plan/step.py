"""``mpishard plan step``: the time of a training step, and where it goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mpishard.cli.outputs import check_png
from mpishard.cli.plan.options import (
    USUAL_ORDER,
    Batch,
    DataStrategy,
    Hosts,
    Json,
    MachineFile,
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
from mpishard.cli.wording import milliseconds, refusing, say
from mpishard.observe import PALETTE, new_figure, plain_axes, save
from mpishard.planning import (
    DATA_STRATEGIES,
    PARTS,
    Machine,
    StepPlan,
    identity_of,
    jobs_of,
    plan_step,
    planned_model,
    title_of,
)

_HEADS = ("comp.", "mess.", "bubble", "wait", "update")  # of PARTS; 80 columns hold no more


def step(
    target: Target,
    ranks: Ranks,
    hosts: Hosts = 1,
    machine: MachineFile = Path("machine.json"),
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
    output: Annotated[Path | None, typer.Option(help="Draw bars to this file, a .png.")] = None,
    as_json: Json = False,
) -> None:
    """Plan the time of a step of FACTORY's model for each strategy and mesh, without a run."""
    check_png("plan", "--output", output)
    with refusing("plan", errors=(OSError, ValueError, MemoryError)):
        speeds = Machine.load(machine)
        choices = choices_of(
            mesh or [],
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
        jobs = jobs_of(ranks, hosts, strategies=strategy or DATA_STRATEGIES, **choices)
        model = planned_model(factory_of(target))
        plans = [plan_step(model, job, speeds) for job in jobs]
        names = identity_of(model)
    for name in dict.fromkeys(name for plan in plans for name in plan.unknown_layers):
        say("plan", f"the products of {name} are not known, which counts as passes over its arrays")
    if output is not None:
        draw(output, plans, target)
        say("plan", f"wrote {output}")
    if as_json:
        document = {"model": names[0], "parameter_count": names[1], "machine": speeds.name}
        rows = [plan.as_dict() for plan in plans]
        typer.echo(json.dumps(document | {"rows": rows}, indent=1))
    else:
        typer.echo(f"{title_of(*names, plans[0].job)}\n{speeds.name}")
        show(table(plans, tokens_of(model)))


def tokens_of(model: Any) -> int:
    """Return the tokens of a sample if the model reads tokens, otherwise 1."""
    first = model.get_all_layer_info()[0]
    takes = getattr(model.layers[0], "takes_integers", False)
    return int(first.input_shape[0]) if takes and first.input_shape else 1


def table(plans: Sequence[StepPlan], tokens: int) -> Table:
    """Return the plans as a table."""
    columns = ("strategy", "step", *_HEADS, "tokens/s" if tokens > 1 else "samples/s")
    found = figures_table("", columns, ("strategy",), gap=1)
    found.columns[0].no_wrap = False  # a long name is folded, and not the figures beside it
    best = min(plan.seconds for plan in plans)
    for plan in plans:
        mark = " *" if plan.seconds == best else ""
        found.add_row(
            plan.job.name + mark,
            milliseconds(plan.seconds),
            *(f"{getattr(plan, part) / plan.seconds:.0%}" for part in PARTS),
            f"{plan.samples_per_second * tokens:,.0f}",
        )
    found.caption = "* the fastest; the parts in percent of the step: docs/plan-time.md"
    return found


def draw(path: Path, plans: Sequence[StepPlan], title: str) -> None:
    """Draw each step as a bar of its parts."""
    figure = new_figure("plan step", 7.2, 1.2 + 0.32 * len(plans))
    axes = figure.subplots()
    names = [plan.job.name for plan in plans]
    start = [0.0] * len(plans)
    for part, colour in zip(PARTS, PALETTE, strict=False):
        widths = [1e3 * getattr(plan, part) for plan in plans]
        axes.barh(names, widths, left=start, color=colour, label=part, height=0.7)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    plain_axes(axes, title, grid="x")
    figure.legend(loc="outside lower center", ncols=len(PARTS), frameon=False, fontsize=8)
    save(figure, path)
