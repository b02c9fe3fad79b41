"""The run that is planned, and its model, built without arrays."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mpishard.base import as_count
from mpishard.communication import AXES, mesh_sizes
from mpishard.contracts import ILayeredModel
from mpishard.distributed import STRATEGY_OPTIONS, DistributedStrategy
from mpishard.optimizers import AdamW, Optimizer
from mpishard.pipeline import ActivationCheckpointConfig, IPipelineSchedule

PLANNED_STRATEGIES = tuple(
    s.value for s in DistributedStrategy if s is not DistributedStrategy.NONE
)
"""Strategies that can be planned."""


class UnplannableError(ValueError):
    """Raised if a run cannot be planned: its factory, its mesh, or a choice that does not fit."""


@dataclass(frozen=True, slots=True)
class Job:
    """A run: its ranks, its strategy, and the choices that decide memory and time.

    Parameters
    ----------
    ranks, hosts : int
        Numbers of ranks and of hosts. Consecutive ranks share a host, which has ranks / hosts.
    strategy : str
        A strategy of `as_distributed`.
    mesh : (int, int, int)
        Sizes of the pipeline, tensor and data axes, for "hybrid"; -1 for the data axis is what is
        left. Other strategies ignore it.
    data_parallel_strategy : str
        Strategy of the data axis of a mesh.
    batch_size : int, optional
        Samples of a step, of all ranks together. Default: 8 for each rank that computes its own.
    micro_batch_count : int
        Micro-batches into which a rank's batch is cut.
    schedule : IPipelineSchedule or str, optional
        Schedule of the pipeline. Default: that of `HybridShardedModel`.
    sequence_parallel : bool
        Whether norms and dropout are divided over the tensor axis, too.
    precision : str, optional
        Precision of `ShardingConfiguration`.
    checkpoint_config : ActivationCheckpointConfig, optional
        Activations that are computed again.
    optimizer : Optimizer
        The update rule.
    minimum_parameter_group_size : int
        As in `ShardingConfiguration`.
    order : tuple of str
        Axes of a mesh, the one whose ranks are neighbours last: as of `HybridShardedModel`.

    Raises
    ------
    UnplannableError
        If the hosts do not divide the ranks, the mesh does not make up the ranks, or the strategy
        is not known.
    """

    ranks: int
    hosts: int = 1
    strategy: str = "fsdp"
    mesh: tuple[int, int, int] = (1, 1, -1)
    data_parallel_strategy: str = "ddp"
    batch_size: int | None = None
    micro_batch_count: int = 1
    schedule: IPipelineSchedule | str | None = None
    sequence_parallel: bool = False
    precision: str | None = None
    checkpoint_config: ActivationCheckpointConfig | None = None
    optimizer: Optimizer = field(default_factory=AdamW)
    minimum_parameter_group_size: int = 1024
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        as_count("ranks", self.ranks)
        as_count("hosts", self.hosts)
        if self.ranks % self.hosts:
            raise UnplannableError(
                f"hosts must divide ranks, so that each has the same number: {self.ranks} ranks on "
                f"{self.hosts} hosts"
            )
        if self.strategy not in PLANNED_STRATEGIES:
            known = ", ".join(PLANNED_STRATEGIES)
            raise UnplannableError(f"strategy must be one of {known}, got {self.strategy!r}")
        try:
            _ = self.sizes
        except ValueError as error:
            raise UnplannableError(f"mesh {self.mesh} of {self.ranks} ranks: {error}") from None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of the pipeline, tensor and data axes of this strategy."""
        match self.strategy:
            case DistributedStrategy.PIPELINE_PARALLEL:
                return self.ranks, 1, 1
            case DistributedStrategy.TENSOR_PARALLEL:
                return 1, self.ranks, 1
            case DistributedStrategy.HYBRID:
                return mesh_sizes(self.ranks, *self.mesh)
        return 1, 1, self.ranks

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks of each host."""
        return self.ranks // self.hosts

    @property
    def samples(self) -> int:
        """Samples of a step, of all ranks together."""
        return 8 * self.sizes[2] if self.batch_size is None else self.batch_size

    @property
    def samples_of_rank(self) -> int:
        """Samples that one rank computes in a step: the most that any rank has."""
        return -(-self.samples // self.sizes[2])

    @property
    def options(self) -> dict[str, Any]:
        """Options of `as_distributed` for this strategy."""
        pipeline, tensor, data = self.sizes
        values = {
            "pipeline_parallel_size": pipeline,
            "tensor_parallel_size": tensor,
            "data_parallel_size": data,
            "micro_batch_count": self.micro_batch_count,
            "schedule": self.schedule,
            "checkpoint_config": self.checkpoint_config,
            "sequence_parallel": self.sequence_parallel,
            "data_parallel_strategy": self.data_parallel_strategy,
            "order": self.order,
        }
        taken = STRATEGY_OPTIONS.get(self.strategy, ())
        return {name: value for name, value in values.items() if name in taken}

    def with_options(self) -> Job:
        """Return the job itself, or a mesh with a data axis alone if its options need a mesh.

        Micro-batches and recomputation are options of a mesh. "ddp", "zero1", "zero2" and "fsdp" on
        its data axis are the same strategies.
        """
        is_plain = self.micro_batch_count == 1 and self.checkpoint_config is None
        if is_plain or STRATEGY_OPTIONS.get(self.strategy):
            return self
        mesh = (1, 1, self.ranks)
        return replace(self, strategy="hybrid", mesh=mesh, data_parallel_strategy=self.strategy)


def planned_model(factory: Callable[..., Any] | object) -> Any:
    """Return the model of a factory, or the model itself, which has allocated no parameters.

    Parameters
    ----------
    factory : callable or model
        ``factory()`` or ``factory(seed)`` returns a model, or a tuple that begins with one, as for
        ``mpishard verify``.

    Raises
    ------
    UnplannableError
        If it returns no model.
    """
    if isinstance(factory, ILayeredModel) or hasattr(factory, "get_parameters"):
        return factory
    if not callable(factory):
        raise UnplannableError(
            f"expected a model, or a factory that returns one, got a {type(factory).__name__}"
        )
    required = [
        parameter
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in _POSITIONAL
    ]
    given = factory(*[0] * min(1, len(required)))
    return given[0] if isinstance(given, tuple) and given else given


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
