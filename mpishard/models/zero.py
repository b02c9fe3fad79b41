"""The stages of ZeRO: state, then gradients, then parameters are sharded as well."""

from __future__ import annotations

from typing import ClassVar

from mpishard.contracts import ModelMetadata
from mpishard.models.base import ShardedModelBase
from mpishard.models.fsdp import FSDPModel
from mpishard.models.policy import Policy

__all__ = ["ZeRO1Model", "ZeRO2Model", "ZeRO3Model"]


class ZeRO1Model(ShardedModelBase):
    """Every rank holds all parameters and gradients, and 1/N of the optimizer state.

    Gradients stay local until the round's last backward pass, which reduce-scatters each unit's as
    soon as it is complete; each rank updates its pieces, which then go to all. Sent per step,
    summed over N ranks, for S bytes of parameters: 2 (N - 1) S. Rajbhandari et al., "ZeRO: Memory
    Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.1. Parameters and
    errors are those of `ShardedModelBase`.
    """

    policy: ClassVar[Policy] = Policy(
        shards_parameters=False, shards_gradients=False, shards_state=True
    )
    strategy: ClassVar[str] = "ZeRO-1"


class ZeRO2Model(ShardedModelBase):
    """Every rank holds all parameters, and 1/N of the reduced gradients and optimizer state.

    Each unit's gradient is reduce-scattered in every backward pass, so that no rank ever holds all
    of it; each rank updates its pieces, which then go to all. Sent per step, summed over N ranks,
    for S bytes of parameters: 2 (N - 1) S. Rajbhandari et al., SC 2020, section 5.2. Parameters
    and errors are those of `ShardedModelBase`.
    """

    policy: ClassVar[Policy] = Policy(
        shards_parameters=False, shards_gradients=True, shards_state=True
    )
    strategy: ClassVar[str] = "ZeRO-2"


class ZeRO3Model(FSDPModel):
    """`FSDPModel` under the name that the ZeRO paper gives it (section 5.3)."""

    strategy: ClassVar[str] = "ZeRO-3"

    def get_model_metadata(self) -> ModelMetadata:
        metadata = super().get_model_metadata()
        metadata.set_property("EquivalentTo", FSDPModel.strategy)
        return metadata
