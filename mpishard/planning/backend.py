"""One rank of a world that does not exist: its collectives return at once, and move nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from mpishard.base import Array, DType
from mpishard.communication import (
    Call,
    CommunicationBackend,
    ProcessMesh,
    RowChannel,
    Steps,
    Work,
)
from mpishard.planning.reserved import ReservedArray

_SMALL_BYTES = 1 << 20  # a result up to this size is made, because its values may be read


class PlannedBackend(CommunicationBackend):
    """A rank whose peers are taken to do and to know what it does and knows.

    So a result has the right shape, and the values that equal ranks would give: comparisons of
    choices succeed. Memory that ranks of a node share is reserved, and takes none.

    Parameters
    ----------
    rank : int
        The rank.
    nodes : sequence of int
        The node of each rank.
    """

    def __init__(self, rank: int, nodes: Sequence[int]) -> None:
        super().__init__(rank, len(nodes))
        # Numbered by first rank, as `CommunicationBackend.nodes` is.
        numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
        self._nodes = tuple(numbers[node] for node in nodes)
        self._initialized = True

    @property
    def nodes(self) -> tuple[int, ...]:
        return self._nodes

    @property
    def scratch_bytes(self) -> int:
        # Between nodes, messages are sent from the caller's arrays.
        return RowChannel.nbytes(1) if self.world_size > 1 == self.node_count else 0

    def abort(self, error: BaseException) -> None:
        raise error

    def _on_initialize(self) -> None: ...

    def _on_shutdown(self) -> None: ...

    def _drive(self, work: Work) -> None:
        assert work.advance(), "nothing waits for a peer"

    def _send(self, array: Array, destination: int, tag: int) -> None: ...

    def _steps_all_reduce(self, call: Call, array: Array, out: Array) -> Steps:
        yield from ()
        return out

    def _steps_reduce_scatter(
        self, call: Call, array: Array, counts: tuple[int, ...], out: Array
    ) -> Steps:
        yield from ()
        return out

    def _steps_all_gather(self, call: Call, array: Array, out: Array | None) -> Steps:
        yield from ()
        if out is not None:
            return out
        if array.nbytes * self.world_size <= _SMALL_BYTES:
            return np.concatenate([array] * self.world_size)
        rows, *rest = array.shape
        return ReservedArray((rows * self.world_size, *rest), array.dtype)

    def _steps_broadcast(self, call: Call, array: Array | None, root: int) -> Steps:
        yield from ()
        return array

    def _steps_scatter(
        self, call: Call, array: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Steps:
        raise NotImplementedError

    def _steps_gather(self, call: Call, array: Array, root: int) -> Steps:
        raise NotImplementedError

    def _steps_all_to_all(self, call: Call, parts: Sequence[Array]) -> Steps:
        raise NotImplementedError

    def _steps_barrier(self, call: Call) -> Steps:
        yield from ()

    def _steps_split(self, call: Call, color: int | None, key: int) -> Steps:
        yield from ()
        if color is None:
            return None
        # The other members' colors are not known: a group of one asks for the same memory.
        return PlannedBackend(0, (0,))

    def _steps_allocate_shared(self, call: Call, nbytes: int) -> Steps:
        yield from ()
        return ReservedArray(nbytes, np.dtype(np.uint8))

    def _steps_reduce_into(self, call: Call, arrays: Mapping[int, Array], out: Array) -> Steps:
        yield from ()
        return out

    def _steps_reduce_in_place(self, call: Call, arrays: Mapping[int, Array]) -> Steps:
        yield from ()
        return arrays[self.rank]

    def _steps_gather_in_place(
        self, call: Call, arrays: Mapping[int, Array], piece: Array, once_per_node: bool
    ) -> Steps:
        yield from ()
        return arrays[self.rank]

    def _steps_receive(self, source: int, count: int, tag: int, dtype: DType | None) -> Steps:
        raise NotImplementedError


class PlannedMesh(ProcessMesh):
    """The mesh of a world of planned ranks."""

    def _require_same_on_all_ranks(self) -> None:
        """Do nothing: the other ranks are taken to have the same mesh."""

    def _split(self, name: str, axes: Sequence[str]) -> CommunicationBackend:
        own = self._coordinates(self.world.rank)
        ways = [range(self._size[axis]) for axis in axes]
        ranks = [self._rank_at(own | dict(zip(axes, at, strict=True))) for at in product(*ways)]
        nodes = self.world.nodes
        group = PlannedBackend(ranks.index(self.world.rank), [nodes[rank] for rank in ranks])
        group.axis = name
        return group
