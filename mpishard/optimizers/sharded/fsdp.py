"""The optimizer of `FSDPModel`."""

from __future__ import annotations

from typing import ClassVar

from mpishard.models import FSDPModel, ShardedModelBase
from mpishard.optimizers.sharded.base import ShardedOptimizerBase

__all__ = ["FSDPOptimizer"]


class FSDPOptimizer(ShardedOptimizerBase):
    """Every rank holds the state of what it owns, and updates that.

    Parameters and errors are those of `ShardedOptimizerBase`.
    """

    model_class: ClassVar[type[ShardedModelBase]] = FSDPModel
