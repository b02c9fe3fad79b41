"""Functions that wrap models and optimizers by strategy, and run a program on its ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar, overload

from mpishard import models, optimizers
from mpishard.base import PeerError, adapter_hint, as_count, nearest
from mpishard.base.mirrored import StrategySpellings
from mpishard.communication import (
    CommunicationBackend,
    OnFailure,
    check_backend_name,
    check_on_failure,
    init,
    is_launched,
    refuse_worlds_of_one,
    run_in_threads,
)
from mpishard.pipeline import about_schedule
from mpishard.sharding import ShardingConfiguration

__all__ = [
    "STRATEGY_OPTIONS",
    "DistributedStrategy",
    "as_distributed",
    "launch",
    "register_strategy",
]

T = TypeVar("T")


class DistributedStrategy(StrategySpellings, StrEnum):
    """A way to spread a model and its training over ranks; NONE leaves both as they are."""

    NONE = "none"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP = "fsdp"
    TENSOR_PARALLEL = "tensor"
    PIPELINE_PARALLEL = "pipeline"
    HYBRID = "hybrid"


# By text and not by member, because `register_strategy` adds names.
_CLASSES: dict[str, tuple[type[models.ShardedModelBase], type[optimizers.ShardedOptimizerBase]]] = {
    DistributedStrategy.DDP: (models.DDPModel, optimizers.DDPOptimizer),
    DistributedStrategy.ZERO1: (models.ZeRO1Model, optimizers.ZeRO1Optimizer),
    DistributedStrategy.ZERO2: (models.ZeRO2Model, optimizers.ZeRO2Optimizer),
    DistributedStrategy.ZERO3: (models.ZeRO3Model, optimizers.ZeRO3Optimizer),
    DistributedStrategy.FSDP: (models.FSDPModel, optimizers.FSDPOptimizer),
    DistributedStrategy.TENSOR_PARALLEL: (
        models.TensorParallelModel,
        optimizers.TensorParallelOptimizer,
    ),
    DistributedStrategy.PIPELINE_PARALLEL: (
        models.PipelineParallelModel,
        optimizers.PipelineParallelOptimizer,
    ),
    DistributedStrategy.HYBRID: (models.HybridShardedModel, optimizers.HybridShardedOptimizer),
}
_TENSOR = ("sequence_parallel", "checkpoint_config")
_PIPELINE = ("micro_batch_count", "schedule", "partition_strategy", "checkpoint_config")
STRATEGY_OPTIONS: dict[str, tuple[str, ...]] = {
    DistributedStrategy.TENSOR_PARALLEL: _TENSOR,
    DistributedStrategy.PIPELINE_PARALLEL: _PIPELINE,
    DistributedStrategy.HYBRID: (
        "pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size",
        *_PIPELINE, "sequence_parallel", "data_parallel_strategy", "order",
    ),
}  # fmt: skip
"""Options of `as_distributed` besides the strategy; other strategies take none."""


# Type checkers learn that a wrapped optimizer is a ShardedOptimizerBase. The wrapper of a model
# depends on the strategy.
@overload
def as_distributed(
    model_or_optimizer: optimizers.Optimizer,
    backend_or_config: CommunicationBackend | ShardingConfiguration,
    strategy: str | DistributedStrategy = ...,
    *,
    precision: str | None = ...,
    **degrees: Any,
) -> optimizers.ShardedOptimizerBase: ...


@overload
def as_distributed(
    model_or_optimizer: Any,
    backend_or_config: CommunicationBackend | ShardingConfiguration,
    strategy: str | DistributedStrategy = ...,
    *,
    precision: str | None = ...,
    **degrees: Any,
) -> Any: ...


def as_distributed(
    model_or_optimizer: Any,
    backend_or_config: CommunicationBackend | ShardingConfiguration,
    strategy: str | DistributedStrategy = DistributedStrategy.FSDP,
    *,
    precision: str | None = None,
    **degrees: Any,
) -> Any:
    """Wrap a model or an optimizer in a strategy.

    Parameters
    ----------
    model_or_optimizer : object
        An optimizer of `mpishard.optimizers`, or a model (see `ShardedModelBase`). Wrapping a
        model is collective: all ranks receive rank 0's first parameters.
    backend_or_config : CommunicationBackend or ShardingConfiguration
        The backend, with default settings, or a configuration with your own.
    strategy : {"fsdp", "ddp", "zero1", "zero2", "zero3", "tensor", "pipeline", "hybrid", "none"} \
