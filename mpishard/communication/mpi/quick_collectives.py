"""Blocking collectives that take no longer than the calls that make them: done on the spot.

Where headers go through a mailbox nothing is issued and driven: the header is written, the others'
are read in a short loop, and what they say is compared as bytes and combined where it stands: in
the headers, or in the bounce buffers. Whatever is not as it should be, or not there soon, is left
to the collective as it always is, which takes up the header that was sent.
"""

from __future__ import annotations

import sys

import numpy as np

from mpishard import settings
from mpishard.arrays import Array, is_own
from mpishard.communication.contract.call import DTYPES, Call, Kind
from mpishard.communication.contract.reduction import (
    ReductionOperation,
    check_reducible,
    is_one_step,
)
from mpishard.communication.contract.work import Steps
from mpishard.communication.mpi.headers import COPIED, INLINE_BYTES, Readiness, make_row
from mpishard.communication.mpi.message_collectives import COPY_POLLS, MessageCollectives, at_once
from mpishard.communication.mpi.node_memory import PRIVATE
from mpishard.communication.mpi.plans import (
    BouncePlan,
    HalvesPlan,
    InlinePlan,
    MessagePlan,
)
from mpishard.communication.mpi.rings import Mailbox
from mpishard.layout import ShardLayout

__all__ = ["QuickCollectives"]

_FENCE_POLLS = 2000
_PLANS_KEPT = 64

Plan = InlinePlan | BouncePlan | HalvesPlan | MessagePlan


class QuickCollectives(MessageCollectives):
    """The part of the MPI backend that is quick about what is short."""

    def __init__(self) -> None:
        super().__init__()
        self._plans: dict[object, Plan] = {}
        self._barrier_call = Call.describe(0, Kind.BARRIER, None)

    def _forget_plans(self) -> None:
        """The next plans are for another mailbox."""
        self._plans.clear()

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
            # Without headers no rank knows of the other's result.
            is_apart = out is not array and is_own(out) and self._needs_header(array)
            if is_apart and plan.may_swap:
                steps = self._steps_whole(plan, call, array, out)
            else:
                steps = self._steps_in_parts(plan, call, array, out, is_apart=is_apart)
            return self._at_once_or_issued(steps, call, array, out, in_flight)
        if isinstance(plan, HalvesPlan):
            steps = self._steps_by_halves(plan, call, array, out)
            return self._at_once_or_issued(steps, call, array, out, in_flight)
        if isinstance(plan, BouncePlan):
            try:
                done = self._reduce_bounced(plan, call, array, out)
            except BaseException:
                self._break_off(call)
                raise
        else:
            done = self._reduce_inline(plan, call, array, out)
        if done:
            self._count(plan.bytes_sent)
            at_once(in_flight)
            return out
        return self._issue(call, self._steps_all_reduce(call, array, out), in_flight).wait()

    def _reduce_inline(self, plan: InlinePlan, call: Call, array: Array, out: Array) -> bool:
        mailbox = plan.mailbox
        number = mailbox.post_at_once(call.sequence, call.description, array.tobytes())
        if not self._meet(mailbox, number):
            self._take_up(call, mailbox, make_row(call, array))
            return False
        plan.reducer(number).reduce(out)
        mailbox.have_read(number)
        return True

    def _reduce_bounced(self, plan: BouncePlan, call: Call, array: Array, out: Array) -> bool:
        mailbox, bounce = plan.mailbox, plan.bounce
        turn = bounce.turn
        plan.row(turn)[...] = array
        number = mailbox.post_at_once(call.sequence, call.description, COPIED)
        if not self._meet(mailbox, number, COPY_POLLS) or mailbox.differs(number, COPIED):
            self._take_up(call, mailbox, make_row(call, array, readiness=Readiness.COPIED))
            return False
        plan.combine(turn, out)
        mailbox.have_read(number)
        bounce.end_turn()
        return True

    def _steps_by_halves(self, plan: HalvesPlan, call: Call, array: Array, out: Array) -> Steps:
        """For `_at_once_or_issued`: as `_bounced_all_reduce` of what goes by halves."""
        mailbox, bounce = plan.mailbox, plan.bounce
        own, met = plan.own_rows[bounce.turn], plan.met_rows[bounce.turn]
        flat, result = array.reshape(-1), out.reshape(-1)
        own[...] = flat[plan.theirs]
        number = mailbox.post_at_once(call.sequence, call.description, COPIED)
        if not self._meet(mailbox, number, COPY_POLLS) or mailbox.differs(number, COPIED):
            self._take_up(call, mailbox, make_row(call, array, readiness=Readiness.COPIED))
            return None
        mailbox.have_read(number)
        plan.combine(flat[plan.mine], met)
        fence = mailbox.fence()
        for _ in range(1 if self._is_crowded else _FENCE_POLLS):
            if fence.test():
                break
        else:
            yield fence
        result[plan.mine] = met
        result[plan.theirs] = own
        bounce.end_turn()
        self._count(plan.bytes_sent)
        return out

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
            at_once(in_flight)
            return
        self._take_up(call, mailbox, make_row(call, None))
        self._issue(call, self._steps_barrier(call), in_flight).wait()

    def _idle_mailbox(self) -> Mailbox | None:
        """The mailbox, where a header may be posted and waited for at once."""
        if self._pending or not self._initialized:
            return None
        mailbox = self._talk.mailbox
        return mailbox if mailbox is not None and mailbox.is_idle else None

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
        if plan.mailbox is not None and not plan.mailbox.is_idle:
            return False
        if (
            self._regions.ever
            and plan.is_for_private_alone
            and self._regions.locate(array) != PRIVATE
        ):
            return False
        if out is None or out is array:
            return True
        return (
            type(out) is np.ndarray
            and out.dtype == array.dtype
            and out.shape == array.shape
            and out.flags.carray
            and (plan.may_overlap or not np.may_share_memory(array, out))
        )

    def _make_plan(self, array: Array, operation: ReductionOperation) -> Plan | None:
        mailbox, bounce = self._talk.mailbox, self._talk.bounce
        if mailbox is not None and 0 < array.nbytes <= INLINE_BYTES:
            return InlinePlan(mailbox, array, operation, self.rank)
        if self.world_size != 2 or not is_one_step(array.dtype, operation):
            return None
        if mailbox is not None and self._is_to_bounce(array.nbytes):
            if bounce is None:
                return None
            kind = HalvesPlan if self._goes_by_halves(array.nbytes) else BouncePlan
            return kind(mailbox, bounce, array, operation, self.rank)
        if not self._sends_pairwise or array.nbytes <= INLINE_BYTES:
            return None
        longest = ShardLayout(array.size, 2).size(0)
        lengths = (
            self._message_length(longest, array.itemsize),
            self._message_length(longest, array.itemsize, is_apart=True),
        )
        may_swap = self._may_swap(array, operation)
        return MessagePlan(mailbox, array, operation, self.rank, lengths, may_swap=may_swap)

    def _repeat(self, call: Call) -> Call:
        """Number and log ``call`` as made once more."""
        self._admit(call.kind, self._sequence + 1)
        self._sequence += 1
        call = call.again(self._sequence)
        self.status.record(call, self.label, sys._getframe(2))
        return call
