"""The flags of ``mpishard verify``: what each takes, and what the user is told of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from mpishard.cli.verify.mesh import DATA_STRATEGIES
from mpishard.cli.verify.rules import RULES
from mpishard.distributed import DistributedStrategy
from mpishard.pipeline import SCHEDULE_NAMES

__all__ = [
    "STRATEGIES",
    "BackendChoice",
    "BackendOption",
    "BatchSizeOption",
    "DataSizeOption",
    "DataStrategyOption",
    "LearningRateOption",
    "MeshSizeOption",
    "MicroBatchesOption",
    "OptimizerOption",
    "RanksOption",
    "RecomputeOption",
    "ScheduleOption",
    "SeedOption",
    "SequenceParallelOption",
    "StepsOption",
    "StrategyOption",
    "TargetArgument",
    "ToleranceOption",
    "TypeOption",
]

STRATEGIES = tuple(s.value for s in DistributedStrategy if s != DistributedStrategy.NONE)
"""What ``--strategy`` may be."""


class BackendChoice(StrEnum):
    """What ``--backend`` may be."""

    AUTO = "auto"
    MPI = "mpi"
    MEMORY = "memory"


class _Recompute(StrEnum):
    FULL = "full"
    SELECTIVE = "selective"


class _Type(StrEnum):
    FLOAT32 = "float32"
    FLOAT64 = "float64"


TargetArgument = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:factory or file.py:factory. factory(seed) returns (model, x, y) "
        "or (model, x, y, loss); it may take dtype too.",
    ),
]
StrategyOption = Annotated[str, typer.Option(help=f"One of {', '.join(STRATEGIES)}.")]
RanksOption = Annotated[int, typer.Option("-n", min=1, metavar="N", help="Number of ranks.")]
BackendOption = Annotated[
    BackendChoice,
    typer.Option(help="mpi: processes; memory: threads; auto: mpi where it can be started."),
]
OptimizerOption = Annotated[str, typer.Option(help=f"One of {', '.join(RULES)}.")]
LearningRateOption = Annotated[float, typer.Option(help="Of the optimizer.")]
StepsOption = Annotated[int, typer.Option(min=1, help="Updates.")]
BatchSizeOption = Annotated[
    int,
    typer.Option(min=0, show_default=False, help="Samples of the global batch; default 8 N."),
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(show_default=False, help="Relative error; default 1e-10, float32: 1e-4."),
]
TypeOption = Annotated[
    _Type | None, typer.Option(show_default=False, help="Of the model; default its own.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Given to the factory.")]
MeshSizeOption = Annotated[
    int | None, typer.Option(min=1, show_default=False, help="Of hybrid; default 1.")
]
DataSizeOption = Annotated[
    int | None, typer.Option(show_default=False, help="Of hybrid; default what is left of N.")
]
MicroBatchesOption = Annotated[
    int | None,
    typer.Option(min=1, show_default=False, help="Of pipeline and hybrid; default 4."),
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        show_default=False,
        help=f"Of pipeline and hybrid: {', '.join(SCHEDULE_NAMES)}, or all of them one after "
        "the other; default gpipe.",
    ),
]
SequenceParallelOption = Annotated[
    bool, typer.Option("--sequence-parallel", help="Of tensor and hybrid.")
]
RecomputeOption = Annotated[
    _Recompute | None,
    typer.Option(
        show_default=False, help="Activations that are computed again; of mesh strategies."
    ),
]
DataStrategyOption = Annotated[
    str | None,
    typer.Option(
        show_default=False, help=f"Of hybrid: {', '.join(DATA_STRATEGIES)}; default zero1."
    ),
]
