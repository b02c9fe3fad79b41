"""The sharded optimizers, one for each strategy: the model that each updates, and its options."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mpishard.base import ShardingError, as_count, as_integer, nearest
from mpishard.models import (
    DATA_POLICIES,
    DDPModel,
    FSDPModel,
    HybridShardedModel,
    MeshModel,
    PipelineParallelModel,
    ShardedModelBase,
    TensorParallelModel,
    ZeRO1Model,
    ZeRO2Model,
    ZeRO3Model,
    axis_sizes,
    checked_mesh_options,
)
from mpishard.optimizers.rules.rule import Optimizer
from mpishard.optimizers.sharded.base import ShardedOptimizerBase
from mpishard.pipeline import IPipelineSchedule
from mpishard.sharding import ShardingConfiguration

if TYPE_CHECKING:
    from mpishard.training import OptimizationInputData, OptimizationResult

_log = logging.getLogger("mpishard")

_DATA_STRATEGIES: dict[str, type[ShardedModelBase]] = {
    "ddp": DDPModel, "zero1": ZeRO1Model, "zero2": ZeRO2Model, "zero3": ZeRO3Model,
    "fsdp": FSDPModel,
}  # fmt: skip


def data_model_class(strategy: str, **others: type[ShardedModelBase]) -> type[ShardedModelBase]:
    """Return the model of a strategy without mesh axes, or one of ``others``.

    Raises
    ------
    ValueError
        For another strategy.
    """
    known = {**_DATA_STRATEGIES, **others}
    if strategy not in known:
        raise ValueError(f"strategy must be one of {', '.join(known)}, got {strategy!r}")
    return known[strategy]


class DDPOptimizer(ShardedOptimizerBase):
    """Updates a `DDPModel`: every rank holds the whole state and makes the same update.

    Parameters and errors are those of `ShardedOptimizerBase`.
    """

    model_class = DDPModel


class ZeRO1Optimizer(ShardedOptimizerBase):
    """Updates a `ZeRO1Model`: each rank updates its pieces, and publishes them.

    Parameters and errors are those of `ShardedOptimizerBase`.
    """

    model_class = ZeRO1Model


class ZeRO2Optimizer(ShardedOptimizerBase):
    """Updates a `ZeRO2Model`: each rank updates its pieces, and publishes them.

    Parameters and errors are those of `ShardedOptimizerBase`.
    """

    model_class = ZeRO2Model


class FSDPOptimizer(ShardedOptimizerBase):
    """Updates an `FSDPModel`: every rank holds the state of the shard it owns, and updates it.

    Parameters and errors are those of `ShardedOptimizerBase`.
    """

    model_class: type[ShardedModelBase] = FSDPModel


class ZeRO3Optimizer(FSDPOptimizer):
    """`FSDPOptimizer` for a `ZeRO3Model`."""

    model_class = ZeRO3Model


class _MeshOptimizer(ShardedOptimizerBase):
    """Updates a model on a mesh of ``sizes`` (pipeline, tensor, data), with options of that model.

    The options are the keyword arguments with which `optimize` wraps a plain model. A model that
    is wrapped already must have been given the same, as far as the optimizer was given any.
    """

    sizes: tuple[int, int, int]

    def __init__(
        self, wrapped_optimizer: Optimizer, config: ShardingConfiguration, options: dict[str, Any]
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        own = type(self).__name__
        # Arguments of the optimizer itself, such as sizes, are no options of the model.
        named = set(inspect.signature(type(self)).parameters) | {"wrapped_model"}
        # Read from the signature, so that a new option of the model needs no line here.
        known = [
            name for name in inspect.signature(self.model_class).parameters if name not in named
        ]
        for name in options:
            if name not in known:
                raise TypeError(
                    f"{own} takes no {name}; it takes {', '.join(known)}{nearest(name, known)}"
                )
        self._model_options = checked_mesh_options(options)

    @property
    def _data_size(self) -> int:
        return self.sizes[2]

    def _require_fit(self, model: ShardedModelBase) -> None:
        super()._require_fit(model)
        assert isinstance(model, MeshModel)
        # Only options that were given are compared; the model decides the others.
        for name, mine in self._model_options.items():
            # Options without an entry matter only when a model is wrapped.
            value = _COMPARED.get(name)
            if value is not None and value(mine) != value(getattr(model, name)):
                raise ShardingError(
                    f"the optimizer was made with {name} {_named_option(mine)}, and the model with "
                    f"{_named_option(getattr(model, name))}; give both the same"
                )
        # A model of the right class may have been made with other sizes.
        if model.mesh.sizes != self.sizes:
            named = [" x ".join(map(str, sizes)) for sizes in (model.mesh.sizes, self.sizes)]
            raise ShardingError(
                f"the model's mesh is {named[0]} (pipeline, tensor, data), the optimizer's "
                f"{named[1]}; give both the same sizes"
            )

    def synchronize_optimizer_state(self) -> None:
        """Make copies of state on several ranks equal again. Collective; a repair.

        The state of whole layers becomes that of one of the ranks. The state of slices and layers
        that only one rank has stays. The number of updates becomes rank 0's.

        Raises
        ------
        NotImplementedError
            For a `HybridShardedOptimizer`, whose state is partitioned.
        """
        self._require_offered("synchronize_optimizer_state")
        if self._state is not None:
            self._state.synchronize()


# Option -> the function of its value that must be equal for the optimizer and the model.
_COMPARED: dict[str, Callable[[Any], object]] = {
    "schedule": lambda schedule: (schedule.name, schedule.virtual_stages_per_rank),
    "data_parallel_strategy": DATA_POLICIES.__getitem__,  # two of them have two names
    "sequence_parallel": bool,
    "micro_batch_count": int,
}


def _named_option(value: object) -> str:
    if isinstance(value, IPipelineSchedule):
        stages = value.virtual_stages_per_rank
        return f"{value.name} of {stages} stage{'s' * (stages > 1)} per rank"
    return str(value)


class TensorParallelOptimizer(_MeshOptimizer):
    """Updates a `TensorParallelModel`: each rank its slices, all ranks the whole parameters.

    Parameters and errors are those of `ShardedOptimizerBase`; ``model_options`` are keyword
    arguments of `TensorParallelModel`, for a plain model that `optimize` wraps. They are checked at
    once, and a wrapped model must have the same.
    """

    model_class = TensorParallelModel

    def __init__(
        self, wrapped_optimizer: Optimizer, config: ShardingConfiguration, **model_options: Any
    ) -> None:
        super().__init__(wrapped_optimizer, config, model_options)
        self.sizes = 1, self.world_size, 1


class PipelineParallelOptimizer(_MeshOptimizer):
    """Updates a `PipelineParallelModel`: each rank the layers of its stages.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    num_micro_batches : int
        Number of micro-batches of a plain model that `optimize` wraps. If it is above 1, a
        wrapped model's must be the same.
    **model_options
        Keyword arguments of `PipelineParallelModel` for a plain model. A wrapped model must have
        the same.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizerBase`; for fewer than one micro-batch, and for options that the model
        does not take.
    """

    model_class = PipelineParallelModel

    def __init__(
        self,
        wrapped_optimizer: Optimizer,
        config: ShardingConfiguration,
        num_micro_batches: int = 1,
        **model_options: Any,
    ) -> None:
        # 1 is the default, and means that the model decides.
        count = as_count("num_micro_batches", num_micro_batches)
        if count > 1 and model_options.setdefault("micro_batch_count", count) != count:
            raise ValueError(
                f"num_micro_batches {count} and micro_batch_count "
                f"{model_options['micro_batch_count']} are two names of one number; give one of "
                "them"
            )
        super().__init__(wrapped_optimizer, config, model_options)
        self.sizes = self.world_size, 1, 1
        self.num_micro_batches: int = self._model_options.get("micro_batch_count", count)


class HybridShardedOptimizer(_MeshOptimizer):
    """Updates a `HybridShardedModel`: each rank its pieces of its stages' slices.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    pipeline_parallel_size, tensor_parallel_size, data_parallel_size : int
        Sizes of the axes, which must be the model's; -1 takes the rest of the world.
    **model_options
        Further arguments of `HybridShardedModel`, for a plain model that `optimize` wraps. A
        wrapped model must have the same.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizerBase`; for sizes that do not make up the world, and for options that
        the model does not take.
    """

    model_class = HybridShardedModel
    _refused = MappingProxyType(
        {
            "synchronize_optimizer_state": "it partitions the optimizer state over the mesh: each "
            "rank holds a part that no other rank need have, so there is nothing to synchronise"
        }
    )

    def __init__(
        self,
        wrapped_optimizer: Optimizer,
        config: ShardingConfiguration,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = -1,
        **model_options: Any,
    ) -> None:
        super().__init__(wrapped_optimizer, config, model_options)
        # Resolved, so that -1 is compared as the number that it stands for.
        self.sizes = axis_sizes(
            self._config, pipeline_parallel_size, tensor_parallel_size, data_parallel_size
        )
        # The sizes are arguments of the model, too, if `optimize` wraps a plain one.
        names = "pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"
        self._model_options |= zip(names, self.sizes, strict=True)


class ElasticOptimizer(ShardedOptimizerBase):
    """Updates a model on a number of ranks that may change from start to start, within bounds.

    The number changes in three ways. ``mpishard resize`` orders a running job to continue with
    other ranks from the next step on; the bounds are checked before. If a rank is lost under
    ``launch(main, on_failure="shrink")``, the others form a smaller world, in which ``main`` begins
    again; that needs Open MPI, or threads. Elsewhere ``mpishard run --max-restarts K --min-ranks
    M`` starts the job again on the hosts that are left, and takes the others back when they answer
    again. Each time ``main`` makes this optimizer anew, which checks the bounds, and
    ``optimize(checkpoint=FOLDER)`` divides parameters, state and the rest of the epoch's samples
    among the new ranks. With ``gradient_leaves`` the result has the same bits.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    min_workers, max_workers : int
        Least and largest number of ranks with which the job may continue.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}
        Strategy of the model.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizerBase`; for a minimum below 1, a maximum below it, another strategy.
    ShardingError
        A `RuntimeError`, on every rank, if the number of ranks is outside the bounds: here, at the
        first step, and when `optimize` begins.
    """

    # In the bytes of `serialize`, too: a job that continues has the same bounds.
    _setting_names = _lasting_settings = "min_workers", "max_workers"
    _refused = MappingProxyType(
        {
            "synchronize_optimizer_state": "the state is divided anew when the number of ranks "
            "changes, and steps keep it: there is nothing to synchronise"
        }
    )

    def __init__(
        self,
        wrapped_optimizer: Optimizer,
        config: ShardingConfiguration,
        min_workers: int = 1,
        max_workers: int = 1024,
        *,
        strategy: str = "ddp",
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        self.min_workers = as_count("min_workers", min_workers)
        if as_integer("max_workers", max_workers) < min_workers:
            raise ValueError(
                f"max_workers must be min_workers, {min_workers}, or more, got {max_workers}"
            )
        self.model_class = data_model_class(strategy)
        self.max_workers = int(max_workers)
        self.allowed_ranks = self.min_workers, self.max_workers
        # At once, so that a job with a wrong number of ranks ends before it reads data.
        self._require_bounds()

    @property
    def current_workers(self) -> int:
        """Number of ranks now."""
        return self.world_size

    @property
    def can_scale_up(self) -> bool:
        """True if the job may continue with more ranks."""
        return self.current_workers < self.max_workers

    @property
    def can_scale_down(self) -> bool:
        """True if the job may continue with fewer ranks."""
        return self.current_workers > self.min_workers

    def _require_bounds(self) -> None:
        if not self.min_workers <= self.current_workers <= self.max_workers:
            raise ShardingError(
                f"{type(self).__name__} allows {self.min_workers} to {self.max_workers} ranks, but "
                f"the job has {self.current_workers}: start it with an allowed number, or give "
                "other bounds"
            )

    def _require_fit(self, model: ShardedModelBase) -> None:
        super()._require_fit(model)
        self._require_bounds()

    def optimize(self, input_data: OptimizationInputData) -> OptimizationResult:
        """Train as every optimizer; rank 0 warns if there is no checkpoint folder. Collective."""
        # By getattr, because input of another type is refused below.
        if getattr(input_data, "checkpoint", "") is None and self.rank == 0:
            _log.warning(
                "%s without checkpoint=FOLDER: if the number of ranks changes, training starts "
                "from the beginning",
                type(self).__name__,
            )
        return super().optimize(input_data)
