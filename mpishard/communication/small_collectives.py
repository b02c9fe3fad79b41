"""Blocking collectives of few bytes, where headers go through a mailbox: done on the spot.

Nothing is issued and driven: the header is written, the others' are read in a short loop, and
what they say is compared as bytes and combined where it stands: in the headers, or in the bounce
buffers. Whatever is not as it should be, or not there soon, is left to the collective as it always
is, which takes up the header that was sent.
"""

from __future__ import annotations

import sys
from abc import abstractmethod

import numpy as np

from mpishard import settings
from mpishard.arrays import Array
from mpishard.communication.arena import PRIVATE
from mpishard.communication.bounce import BOUNCE_SETS, BounceBuffers
from mpishard.communication.call import DTYPES, Call, Kind
from mpishard.communication.header import COPIED, INLINE_BYTES, Readiness, make_row
from mpishard.communication.mailbox import SLOTS, Mailbox
from mpishard.communication.recorder import CollectiveInFlight
from mpishard.communication.reduction import (
    FixedReducer,
    ReductionOperation,
    accumulation_dtype,
    check_reducible,
)
from mpishard.communication.staging import StagedCollectives
from mpishard.layout import ShardLayout

__all__ = ["SmallCollectives"]

_POLLS = 500
_CROWDED_POLLS = 50
_PLANS_KEPT = 64


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
        self._mailbox = mailbox
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
                for row in self._mailbox.payloads(slot)
            ]
            reducer = self._reducers[slot] = FixedReducer(contributions, self._operation)
        return reducer


class BouncePlan:
    """What an all_reduce through the bounce buffers of two ranks needs each time it is called.

    Parameters
    ----------
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
        self, bounce: BounceBuffers, array: Array, operation: ReductionOperation, rank: int
    ) -> None:
        self.call = Call.describe(0, Kind.ALL_REDUCE, array, operation=operation)
        self.bytes_sent = _bytes_sent(array, 2, rank)
        self._rows = []
        self._reducers = []
        for turn in range(BOUNCE_SETS):
            rows = [row.reshape(array.shape) for row in bounce.rows(array.dtype, array.size, turn)]
            self._rows.append(rows[rank])
            self._reducers.append(FixedReducer(rows, operation))

    @staticmethod
    def suits(array: Array, operation: ReductionOperation) -> bool:
        """Whether the combination is one step, which needs no memory."""
        is_average = operation is ReductionOperation.AVERAGE
        return not is_average and accumulation_dtype(array.dtype) == array.dtype

    def row(self, turn: int) -> Array:
        """The rank's row of a set, as an array of the shape that is combined."""
        return self._rows[turn]

    def reducer(self, turn: int) -> FixedReducer:
        """What combines the rows of a set."""
        return self._reducers[turn]


def _bytes_sent(array: Array, world_size: int, rank: int) -> tuple[int, int]:
    """The bytes that ``rank`` is booked with, which scatters its array and gathers the result."""
    mine = ShardLayout(array.size, world_size).sizes[rank]
    return (array.size - mine) * array.itemsize, mine * array.itemsize * (world_size - 1)