or DistributedStrategy
        The strategy, or a name of `register_strategy`; "none" returns the object itself.
    precision : {"bfloat16", "tf32"}, optional
        The precision of `ShardingConfiguration`. A given configuration is not changed. Default:
        the configuration's precision.
    **degrees
        Options of "tensor", "pipeline" and "hybrid", which `TensorParallelModel`,
        `PipelineParallelModel` and `HybridShardedModel` describe: ``pipeline_parallel_size``,
        ``tensor_parallel_size``, ``data_parallel_size``, ``micro_batch_count`` (or
        ``num_micro_batches``), ``schedule``, ``partition_strategy``, ``checkpoint_config``,
        ``sequence_parallel``, ``data_parallel_strategy``, ``order``. Give the model and the
        optimizer the same options.

    Returns
    -------
    ShardedModelBase or ShardedOptimizerBase
        The wrapper.

    Raises
    ------
    TypeError
        For None; for an option that the strategy does not take, naming those that it takes.
    ValueError
        For an unknown strategy, naming the known ones; for options that its class refuses.

    Examples
    --------
    The same options for both::

        options = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "micro_batch_count": 8}
        model = ms.as_distributed(ms.nn.GPT(...), backend, "hybrid", **options)
        optimizer = ms.as_distributed(ms.optimizers.AdamW(), backend, "hybrid", **options)
    """
    if model_or_optimizer is None or backend_or_config is None:
        raise TypeError(
            "as_distributed needs a model or optimizer, and a backend or configuration; got "
            f"{type(model_or_optimizer).__name__} and {type(backend_or_config).__name__}"
        )
    # The two arguments in the wrong order, which other checks would report as a wrong backend.
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
        raise TypeError(
            f"as_distributed wraps an object: pass {name}(...), not the class {name}"
            + adapter_hint(model_or_optimizer)
        )
    hint = adapter_hint(model_or_optimizer)
    # An object of another library may also be a black box, with the members of a model.
    if hint and not hasattr(model_or_optimizer, "get_parameters"):
        raise TypeError(
            "as_distributed wraps models and optimizers, got a "
            f"{type(model_or_optimizer).__name__}{hint}"
        )
    # Before anything is made or communicated: a wrong name is refused alike on all ranks.
    kind = strategy_named(strategy)
    options = checked_options(kind, degrees)
    # After the checks of name and options, which must be right even if nothing is wrapped.
    if kind == DistributedStrategy.NONE:
        return model_or_optimizer
    model_class, optimizer_class = _CLASSES[kind]
    config = backend_or_config
    if isinstance(config, CommunicationBackend):
        config = ShardingConfiguration(config)
    if precision is not None:
        # A copy, because other models may use the given configuration, with its precision.
        config = copy.copy(config)
        config.precision = precision
    if hasattr(model_or_optimizer, "optimize") and not hasattr(
        model_or_optimizer, "get_parameters"
    ):
        # The class itself refuses an optimizer that it cannot run.
        return optimizer_class(model_or_optimizer, config, **options)
    return model_class(model_or_optimizer, config, **options)


def register_strategy(
    name: str,
    model_class: type[models.ShardedModelBase],
    optimizer_class: type[optimizers.ShardedOptimizerBase],
    *,
    options: Sequence[str] = (),
) -> None:
    """Register a strategy of your own under a name for `as_distributed` and its callers.

    To register the same classes again, as each thread-rank of a test may do, changes nothing.

    Parameters
    ----------
    name : str
        Name for ``strategy=``: lower-case letters and digits.
    model_class : subclass of ShardedModelBase
        The wrapper of models, called as ``model_class(model, config, **options)``.
    optimizer_class : subclass of ShardedOptimizerBase
        The wrapper of optimizers for models of `model_class`, called in the same way.
    options : sequence of str
        Names of the keyword arguments that both classes take.

    Raises
    ------
    TypeError
        If a class is not a subclass of the right base.
    ValueError
        If the name has other characters, or is registered for other classes already.

    Examples
    --------
    >>> import mpishard as ms
    >>> class MyModel(ms.FSDPModel): ...
    >>> class MyOptimizer(ms.FSDPOptimizer): ...
    >>> ms.register_strategy("mine", MyModel, MyOptimizer)
    >>> def main(backend):
    ...     return type(ms.as_distributed(ms.nn.MLP([2, 2]), backend, strategy="mine")).__name__
    >>> ms.run_in_threads(2, main)
    ['MyModel', 'MyModel']
    """
    # Without "-" and "_", which `_strategy` removes from the names that users give.
    if not re.fullmatch(r"[a-z][a-z0-9]*", name):
        raise ValueError(f"a strategy's name is of lower-case letters and digits, got {name!r}")
    for given, base in (
        (model_class, models.ShardedModelBase),
        (optimizer_class, optimizers.ShardedOptimizerBase),
    ):
        if not issubclass(given, base):
            raise TypeError(f"strategy {name!r} needs a subclass of {base.__name__}, got {given!r}")
    pair, known = (model_class, optimizer_class), _CLASSES.get(name)
    # The same classes may be registered again: a test's thread-ranks all run the same script.
    if name == DistributedStrategy.NONE or known not in (None, pair):
        raise ValueError(f"there is a strategy {name!r} already; choose another name")
    _CLASSES[name] = pair
    STRATEGY_OPTIONS[name] = tuple(options)


def strategy_named(given: str | DistributedStrategy) -> str:
    """Return the name of a strategy, also in usual spellings: ZeRO-1, tensor_parallel, FSDP."""
    name = str(given).lower().replace("-", "").replace("_", "").removesuffix("parallel")
    known = [*map(str, _CLASSES), DistributedStrategy.NONE.value]
    if name not in known:
        # Users give "1f1b" here, which is a schedule and belongs into an option.
        hint = about_schedule(str(given)) or nearest(name, known)
        raise ValueError(f"unknown strategy {given!r}; there are {', '.join(known)}{hint}")
    return name


def checked_options(strategy: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options ``given``; refuse those that the strategy does not take."""
    options = dict(given)
    if "num_micro_batches" in options:
        # The name that schedules and timelines have for the same number.
        count = options.pop("num_micro_batches")
        if options.setdefault("micro_batch_count", count) != count:
            raise ValueError(
                f"num_micro_batches {count} and micro_batch_count {options['micro_batch_count']} "
                "are two names of one number; give one of them"
            )
    taken = STRATEGY_OPTIONS.get(strategy, ())
    wrong = [name for name in options if name not in taken]
    if wrong:
        hybrid = STRATEGY_OPTIONS[DistributedStrategy.HYBRID]
        raise TypeError(
            f"strategy {strategy!r} takes no {', '.join(wrong)}; "
            + (f"it takes {', '.join(taken)}" if taken else "it takes no options")
            + nearest(wrong[0], taken)
            + (
                "; strategy 'hybrid' takes all of these"
                if taken and set(wrong) <= set(hybrid)
                else ""
            )
        )
    return options


