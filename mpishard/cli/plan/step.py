"""``mpishard plan step``: the time of a training step, and where it goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from mpishard.cli.factories import load_factory
from mpishard.cli.outputs import check_png
from mpishard.cli.plan.options import (
    RETURNS,
    USUAL_ORDER,
    Hosts,
    Json,
    MachineFile,
    Meshes,
    Order,
    Ranks,
    Target,
    sizes_of_mesh,
)
from mpishard.cli.tables import figures_table, show
from mpishard.cli.wording import choice, counted, milliseconds, refusing, say
from mpishard.observe import PALETTE, new_figure, plain_axes, save
from mpishard.pipeline import SCHEDULE_NAMES
from mpishard.planning import (
    DATA_STRATEGIES,
    PARTS,
    RECOMPUTATION,
    Job,
    Machine,
    StepPlan,
    plan_step,
    planned_model,
)

_HEADS = ("comp.", "mess.", "bubble", "wait", "update")  # of PARTS; 80 columns hold no more

Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Samples of a step, of all ranks; default 8 per rank."),
]


def step(
    target: Target,
    ranks: Ranks,
    hosts: Hosts = 1,
    machine: MachineFile = Path("machine.json"),
    strategy: Annotated[
        list[str] | None,
        choice("plan", DATA_STRATEGIES, "One of {}; may be repeated. Default: all."),
    ] = None,
    mesh: Meshes = None,
    order: Order = USUAL_ORDER,
    schedule: Annotated[
        list[str] | None,
        choice(
            "plan", SCHEDULE_NAMES, "Of a pipeline: one of {}; may be repeated. Default: gpipe."
        ),
    ] = None,
    batch: Batch = None,
    micro_batches: Annotated[
        list[int] | None,
        typer.Option("-m", "--micro-batches", min=1, help="Of meshes; may be repeated."),
    ] = None,
    precision: Annotated[
        str, choice("plan", ("float32", "bfloat16"), "float32 stands for the model's dtype.")
    ] = "float32",
    recompute: Annotated[
        bool, typer.Option(help="Meshes compute activations again, in segments of sqrt(layers).")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Draw bars to this file, a .png.")] = None,
    as_json: Json = False,
) -> None:
    """Plan the time of a step of FACTORY's model for each strategy and mesh, without a run."""
    check_png("plan", "--output", output)
    with refusing("plan", errors=(OSError, ValueError, MemoryError)):
        speeds = Machine.load(machine)
        model = planned_model(load_factory(target, RETURNS))
        job = Job(
            ranks,
            hosts,
            # One batch for all rows, because a mesh with fewer data ranks would do less work.
            batch_size=batch or 8 * ranks,
            precision=None if precision == "float32" else precision,
            order=tuple(order.split(",")),
        )
        jobs = [replace(job, strategy=name) for name in strategy or DATA_STRATEGIES]
        meshes = [sizes_of_mesh(text) for text in mesh or ()]
        on_mesh = [
            replace(
                job,
                strategy="hybrid",
                mesh=sizes,
                micro_batch_count=count,
                schedule=name,
                checkpoint_config=RECOMPUTATION if recompute else None,
            )
            for sizes in meshes
            for count in micro_batches or [1]
            for name in (schedule or ["gpipe"] if sizes[0] > 1 else [None])
        ]
        plans = [plan_step(model, each, speeds) for each in (*jobs, *on_mesh)]
    for name in dict.fromkeys(name for plan in plans for name in plan.unknown_layers):
        say("plan", f"the products of {name} are not known, which counts as passes over its arrays")
    if output is not None:
        draw(output, plans, target)
        say("plan", f"wrote {output}")
    if as_json:
        rows = {"machine": speeds.name, "steps": [plan.as_dict() for plan in plans]}
        typer.echo(json.dumps(rows, indent=1))
    else:
        show(table(plans, target, speeds, tokens_of(model)))


def tokens_of(model: Any) -> int:
    """Return the tokens of a sample if the model reads tokens, otherwise 1."""
    first = model.get_all_layer_info()[0]
    takes = getattr(model.layers[0], "takes_integers", False)
    return int(first.input_shape[0]) if takes and first.input_shape else 1


def name_of(job: Job) -> str:
    """Return a job's strategy and mesh, as one word or a few."""
    if job.strategy != "hybrid":
        return job.strategy
    words = "x".join(map(str, job.sizes))
    if job.sizes[0] > 1:
        words += f" {job.schedule}"
    if job.micro_batch_count > 1:
        words += f" m{job.micro_batch_count}"
    if job.sizes[2] > 1:
        words += f" {job.data_parallel_strategy}"
    if job.checkpoint_config is not None:
        words += " recompute"
    return words if job.precision is None else f"{words} {job.precision}"


def table(plans: Sequence[StepPlan], target: str, machine: Machine, tokens: int) -> Table:
    """Return the plans as a table."""
    job = plans[0].job
    title = (
        f"{target}, {counted(job.ranks, 'rank')} on {counted(job.hosts, 'host')}, "
        f"{counted(job.samples, 'sample')} a step\n{machine.name}"
    )
    columns = ("strategy", "step", *_HEADS, "tokens/s" if tokens > 1 else "samples/s")
    found = figures_table(title, columns, ("strategy",), gap=1)
    found.columns[0].no_wrap = False  # a long name is folded, and not the figures beside it
    best = min(plan.seconds for plan in plans)
    for plan in plans:
        mark = " *" if plan.seconds == best else ""
        found.add_row(
            name_of(plan.job) + mark,
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
    names = [name_of(plan.job) for plan in plans]
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
