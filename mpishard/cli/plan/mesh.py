"""``mpishard plan mesh``: the fastest mesh that fits a memory, and what was rejected."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from rich.table import Table

from mpishard.cli.plan.options import (
    RULES,
    Batch,
    HostMemory,
    Hosts,
    Json,
    MachineFile,
    Precisions,
    Ranks,
    Rule,
    SequenceParallel,
    Target,
    factory_of,
    precisions_of,
)
from mpishard.cli.tables import figures_table, show
from mpishard.cli.wording import bytes_text, counted, milliseconds, parse_bytes, refusing
from mpishard.planning import (
    Candidate,
    Job,
    Machine,
    MeshPlan,
    identity_of,
    plan_mesh,
    planned_model,
    title_of,
)

_SHOWN = 12  # rows after the chosen one tell little


def mesh(
    target: Target,
    ranks: Ranks,
    hosts: Hosts = 1,
    machine: MachineFile = Path("machine.json"),
    host_memory: HostMemory = None,
    batch: Batch = None,
    precision: Precisions = None,
    optimizer: Rule = "adamw",
    sequence_parallel: SequenceParallel = False,
    as_json: Json = False,
) -> None:
    """Propose mesh, strategy, schedule, micro-batches and recomputation for FACTORY's model.

    It fits the memory in the machine file, unless --host-memory gives another.
    """
    with refusing("plan", errors=(OSError, ValueError, MemoryError)):
        speeds = Machine.load(machine)
        limit = speeds.memory_bytes if host_memory is None else parse_bytes(host_memory)
        if limit is None:
            raise ValueError(f'{machine} has no "memory_bytes": give --host-memory, such as 64GiB')
        job = Job(
            ranks,
            hosts,
            batch_size=batch,
            optimizer=RULES[optimizer],
            sequence_parallel=sequence_parallel,
        )
        model = planned_model(factory_of(target))
        found = plan_mesh(model, job, speeds, limit, precisions=precisions_of(precision))
        names = identity_of(model)
    if as_json:
        document = {"model": names[0], "parameter_count": names[1], "machine": speeds.name}
        typer.echo(json.dumps({**document, "host_memory": limit, **_as_dict(found)}, indent=1))
    else:
        ways = counted(len(found.candidates), "way")
        typer.echo(
            f"{title_of(*names, job)}\n{bytes_text(limit)} of memory per host; {ways} to train"
        )
        show(_table(found))
        reasons: dict[str, list[str]] = {}
        for sizes, reason in found.refused:
            reasons.setdefault(reason, []).append(sizes)
        for reason, meshes in reasons.items():
            typer.echo(f"Not possible: {', '.join(meshes)}: {reason}")
        for line in found.advice:
            typer.echo(line)
        if found.chosen is not None:
            typer.echo(f"As a run: {_call(found.chosen.step.job)}")
    if found.chosen is None:
        raise typer.Exit(1)


def _as_dict(found: MeshPlan) -> dict[str, object]:
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
    return {"rows": rows, "refused": refused, "advice": list(found.advice)}


def _call(job: Job) -> str:
    """Return the call in a program that makes the run of ``job``."""
    options = {name: repr(value) for name, value in job.options.items() if value}
    if job.checkpoint_config is not None:  # its own text names the defaults, too
        every = job.checkpoint_config.checkpoint_every_n_layers
        text = f"ActivationCheckpointConfig(enabled=True, checkpoint_every_n_layers={every!r})"
        options["checkpoint_config"] = text
    words = "".join(f", {name}={text}" for name, text in options.items())
    return f'as_distributed(model, config, "{job.strategy}"{words})'


def _table(found: MeshPlan) -> Table:
    table = figures_table("", ("strategy", "step", "host", ""), ("strategy", ""))
    table.columns[0].no_wrap = False  # a long name is folded, and not the figures beside it
    chosen = found.chosen
    if chosen is None:
        for each in found.nearest[:_SHOWN]:
            _add_row(table, each, _missing(each))
        table.caption = "Nothing fits. The nearest to fitting are shown."
        return table
    best = found.candidates.index(chosen)
    # The rejected ones that would be faster, the choice, and a few that are slower.
    first = max(0, best - _SHOWN)
    for each in found.candidates[first : best + _SHOWN // 2]:
        words = f"slower by {each.step.seconds / chosen.step.seconds - 1:.1%}"
        if each.missing:
            words = _missing(each)
        _add_row(table, each, "chosen" if each is chosen else words)
    hidden = f"; {first} faster ones, which do not fit either, are not shown" if first else ""
    table.caption = f"{chosen.step.job.name} is the fastest that fits{hidden}."
    return table


def _missing(each: Candidate) -> str:
    at_least = "at least " if each.host_bytes is None else ""
    return f"needs {at_least}{bytes_text(each.missing)} more"


def _add_row(table: Table, each: Candidate, words: str) -> None:
    cells = milliseconds(each.step.seconds), bytes_text(each.host_bytes)
    table.add_row(each.step.job.name, *cells, words)
