"""Arguments and options that ``mpishard plan memory``, ``step`` and ``mesh`` have in common."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from mpishard.communication import AXES
from mpishard.planning import UnplannableError

RETURNS = "factory() or factory(seed) is a function that returns a model, or a tuple that begins so"

Target = Annotated[
    str,
    typer.Argument(
        metavar="FACTORY",
        help="package.module:factory or file.py:factory, a function that returns a model.",
    ),
]
Ranks = Annotated[int, typer.Option("-n", "-np", min=1, metavar="N", help="Number of ranks.")]
Hosts = Annotated[int, typer.Option(min=1, help="Number of hosts, with N / hosts ranks each.")]
Meshes = Annotated[
    list[str] | None,
    typer.Option(
        "--mesh",
        metavar="PxTxD",
        show_default=False,
        help="A mesh, pipeline x tensor x data, as 4x2x8; may be repeated.",
    ),
]
Order = Annotated[
    str,
    typer.Option(metavar="AXES", help="Axes of meshes; ranks of the last one are neighbours."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", show_default=False, help="Memory of a host, as 64GiB."),
]
MachineFile = Annotated[Path, typer.Option("--machine", help="File of `mpishard bench machine`.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON in place of the table.")]

USUAL_ORDER = ",".join(AXES)


def sizes_of_mesh(text: str) -> tuple[int, int, int]:
    """Return the sizes that ``4x2x8`` names: pipeline, tensor, data."""
    found = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if found is None:
        raise UnplannableError(f"--mesh is pipeline x tensor x data, as 4x2x8, got {text!r}")
    pipeline, tensor, data = map(int, found.groups())
    return pipeline, tensor, data
