"""Wrapping by strategy, and starting a program on its ranks."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeVar, overload

from mpishard.communication import CommunicationBackend, init, run_in_threads
from mpishard.communication.start import is_launched, refuse_worlds_of_one
from mpishard.contracts import IOptimizer
from mpishard.models import (
    DDPModel,
    FSDPModel,
    ShardedModelBase,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
)
from mpishard.optimizers import (
    DDPOptimizer,
    FSDPOptimizer,
    Optimizer,
    ShardedOptimizerBase,
    ZeRO1Optimizer,
    ZeRO2Optimizer,
    ZeRO3Optimizer,
)
from mpishard.sharding import ShardingConfiguration

__all__ = [
    "DistributedStrategy",
    "as_distributed",
    "as_distributed_for_high_bandwidth",
    "as_distributed_for_low_bandwidth",
    "launch",
]

T = TypeVar("T")


class DistributedStrategy(StrEnum):
    """How a model and its training are spread over ranks."""

    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"
    # As the mirrored hierarchy spells them.
    ZeRO1 = "zero1"
    ZeRO2 = "zero2"
    ZeRO3 = "zero3"


_CLASSES: dict[DistributedStrategy, tuple[type[ShardedModelBase], type[ShardedOptimizerBase]]] = {
    DistributedStrategy.DDP: (DDPModel, DDPOptimizer),
    DistributedStrategy.ZERO1: (ZeRO1Model, ZeRO1Optimizer),
    DistributedStrategy.ZERO2: (ZeRO2Model, ZeRO2Optimizer),
    DistributedStrategy.ZERO3: (ZeRO3Model, ZeRO3Optimizer),
    DistributedStrategy.FSDP: (FSDPModel, FSDPOptimizer),
}


@overload
def as_distributed(
    model_or_optimizer: Optimizer,
    backend_or_config: CommunicationBackend | ShardingConfiguration,
    strategy: str | DistributedStrategy = ...,
) -> ShardedOptimizerBase: ...


@overload
def as_distributed(
    model_or_optimizer: Any,
    backend_or_config: CommunicationBackend | ShardingConfiguration,
    strategy: str | DistributedStrategy = ...,
) -> Any: ...


def as_distributed(
    model_or_optimizer: Any,
    backend_or_config: CommunicationBackend | ShardingConfiguration,
    strategy: str | DistributedStrategy = DistributedStrategy.FSDP,
) -> Any:
    """Wrap a model or an optimizer in a strategy.

    Parameters
    ----------
    model_or_optimizer : object
        An optimizer of `mpishard.optimizers`, or a model (see `ShardedModelBase`). Wrapping a
        model is collective: rank 0's first parameters are dealt to all.
    backend_or_config : CommunicationBackend or ShardingConfiguration
        How the ranks talk, with default choices or with yours.
    strategy : {"fsdp", "ddp", "zero1", "zero2", "zero3"} or DistributedStrategy
        How to spread it.

    Returns
    -------
    ShardedModelBase or ShardedOptimizerBase
        The wrapper.

    Raises
    ------
    TypeError
        For None.
    ValueError
        For an unknown strategy, naming those there are.
    """
    if model_or_optimizer is None or backend_or_config is None:
        raise TypeError(
            "as_distributed needs a model or optimizer, and a backend or configuration; got "
            f"{type(model_or_optimizer).__name__} and {type(backend_or_config).__name__}"
        )
    if isinstance(model_or_optimizer, CommunicationBackend | ShardingConfiguration):
        raise TypeError("as_distributed takes the model or optimizer first, then the backend")
    if not isinstance(backend_or_config, CommunicationBackend | ShardingConfiguration):
        raise TypeError(
            "backend_or_config must be a CommunicationBackend or a ShardingConfiguration, got "
            f"{type(backend_or_config).__name__}; mpishard.init() and mpishard.launch() give a "
            "backend"
        )
    if isinstance(model_or_optimizer, type):
        name = model_or_optimizer.__name__
        raise TypeError(f"as_distributed wraps an object: pass {name}(...), not the class {name}")
    try:
        model_class, optimizer_class = _CLASSES[
            DistributedStrategy(str(strategy).lower().replace("-", ""))
        ]
    except ValueError:
        known = ", ".join(s.value for s in DistributedStrategy)
        raise ValueError(f"unknown strategy {strategy!r}; there are {known}") from None
    config = backend_or_config
    if isinstance(config, CommunicationBackend):
        config = ShardingConfiguration(config)
    if isinstance(model_or_optimizer, IOptimizer):
        return optimizer_class(model_or_optimizer, config)  # which refuses what it cannot run
    return model_class(model_or_optimizer, config)


def as_distributed_for_high_bandwidth(model: Any, backend: CommunicationBackend) -> Any:
    """Fully sharded, with the choices of `ShardingConfiguration.create_for_high_bandwidth`.

    Parameters and errors are those of `as_distributed`.
    """
    return _with_preset(model, backend, ShardingConfiguration.create_for_high_bandwidth)


def as_distributed_for_low_bandwidth(model: Any, backend: CommunicationBackend) -> Any:
    """Fully sharded, with the choices of `ShardingConfiguration.create_for_low_bandwidth`.

    Parameters and errors are those of `as_distributed`.
    """
    return _with_preset(model, backend, ShardingConfiguration.create_for_low_bandwidth)


def _with_preset(
    model: Any,
    backend: CommunicationBackend,
    preset: Callable[[CommunicationBackend], ShardingConfiguration],
) -> Any:
    if model is None or backend is None:
        raise TypeError(
            f"needs a model or optimizer, and a backend; got {type(model).__name__} and "
            f"{type(backend).__name__}"
        )
    return as_distributed(model, preset(backend))


def launch(
    main: Callable[..., T],
    *args: Any,
    backend: str = "auto",
    world_size: int | None = None,
) -> T:
    """Run ``main(backend, *args)`` on every rank.

    Started by a launcher (``mpirun``, ``srun``, ``mpishard run``) this process is one rank, and
    ``main`` runs here. Started as plain ``python``, ``main`` runs on ``world_size`` threads of
    this process.

    Parameters
    ----------
    main : callable
        ``main(backend, *args)``.
    backend : {"auto", "mpi", "memory"}
        "auto" is MPI where a launcher started the process, threads elsewhere.
    world_size : int, optional
        Number of thread-ranks, default 1. Under a launcher its own number holds.

    Returns
    -------
    object
        What ``main`` returned on this rank; on threads, on rank 0.

    Raises
    ------
    ValueError
        For a world below 1, or a backend of another name.
    MPIUnavailableError
        Where MPI is asked for and cannot be had.
    """
    if world_size is not None and world_size < 1:
        raise ValueError(f"world_size must be 1 or more, got {world_size}")
    if backend == "mpi" or (backend == "auto" and is_launched()):
        return main(init("mpi"), *args)
    if backend not in ("auto", "memory"):
        raise ValueError(f"backend must be auto, mpi or memory, got {backend!r}")
    refuse_worlds_of_one()
    return run_in_threads(world_size or 1, main, *args)[0]
