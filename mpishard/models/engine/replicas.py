"""Replicas of the parameters that each rank may update alone."""

from __future__ import annotations

import numpy as np

from mpishard.base import ShardingError
from mpishard.models.engine.update import Policy
from mpishard.models.programs.program import Replica
from mpishard.models.stores.parameter_store import ParameterStore
from mpishard.sharding import refuse_several_replicas, refuse_updates_alone


class Replicas:
    """Replicas that ranks may update alone, and that become equal again.

    Parameters
    ----------
    parameters : ParameterStore
        Store of the parameters.
    policy : Policy
        If it shards anything, nothing can drift.
    replica : Replica
        The ranks of a replica. On a mesh they are several, and none can update the replica alone.
        Replicas of groups of ranks need an optimizer that exchanges data between them.

    Attributes
    ----------
    weight : float
        Weight of the samples that this rank has used alone since all were equal.
    agreements : int
        Number of times that all replicas were made equal.
    """

    def __init__(self, parameters: ParameterStore, policy: Policy, replica: Replica) -> None:
        self._parameters = parameters
        self._policy = policy
        self._replica = replica
        self.weight = 0.0
        self.agreements = 0

    def require_drifting(self) -> None:
        """Refuse a strategy whose ranks cannot update alone.

        Raises
        ------
        ValueError
            If gradients, state or parameters are sharded, or ranks of a mesh hold parts.
        """
        # An optimizer exchanges between such groups; inside one all is reduced as elsewhere.
        if self._replica.is_grouped:
            return
        if self._replica.is_on_mesh:
            refuse_updates_alone("here ranks hold parts of one")
        if self._policy.shards_state:  # as all that shard anything do
            refuse_updates_alone("this strategy shards gradients or optimizer state")

    def require_one(self, purpose: str) -> None:
        """Refuse training of one replica on all ranks if groups of ranks have one each.

        Raises
        ------
        ValueError
            With ``replica_size``.
        """
        if self._replica.is_grouped:
            refuse_several_replicas(
                self._replica.across.world_size,
                purpose,
                "use LocalSGDOptimizer, GradientCompressionOptimizer or AsyncSGDOptimizer",
            )

    def require_equal(self, purpose: str) -> None:
        """Refuse a call that needs the same parameters on all ranks, while replicas differ.

        Raises
        ------
        ShardingError
            If this rank has made updates of its own since the last synchronisation.
        """
        # Without a message, so that the check costs nothing in each step of equal replicas.
        if self.weight:
            raise ShardingError(
                f"{purpose} needs equal replicas, but rank {self._parameters.backend.rank} has "
                "made updates of its own. First call settle() of the LocalSGDOptimizer on all "
                "ranks; with auto_sync_gradients=False call synchronize_gradients()"
            )

    def drift(self, weight: float) -> None:
        """Count an update that this rank made alone, with samples of this weight."""
        self.weight += weight

    def mark_equal(self) -> None:
        """Note that all ranks have the same parameters now."""
        self.weight = 0.0
        # Optimizers compare this number to see that somebody else has made the replicas equal.
        self.agreements += 1

    def synchronize(self) -> bool:
        """Give every rank the mean of all replicas, weighted by the samples each has used.

        Collective. After one step of plain descent the result is that of a synchronised step.

        Returns
        -------
        bool
            Whether parameters have changed.
        """
        self.require_one("synchronize_gradients()")
        backend, subject = self._parameters.backend, self._parameters.layout.subject
        if self._policy.shards_state:
            # No replica can have drifted. A barrier, so that the call is collective as under DDP.
            backend.barrier(subject=subject)
            return False
        # Weighted by samples and not by steps, so that uneven batches average as in one step.
        total = float(backend.all_reduce(np.array([self.weight]), subject=subject)[0])
        # The same sum on all ranks, so that all return here, or none.
        if total == 0:
            return False
        whole = self._parameters.layout.pieces(sharded=False)
        for replica in self._parameters.owned(whole):
            # In place, in the store's own memory: a second copy of all parameters may not fit.
            mine = replica
            mine *= self.weight / total
            backend.all_reduce(mine, subject=subject)
        self.mark_equal()
        return True
