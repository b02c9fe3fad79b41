"""The stages of ZeRO: state, then gradients, then parameters are sharded as well."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from mpishard.arrays import Array
from mpishard.contracts import ModelMetadata
from mpishard.errors import ShardingError
from mpishard.models.engine.update import Policy, Update
from mpishard.models.strategies.fsdp import FSDPModel
from mpishard.models.wrapper.base import ShardedModelBase

__all__ = ["ZeRO1Model", "ZeRO2Model", "ZeRO3Model"]


class ZeRO1Model(ShardedModelBase):
    """Every rank holds all parameters and gradients, and 1/N of the optimizer state.

    Gradients stay local until the round's last backward pass, which reduce-scatters each unit's as
    soon as it is complete; each rank updates its pieces, which then go to all. Sent per step,
    summed over N ranks, for S bytes of parameters: 2 (N - 1) S. Rajbhandari et al., "ZeRO: Memory
    Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.1. Parameters and
    errors are those of `ShardedModelBase`.
    """

    policy: Policy = Policy(shards_parameters=False, shards_gradients=False, shards_state=True)
    strategy: ClassVar[str] = "ZeRO-1"


class ZeRO2Model(ShardedModelBase):
    """Every rank holds all parameters, and 1/N of the reduced gradients and optimizer state.

    Each unit's gradient is reduce-scattered in every backward pass, so that no rank ever holds all
    of it; each rank updates its pieces, which then go to all. Sent per step, summed over N ranks,
    for S bytes of parameters: 2 (N - 1) S. Rajbhandari et al., SC 2020, section 5.2. Parameters
    and errors are those of `ShardedModelBase`.
    """

    policy: Policy = Policy(shards_parameters=False, shards_gradients=True, shards_state=True)
    strategy: ClassVar[str] = "ZeRO-2"

    @property
    def tracks_parameter_deltas(self) -> bool:
        """Whether `parameter_delta_shard` is kept: off at first, for it takes a shard of memory."""
        return self.engine.observer is not None

    @tracks_parameter_deltas.setter
    def tracks_parameter_deltas(self, value: bool) -> None:
        self.engine.observer = self._remember if value else None
        if not value:
            self._delta = None

    @property
    def parameter_delta_shard(self) -> Array:
        """The last update's change of the elements that this rank updates, end to end.

        Raises
        ------
        ShardingError
            Unless ``tracks_parameter_deltas`` was set before that update.
        """
        if self._delta is None:
            raise ShardingError(
                "no parameter delta is kept: set tracks_parameter_deltas = True before the step"
            )
        return self._delta

    def all_gather_parameter_shards(self) -> None:
        """Give every rank what the owners hold now of each piece. Collective.

        Every step ends with it; it is of use after writing to parameters by other ways.
        """
        self.engine.parameters.publish(self.engine.pieces.published)
        self.engine.changed()

    _delta: Array | None = None

    @contextlib.contextmanager
    def _remember(self, updates: list[Update]) -> Iterator[None]:
        parameters = [update.parameters for update in updates]
        before = np.concatenate(parameters) if parameters else np.empty(0, self.dtype)
        yield
        after = np.concatenate(parameters) if parameters else before
        self._delta = np.subtract(after, before, out=before)


class ZeRO3Model(FSDPModel):
    """`FSDPModel` under the name that the ZeRO paper gives it (section 5.3)."""

    strategy: ClassVar[str] = "ZeRO-3"

    def get_model_metadata(self) -> ModelMetadata:
        metadata = super().get_model_metadata()
        metadata.set_property("EquivalentTo", FSDPModel.strategy)
        return metadata
