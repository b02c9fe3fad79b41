"""Blocking collectives of a few bytes, where headers go through a mailbox: done on the spot.

Nothing is issued and driven: the header is written, the others' are read in a short loop, and
what they say is compared as bytes and combined where it stands. Whatever is not as it should be,
or not there soon, is left to the collective as it always is, which takes up the header that was
sent.
"""

from __future__ import annotations

import sys
from abc import abstractmethod

import numpy as np

from mpishard import settings
from mpishard.arrays import Array
from mpishard.communication.call import DTYPES, Call, Kind
from mpishard.communication.header import INLINE_BYTES, make_row
from mpishard.communication.mailbox import SLOTS, Mailbox
from mpishard.communication.recorder import CollectiveInFlight
from mpishard.communication.reduction import FixedReducer, ReductionOperation, check_reducible
from mpishard.communication.staging import StagedCollectives
from mpishard.layout import ShardLayout

__all__ = ["SmallCollectives"]

_POLLS = 500
_CROWDED_POLLS = 50
_PLANS_KEPT = 64


class Plan:
    """What one small all_reduce needs each time it is called.

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
        world_size = 1 + len(mailbox.peers)
        mine = ShardLayout(array.size, world_size).sizes[rank]
        self.scattered_bytes = (array.size - mine) * array.itemsize
        self.gathered_bytes = mine * array.itemsize * (world_size - 1)

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


class SmallCollectives(StagedCollectives):
    """The part of the MPI backend that is quick about little."""

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[object, Plan] = {}
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
        if mailbox is None or (out is not None and out is not array):
            return super().all_reduce(array, operation, out=out)
        plan = self._plan(mailbox, array, operation)
        if plan is None:
            return super().all_reduce(array, operation, out=out)
        call = self._repeat(plan.call)
        in_flight = self._record(call)
        number = mailbox.post_at_once(call.sequence, call.description, array.tobytes())
        if self._meet(mailbox, number):
            plan.reducer(number).reduce(array)
            mailbox.have_read(number)
            self.traffic.count("reduce_scatter", plan.scattered_bytes)
            self.traffic.count("all_gather", plan.gathered_bytes)
            _at_once(in_flight)
            return array
        self._talk.take_up(mailbox.take_up(make_row(call, array)))
        return self._issue(call, self._steps_all_reduce(call, array, array), in_flight).wait()

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

    def _plan(self, mailbox: Mailbox, array: Array, operation: ReductionOperation) -> Plan | None:
        """The plan for such an array; None where it is not small, or not right."""
        if type(array) is not np.ndarray or not array.flags.carray:
            return None
        key = array.dtype, array.shape, operation
        plan = self._plans.get(key)
        if plan is None:
            if not 0 < array.nbytes <= INLINE_BYTES or array.ndim > settings.MAXIMUM_DIMS:
                return None
            if array.dtype not in DTYPES:
                return None
            check_reducible(array.dtype, operation)
            if len(self._plans) == _PLANS_KEPT:
                self._plans.clear()
            plan = self._plans[key] = Plan(mailbox, array, operation, self.rank)
        return plan

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
