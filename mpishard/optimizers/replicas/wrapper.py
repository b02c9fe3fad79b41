"""The base of optimizers that exchange between replicas of the model."""

from __future__ import annotations

from typing import ClassVar

from mpishard.communication import CommunicationBackend
from mpishard.models import HybridShardedModel, ShardedModelBase
from mpishard.optimizers.replicas.delayed_state import DelayedState
from mpishard.optimizers.sharded.base import ShardedOptimizerBase
from mpishard.optimizers.sharded.state import ModelState
from mpishard.optimizers.sharded.strategies import data_model_class
from mpishard.sharding import (
    by_node,
    refuse_one_replica,
    refuse_rounding,
    refuse_updates_alone,
    refuse_with_leaves,
)


class ReplicasOptimizer(ShardedOptimizerBase):
    """Base of optimizers whose replicas exchange little, or late.

    A replica is one rank, or a group of ranks. `LocalSGDOptimizer` says how the user chooses it,
    and which strategies there are inside it.
    """

    _sends_gradients: ClassVar[bool] = True

    @property
    def _is_plain(self) -> bool:
        """True if each step is that of the strategy: nothing is compressed or late."""
        return False

    def _choose_replicas(self, strategy: str) -> None:
        """Set the model class of the strategy inside each replica; replicas may be nodes.

        Collective.

        Raises
        ------
        ValueError
            For another strategy, or one that shards a replica of one rank.
        """
        # Links between nodes are slow, so that each node is a replica unless the user chose a size.
        if not self._is_plain:
            self._config = by_node(self._config)
        self.model_class = data_model_class(strategy, hybrid=HybridShardedModel)
        # A replica of one rank has no other rank to shard over.
        if strategy != "ddp" and self._config.replica_size is None:
            refuse_one_replica(type(self).__name__, f"strategy={strategy!r} without replica_size")

    def _require_fit(self, model: ShardedModelBase) -> None:
        name, replica = type(self).__name__, model.engine.replica
        # Each rank is a replica, and must have a whole model and state of its own.
        if not replica.is_grouped:
            if replica.is_on_mesh or model.policy.shards_state:
                kind = type(model).__name__
                refuse_one_replica(name, f"this {kind}, wrapped without replica_size,")
            if self._is_plain:
                return
        config = model.sharding_configuration
        if model.gradient_leaves is not None:
            refuse_with_leaves(model.gradient_leaves, name)
        if not config.auto_sync_gradients:
            refuse_updates_alone(f"{name} synchronizes the ranks", "leave out one of the two")
        # Gradients rounded by the model would be encoded again, and its errors are fed back
        # nowhere.
        if self._sends_gradients and config.enable_gradient_compression:
            refuse_rounding(name)

    def _make_state(self, model: ShardedModelBase, frozen: frozenset[str]) -> ModelState:
        # Sums between groups need an exchange of their own, also without codes: a delay of 0.
        if model.engine.replica.is_grouped:
            return DelayedState(self._rule, model, frozen, 0, type(self).__name__)
        return super()._make_state(model, frozen)

    @property
    def _with_equal_state(self) -> CommunicationBackend | None:
        if self.model is None or not self.model.engine.replica.is_grouped:
            return super()._with_equal_state
        # The ranks of a replica may divide the state; those with equal pieces are in others.
        return self.model.engine.replica.across
