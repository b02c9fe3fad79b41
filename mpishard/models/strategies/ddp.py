"""Data parallelism: everything whole on every rank."""

from __future__ import annotations

from typing import ClassVar

from mpishard.models.engine.update import Policy
from mpishard.models.wrapper.base import ShardedModelBase

__all__ = ["DDPModel"]


class DDPModel(ShardedModelBase):
    """Every rank holds all parameters, gradients and state, and its share of the batch.

    Backward all-reduces each unit's gradient as soon as it is complete; then every rank makes
    the same update. Sent per step, summed over N ranks, for S bytes of parameters: 2 (N - 1) S.
    Parameters and errors are those of `ShardedModelBase`.
    """

    policy: Policy = Policy(shards_parameters=False, shards_gradients=False, shards_state=False)
    strategy: ClassVar[str] = "DDP"
