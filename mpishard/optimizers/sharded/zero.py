"""Training with the stages of ZeRO."""

from __future__ import annotations

from typing import ClassVar

from mpishard.models import ShardedModelBase, ZeRO1Model, ZeRO2Model, ZeRO3Model
from mpishard.optimizers.sharded.base import ShardedOptimizerBase
from mpishard.optimizers.sharded.fsdp import FSDPOptimizer

__all__ = ["ZeRO1Optimizer", "ZeRO2Optimizer", "ZeRO3Optimizer"]


class ZeRO1Optimizer(ShardedOptimizerBase):
    """Updates a `ZeRO1Model`: each rank its pieces, with their state, and tells the others.

    Parameters and errors are those of `ShardedOptimizerBase`.
    """

    model_class: ClassVar[type[ShardedModelBase]] = ZeRO1Model


class ZeRO2Optimizer(ShardedOptimizerBase):
    """Updates a `ZeRO2Model`: each rank its pieces, with their state, and tells the others.

    Parameters and errors are those of `ShardedOptimizerBase`.
    """

    model_class: ClassVar[type[ShardedModelBase]] = ZeRO2Model


class ZeRO3Optimizer(FSDPOptimizer):
    """`FSDPOptimizer` for a `ZeRO3Model`."""

    model_class: ClassVar[type[ShardedModelBase]] = ZeRO3Model
