"""Calls that configure a model and an optimizer, and wrap them as a pair."""

from __future__ import annotations

from typing import Any, Self

from mpishard.communication import CommunicationBackend, init
from mpishard.contracts import UserModel
from mpishard.distributed import (
    DistributedStrategy,
    as_distributed,
    checked_options,
    strategy_named,
)
from mpishard.models import checked_mesh_options
from mpishard.sharding import ShardingConfiguration


class TrainingBuilder:
    """A model and an optimizer, configured call by call and wrapped as a pair.

    It wraps both as `as_distributed` does, with calls that can be chained.

    Parameters
    ----------
    model, optimizer : object
        Plain objects, as `as_distributed` takes them.

    Examples
    --------
    >>> import mpishard as ms
    >>> def main(backend):
    ...     plain, rule = ms.nn.MLP([4, 8, 8, 2]), ms.optimizers.AdamW(1e-3)
    ...     builder = ms.TrainingBuilder(plain, rule).configure_distributed_training(backend)
    ...     builder.configure_pipeline_parallelism("1f1b", micro_batch_count=4)
    ...     return str(builder.build())
    >>> print(ms.run_in_threads(2, main)[0])
    (PipelineParallelModel(MLP, 2 pipeline x 1 tensor x 1 data, 1F1B, 4 micro-batches), \
PipelineParallelOptimizer(AdamW, learning rate 0.001, 2 ranks, 0 updates))
    """

    def __init__(self, model: UserModel, optimizer: Any) -> None:
        self._pair = model, optimizer
        self._place: CommunicationBackend | ShardingConfiguration | None = None
        self._strategy: str = DistributedStrategy.DDP
        self._options: dict[str, Any] = {}

    def configure_distributed_training(
        self,
        backend: CommunicationBackend | None = None,
        strategy: str | DistributedStrategy = DistributedStrategy.DDP,
        configuration: ShardingConfiguration | None = None,
        **degrees: object,
    ) -> Self:
        """Choose the ranks and the strategy.

        Parameters
        ----------
        backend : CommunicationBackend, optional
            The backend. Default: that of the configuration, or of `mpishard.init`.
        strategy, degrees
            As for `as_distributed`.
        configuration : ShardingConfiguration, optional
            Further settings.

        Raises
        ------
        ValueError
            For an unknown strategy, or a configuration with another backend than ``backend``.
        TypeError
            For an option that the strategy does not take.
        """
        if None not in (backend, configuration) and configuration is not None:
            own = configuration.communication_backend
            if own is not backend:
                raise ValueError(
                    f"the configuration's backend is {own!r}, and backend is {backend!r}; give one"
                )
        self._strategy = strategy_named(strategy)
        # Added to earlier ones, because the calls of a builder may come in any order.
        self._options |= checked_options(self._strategy, degrees)
        self._place = configuration or backend
        return self

    def configure_pipeline_parallelism(
        self,
        schedule: object = None,
        partition_strategy: object = None,
        checkpoint_config: object = None,
        micro_batch_count: int = 1,
    ) -> Self:
        """Divide the layers into stages, with strategy "pipeline" unless "hybrid" was chosen.

        Parameters and errors are those of `PipelineParallelModel`.
        """
        self._options |= checked_mesh_options(
            {
                "schedule": schedule,
                "partition_strategy": partition_strategy,
                "checkpoint_config": checkpoint_config,
                "micro_batch_count": micro_batch_count,
            }
        )
        if self._strategy != DistributedStrategy.HYBRID:
            self._strategy = DistributedStrategy.PIPELINE_PARALLEL
        return self

    def build(self) -> tuple[Any, Any]:
        """Wrap both. Collective. Errors are those of `as_distributed`."""
        place = self._place or init()
        model, optimizer = self._pair
        return (
            as_distributed(model, place, self._strategy, **self._options),
            as_distributed(optimizer, place, self._strategy, **self._options),
        )


def as_distributed_for_high_bandwidth(model: object, backend: CommunicationBackend) -> Any:
    """Wrap in FSDP with the settings of `ShardingConfiguration.create_for_high_bandwidth`.

    Parameters and errors are those of `as_distributed`.
    """
    return as_distributed(model, ShardingConfiguration.create_for_high_bandwidth(backend))


def as_distributed_for_low_bandwidth(model: object, backend: CommunicationBackend) -> Any:
    """Wrap in FSDP with the settings of `ShardingConfiguration.create_for_low_bandwidth`.

    Parameters and errors are those of `as_distributed`.
    """
    return as_distributed(model, ShardingConfiguration.create_for_low_bandwidth(backend))
