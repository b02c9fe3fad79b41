"""Which mesh, and which schedules, ``mpishard verify`` trains on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpishard.cli.wording import counted
from mpishard.communication.mesh import AXES, mesh_sizes
from mpishard.distributed import STRATEGY_OPTIONS, DistributedStrategy
from mpishard.pipeline import SCHEDULE_NAMES

__all__ = ["ALL_SCHEDULES", "DATA_STRATEGIES", "MESH_FLAGS", "MeshChoice", "UsageError"]

ALL_SCHEDULES = "all"
_MICRO_BATCHES = 4

MESH_FLAGS = {
    "--pipeline-parallel-size": "pipeline_parallel_size",
    "--tensor-parallel-size": "tensor_parallel_size",
    "--data-parallel-size": "data_parallel_size",
    "--micro-batches": "micro_batch_count",
    "--schedule": "schedule",
    "--sequence-parallel": "sequence_parallel",
    "--recompute": "checkpoint_config",
    "--data-parallel-strategy": "data_parallel_strategy",
}
"""Flags of the command, and which option of `as_distributed` each of them is."""

DATA_STRATEGIES = tuple(
    s.value for s in DistributedStrategy if s not in {*STRATEGY_OPTIONS, DistributedStrategy.NONE}
)
"""What ``--data-parallel-strategy`` may be."""


class UsageError(ValueError):
    """Raised for flags that do not go together; says which, with numbers."""


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """Where the ranks stand, and in which orders they work.

    Parameters
    ----------
    sizes : tuple of int
        Of the pipeline, tensor and data axes.
    options : mapping
        Of `as_distributed`, but for the schedule; ``recompute`` is the name of a strategy.
    schedules : tuple of str
        One comparison each; the one name "" where there is none to choose.
    """

    sizes: tuple[int, int, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    schedules: tuple[str, ...] = ("",)

    @classmethod
    def of(cls, strategy: str, ranks: int, flags: Mapping[str, Any]) -> MeshChoice:
        """What the flags ask for; those that were not given are None or missing.

        Raises
        ------
        UsageError
            For a flag that the strategy does not take, sizes that do not make up the ranks, and
            names that there are not.
        """
        kind = DistributedStrategy(strategy)
        taken = STRATEGY_OPTIONS.get(kind, ())
        given = {flag: value for flag, value in flags.items() if value is not None}
        for flag in given:
            takers = [str(s) for s, names in STRATEGY_OPTIONS.items() if MESH_FLAGS[flag] in names]
            if strategy not in takers:
                raise UsageError(f"{flag} is for --strategy {' and '.join(takers)}; got {strategy}")
        options = {MESH_FLAGS[flag]: value for flag, value in given.items()}
        if "checkpoint_config" in options:
            options["recompute"] = options.pop("checkpoint_config")
        inside = options.get("data_parallel_strategy", DATA_STRATEGIES[0])
        if inside not in DATA_STRATEGIES:
            raise UsageError(
                f"--data-parallel-strategy must be one of {', '.join(DATA_STRATEGIES)}; got "
                f"{inside!r}"
            )
        schedules: tuple[str, ...] = ("",)
        if "schedule" in taken:
            schedules = _schedules(options.pop("schedule", "gpipe"))
            options.setdefault("micro_batch_count", _MICRO_BATCHES)
        return cls(_sizes(kind, ranks, options), options, schedules)

    def describe(self, schedule: str) -> str:
        """Mesh and schedule, in words; nothing where all ranks are replicas."""
        if not self.options and self.sizes[:2] == (1, 1):
            return ""
        words = [" x ".join(f"{size} {axis}" for axis, size in zip(AXES, self.sizes, strict=True))]
        if schedule:
            words += [schedule, counted(self.options["micro_batch_count"], "micro-batch")]
        if "data_parallel_strategy" in self.options:
            words.append(f"{self.options['data_parallel_strategy']} over data")
        if self.options.get("sequence_parallel"):
            words.append("sequence parallel")
        if "recompute" in self.options:
            words.append(f"{self.options['recompute']} recomputation")
        return f" ({', '.join(words)})"


def _sizes(
    kind: DistributedStrategy, ranks: int, options: Mapping[str, Any]
) -> tuple[int, int, int]:
    if kind is DistributedStrategy.PIPELINE_PARALLEL:
        return ranks, 1, 1
    if kind is DistributedStrategy.TENSOR_PARALLEL:
        return 1, ranks, 1
    pipeline, tensor, data = (
        options.get(f"{axis}_parallel_size", default)
        for axis, default in zip(AXES, (1, 1, -1), strict=True)
    )
    try:
        return mesh_sizes(ranks, pipeline, tensor, data)
    except ValueError as error:
        raise UsageError(f"-n {ranks}: {error}") from None


def _schedules(name: str) -> tuple[str, ...]:
    if name.lower() == ALL_SCHEDULES:
        return SCHEDULE_NAMES
    if name.lower() not in SCHEDULE_NAMES:
        raise UsageError(
            f"--schedule must be {ALL_SCHEDULES} or one of {', '.join(SCHEDULE_NAMES)}; got "
            f"{name!r}"
        )
    return (name.lower(),)
