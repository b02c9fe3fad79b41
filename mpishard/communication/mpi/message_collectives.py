"""All-reduces of two ranks by messages, on the spot: what both send comes soon, or is waited for.

Short arrays are swapped whole where both results lie apart, in memory that NumPy allocated: each
takes the other's array. Of others each rank combines a half, part after part: what is received of
one is combined, and goes on, while the cache has it, and scratch is one message long. (That of a
call which goes the generic way is as long as a rank's piece.)
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from mpishard.arrays import Array
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.work import Steps, Waitable, in_call
from mpishard.communication.mpi.gpu import StagedCollectives
from mpishard.communication.mpi.headers import APART, AT_HOME, ROW_BYTES, Readiness, make_row
from mpishard.communication.mpi.lanes import PendingAll
from mpishard.communication.mpi.pairwise_collectives import DATA_TAG
from mpishard.communication.mpi.plans import MessagePlan
from mpishard.communication.mpi.rings import Mailbox
from mpishard.communication.tracing.recorder import CollectiveInFlight
from mpishard.errors import CommunicationError

__all__ = ["COPY_POLLS", "MessageCollectives", "at_once"]

_POLLS = 500
COPY_POLLS = 5000
"""Polls for a rank that is still copying."""
_CROWDED_POLLS = 50
_MESSAGE_POLLS = 1000
_CROWDED_MESSAGE_POLLS = 16  # MPICH moves what a message has of a few pages at each


class MessageCollectives(StagedCollectives):
    """The part of the MPI backend that swaps messages with one other rank."""

    @property
    @abstractmethod
    def _is_crowded(self) -> bool:
        """Whether the node has more ranks than cores."""

    def _at_once_or_issued(
        self,
        steps: Steps,
        call: Call,
        array: Array,
        out: Array,
        in_flight: CollectiveInFlight | None,
    ) -> Any:
        """The result of ``steps``, which begin when nothing else is under way.

        Where they have to wait they go on as any collective; where they come to None, having done
        no more than post a header, `_steps_all_reduce` takes it up.
        """
        try:
            late = next(steps)
        except StopIteration as stop:
            if stop.value is not None:
                at_once(in_flight)
                return stop.value
            steps = self._steps_all_reduce(call, array, out)
        except Exception as error:  # noqa: BLE001 - told as that of any collective
            steps = _failing(error)
        except BaseException:
            self._break_off(call, array, out)
            raise
        else:
            steps = self._in_turn(late, steps)
        return self._issue(call, steps, in_flight).wait()

    def _steps_whole(self, plan: MessagePlan, call: Call, array: Array, out: Array) -> Steps:
        """For `_at_once_or_issued`, where ``out`` lies apart: as `_swap_and_combine`."""
        if not self._matches(plan, call, array, is_apart=True):
            return None
        group = self._talk
        comm, flat, result = group.lanes[0].comm, array.reshape(-1), out.reshape(-1)
        size, element = flat.size, group.element(plan.itemsize)
        requests = [
            comm.Isend([flat.view(np.uint8), size, element], plan.other, DATA_TAG),
            comm.Irecv([result.view(np.uint8), size, element], plan.other, DATA_TAG),
        ]
        late = self._await(requests, flat, result)
        if late is not None:
            yield late
        plan.combine(flat, result, result)
        self._count(plan.bytes_sent)
        return out

    def _steps_in_parts(
        self, plan: MessagePlan, call: Call, array: Array, out: Array, *, is_apart: bool
    ) -> Steps:
        """For `_at_once_or_issued`: one part after the other goes there and back.

        Each rank sends before it receives: a message that is there already may be copied by the
        call that asks for it, and the other rank would wait for that.
        """
        if self._needs_header(array) and not self._matches(plan, call, array, is_apart=is_apart):
            return None
        group = self._talk
        other, element = (plan.other, DATA_TAG), group.element(plan.itemsize)
        scatter, gather = (lane.comm for lane in group.lanes)
        flat = array if array.ndim == 1 else array.reshape(-1)
        result = flat
        outgoing = incoming = flat.view(np.uint8)
        if out is not array:
            result = out if out.ndim == 1 else out.reshape(-1)
            incoming = result.view(np.uint8)
        parts = plan.parts(is_apart=is_apart)
        room = parts[0].own.stop - parts[0].own.start
        buffer = self._pool.take(room)
        received = buffer[:room].view(flat.dtype)
        for part in parts:
            own, theirs = part.own_size, part.their_size
            requests = []
            if theirs:
                requests.append(scatter.Isend([outgoing[part.theirs], theirs, element], *other))
            if own:
                requests.append(scatter.Irecv([buffer, own, element], *other))
            late = self._await(requests, buffer, outgoing)
            if late is not None:
                yield late
            if own:
                plan.combine(flat[part.mine], received[:own], result[part.mine])
            requests = []
            if own:
                requests.append(gather.Isend([incoming[part.own], own, element], *other))
            if theirs:
                requests.append(gather.Irecv([incoming[part.theirs], theirs, element], *other))
            late = self._await(requests, incoming)
            if late is not None:
                yield late
        self._pool.give(buffer)
        self._count(plan.bytes_sent)
        return out

    def _break_off(self, call: Call, *keep: object) -> None:
        """Refuse what comes after ``call``, of which an interruption left out the rest."""
        where = in_call(call, self.label)
        error = CommunicationError(
            f"rank {self.world_ranks[self.rank]} was interrupted {where}, and the others are "
            "further than it is: nothing more can be called on this world; end the job"
        )
        self._talk.break_off(error, *keep)

    def _in_turn(self, late: Waitable, steps: Steps) -> Steps:
        """``steps``, which wait for ``late``: what is issued from now on posts behind them."""
        with self._turn(0), self._turn(1):
            yield late
            return (yield from steps)

    def _await(self, requests: list[Any], *keep: object) -> PendingAll | None:
        """None where ``requests`` are complete soon; what is to be waited for where not."""
        testall = self._talk.mpi.Request.Testall
        try:
            for _ in range(_CROWDED_MESSAGE_POLLS if self._is_crowded else _MESSAGE_POLLS):
                if testall(requests):
                    return None
        except BaseException:
            self._keep_all(requests, *keep)
            raise
        return self._keep_all(requests, *keep)

    def _count(self, bytes_sent: tuple[int, int]) -> None:
        scattered, gathered = bytes_sent
        self.traffic.count("reduce_scatter", scattered)
        self.traffic.count("all_gather", gathered)

    # ----------------------------------------------------------------------------------- headers

    def _matches(self, plan: MessagePlan, call: Call, array: Array, *, is_apart: bool) -> bool:
        """Whether the other rank calls the same, and soon, and its result lies apart or does not.

        Else its header is left to be read.
        """
        mailbox = plan.mailbox
        if mailbox is None:
            return self._matches_by_message(plan, call, is_apart=is_apart)
        payload = APART if is_apart else AT_HOME
        number = mailbox.post_at_once(call.sequence, call.description, payload)
        if not self._meet(mailbox, number, COPY_POLLS) or mailbox.differs(number, payload):
            readiness = Readiness.APART if is_apart else Readiness.AT_HOME
            self._take_up(call, mailbox, make_row(call, array, readiness=readiness))
            return False
        mailbox.have_read(number)
        return True

    def _matches_by_message(self, plan: MessagePlan, call: Call, *, is_apart: bool) -> bool:
        """As `_matches`."""
        group, row = self._talk, plan.row(call.sequence, is_apart=is_apart)
        requests, rows = group.swap_headers(row)
        try:
            late = self._await(requests, row, rows)
        except BaseException:
            group.expect(self._keep_all(requests, row, rows), rows, call)
            raise
        if late is None and rows[:ROW_BYTES] == rows[ROW_BYTES:]:
            return True
        group.take_up(call, late or self._keep_all(requests, row, rows), rows)
        return False

    def _meet(self, mailbox: Mailbox, number: int, polls: int = _POLLS) -> bool:
        crowded = self._is_crowded
        return mailbox.meet(number, _CROWDED_POLLS if crowded else polls, crowded=crowded)

    def _take_up(self, call: Call, mailbox: Mailbox, row: bytearray) -> None:
        """Leave the exchange that was begun with ``row`` to the collective as it always is."""
        letter = mailbox.take_up(row)
        self._talk.take_up(call, letter, letter.rows)


def _failing(error: Exception) -> Steps:
    yield from ()
    raise error


def at_once(in_flight: CollectiveInFlight | None) -> None:
    """Record a collective that is done as soon as it is called."""
    if in_flight is not None:
        in_flight.done()
        in_flight.blocked(in_flight.start)
