"""The optimizer of a job whose number of ranks may change."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpishard.arguments import as_integer
from mpishard.contracts import IOptimizer
from mpishard.errors import ShardingError
from mpishard.models import ShardedModelBase
from mpishard.optimizers.loop.data import OptimizationInputData
from mpishard.optimizers.loop.result import OptimizationResult
from mpishard.optimizers.sharded.base import ShardedOptimizerBase
from mpishard.optimizers.sharded.state_bytes import StateBytes
from mpishard.optimizers.sharded.strategies import data_model_class
from mpishard.sharding import ShardingConfiguration

__all__ = ["ElasticOptimizer"]

_log = logging.getLogger("mpishard")


class ElasticOptimizer(ShardedOptimizerBase):
    """Updates a model on a number of ranks that may change from start to start, within bounds.

    The number changes in three ways. ``mpishard resize`` orders a running job to go on with other
    ranks from the next step on; the bounds are checked before. If a rank is lost under
    ``launch(main, on_failure="shrink")``, the others form a smaller world, in which ``main`` begins
    again; that needs Open MPI, or threads. Elsewhere ``mpishard run --max-restarts K --min-ranks
    M`` starts the job again on the hosts that are left, and takes the others back when they answer
    again. Each time ``main`` makes this optimizer anew, which checks the bounds, and
    ``optimize(checkpoint=FOLDER)`` deals parameters, state and the rest of the epoch's samples to
    the ranks that there are. With ``gradient_leaves`` the result has the same bits.

    Parameters
    ----------
    wrapped_optimizer : Optimizer
        The rule and its settings.
    config : ShardingConfiguration
        Backend and choices.
    min_workers, max_workers : int
        Numbers of ranks between which the job may go on, both included.
    strategy : {"ddp", "zero1", "zero2", "zero3", "fsdp"}
        Of the model, which is wrapped in the same.

    Raises
    ------
    TypeError, ValueError
        As `ShardedOptimizerBase`; for a minimum below 1, a maximum below it, another strategy.
    ShardingError
        A `RuntimeError`, on every rank, if the world has fewer or more ranks than that: here, at
        the first step, and when `optimize` begins.
    """

    def __init__(
        self,
        wrapped_optimizer: IOptimizer,
        config: ShardingConfiguration,
        min_workers: int = 1,
        max_workers: int = 1024,
        *,
        strategy: str = "ddp",
    ) -> None:
        super().__init__(wrapped_optimizer, config)
        if as_integer("min_workers", min_workers) < 1:
            raise ValueError(f"min_workers must be 1 or more, got {min_workers}")
        if as_integer("max_workers", max_workers) < min_workers:
            raise ValueError(
                f"max_workers must be min_workers, {min_workers}, or more, got {max_workers}"
            )
        self.model_class = data_model_class(strategy)
        self.min_workers, self.max_workers = int(min_workers), int(max_workers)
        self.allowed_ranks = self.min_workers, self.max_workers
        self._require_bounds()

    @property
    def current_workers(self) -> int:
        """Number of ranks now."""
        return self.world_size

    @property
    def can_scale_up(self) -> bool:
        """Whether the job may go on with more ranks."""
        return self.current_workers < self.max_workers

    @property
    def can_scale_down(self) -> bool:
        """Whether the job may go on with fewer ranks."""
        return self.current_workers > self.min_workers

    def _require_bounds(self) -> None:
        if not self.min_workers <= self.current_workers <= self.max_workers:
            raise ShardingError(
                f"the job has {self.current_workers} ranks, and {type(self).__name__} allows "
                f"{self.min_workers} to {self.max_workers}: start it with as many, or give other "
                "bounds"
            )

    def _settings(self) -> dict[str, Any]:
        return {"min_workers": self.min_workers, "max_workers": self.max_workers}

    def _require_model_of_this_kind(self, model: ShardedModelBase) -> None:
        super()._require_model_of_this_kind(model)
        self._require_bounds()

    def optimize(self, input_data: OptimizationInputData) -> OptimizationResult:
        """As every optimizer's; warns on rank 0 if there is no folder to go on from. Collective."""
        if getattr(input_data, "checkpoint", "") is None and self.rank == 0:
            _log.warning(
                "%s without checkpoint=FOLDER: if the number of ranks changes, training begins "
                "anew", type(self).__name__,
            )  # fmt: skip
        return super().optimize(input_data)

    def _refusals(self) -> Mapping[str, str]:
        return {
            "synchronize_optimizer_state": "the state is dealt anew when the number of ranks "
            "changes, and steps keep it: there is nothing to synchronise"
        }

    def serialize(self) -> bytes:
        """As every optimizer's, with the bounds; any number of ranks can take it. Collective."""
        saved = StateBytes.from_bytes(super().serialize())
        return replace(saved, settings={**saved.settings, **self._settings()}).to_bytes()

    def deserialize(self, data: bytes) -> None:
        """Take state and step count from bytes of `serialize`, of any number of ranks. Collective.

        Raises
        ------
        TypeError, ValueError
            As `ShardedOptimizerBase.deserialize`.
        ShardingError
            For other bounds than this optimizer's, before anything is communicated.
        """
        settings = StateBytes.from_bytes(data).settings
        bounds = self._settings().items()
        wrong = [f"{name} {settings[name]}, here {value}" for name, value in bounds
                 if settings.get(name, value) != value]  # fmt: skip
        if wrong:
            raise ShardingError(
                f"these bytes are of an {type(self).__name__} with {', '.join(wrong)}; give both "
                "the same bounds"
            )
        super().deserialize(data)
