"""Documented members of sharded optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from mpishard.base import Array, Document
from mpishard.contracts import UserModel
from mpishard.mirror.interfaces import ICheckpointableModel, IShardedModel, IShardedOptimizer

if TYPE_CHECKING:
    from mpishard.optimizers import Optimizer

    class _DocumentedShardedOptimizer(ICheckpointableModel, IShardedOptimizer):
        """What type checkers see: the interfaces, and the native members that these use."""

        _rule: Optimizer

        def _settings(self) -> Document: ...

else:
    _DocumentedShardedOptimizer = object

__all__ = ["ShardedOptimizerMembers"]


@ICheckpointableModel.register
@IShardedOptimizer.register
class ShardedOptimizerMembers(_DocumentedShardedOptimizer):
    """What the documented hierarchy has of a sharded optimizer."""

    def get_options(self) -> Mapping[str, object]:
        """Return the settings of the rule and of this optimizer, by name."""
        return {**self._rule.get_options(), **self._settings()}

    def update_parameters(self, parameters: object, gradients: object) -> NoReturn:
        """Raise NotImplementedError: the state belongs to a model's shards, not to vectors."""
        raise NotImplementedError(
            f"{type(self).__name__} keeps its state for the pieces of a sharded model, not for "
            "vectors: use apply_gradients(gradients, model), or "
            "wrapped_optimizer.update_parameters, whose state is its own"
        )

    def reverse_update(self, updated: Array, gradients: Array) -> Array:
        """Raise NotImplementedError: no rank keeps the state from before an update."""
        raise NotImplementedError(
            f"{type(self).__name__} keeps no copy of the state from before an update: save a "
            "checkpoint before it, or use wrapped_optimizer.reverse_update, whose state is its own"
        )

    def _synchronize_parameters(self, model: UserModel) -> None:
        """Give a plain model on every rank the mean of all ranks' parameters. Collective.

        Nothing is done for None, and for a sharded model, whose steps keep its parameters equal.
        """
        if model is None or isinstance(model, IShardedModel):
            return
        from mpishard.communication import ReductionOperation

        parameters = model.get_parameters().copy()
        model.set_parameters(self.backend.all_reduce(parameters, ReductionOperation.AVERAGE))

    save_state = ICheckpointableModel.save_state
    load_state = ICheckpointableModel.load_state
