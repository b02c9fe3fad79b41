"""Arguments and options that ``mpishard plan memory``, ``step`` and ``mesh`` have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mpishard.cli.factories import load_factory
from mpishard.cli.wording import choice
from mpishard.optimizers import LAMB, SGD, Adagrad, Adam, AdamW, Lion, Optimizer, RMSprop
from mpishard.pipeline import SCHEDULE_NAMES
from mpishard.planning import DATA_STRATEGIES, NEIGHBOURS, RECOMPUTATION, UnplannableError

RULES: dict[str, Optimizer] = {
    "adamw": AdamW(),
    "adam": Adam(),
    "sgd": SGD(),
    "momentum": SGD(momentum=0.9),
    "adagrad": Adagrad(),
    "rmsprop": RMSprop(),
    "lion": Lion(),
    "lamb": LAMB(),
}

Target = Annotated[
    str,
    typer.Argument(
        metavar="FACTORY",
        help="package.module:factory or file.py:factory, a function that returns a model.",
    ),
]
Ranks = Annotated[int, typer.Option("-n", "-np", min=1, metavar="N", help="Number of ranks.")]
Hosts = Annotated[int, typer.Option(min=1, help="Number of hosts, with N / hosts ranks each.")]
Strategies = Annotated[
    list[str] | None,
    choice("plan", DATA_STRATEGIES, "One of {}; may be repeated. Default: all."),
]
Meshes = Annotated[
    list[str] | None,
    typer.Option(
        "--mesh",
        metavar="PxTxD",
        show_default=False,
        help="A mesh, pipeline x tensor x data, as 4x2x8; may be repeated.",
    ),
]
DataStrategy = Annotated[str, choice("plan", DATA_STRATEGIES, "Data axis of a mesh: {}.")]
Order = Annotated[
    str,
    typer.Option(metavar="AXES", help="Axes of meshes; ranks of the last one are neighbours."),
]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Samples of a step, of all ranks together; default 8 per rank."),
]
MicroBatches = Annotated[
    list[int] | None,
    typer.Option(
        "-m", "--micro-batches", min=1, help="Micro-batches of a rank; may be repeated. Default: 1."
    ),
]
Schedules = Annotated[
    list[str] | None,
    choice("plan", SCHEDULE_NAMES, "Of micro-batches: one of {}; may be repeated. Default: gpipe."),
]
Precisions = Annotated[
    list[str] | None,
    choice(
        "plan",
        ("float32", "bfloat16"),
        "One of {}; may be repeated. Default: float32, which stands for the model's own dtype.",
    ),
]
Rule = Annotated[str, choice("plan", RULES, "Update rule: {}.")]
Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute", help="Compute activations again, in segments of sqrt(layers) layers."
    ),
]
SequenceParallel = Annotated[
    bool,
    typer.Option("--sequence-parallel", help="Divide norms and dropout over the tensor axis, too."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", show_default=False, help="Memory of a host, as 64GiB."),
]
MachineFile = Annotated[Path, typer.Option("--machine", help="File of `mpishard bench machine`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")]

USUAL_ORDER = ",".join(NEIGHBOURS)


def factory_of(target: str) -> Callable[..., Any]:
    """Return the factory that ``target`` names."""
    returns = (
        "factory() or factory(seed) is a function that returns a model, or a tuple that begins so"
    )
    return load_factory(target, returns)


def precisions_of(names: list[str] | None) -> list[str | None]:
    """Return precisions of jobs, in which None is the model's own dtype."""
    return [None if name == "float32" else name for name in names or ["float32"]]


def choices_of(
    meshes: list[str] | None,
    micro_batches: list[int] | None,
    schedules: list[str] | None,
    precisions: list[str] | None,
    data_strategy: str,
    order: str,
    batch: int | None,
    optimizer: str,
    *,
    recompute: bool,
    sequence_parallel: bool,
) -> dict[str, Any]:
    """Return arguments of `jobs_of` from the options of a command."""
    return {
        "meshes": None if meshes is None else [_sizes_of_mesh(text) for text in meshes],
        "micro_batch_counts": micro_batches or [1],
        "schedules": schedules or ["gpipe"],
        "precisions": precisions_of(precisions),
        "data_parallel_strategy": data_strategy,
        "order": tuple(order.split(",")),
        "batch_size": batch,
        "optimizer": RULES[optimizer],
        "checkpoint_config": RECOMPUTATION if recompute else None,
        "sequence_parallel": sequence_parallel,
    }


def _sizes_of_mesh(text: str) -> tuple[int, int, int]:
    """Return the sizes that ``4x2x8`` names: pipeline, tensor, data."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if found is None:
        raise UnplannableError(f"--mesh is pipeline x tensor x data, as 4x2x8, got {text!r}")
    pipeline, tensor, data = map(int, found.groups())
    return pipeline, tensor, data
