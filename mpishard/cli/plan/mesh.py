"""``mpishard plan mesh``: the fastest mesh that fits a memory, and what was rejected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mpishard.cli.factories import load_factory
from mpishard.cli.plan.options import (
    RETURNS,
    HostMemory,
    Hosts,
    Json,
    MachineFile,
    Ranks,
    Target,
)
from mpishard.cli.plan.step import Batch, name_of
from mpishard.cli.tables import figures_table, show
from mpishard.cli.wording import bytes_text, choice, counted, milliseconds, parse_bytes, refusing
from mpishard.planning import Job, Machine, MeshPlan, plan_mesh, planned_model

_SHOWN = 12  # rows after the chosen one tell little


def mesh(
    target: Target,
    ranks: Ranks,
    hosts: Hosts = 1,
    machine: MachineFile = Path("machine.json"),
    host_memory: HostMemory = None,
    batch: Batch = None,
    precision: Annotated[
        list[str] | None,
        choice("plan", ("float32", "bfloat16"), "One of {}; may be repeated. Default: float32."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Propose mesh, strategy, schedule, micro-batches and recomputation for FACTORY's model.

    Without --host-memory it is the memory in the machine file.
    """
    with refusing("plan", errors=(OSError, ValueError, MemoryError)):
        speeds = Machine.load(machine)
        limit = speeds.memory_bytes if host_memory is None else parse_bytes(host_memory)
        if limit is None:
            raise ValueError(f'{machine} has no "memory_bytes": give --host-memory, such as 64GiB')
        model = planned_model(load_factory(target, RETURNS))
        job = Job(ranks, hosts, batch_size=batch)
        kinds = [None if name == "float32" else name for name in precision or ["float32"]]
        found = plan_mesh(model, job, speeds, limit, precisions=kinds)
    if as_json:
        rows = [
            {
                **each.step.as_dict(),
                "host_bytes": each.host_bytes,
                "missing_bytes": each.missing,
                "is_chosen": each is found.chosen,
            }
            for each in found.candidates
        ]
        refused = [{"mesh": mesh, "reason": reason} for mesh, reason in found.refused]
        document = {"machine": speeds.name, "host_memory": limit, "refused": refused}
        typer.echo(json.dumps(document | {"candidates": rows}, indent=1))
    else:
        show(_table(found, job, limit))
        for sizes, reason in found.refused:
            typer.echo(f"{sizes} is not possible: {reason}")
        if found.chosen is not None:
            typer.echo(f"As a run: {_call(found.chosen.step.job)}")
    if found.chosen is None:
        raise typer.Exit(1)


def _call(job: Job) -> str:
    """Return the call in a program that makes the run of ``job``."""
    options = {name: repr(value) for name, value in job.options.items() if value}
    if job.checkpoint_config is not None:  # its own text names the defaults, too
        every = job.checkpoint_config.checkpoint_every_n_layers
        text = f"ActivationCheckpointConfig(enabled=True, checkpoint_every_n_layers={every!r})"
        options["checkpoint_config"] = text
    words = "".join(f", {name}={text}" for name, text in options.items())
    return f'as_distributed(model, config, "{job.strategy}"{words})'


def _table(found: MeshPlan, job: Job, limit: int) -> Table:
    title = (
        f"{counted(job.ranks, 'rank')} on {counted(job.hosts, 'host')}, {bytes_text(limit)} of "
        f"memory each; {counted(len(found.candidates), 'way')} to train"
    )
    table = figures_table(title, ("strategy", "step", "host", ""), ("strategy", ""))
    table.columns[0].no_wrap = False  # a long name is folded, and not the figures beside it
    chosen = found.chosen
    best = 0 if chosen is None else found.candidates.index(chosen)
    # The rejected ones that would be faster, the choice, and a few that are slower.
    first = max(0, best - _SHOWN)
    for each in found.candidates[first : best + _SHOWN // 2]:
        if each.missing:
            words = f"needs {bytes_text(each.missing)} more"
        elif each is chosen:
            words = "chosen"
        else:
            assert chosen is not None
            words = f"slower by {each.step.seconds / chosen.step.seconds - 1:.1%}"
        table.add_row(
            name_of(each.step.job),
            milliseconds(each.step.seconds),
            bytes_text(each.host_bytes),
            words,
        )
    hidden = f"; {first} faster ones, which do not fit either, are not shown" if first else ""
    if chosen is None:
        table.caption = "Nothing fits: `mpishard plan memory` says what would."
    else:
        table.caption = f"{name_of(chosen.step.job)} is the fastest that fits{hidden}."
    return table
