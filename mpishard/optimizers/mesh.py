"""Training models on a mesh."""

from __future__ import annotations

from typing import Any, ClassVar

from mpishard.arguments import as_integer
from mpishard.communication.mesh import mesh_sizes
from mpishard.contracts import IOptimizer
from mpishard.errors import ShardingError
from mpishard.models import (
    HybridShardedModel,
    PipelineParallelModel,
    ShardedModelBase,
    TensorParallelModel,
)
from mpishard.optimizers.sharded import ShardedOptimizerBase
from mpishard.sharding import ShardingConfiguration

__all__ = ["HybridShardedOptimizer", "PipelineParallelOptimizer", "TensorParallelOptimizer"]


class TensorParallelOptimizer(ShardedOptimizerBase):
    """Updates a `TensorParallelModel`: each rank its slices, and what is whole on all of them.

    Parameters and errors are those of `ShardedOptimizerBase`; ``model_options`` are keyword
    arguments of `TensorParallelModel`, for a plain model that `optimize` wraps.
    """

    model_class: ClassVar[type[ShardedModelBase]] = TensorParallelModel

    def __init__(
        self, wrapped_optimizer: IOptimizer, config: ShardingConfiguration, **model_options: Any
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        self._model_options = model_options

    @property
    def _data_size(self) -> int:
        return 1

    def synchronize_optimizer_state(self) -> None:
        """Nothing: a rank's state belongs to slices that it alone has, or is equal by itself."""


class PipelineParallelOptimizer(ShardedOptimizerBase):
    """Updates a `PipelineParallelModel`: each rank the layers of its stages.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    num_micro_batches : int
        Of a plain model that `optimize` wraps. Where it is above 1, a wrapped model's must be
        the same.
    **model_options
        Keyword arguments of `PipelineParallelModel` for a plain model.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizerBase`; for fewer than one micro-batch.
    """

    model_class: ClassVar[type[ShardedModelBase]] = PipelineParallelModel

    def __init__(
        self,
        wrapped_optimizer: IOptimizer,
        config: ShardingConfiguration,
        num_micro_batches: int = 1,
        **model_options: Any,
    ) -> None:
        if as_integer("num_micro_batches", num_micro_batches) < 1:
            raise ValueError(f"num_micro_batches must be 1 or more, got {num_micro_batches}")
        super().__init__(wrapped_optimizer, config)
        self.num_micro_batches = int(num_micro_batches)
        self._model_options = {"micro_batch_count": self.num_micro_batches} | model_options

    def _require_model_of_this_kind(self, model: ShardedModelBase) -> None:
        super()._require_model_of_this_kind(model)
        assert isinstance(model, PipelineParallelModel)
        if self.num_micro_batches not in (1, model.micro_batch_count):
            raise ShardingError(
                f"the optimizer was made for {self.num_micro_batches} micro-batches, and the model "
                f"cuts a batch into {model.micro_batch_count}; give both the same"
            )

    @property
    def _data_size(self) -> int:
        return 1

    def synchronize_optimizer_state(self) -> None:
        """Nothing: a rank's state belongs to layers that it alone has."""


class HybridShardedOptimizer(ShardedOptimizerBase):
    """Updates a `HybridShardedModel`: each rank what it owns of its stages' slices.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    pipeline_parallel_size, tensor_parallel_size, data_parallel_size : int
        Sizes of the axes, which must be the model's; -1 takes what is left of the world.
    **model_options
        Further arguments of `HybridShardedModel`, for a plain model that `optimize` wraps.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizerBase`; for sizes that do not make up the world.
    """

    model_class: ClassVar[type[ShardedModelBase]] = HybridShardedModel

    def __init__(
        self,
        wrapped_optimizer: IOptimizer,
        config: ShardingConfiguration,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        data_parallel_size: int = -1,
        **model_options: Any,
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        self.sizes = mesh_sizes(
            self.world_size, pipeline_parallel_size, tensor_parallel_size, data_parallel_size
        )
        names = "pipeline_parallel_size", "tensor_parallel_size", "data_parallel_size"
        self._model_options = dict(zip(names, self.sizes, strict=True)) | model_options

    def _require_model_of_this_kind(self, model: ShardedModelBase) -> None:
        super()._require_model_of_this_kind(model)
        assert isinstance(model, HybridShardedModel)
        if model.mesh.sizes != self.sizes:
            raise ShardingError(
                f"the model's mesh is {_named(model.mesh.sizes)} (pipeline, tensor, data), the "
                f"optimizer's {_named(self.sizes)}; give both the same sizes"
            )

    @property
    def _data_size(self) -> int:
        return self.sizes[2]

    def synchronize_optimizer_state(self) -> None:
        """Nothing can be made equal: the state is partitioned.

        Raises
        ------
        NotImplementedError
            Always.
        """
        raise NotImplementedError(
            "HybridShardedOptimizer partitions the optimizer state over the mesh: each rank holds "
            "a part that nobody else need have, so there is nothing to synchronise"
        )


def _named(sizes: tuple[int, int, int]) -> str:
    return " x ".join(map(str, sizes))
