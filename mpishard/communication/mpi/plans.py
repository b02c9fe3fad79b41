"""What all-reduces that are called again and again need each time: laid out once."""

from __future__ import annotations

import struct
from typing import ClassVar, NamedTuple

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.call import Call, Kind
from mpishard.communication.contract.reduction import (
    FixedReducer,
    ReductionOperation,
    quiet_combiner,
)
from mpishard.communication.mpi.bounce import BOUNCE_SETS, BounceBuffers
from mpishard.communication.mpi.headers import Readiness, make_row
from mpishard.communication.mpi.rings import SLOTS, Mailbox
from mpishard.layout import ShardLayout

__all__ = ["BouncePlan", "HalvesPlan", "InlinePlan", "MessagePlan"]

_SEQUENCE = struct.Struct("q")  # with which a header begins


class AllReducePlan:
    """What is laid out for one dtype, shape and operation, and which arrays it is for."""

    is_for_private_alone: ClassVar[bool] = True
    """Whether an array that ranks share is left to the collective as it always is."""
    may_overlap: ClassVar[bool] = True
    """Whether a result may overlap the array."""


class InlinePlan(AllReducePlan):
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

    is_for_private_alone = False

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


class BouncePlan(AllReducePlan):
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


class HalvesPlan(AllReducePlan):
    """What an all_reduce by halves through bounce buffers needs each time it is called.

    Parameters
    ----------
    mailbox : Mailbox
        Through which the two ranks say so.
    bounce : BounceBuffers
        Where the halves will stand.
    array : Array
        One like theirs.
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
        layout, other = ShardLayout(array.size, 2), 1 - rank
        self.mine, self.theirs = layout.slice(rank), layout.slice(other)
        self.own_rows, self.met_rows = (
            [bounce.rows(array.dtype, layout.size(half), turn)[row] for turn in range(BOUNCE_SETS)]
            for row, half in ((rank, other), (other, rank))
        )
        """Of each set: what this rank copies, and what the other one has copied for it."""
        self._combine = quiet_combiner(operation, array.dtype)
        self._is_first = rank == 0

    def combine(self, own: Array, met: Array) -> None:
        """Combine this rank's half and the other's into ``met``, in the order of ranks."""
        if self._is_first:
            self._combine(own, met, out=met)
        else:
            self._combine(met, own, out=met)


class Part(NamedTuple):
    """What two ranks swap at a time: elements of the piece of each."""

    mine: slice
    """Of the array: what this rank combines."""
    own: slice
    theirs: slice
    """Of the array's bytes: what this rank combines, and the other one."""
    own_size: int
    their_size: int
    """Elements; 0 where one piece is longer than the other."""


class MessagePlan(AllReducePlan):
    """What an all_reduce by messages between two ranks needs each time it is called.

    Parameters
    ----------
    mailbox : Mailbox, optional
        Through which they say so; None where it is messages that do.
    array : Array
        One like those of the two ranks.
    operation : ReductionOperation
        How to combine.
    rank : int
        This rank.
    lengths : tuple of int
        Elements of the longest message, and of that between ranks whose results lie apart.
    may_swap : bool
        Whether ranks whose results lie apart swap whole arrays.
    """

    may_overlap = False

    def __init__(
        self,
        mailbox: Mailbox | None,
        array: Array,
        operation: ReductionOperation,
        rank: int,
        lengths: tuple[int, int],
        *,
        may_swap: bool,
    ) -> None:
        self.mailbox = mailbox
        self.call = Call.describe(0, Kind.ALL_REDUCE, array, operation=operation)
        self.bytes_sent = _bytes_sent(array, 2, rank)
        self.other = 1 - rank
        self.may_swap = may_swap
        self.itemsize = array.itemsize
        layout = ShardLayout(array.size, 2)
        self._parts = [
            tuple(self._part(layout, rank, low, n) for low in range(0, max(layout.sizes), n))
            for n in lengths
        ]
        self._described = [
            bytes(make_row(self.call, array, readiness=readiness)[_SEQUENCE.size :])
            for readiness in (Readiness.AT_HOME, Readiness.APART)
        ]
        self._combine = quiet_combiner(operation, array.dtype)
        self._is_first = rank == 0

    def _part(self, layout: ShardLayout, rank: int, low: int, length: int) -> Part:
        slices = []
        for one in (rank, 1 - rank):
            start = layout.start(one) + low
            slices.append(slice(start, min(start + length, layout.slice(one).stop)))
        mine, others = slices
        own, theirs = (slice(s.start * self.itemsize, s.stop * self.itemsize) for s in slices)
        return Part(mine, own, theirs, mine.stop - mine.start, others.stop - others.start)

    def parts(self, *, is_apart: bool) -> tuple[Part, ...]:
        """What is swapped one after the other; the first is the longest."""
        return self._parts[is_apart]

    def row(self, sequence: int, *, is_apart: bool) -> bytes:
        """The header of collective ``sequence``; ``is_apart`` says so of its result."""
        return _SEQUENCE.pack(sequence) + self._described[is_apart]

    def combine(self, own: Array, received: Array, out: Array) -> None:
        """Combine this rank's elements and the other's, in the order of ranks."""
        if self._is_first:
            self._combine(own, received, out=out)
        else:
            self._combine(received, own, out=out)


def _bytes_sent(array: Array, world_size: int, rank: int) -> tuple[int, int]:
    """The bytes that ``rank`` is booked with, which scatters its array and gathers the result."""
    mine = ShardLayout(array.size, world_size).sizes[rank]
    return (array.size - mine) * array.itemsize, mine * array.itemsize * (world_size - 1)