class SmallCollectives(StagedCollectives):
    """The part of the MPI backend that is quick about little."""

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[object, InlinePlan | BouncePlan] = {}
        self._barrier_call = Call.describe(0, Kind.BARRIER, None)

    def _forget_plans(self) -> None:
        """The next plans are for another mailbox."""
        self._plans.clear()

    @property
    @abstractmethod
    def _is_crowded(self) -> bool:
        """Whether the node has more ranks than cores."""

    def all_reduce(
        self,
        array: Array,
        operation: ReductionOperation = ReductionOperation.SUM,
        *,
        out: Array | None = None,
    ) -> Array:
        mailbox = self._idle_mailbox()
        plan = None if mailbox is None else self._plan(mailbox, array, operation, out)
        if mailbox is None or plan is None:
            return super().all_reduce(array, operation, out=out)
        if out is None:
            out = array
        call = self._repeat(plan.call)
        in_flight = self._record(call)
        if isinstance(plan, BouncePlan):
            done = self._reduce_bounced(mailbox, plan, call, array, out)
        else:
            done = self._reduce_inline(mailbox, plan, call, array, out)
        if done:
            scattered, gathered = plan.bytes_sent
            self.traffic.count("reduce_scatter", scattered)
            self.traffic.count("all_gather", gathered)
            _at_once(in_flight)
            return out
        return self._issue(call, self._steps_all_reduce(call, array, out), in_flight).wait()

    def _reduce_inline(
        self, mailbox: Mailbox, plan: InlinePlan, call: Call, array: Array, out: Array
    ) -> bool:
        number = mailbox.post_at_once(call.sequence, call.description, array.tobytes())
        if not self._meet(mailbox, number):
            self._talk.take_up(mailbox.take_up(make_row(call, array)))
            return False
        plan.reducer(number).reduce(out)
        mailbox.have_read(number)
        return True

    def _reduce_bounced(
        self, mailbox: Mailbox, plan: BouncePlan, call: Call, array: Array, out: Array
    ) -> bool:
        bounce = self._talk.bounce
        assert bounce is not None
        turn = bounce.turn
        plan.row(turn)[...] = array
        number = mailbox.post_at_once(call.sequence, call.description, COPIED)
        if not self._meet(mailbox, number) or mailbox.differs(number, COPIED):
            row = make_row(call, array, readiness=Readiness.COPIED)
            self._talk.take_up(mailbox.take_up(row))
            return False
        plan.reducer(turn).reduce(out)
        mailbox.have_read(number)
        bounce.end_turn()
        return True

    def barrier(self) -> None:
        mailbox = self._idle_mailbox()
        if mailbox is None:
            super().barrier()
            return
        call = self._repeat(self._barrier_call)
        in_flight = self._record(call)
        number = mailbox.post_at_once(call.sequence, call.description, b"")
        if self._meet(mailbox, number):
            mailbox.have_read(number)
            _at_once(in_flight)
            return
        self._talk.take_up(mailbox.take_up(make_row(call, None)))
        self._issue(call, self._steps_barrier(call), in_flight).wait()

    def _idle_mailbox(self) -> Mailbox | None:
        """The mailbox, where a header may be posted and waited for at once."""
        if self._pending or not self._initialized:
            return None
        mailbox = self._talk.mailbox
        return mailbox if mailbox is not None and mailbox.is_idle else None

    def _plan(
        self,
        mailbox: Mailbox,
        array: Array,
        operation: ReductionOperation,
        out: Array | None,
    ) -> InlinePlan | BouncePlan | None:
        """The plan for such an array; None where it is too long, or something is not right."""
        if type(array) is not np.ndarray or not array.flags.carray:
            return None
        key = array.dtype, array.shape, operation
        plan = self._plans.get(key)
        if plan is None:
            if array.ndim > settings.MAXIMUM_DIMS or array.dtype not in DTYPES:
                return None
            check_reducible(array.dtype, operation)
            bounce = self._talk.bounce
            if 0 < array.nbytes <= INLINE_BYTES:
                plan = InlinePlan(mailbox, array, operation, self.rank)
            elif (
                bounce is not None
                and self.world_size == 2
                and self._is_to_bounce(array.nbytes)
                and BouncePlan.suits(array, operation)
            ):
                plan = BouncePlan(bounce, array, operation, self.rank)
            else:
                return None
            if len(self._plans) == _PLANS_KEPT:
                self._plans.clear()
            self._plans[key] = plan
        if isinstance(plan, BouncePlan) and self._places(array, None)[0] != PRIVATE:
            return None
        if out is None or out is array:
            return plan
        is_like = type(out) is np.ndarray and out.dtype == array.dtype and out.shape == array.shape
        return plan if is_like and out.flags.carray else None

    def _repeat(self, call: Call) -> Call:
        """Number and log ``call`` as made once more."""
        self._admit(call.kind, self._sequence + 1)
        self._sequence += 1
        call = call.again(self._sequence)
        self.call_log.record(call, sys._getframe(2))
        return call

    def _meet(self, mailbox: Mailbox, number: int) -> bool:
        crowded = self._is_crowded
        return mailbox.meet(number, _CROWDED_POLLS if crowded else _POLLS, crowded=crowded)


def _at_once(in_flight: CollectiveInFlight | None) -> None:
    """Record a collective that is done as soon as it is called."""
    if in_flight is not None:
        in_flight.done()
        in_flight.blocked(in_flight.start)
