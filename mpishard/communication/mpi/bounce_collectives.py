"""All-reduces on one node of arrays that the ranks do not share: through memory that they do.

Each rank copies its array into its row of the group's `BounceBuffers`; when all have, they combine
what stands there. A rank whose turn it is copies before it sends its header. Where all did, their
headers say that it is there, and one exchange is all that the collective waits for. A message of
that length takes a library's protocol, a header before it, and a dozen calls from Python.

Two ranks swap halves of what is longer than `WHOLE_BYTES`: each copies the one that the other
combines, which leaves the result where it found it. Of what is shorter each combines all, which
takes less than to wait for the other's half, and to copy it.
"""

from __future__ import annotations

from abc import abstractmethod

from mpishard.arrays import Array, is_device_array
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.nodes import Places
from mpishard.communication.contract.reduction import ReductionOperation
from mpishard.communication.contract.work import Steps
from mpishard.communication.mpi.bounce import WHOLE_BYTES, BounceBuffers, longest_bounced
from mpishard.communication.mpi.group import Group
from mpishard.communication.mpi.headers import INLINE_BYTES, Headers, Readiness
from mpishard.communication.mpi.lanes import Turn
from mpishard.communication.mpi.node_memory import PRIVATE
from mpishard.communication.mpi.shared_collectives import SharedCollectives
from mpishard.layout import ShardLayout

__all__ = ["BounceCollectives"]


class BounceCollectives(SharedCollectives):
    """The part of the MPI backend that copies through memory of the node."""

    @property
    @abstractmethod
    def _talk(self) -> Group:
        """The group of an initialised backend."""

    @abstractmethod
    def _steps_share(self, call: Call, turn: Turn, nbytes: int) -> Steps:
        """Memory that this rank's node shares, or None, for ``call``, whose turn it is."""

    @property
    def scratch_bytes(self) -> int:
        bounce = self._talk.bounce if self._initialized else None
        return super().scratch_bytes + (0 if bounce is None else bounce.nbytes_each)

    def _is_to_bounce(self, nbytes: int) -> bool:
        """Whether so many bytes may go this way; alike on all ranks."""
        longest = longest_bounced(self.world_size)
        return INLINE_BYTES < nbytes <= longest and self._talk.mailbox is not None

    def _goes_by_halves(self, nbytes: int) -> bool:
        """Whether of so many bytes that bounce the rows take half, and each rank combines one."""
        return self.world_size == 2 and nbytes > WHOLE_BYTES

    def _copy_ahead(self, call: Call, turn: Turn, array: Array, places: Places) -> Readiness:
        """Copy ``array`` to this rank's row, if that may be done before its header is sent."""
        if is_device_array(array):
            return Readiness.ON_DEVICE
        bounce = self._talk.bounce
        if bounce is None or not self._is_to_bounce(array.nbytes):
            return Readiness.AT_HOME
        if self._talk.has_begun(call):  # copied before, and others may have left a result there
            return Readiness.COPIED
        if places[0] != PRIVATE or not turn.test():
            return Readiness.AT_HOME
        self._copy_to_row(bounce, array)
        return Readiness.COPIED

    def _copy_to_row(self, bounce: BounceBuffers, array: Array) -> None:
        part = array.reshape(-1)
        if self._goes_by_halves(array.nbytes):
            part = part[ShardLayout(part.size, 2).slice(1 - self.rank)]
        bounce.own_row(part.dtype, part.size)[...] = part

    def _bounce(self, call: Call, turn: Turn, headers: Headers, array: Array) -> Steps:
        """See that every rank's ``array``, or half, stands in its row; return the `BounceBuffers`.

        None, on all ranks, where messages are to be sent: there is no memory for more, or it is
        GPUs that send them.
        """
        group = self._talk
        if headers.any_on_device:
            return None
        yield turn
        if group.bounce is None and not group.has_no_bounce:
            memory = yield from self._steps_share(call, turn, BounceBuffers.nbytes(self.world_size))
            group.has_no_bounce = memory is None
            if memory is not None:
                group.bounce = BounceBuffers(memory, self.world_size, self.rank)
        if group.bounce is not None and not headers.all_have_copied:
            if not headers.has_copied(self.rank):
                self._copy_to_row(group.bounce, array)
            yield from self._fence(turn)
        return group.bounce

    def _bounced_all_reduce(
        self,
        turn: Turn,
        bounce: BounceBuffers,
        operation: ReductionOperation,
        array: Array,
        out: Array,
    ) -> Steps:
        """Combine what the rows hold into flat ``out``; where they hold halves, with ``array``."""
        if self._goes_by_halves(out.nbytes):
            yield from self._combine_half(turn, bounce, operation, array, out)
        elif self.world_size == 2:
            self._reducer.reduce(bounce.rows(out.dtype, out.size), operation, out)
        else:
            rows = bounce.rows(out.dtype, out.size)
            mine = ShardLayout(out.size, self.world_size).slice(self.rank)
            result = bounce.result(out.dtype, out.size)
            self._reducer.reduce([row[mine] for row in rows], operation, result[mine])
            yield from self._fence(turn)
            out[...] = result
        bounce.end_turn()

    def _combine_half(
        self,
        turn: Turn,
        bounce: BounceBuffers,
        operation: ReductionOperation,
        array: Array,
        out: Array,
    ) -> Steps:
        layout, other = ShardLayout(out.size, 2), 1 - self.rank
        mine, theirs = layout.slice(self.rank), layout.slice(other)
        met = bounce.rows(out.dtype, layout.size(self.rank))[other]
        halves = [array[mine], met] if self.rank == 0 else [met, array[mine]]
        self._reducer.reduce(halves, operation, met)
        yield from self._fence(turn)
        out[mine] = met  # not before: the other may have read its array there
        out[theirs] = bounce.own_row(out.dtype, layout.size(other))
