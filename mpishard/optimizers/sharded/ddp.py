"""The optimizer of `DDPModel`."""

from __future__ import annotations

from typing import ClassVar

from mpishard.models import DDPModel, ShardedModelBase
from mpishard.optimizers.sharded.base import ShardedOptimizerBase

__all__ = ["DDPOptimizer"]


class DDPOptimizer(ShardedOptimizerBase):
    """Every rank holds the whole state and makes the same update.

    Parameters and errors are those of `ShardedOptimizerBase`.
    """

    model_class: ClassVar[type[ShardedModelBase]] = DDPModel
