"""Full sharding: no rank holds more of the model than the units in use."""

from __future__ import annotations

from typing import ClassVar

from mpishard.models.engine.update import Policy
from mpishard.models.wrapper.base import ShardedModelBase

__all__ = ["FSDPModel"]


class FSDPModel(ShardedModelBase):
    """Every rank owns a piece of each unit: of its parameters, its gradient, its state.

    Construction
        rank 0's values are dealt out unit by unit; each rank keeps 1/N of them.
    Forward
        each unit is gathered when its first layer begins, while the next is already under way,
        and let go after its last layer; the last unit is kept, for backward begins with it.
    Backward
        the same in reverse. A unit's full gradient is reduce-scattered as soon as its first
        layer is through; at most two of them exist at a time, and never the whole.
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
