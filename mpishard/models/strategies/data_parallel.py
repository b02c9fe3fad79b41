"""Data parallelism: DDP, the stages of ZeRO, and FSDP, by what each rank holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from mpishard.base import Array, Document, ShardingError
from mpishard.models.engine.update import Policy, Update
from mpishard.models.wrapper.base import ShardedModelBase


class DDPModel(ShardedModelBase):
    """Every rank holds all parameters, gradients and state, and its share of the batch.

    Backward all-reduces each unit's gradient as soon as it is complete; then every rank makes
    the same update. Sent per step, summed over N ranks, for S bytes of parameters: 2 (N - 1) S.
    Parameters and errors are those of `ShardedModelBase`.
    """

    policy: Policy = Policy(shards_parameters=False, shards_gradients=False, shards_state=False)
    strategy: ClassVar[str] = "DDP"


class FSDPModel(ShardedModelBase):
    """Every rank owns a piece of each unit: of its parameters, its gradient, its state.

    Construction
        rank 0's values are distributed unit by unit; each rank keeps 1/N of them.
    Forward
        each unit is gathered when its first layer begins, while the next is already under way,
        and released after its last layer; the last unit is kept, for backward begins with it.
    Backward
        the same in reverse. A unit's full gradient is reduce-scattered as soon as backward has
        finished with its first layer; at most two such gradients exist at a time.
    Update
        each rank updates what it owns. The next forward gathers what the owners hold.

    Beside what `memory` counts, the backend keeps the buffers its messages land in: under MPI the
    peers' contributions to one reduce-scatter, N - 1 pieces (``backend.scratch_bytes``).

    Sent per step, summed over N ranks, for S bytes of parameters of which K belong to kept units:
    3 (N - 1) (S - K) + 2 (N - 1) K. After Zhao et al., "PyTorch FSDP: Experiences on Scaling
    Fully Sharded Data Parallel", VLDB 2023; the memory is that of ZeRO stage 3 (Rajbhandari et
    al., SC 2020, section 5.3). Parameters and errors are those of `ShardedModelBase`.
    """

    policy: Policy = Policy(shards_parameters=True, shards_gradients=True, shards_state=True)
    strategy: ClassVar[str] = "FSDP"


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
        """True if `parameter_delta_shard` is kept. Default: False, because it takes memory."""
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
        """Give every rank the owners' values of each piece. Collective.

        Every step ends with it. Call it after writing to parameters in another way.
        """
        self.engine.parameters.publish(self.engine.pieces.published)
        self.engine.changed()

    _delta: Array | None = None

    @contextlib.contextmanager
    def _remember(self, updates: list[Update]) -> Iterator[None]:
        parameters = [update.parameters for update in updates]
        # A copy, because the rule changes parameters in place.
        before = np.concatenate(parameters) if parameters else np.empty(0, self.dtype)
        yield
        after = np.concatenate(parameters) if parameters else before
        # Written over the first copy, so that tracking takes the memory of one shard and not two.
        self._delta = np.subtract(after, before, out=before)


class ZeRO3Model(FSDPModel):
    """`FSDPModel` under the name that the ZeRO paper gives it (section 5.3)."""

    strategy: ClassVar[str] = "ZeRO-3"

    def _properties(self) -> Document:
        return {**super()._properties(), "EquivalentTo": FSDPModel.strategy}
