"""The run that is planned, and its model, built without arrays."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpishard.adapters import TorchModel
from mpishard.base import DType, as_count
from mpishard.communication import mesh_order, mesh_sizes
from mpishard.contracts import ILayeredModel
from mpishard.distributed import STRATEGY_OPTIONS, DistributedStrategy
from mpishard.models import IPlaceableModel, checked_mesh_options
from mpishard.optimizers import AdamW, Optimizer
from mpishard.pipeline import ActivationCheckpointConfig, GPipeSchedule, IPipelineSchedule
from mpishard.sharding import ParameterEntry

PLANNED_STRATEGIES = tuple(
    s.value for s in DistributedStrategy if s is not DistributedStrategy.NONE
)
"""Strategies that can be planned."""

DATA_STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
"""Strategies that divide samples alone, in the order of the memory that they need, most first."""

NEIGHBOURS = ("pipeline", "data", "tensor")
"""Order of the axes of a planned mesh. A tensor group communicates most, and stays on a host."""

RECOMPUTATION = ActivationCheckpointConfig(enabled=True, checkpoint_every_n_layers="sqrt")
"""Activations that are computed again, in segments of about sqrt(layers) layers."""


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
        Strategy of the data axis of a mesh, by default that of `HybridShardedModel`.
    batch_size : int, optional
        Samples of a step, of all ranks together. Default: 8 for each rank, so that every strategy
        and mesh of the same ranks does the same work.
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
        Axes of a mesh, the one whose ranks are neighbours last, as of `HybridShardedModel`.
        Default: ranks of a tensor group are neighbours, and stay on a host wherever they fit.

    Raises
    ------
    UnplannableError
        If the hosts do not divide the ranks, the mesh does not make up the ranks, or the strategy
        or the order is not known.
    """

    ranks: int
    hosts: int = 1
    strategy: str = "fsdp"
    mesh: tuple[int, int, int] = (1, 1, -1)
    data_parallel_strategy: str = "zero1"
    batch_size: int | None = None
    micro_batch_count: int = 1
    schedule: IPipelineSchedule | str | None = None
    sequence_parallel: bool = False
    precision: str | None = None
    checkpoint_config: ActivationCheckpointConfig | None = None
    optimizer: Optimizer = field(default_factory=AdamW)
    minimum_parameter_group_size: int = 1024
    order: tuple[str, ...] = NEIGHBOURS

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
        try:
            mesh_order(self.order)
        except ValueError as error:
            raise UnplannableError(str(error)) from None

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
        return 8 * self.ranks if self.batch_size is None else self.batch_size

    @property
    def samples_of_rank(self) -> int:
        """Samples that one rank computes in a step: the most that any rank has."""
        return -(-self.samples // self.sizes[2])

    @property
    def axis_strategy(self) -> str:
        """Strategy of the data axis."""
        if self.strategy == DistributedStrategy.HYBRID:
            return self.data_parallel_strategy
        return self.strategy if self.strategy in DATA_STRATEGIES else "ddp"

    @property
    def used_schedule(self) -> IPipelineSchedule:
        """The schedule that was given, or that of a mesh model without one."""
        found = checked_mesh_options({"schedule": self.schedule})["schedule"]
        return found if isinstance(found, IPipelineSchedule) else GPipeSchedule()

    @property
    def has_schedule(self) -> bool:
        """True if a schedule orders more than one forward pass and its backward pass."""
        return self.sizes[0] > 1 or self.micro_batch_count > 1

    @property
    def name(self) -> str:
        """What a table calls it: mesh (pipeline x tensor x data), strategy, and choices."""
        pipeline, tensor, data = self.sizes
        words = []
        if self.strategy not in (*DATA_STRATEGIES, DistributedStrategy.HYBRID):
            words.append(self.strategy)
        elif pipeline * tensor > 1:
            words.append(f"{pipeline}x{tensor}x{data}")
        if data > 1 or not words:
            words.append(self.axis_strategy)
        if self.has_schedule:
            given = self.schedule
            words.append(given if isinstance(given, str) else self.used_schedule.name.lower())
        if self.micro_batch_count > 1:
            words.append(f"m{self.micro_batch_count}")
        if self.checkpoint_config is not None:
            words.append("recompute")
        return " ".join([*words, *filter(None, [self.precision])])

    def as_dict(self) -> dict[str, Any]:
        """Return the choices for JSON, as every command of `mpishard plan` names them."""
        return {
            "name": self.name,
            "strategy": self.strategy,
            "ranks": self.ranks,
            "hosts": self.hosts,
            "samples": self.samples,
            "mesh": list(self.sizes),
            "order": list(self.order),
            "data_parallel_strategy": self.axis_strategy,
            "schedule": self.used_schedule.name if self.has_schedule else None,
            "micro_batch_count": self.micro_batch_count,
            "precision": self.precision,
            "recomputes": self.checkpoint_config is not None,
        }

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

        Raises
        ------
        UnplannableError
            If a micro-batch would have no sample.
        """
        data, count = self.sizes[2], self.micro_batch_count
        if self.samples < data * count:
            raise UnplannableError(
                f"a batch of {self.samples} is too small for a data axis of {data} and "
                f"{count} micro-batch{'es' * (count > 1)} of a rank: give at least {data * count} "
                "samples"
            )
        is_plain = self.micro_batch_count == 1 and self.checkpoint_config is None
        if is_plain or STRATEGY_OPTIONS.get(self.strategy):
            return self
        mesh = (1, 1, self.ranks)
        return replace(self, strategy="hybrid", mesh=mesh, data_parallel_strategy=self.strategy)


def jobs_of(
    ranks: int,
    hosts: int = 1,
    *,
    strategies: Iterable[str] = DATA_STRATEGIES,
    meshes: Iterable[tuple[int, int, int]] = (),
    micro_batch_counts: Sequence[int] = (1,),
    schedules: Sequence[str | None] = (None,),
    precisions: Sequence[str | None] = (None,),
    **choices: Any,
) -> list[Job]:
    """Return a job for each strategy and mesh, with each precision, count and schedule.

    Schedules are those of jobs that have one: see `Job.has_schedule`. ``choices`` are others of
    `Job`.

    Raises
    ------
    UnplannableError
        If a strategy is none that divides samples alone, or a job is not possible.
    """
    names = list(strategies)
    unknown = next((name for name in names if name not in DATA_STRATEGIES), None)
    if unknown is not None:
        known = ", ".join(DATA_STRATEGIES)
        raise UnplannableError(f"strategies must be of {known}, got {unknown!r}; others are meshes")
    ways: list[dict[str, Any]] = [{"strategy": name} for name in names]
    ways += [{"strategy": "hybrid", "mesh": mesh} for mesh in meshes]
    return [
        Job(
            ranks,
            hosts,
            micro_batch_count=count,
            schedule=schedule,
            precision=precision,
            **(choices | way),
        ).with_options()
        for precision in precisions
        for way in ways
        for count in micro_batch_counts
        for schedule in (schedules if count > 1 or way.get("mesh", (1,))[0] > 1 else (None,))
    ]


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
        If it needs more arguments, or returns no model.
    """
    if _is_model(factory):
        return _without_arrays(factory)
    if not callable(factory):
        raise UnplannableError(
            f"expected a model, or a factory that returns one, got a {type(factory).__name__}"
        )
    required = [
        parameter
        for parameter in inspect.signature(factory).parameters.values()
        if parameter.default is parameter.empty and parameter.kind in _POSITIONAL
    ]
    if len(required) > 1:
        names = ", ".join(parameter.name for parameter in required)
        raise UnplannableError(f"a factory takes no argument or a seed, and this one needs {names}")
    try:
        given = factory(*[0] * len(required))
    except MemoryError as error:
        raise UnplannableError(f"the factory ran out of memory ({error}); {_EXPECTED}") from error
    except (Exception, SystemExit) as error:
        raise UnplannableError(f"the factory raised {type(error).__name__}: {error}") from error
    model = given[0] if isinstance(given, tuple) and given else given
    if not _is_model(model):
        raise UnplannableError(
            f"the factory returned an object of type {type(model).__name__}, which is no model; "
            f"{_EXPECTED}"
        )
    return _without_arrays(model)


def _is_model(thing: object) -> bool:
    is_box = hasattr(thing, "get_parameters") and not isinstance(thing, type)
    return isinstance(thing, ILayeredModel | IPlaceableModel) or is_box or _is_module(thing)


def _is_module(thing: object) -> bool:
    # Not imported: if there is a module, PyTorch is loaded.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(thing, torch.nn.Module)


def _without_arrays(model: Any) -> Any:
    """Return the model, or the shapes of a PyTorch module; refuse one that has allocated."""
    name = type(model).__name__
    if _is_module(model):
        real = [n for n, p in model.named_parameters() if p.device.type != "meta"]
        if real:
            raise UnplannableError(
                f"the PyTorch module {name} has allocated {real[0]}"
                + (f" and {len(real) - 1} more parameters" if len(real) > 1 else "")
                + "; expected one on the device meta: build it in `with torch.device('meta'):`"
            )
        return ModuleShapes(model)
    if getattr(model, "has_parameters", False):
        raise UnplannableError(
            f"this {name} has allocated its {model.parameter_count} parameters; {_EXPECTED}"
        )
    if isinstance(model, TorchModel):
        raise UnplannableError(
            "a TorchModel holds its parameters: return the PyTorch module itself, on the device "
            "meta, as built in `with torch.device('meta'):`"
        )
    return model


def identity_of(model: Any) -> tuple[str, int]:
    """Return the class of a planned model, and the number of its parameters."""
    if isinstance(model, ILayeredModel):
        return type(model).__name__, int(model.parameter_table.length)
    if isinstance(model, IPlaceableModel):
        own = model.placed_object if isinstance(model, ModuleShapes) else model
        return type(own).__name__, sum(entry.size for entry in model.parameter_entries)
    return type(model).__name__, int(model.get_parameters().size)


def title_of(model: str, parameter_count: int, job: Job) -> str:
    """Return model, ranks and batch in words, as each table of a plan begins."""
    hosts = f"{job.hosts} host{'s' * (job.hosts > 1)}"
    ranks = f"{job.ranks} rank{'s' * (job.ranks > 1)}"
    samples = f"{job.samples} sample{'s' * (job.samples > 1)}"
    return f"{model} of {parameter_count:,} parameters on {ranks}, {hosts}; {samples} a step"


class ModuleShapes(IPlaceableModel):
    """Names and shapes of the parameters of a PyTorch module on the device "meta"."""

    def __init__(self, module: Any) -> None:
        self._module = module
        entries, position = [], 0
        kinds = set()
        for name, parameter in module.named_parameters():
            shape = tuple(parameter.shape)
            entries.append(ParameterEntry(name, shape, position, bool(parameter.requires_grad)))
            position = entries[-1].stop
            kinds.add(str(parameter.dtype).removeprefix("torch."))
        if len(kinds) != 1:
            raise UnplannableError(
                f"all parameters must have one dtype, {type(module).__name__} has "
                f"{', '.join(sorted(kinds)) or 'none'}"
            )
        self._entries, self._dtype = entries, np.dtype(kinds.pop())

    @property
    def placed_object(self) -> Any:
        return self._module

    @property
    def parameter_entries(self) -> Sequence[ParameterEntry]:
        return self._entries

    @property
    def dtype(self) -> DType:
        return self._dtype

    def obstacle_to_bfloat16(self) -> str | None:
        return None

    fill_parameters = place_parameters = reclaim_parameters = with_parameters = None  # type: ignore[assignment]
    check_input = predict = forward_pass = backward_pass = None  # type: ignore[assignment]


_EXPECTED = (
    "expected a model that has shapes and no arrays: one of mpishard.nn that was just made, a "
    "PyTorch module on the device meta, or a black box"
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
