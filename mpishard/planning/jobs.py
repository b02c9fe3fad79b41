"""The run that is planned, and its model, built without arrays."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpishard.adapters import TorchModel
from mpishard.base import DType, as_count
from mpishard.communication import AXES, mesh_sizes
from mpishard.contracts import ILayeredModel
from mpishard.distributed import STRATEGY_OPTIONS, DistributedStrategy
from mpishard.models import IPlaceableModel
from mpishard.optimizers import AdamW, Optimizer
from mpishard.pipeline import ActivationCheckpointConfig, IPipelineSchedule
from mpishard.sharding import ParameterEntry

PLANNED_STRATEGIES = tuple(
    s.value for s in DistributedStrategy if s is not DistributedStrategy.NONE
)
"""Strategies that can be planned."""

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
    data_parallel_strategy: str = "zero1"
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
        If it needs more arguments, or returns no model.
    """
    if _is_model(factory):
        return _without_arrays(factory)
    if not callable(factory) or isinstance(factory, type):
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
    model = given[0] if isinstance(given, tuple) and given else given
    if not _is_model(model):
        raise UnplannableError(
            f"the factory returned a {type(model).__name__}, which is no model; {_EXPECTED}"
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


def name_of(model: Any) -> str:
    """Return the class of a planned model: of a PyTorch module, its own."""
    return type(model.placed_object if isinstance(model, ModuleShapes) else model).__name__


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
    "expected a model that has shapes and no arrays: one of mpishard.nn whose parameters nobody "
    "has asked for, a PyTorch module on the device meta, or a black box"
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
