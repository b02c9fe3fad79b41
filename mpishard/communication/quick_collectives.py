"""Blocking collectives that take no longer than the calls that make them: done on the spot.

Where headers go through a mailbox nothing is issued and driven: the header is written, the others'
are read in a short loop, and what they say is compared as bytes and combined where it stands: in
the headers, or in the bounce buffers. Whatever is not as it should be, or not there soon, is left
to the collective as it always is, which takes up the header that was sent. Where they are messages,
those that carry the data follow in the same manner.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.arrays import Array
from mpishard.communication.arena import PRIVATE
from mpishard.communication.call import DTYPES, Call, Kind
from mpishard.communication.header import COPIED, INLINE_BYTES, Readiness, make_row
from mpishard.communication.lanes import PendingAll, Turn
from mpishard.communication.mailbox import Mailbox
from mpishard.communication.plans import BouncePlan, InlinePlan, MessagePlan, is_one_step
from mpishard.communication.recorder import CollectiveInFlight
from mpishard.communication.reduction import ReductionOperation, check_reducible
from mpishard.communication.staging import StagedCollectives
from mpishard.communication.work import CollectiveWork, Steps

__all__ = ["QuickCollectives"]

_POLLS = 500
_BOUNCE_POLLS = 5000  # of a rank that is still copying
_CROWDED_POLLS = 50
_MESSAGE_POLLS = 64
_PLANS_KEPT = 64

Plan = InlinePlan | BouncePlan | MessagePlan


class QuickCollectives(StagedCollectives):
    """The part of the MPI backend that is quick about what is short."""

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
        plan = self._plan(array, operation, out)
        if plan is None:
            return super().all_reduce(array, operation, out=out)
        if out is None:
            out = array
        call = self._repeat(plan.call)
        in_flight = self._record(call)
        if isinstance(plan, MessagePlan):
            steps = self._steps_by_messages(plan, call, array, out)
            result: Array = self._at_once_or_issued(call, steps, in_flight)
            return result
        if isinstance(plan, BouncePlan):
            done = self._reduce_bounced(plan, call, array, out)
        else:
            done = self._reduce_inline(plan, call, array, out)
        if done:
            self._count_plan(plan)
            _at_once(in_flight)
            return out
        return self._issue(call, self._steps_all_reduce(call, array, out), in_flight).wait()

    def _count_plan(self, plan: Plan) -> None:
        scattered, gathered = plan.bytes_sent
        self.traffic.count("reduce_scatter", scattered)
        self.traffic.count("all_gather", gathered)

    def _reduce_inline(self, plan: InlinePlan, call: Call, array: Array, out: Array) -> bool:
        mailbox = plan.mailbox
        number = mailbox.post_at_once(call.sequence, call.description, array.tobytes())
        if not self._meet(mailbox, number):
            self._talk.take_up(mailbox.take_up(make_row(call, array)))
            return False
        plan.reducer(number).reduce(out)
        mailbox.have_read(number)
        return True

    def _reduce_bounced(self, plan: BouncePlan, call: Call, array: Array, out: Array) -> bool:
        mailbox, bounce = plan.mailbox, plan.bounce
        turn = bounce.turn
        plan.row(turn)[...] = array
        number = mailbox.post_at_once(call.sequence, call.description, COPIED)
        if not self._meet(mailbox, number, _BOUNCE_POLLS) or mailbox.differs(number, COPIED):
            row = make_row(call, array, readiness=Readiness.COPIED)
            self._talk.take_up(mailbox.take_up(row))
            return False
        plan.combine(turn, out)
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

    def _steps_by_messages(self, plan: MessagePlan, call: Call, array: Array, out: Array) -> Steps:
        """As `_steps_all_reduce` of two ranks that share nothing, each piece in one message."""
        with self._turn(0) as first, self._turn(1) as second:
            if self.check_collectives:
                yield from self._open(call, first, array)
            flat, result = array.reshape(-1), out.reshape(-1)
            buffer = self._pool.take(plan.own_bytes)
            received = buffer[: plan.own_bytes].view(array.dtype)
            yield first
            exchange = self._swap(first, plan.other, flat[plan.others], received)
            first.release()
            yield exchange
            piece = result[plan.mine]
            plan.combine(flat[plan.mine], received, piece)
            self._pool.give(buffer)
            yield second
            exchange = self._swap(second, plan.other, piece, result[plan.others])
            second.release()
            yield exchange
            self._count_plan(plan)
            return out

    def _swap(self, turn: Turn, other: int, outgoing: Array, incoming: Array) -> PendingAll:
        element = self._talk.element(incoming.itemsize)
        requests = [
            turn.comm.Irecv([incoming.view(np.uint8), incoming.size, element], other),
            turn.comm.Isend([outgoing.view(np.uint8), outgoing.size, element], other),
        ]
        return self._keep_all(requests, outgoing, incoming)

    def _at_once_or_issued(
        self, call: Call, steps: Steps, in_flight: CollectiveInFlight | None
    ) -> Any:
        """Take ``steps`` while each is there soon; the others as of any collective."""
        work = CollectiveWork(self, steps, call, in_flight)
        for _ in range(1 if self._is_crowded else _MESSAGE_POLLS):
            if work.advance():
                break
        else:
            self._pending.append(work)
        work.begun()
        return work.wait()

    def _plan(self, array: Array, operation: ReductionOperation, out: Array | None) -> Plan | None:
        """The plan for such an array; None where it is too long, or something is not right."""
        if self._pending or not self._initialized or type(array) is not np.ndarray:
            return None
        if not array.flags.carray:
            return None
        key = array.dtype, array.shape, operation
        plan = self._plans.get(key)
        if plan is None:
            if array.ndim > settings.MAXIMUM_DIMS or array.dtype not in DTYPES:
                return None
            check_reducible(array.dtype, operation)
            plan = self._make_plan(array, operation)
            if plan is None:
                return None
            if len(self._plans) == _PLANS_KEPT:
                self._plans.clear()
            self._plans[key] = plan
        return plan if self._may_go(plan, array, out) else None

    def _may_go(self, plan: Plan, array: Array, out: Array | None) -> bool:
        """Whether nothing else is to be seen to: other exchanges, shared memory, a wrong result."""
        if isinstance(plan, MessagePlan):
            may = not self._regions.ever
        else:
            may = plan.mailbox.is_idle
            if isinstance(plan, BouncePlan):
                may = may and self._places(array, None)[0] == PRIVATE
        if not may or out is None or out is array:
            return may
        if type(out) is not np.ndarray or out.dtype != array.dtype or out.shape != array.shape:
            return False
        is_apart = isinstance(plan, BouncePlan) or not np.may_share_memory(array, out)
        return is_apart and out.flags.carray

    def _make_plan(self, array: Array, operation: ReductionOperation) -> Plan | None:
        mailbox, bounce = self._talk.mailbox, self._talk.bounce
        if mailbox is not None and 0 < array.nbytes <= INLINE_BYTES:
            return InlinePlan(mailbox, array, operation, self.rank)
        if self.world_size != 2 or not is_one_step(array, operation):
            return None
        if mailbox is None:
            pairwise = self._sends_pairwise and not self._regions.ever
            if not pairwise or array.nbytes <= INLINE_BYTES:
                return None
            plan = MessagePlan(array, operation, self.rank)
            return plan if self._is_one_message(plan.longest) else None
        if bounce is not None and self._is_to_bounce(array.nbytes):
            return BouncePlan(mailbox, bounce, array, operation, self.rank)
        return None

    def _repeat(self, call: Call) -> Call:
        """Number and log ``call`` as made once more."""
        self._admit(call.kind, self._sequence + 1)
        self._sequence += 1
        call = call.again(self._sequence)
        self.call_log.record(call, sys._getframe(2))
        return call

    def _meet(self, mailbox: Mailbox, number: int, polls: int = _POLLS) -> bool:
        crowded = self._is_crowded
        return mailbox.meet(number, _CROWDED_POLLS if crowded else polls, crowded=crowded)


def _at_once(in_flight: CollectiveInFlight | None) -> None:
    """Record a collective that is done as soon as it is called."""
    if in_flight is not None:
        in_flight.done()
        in_flight.blocked(in_flight.start)
