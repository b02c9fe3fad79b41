"""What all-reduces that are called again and again need each time: laid out once."""

from __future__ import annotations

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.bounce import BOUNCE_SETS, BounceBuffers
from mpishard.communication.call import Call, Kind
from mpishard.communication.mailbox import SLOTS, Mailbox
from mpishard.communication.reduction import (
    FixedReducer,
    ReductionOperation,
    accumulation_dtype,
    quiet_combiner,
)
from mpishard.layout import ShardLayout

__all__ = ["BouncePlan", "InlinePlan", "MessagePlan", "is_one_step"]


def is_one_step(array: Array, operation: ReductionOperation) -> bool:
    """Whether two arrays are combined in one step, which needs no memory."""
    is_average = operation is ReductionOperation.AVERAGE
    return not is_average and accumulation_dtype(array.dtype) == array.dtype


class InlinePlan:
    """What an all_reduce of an array that travels in headers needs each time it is called.

    Parameters
    ----------
    mailbox : Mailbox
        Where the ranks' arrays will stand.
    array : Array
        One like them.
    operation : ReductionOperation
        How to combine.
    rank : int
        This rank.
    """

    def __init__(
        self, mailbox: Mailbox, array: Array, operation: ReductionOperation, rank: int
    ) -> None:
        self.call = Call.describe(0, Kind.ALL_REDUCE, array, operation=operation)
        self.mailbox = mailbox
        self._like = np.empty_like(array)
        self._operation = operation
        self._reducers: list[FixedReducer | None] = [None] * SLOTS
        self.bytes_sent = _bytes_sent(array, 1 + len(mailbox.peers), rank)

    def reducer(self, number: int) -> FixedReducer:
        """What combines the arrays of the exchange ``number``."""
        slot = number % SLOTS
        reducer = self._reducers[slot]
        if reducer is None:
            like = self._like
            contributions = [
                row[: like.nbytes].view(like.dtype).reshape(like.shape)
                for row in self.mailbox.payloads(slot)
            ]
            reducer = self._reducers[slot] = FixedReducer(contributions, self._operation)
        return reducer


class BouncePlan:
    """What an all_reduce through the bounce buffers of two ranks needs each time it is called.

    Parameters
    ----------
    mailbox : Mailbox
        Through which they say so.
    bounce : BounceBuffers
        Where the ranks' arrays will stand.
    array : Array
        One like them.
    operation : ReductionOperation
        How to combine.
    rank : int
        This rank.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        bounce: BounceBuffers,
        array: Array,
        operation: ReductionOperation,
        rank: int,
    ) -> None:
        self.mailbox, self.bounce = mailbox, bounce
        self.call = Call.describe(0, Kind.ALL_REDUCE, array, operation=operation)
        self.bytes_sent = _bytes_sent(array, 2, rank)
        self._rank = rank
        self._rows = [
            [row.reshape(array.shape) for row in bounce.rows(array.dtype, array.size, turn)]
            for turn in range(BOUNCE_SETS)
        ]
        self._combine = quiet_combiner(operation, array.dtype)

    def row(self, turn: int) -> Array:
        """The rank's row of a set, as an array of the shape that is combined."""
        return self._rows[turn][self._rank]

    def combine(self, turn: int, out: Array) -> None:
        """Combine the rows of a set."""
        left, right = self._rows[turn]
        self._combine(left, right, out=out)


class MessagePlan:
    """What an all_reduce by one message each way, and one back, needs each time it is called.

    Parameters
    ----------
    array : Array
        One like those of the two ranks.
    operation : ReductionOperation
        How to combine.
    rank : int
        This rank.
    """

    def __init__(self, array: Array, operation: ReductionOperation, rank: int) -> None:
        self.call = Call.describe(0, Kind.ALL_REDUCE, array, operation=operation)
        self.bytes_sent = _bytes_sent(array, 2, rank)
        self.other = 1 - rank
        layout = ShardLayout(array.size, 2)
        self.mine, self.others = layout.slice(rank), layout.slice(self.other)
        self.own_bytes = layout.size(rank) * array.itemsize
        self.longest = max(layout.sizes) * array.itemsize
        """Bytes of the longer piece."""
        self._combine = quiet_combiner(operation, array.dtype)
        self._is_first = rank == 0

    def combine(self, own: Array, received: Array, out: Array) -> None:
        """Combine this rank's piece and the other's, in the order of ranks."""
        left, right = (own, received) if self._is_first else (received, own)
        self._combine(left, right, out=out)


def _bytes_sent(array: Array, world_size: int, rank: int) -> tuple[int, int]:
    """The bytes that ``rank`` is booked with, which scatters its array and gathers the result."""
    mine = ShardLayout(array.size, world_size).sizes[rank]
    return (array.size - mine) * array.itemsize, mine * array.itemsize * (world_size - 1)