def launch(
    main: Callable[..., T],
    *args: object,
    backend: str = "auto",
    world_size: int | None = None,
    on_failure: OnFailure = "abort",
) -> T:
    """Run ``main(backend, *args)`` on every rank.

    If a launcher (``mpirun``, ``srun``, ``mpishard run``) started this process, it is one rank, and
    ``main`` runs here. Otherwise ``main`` runs on ``world_size`` threads of this process.

    Parameters
    ----------
    main : callable
        The program of each rank, called as ``main(backend, *args)``.
    backend : {"auto", "mpi", "nccl", "memory"}
        "auto" is MPI if a launcher started the process, and threads otherwise. "nccl" is MPI with
        `NCCLCommunicationBackend`, for ranks with a GPU each.
    world_size : int, optional
        Number of thread-ranks, default 1. A launcher's number of ranks overrides it. They wait
        for each other for 300 seconds, or as long as MPISHARD_TIMEOUT says.
    on_failure : {"abort", "shrink"}
        The fate of the other ranks if one is killed, or raises an error that nobody catches. With
        "abort" the job ends. With "shrink" they raise `PeerError`, and ``main`` begins again, in
        the same processes, on the smaller world of the remaining ranks. ``main`` must then load the
        newest checkpoint. Under MPI this needs Open MPI, started by ``mpishard run --on-failure
        shrink``.

    Returns
    -------
    object
        The result of ``main`` on this rank; on threads, that of the first remaining rank.

    Raises
    ------
    ValueError
        For a world size below 1, or a backend or ``on_failure`` of another name.
    MPIUnavailableError
        If MPI is asked for and is not available, or does not support ``on_failure``.

    Examples
    --------
    A training run that survives the loss of any rank::

        def main(backend):
            model, optimizer = make_model(backend), make_optimizer(backend)
            step = 0
            if Path("runs/newest").exists():
                step = ms.checkpoint.load("runs/newest", model, optimizer)["step"]
            ...

        ms.launch(main, on_failure="shrink")
    """
    check_backend_name(backend)
    check_on_failure(on_failure)
    if world_size is not None:
        as_count("world_size", world_size)
    if backend in ("mpi", "nccl") or (backend == "auto" and is_launched()):
        own = init("nccl" if backend == "nccl" else "mpi", on_failure=on_failure)
        return main(own, *args) if on_failure == "abort" else _go_on(own, main, args)[1]
    # Under a launcher each process would train alone, and all would write the same files.
    refuse_worlds_of_one()
    if on_failure == "abort":
        return run_in_threads(world_size or 1, main, *args)[0]
    ends: Sequence[tuple[int, T] | None] = run_in_threads(
        world_size or 1, _go_on, main, args, on_failure="shrink"
    )
    # A rank that was lost has no end. The others were numbered again, from 0.
    return dict(end for end in ends if end is not None)[0]


def _go_on(
    backend: CommunicationBackend, main: Callable[..., T], args: tuple[object, ...]
) -> tuple[int, T]:
    """Run ``main`` to its end, anew each time ranks are lost; return the last rank, the result."""
    while True:
        # For `optimize`, which warns if a program that begins again could not resume.
        backend._begins_again = True
        try:
            result = main(backend, *args)
            if backend.is_initialized:
                # A rank that has finished waits here, and begins again if another one is lost.
                backend.barrier()
        # Not other errors of communication, after which the ranks that remain are not known.
        except PeerError:
            backend = backend.shrink()
        else:
            return backend.rank, result
