"""The backend of thread-ranks: every rank reads the arrays of its peers in place."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NoReturn, Self

from mpishard.base import (
    Array,
    CollectiveTimeoutError,
    CommunicationError,
    DType,
    PeerError,
    address,
    array_namespace,
    as_count,
    as_index,
    as_number,
    beside,
    copy_into,
    even_sizes,
    is_device_array,
    require_type,
    settings,
    synchronize,
)
from mpishard.communication.contract.arena import anonymous_memory
from mpishard.communication.contract.backend import CommunicationBackend
from mpishard.communication.contract.call import Call, place_after, refuse_other_message
from mpishard.communication.contract.reduction import is_combined_whole
from mpishard.communication.contract.status import RankRecord, RankState
from mpishard.communication.contract.work import Condition, Steps, Transfer, Work
from mpishard.communication.failure.stall import describe_departure, describe_stall
from mpishard.communication.threads.world import Failure, Message, Rendezvous, World
from mpishard.communication.tracing.recorder import stop_recording

_environments: dict[str, list[World]] = {}
"""The worlds of each id, oldest first. There is one until a rank that has left comes again."""
_environments_lock = threading.Lock()


class InMemoryCommunicationBackend(CommunicationBackend):
    """One thread as one rank of a world that lives in this process.

    Parameters
    ----------
    rank : int
        This rank, in ``[0, world_size)``.
    world_size : int
        Number of ranks, 1 or more.
    environment_id : str
        Backends of one id make up a world. `run_in_threads` makes ids of its own.
    timeout : float, optional
        Seconds to wait for the others before `CollectiveTimeoutError`; 0 means no limit. By default
        ``MPISHARD_TIMEOUT``, or 300. Time in which the whole process is suspended does not count.

    Raises
    ------
    TypeError
        If the rank or the world size is no integer, or the id is not a string.
    ValueError
        If the rank is outside the world, the world size is below 1, or the id is blank.
    """

    _rank_is_process = False

    def __init__(
        self,
        rank: int,
        world_size: int,
        environment_id: str = "default",
        *,
        timeout: float | None = None,
    ) -> None:
        world_size = as_count("world_size", world_size)
        rank = as_index("rank", rank, world_size)
        if not isinstance(environment_id, str):
            raise TypeError(f"environment_id must be a string, got {environment_id!r}")
        if not environment_id.strip():
            raise ValueError(f"environment_id must not be blank, got {environment_id!r}")
        timeout = settings.collective_timeout() if timeout is None else timeout
        if not as_number("timeout", timeout) >= 0:
            raise ValueError(f"timeout must be 0 or more seconds, got {timeout}")
        super().__init__(rank, world_size)
        self._me = rank  # this rank's number in the root world
        self._environment_id = environment_id
        self._timeout = timeout
        self._world: World | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        return self._joined().nodes

    def describe(self) -> str:
        return f"{super().describe()[:-1]}, environment {self._environment_id!r})"

    @staticmethod
    def clear_environment(environment_id: str) -> None:
        """Forget an environment, so that its id can be used for a new world."""
        with _environments_lock:
            _environments.pop(environment_id, None)

    # ------------------------------------------------------------------------------- life cycle

    def _on_initialize(self) -> None:
        with _environments_lock:
            if self._is_root:
                worlds = _environments.setdefault(self._environment_id, [])
                if worlds and worlds[0].world_size != self._world_size:
                    raise ValueError(
                        f"environment {self._environment_id!r} has {worlds[0].world_size} ranks, "
                        f"this backend was made for {self._world_size}"
                    )
                # In any world of the id: two threads as one rank would pass one rendezvous twice.
                if any(self._rank in world.members for world in worlds):
                    raise CommunicationError(
                        f"rank {self._rank} of environment {self._environment_id!r} is taken; use "
                        "another environment_id, or clear_environment() after a finished run"
                    )
                # The oldest world that this rank has not left, or a new one.
                unused = (world for world in worlds if self._rank not in world.left)
                self._world = next(unused, None)
                if self._world is None:
                    self._world = World.root(self._environment_id, self._world_size)
                    worlds.append(self._world)
            assert self._world is not None
            with self._world.lock:
                self._world.members[self._rank] = self
                self._world.left.pop(self._rank, None)
                self._world.pages[self._me] = self.status

    def _on_shutdown(self) -> None:
        world = self._joined()
        with world.lock:
            for member in self._session.worlds():
                assert isinstance(member, InMemoryCommunicationBackend)
                # The worlds that were split off this one end with it.
                if f"{member.group}/".startswith(f"{self.group}/") and member._initialized:
                    within = member._joined()
                    within.members.pop(member._rank, None)
                    within.left[member._rank] = member._sequence
                    member._initialized = False
            # Also ranks of other groups, which may wait for this rank in their own wait.
            world.wake_all()
        if len(world.left) == world.world_size:
            _forget(self._environment_id, world)

    def abort(self, error: BaseException) -> None:
        """Make every other rank's present or next collective raise `PeerError`."""
        require_type("error", error, BaseException)
        stop_recording(self, error)
        world = self._joined()
        self.status.end(RankState.REPORTED)
        with world.lock:
            world.lost.add(self._rank)
        after = place_after(self.status.read().last)
        world.fail(self._me, f"rank {self._me}", f"{after}, ", error)

    def _break(self, where: str, error: BaseException) -> None:
        world = self._world
        if world is None or world.world_size == 1 or world.failures:
            return
        because = f"{type(error).__name__}: {error}".removesuffix(": ")
        text = (
            f"rank {self._me} was interrupted by {because}, {where}, so that the ranks are out of "
            "step and this world has ended. Call shrink() on every rank to go on in a new one, or "
            "let the exception end the program"
        )
        failure = Failure(self._me, text, CommunicationError)
        for member in self._session.worlds():
            for work in member._pending:
                if not work.done:
                    work.fail(failure.error(f"{work.awaited.name} cannot complete", self._me))
        world.end(failure)

    def _shrink(self) -> Self:
        world = self._joined()
        deadline = world.clock.now() + (self._timeout or math.inf)
        with world.lock:
            world.survive(self._rank)
            while not world.has_successor():
                if not world.wait(self._rank, deadline):
                    world.survivors.remove(self._rank)
                    raise CollectiveTimeoutError(
                        f"rank {self._rank} waited {self._timeout:g} s in shrink() for ranks "
                        f"{sorted(world.absent() - {self._rank})}, which neither failed nor left: "
                        "every rank that is left calls it"
                    )
        _forget(self._environment_id, world)
        successor = type(self)(
            world.successor_ranks.index(self._rank),
            len(world.successor_ranks),
            world.successor_name,
            timeout=self._timeout,
        )
        stop_recording(self, world.failures[0].error("the world was given up", self._me))
        successor.initialize()
        return successor

    def _joined(self) -> World:
        self._ready()
        assert self._world is not None
        return self._world

    # --------------------------------------------------------------------------------- waiting

    def _drive(self, work: Work) -> None:
        world = self._joined()
        deadline = world.clock.now() + (self._timeout or math.inf)
        try:
            while True:
                self._session.progress()
                if work.done:
                    return
                with world.lock:
                    waitables = [w.waitable for w in self._session.under_way()]
                    if not any(waitable.test() for waitable in waitables if waitable is not None):
                        if self.status.awaited is None:
                            self.status.wait(work.awaited)
                        self._raise_if_hopeless(work)
                        if not world.wait(self._rank, deadline):
                            self._give_up(work, f"waited {self._timeout:g} s {work.where}")
        finally:
            if self.status.awaited is not None:
                self.status.go_on()

    def _raise_if_hopeless(self, work: Work) -> None:
        """Raise if a rank that ``work`` waits for failed or left. Needs the lock."""
        world = self._joined()
        if world.failures:
            raise world.failures[0].error(f"{work.awaited.name} cannot complete", self._me)
        for local in self._missing(work):
            if local in world.left:
                wait = self._me, work.awaited, world.records()
                rank = world.global_ranks[local]
                raise PeerError(describe_departure(rank, world.left[local], *wait), rank)
            # This is the only thread, so no other rank can come, or be started.
            if local not in world.members and len(sys._current_frames()) == 1:
                self._give_up(
                    work, f"is alone in this process, and would wait for ever {work.where}"
                )

    def _missing(self, work: Work) -> list[int]:
        """Return the ranks for which ``work`` waits."""
        if isinstance(work, Transfer):
            return [self.world_ranks.index(work.awaited.peer)]
        assert isinstance(work.waitable, Rendezvous)
        return work.waitable.missing()

    def _give_up(self, work: Work, wait: str) -> NoReturn:
        """Raise because ``work`` cannot complete; ``wait`` is the wait in words. Needs the lock."""
        world = self._joined()
        absent = self._missing(work)
        missing = [world.global_ranks[local] for local in absent]
        records, hint = world.records(), ""
        if not any(local in world.members for local in absent):
            hint = (
                f"; ranks in memory are threads of one process: mpishard.run_in_threads("
                f"{len(world.pages)}, main) starts them all, and calls main(backend) on each"
            )
        elif all(records[rank].waits is None for rank in missing):
            hint = "; if they compute or compile for so long, pass timeout= or set MPISHARD_TIMEOUT"
        text = (
            f"rank {self._me} {wait}; ranks {missing} did not arrive{hint}. "
            f"{describe_stall(records)}"
        )
        if not isinstance(work, Transfer):
            # The ranks are out of step from here on, so the world ends for all of them: at once
            # for those that wait, and for late ones when they come. After a message the world
            # goes on, and the message may still be received.
            world.end(Failure(missing[0], text, CollectiveTimeoutError))
        raise CollectiveTimeoutError(text)

    def _records(self) -> list[RankRecord]:
        return self._joined().records()

    def _admit(self, call: Call) -> None:
        # Also refuses the rank that failed, if its thread goes on after abort().
        for failure in self._joined().failures:
            raise failure.error(f"{call.kind.label} is called after a failure", self._me)

    # ------------------------------------------------------------------------------- collectives

    def _meet(self, call: Call, phase: int, value: object, *arrays: Array) -> Steps:
        """Pass rendezvous number ``phase`` of a collective, and return the values of all ranks.

        Other ranks may read and write ``arrays`` from here on until the last rendezvous.
        """
        for array in arrays:
            synchronize(array)
        rendezvous = self._joined().meet(call.sequence, phase, self._rank, value)
        yield rendezvous
        return rendezvous.values

    def _open(self, call: Call, value: object, *arrays: Array) -> Steps:
        """Pass the first rendezvous of a collective, and compare the ranks' calls."""
        pairs = yield from self._meet(call, 0, (call, value), *arrays)
        self._verify([peer for peer, _ in pairs])
        return [other for _, other in pairs]

    def _steps_barrier(self, call: Call) -> Steps:
        yield from self._open(call, None)

    def _steps_all_reduce(self, call: Call, array: Array, out: Array) -> Steps:
        given = yield from self._open(call, array, array)
        sizes = even_sizes(int(array.size), self._world_size)
        if is_combined_whole(array.nbytes, self._world_size):
            sizes = (array.size, *[0] * (self._world_size - 1))
        starts = list(itertools.accumulate(sizes, initial=0))
        mine = slice(starts[self._rank], starts[self._rank + 1])
        # Each rank combines one piece for all ranks, and not into ``out``, which may be an array
        # that other ranks still read.
        near = [beside(other.reshape(-1)[mine], array) for other in given]
        piece = array_namespace(array).empty(sizes[self._rank], array.dtype)
        assert call.operation is not None
        self._reducer.reduce(near, call.operation, piece)
        pieces = yield from self._meet(call, 1, piece, piece)
        result = out.reshape(-1)
        for rank, other in enumerate(pieces):
            copy_into(result[starts[rank] : starts[rank + 1]], other)
        # Wait until all have read the pieces in GPU memory, because CuPy reuses the memory of a
        # piece as soon as its rank drops it.
        if any(is_device_array(other) for other in given):
            yield from self._meet(call, 2, None, result)
        return out

    def _steps_reduce_scatter(
        self, call: Call, array: Array, counts: tuple[int, ...], out: Array
    ) -> Steps:
        given = yield from self._open(call, array, array)
        start = sum(counts[: self._rank])
        mine = slice(start, start + counts[self._rank])
        xp = array_namespace(array)
        # The others read all of this rank's array except its own piece, which may take the result.
        overlaps = xp.may_share_memory(array, out) and address(array[mine]) != address(out)
        piece = xp.empty(out.shape, out.dtype) if overlaps else out
        near = [beside(other[mine].reshape(-1), array) for other in given]
        assert call.operation is not None
        self._reducer.reduce(near, call.operation, piece.reshape(-1))
        yield from self._meet(call, 1, None, piece)
        if overlaps:
            out[...] = piece
        return out

    def _steps_all_gather(self, call: Call, array: Array, out: Array | None) -> Steps:
        given = yield from self._open(call, array, array)
        starts = list(itertools.accumulate((other.shape[0] for other in given), initial=0))
        if out is None:
            out = array_namespace(array).empty((starts[-1], *array.shape[1:]), array.dtype)
        own = out[starts[self._rank] : starts[self._rank + 1]]
        in_place = address(array) == address(own)
        # The others read this rank's array until the next rendezvous, so a result that would
        # overwrite it goes to a temporary array first.
        overlaps = not in_place and bool(array_namespace(out).may_share_memory(array, out))
        target = array_namespace(array).empty(out.shape, out.dtype) if overlaps else out
        for rank, other in enumerate(given):
            if not (in_place and rank == self._rank):
                copy_into(target[starts[rank] : starts[rank + 1]], other)
        yield from self._meet(call, 1, None, target)
        if overlaps:
            out[...] = target
        return out

    def _steps_broadcast(self, call: Call, array: Array | None, root: int) -> Steps:
        arrays = yield from self._open(call, array, *([] if array is None else [array]))
        # The root returns its own array, so only the others copy.
        if self._rank != root:
            sent = arrays[root]
            if array is None:
                array = array_namespace(sent).empty(sent.shape, sent.dtype)
            copy_into(array, sent)
        assert array is not None
        # The root must not change its array before all have copied it.
        yield from self._meet(call, 1, None, array)
        return array

    def _steps_scatter(
        self, call: Call, array: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Steps:
        given = [array] if self._rank == root and array is not None else []
        values = yield from self._open(call, (given, counts), *given)
        # Only the root has the counts.
        (sent,), pieces = values[root]
        start = sum(pieces[: self._rank])
        piece = sent[start : start + pieces[self._rank]].copy()
        yield from self._meet(call, 1, None, piece)
        return piece

    def _steps_gather(self, call: Call, array: Array, root: int) -> Steps:
        arrays = yield from self._open(call, array, array)
        result = None
        if self._rank == root:
            near = [beside(other, array) for other in arrays]
            result = array_namespace(array).concatenate(near, axis=0)
        # The ranks must not change their arrays before the root has joined them.
        yield from self._meet(call, 1, None, array)
        return result

    def _steps_all_to_all(self, call: Call, parts: Sequence[Array]) -> Steps:
        values = yield from self._open(call, parts, *parts)
        # Copies, because a sender may change its parts after the next rendezvous.
        received = [sent[self._rank].copy() for sent in values]
        yield from self._meet(call, 1, None, *received)
        return received

    def _steps_split(self, call: Call, color: int | None, key: int) -> Steps:
        choices = yield from self._open(call, (color, key))
        # Rank 0 makes the worlds for all, because the ranks of a color must share one object.
        worlds = self._joined().split(choices, call.sequence) if self._rank == 0 else None
        values = yield from self._meet(call, 1, worlds)
        if color is None:
            return None
        child: World = values[0][color]
        rank = child.global_ranks.index(self._me)
        member = type(self)(rank, child.world_size, child.name, timeout=self._timeout)
        # `_on_initialize` looks up an environment only for a root world, and enters this one here.
        member._world, member._me = child, self._me
        member._world_ranks = child.global_ranks
        return member

    def _steps_allocate_shared(self, call: Call, nbytes: int) -> Steps:
        yield from self._open(call, None)
        first = self.peers[0]
        # The first rank of each node makes the memory of all its ranks.
        makes = self._rank == first and settings.shares_memory()
        values = yield from self._meet(call, 1, anonymous_memory(nbytes) if makes else None)
        return values[first]

    def _steps_reduce_into(self, call: Call, arrays: Mapping[int, Array], out: Array) -> Steps:
        sizes = even_sizes(call.size, self._world_size)
        # All ranks read each other's arrays in any case: only the count of bytes is another.
        yield from self._steps_reduce_scatter(call, arrays[self._rank], sizes, out)
        self.traffic.share_reduce(call, self.topology, sizes, arrays[self._rank].dtype)
        return out

    def _steps_reduce_in_place(self, call: Call, arrays: Mapping[int, Array]) -> Steps:
        mine, sizes = arrays[self._rank], even_sizes(call.size, self._world_size)
        yield from self._steps_all_reduce(call, mine, mine)
        self.traffic.share_reduce(call, self.topology, sizes, mine.dtype)
        self.traffic.share_gather(call, self.topology, sizes, mine.dtype)
        return mine

    def _steps_gather_in_place(
        self, call: Call, arrays: Mapping[int, Array], piece: Array, once_per_node: bool
    ) -> Steps:
        given = yield from self._open(call, piece)
        mine, sizes = arrays[self._rank], even_sizes(call.size, self._world_size)
        starts = list(itertools.accumulate(sizes, initial=0))
        for rank, other in enumerate(given):
            target = mine[starts[rank] : starts[rank + 1]]
            # Into a node's one vector each piece is copied by one rank of the node.
            copies = not once_per_node or self.topology.agent(rank) == self._rank
            if copies and address(target) != address(other):
                target[...] = other
        yield from self._meet(call, 1, None)
        self.traffic.share_gather(call, self.topology, sizes, mine.dtype)
        return mine

    # ------------------------------------------------------------------------------- messages

    def _send(self, array: Array, destination: int, tag: int) -> None:
        # The caller may change the array at once, and the receiver may come much later.
        self._post(array.copy(), destination, tag, is_copy=True)

    def _steps_send(self, array: Array, destination: int, tag: int) -> Steps:
        yield self._post(array, destination, tag, is_copy=False)

    def _post(self, array: Array, destination: int, tag: int, *, is_copy: bool) -> Message:
        synchronize(array)
        world, message = self._joined(), Message(array, is_copy)
        with world.lock:
            world.messages.setdefault((self._rank, destination, tag), deque()).append(message)
            world.wake([destination])
        return message

    def _steps_receive(self, source: int, count: int, tag: int, dtype: DType | None) -> Steps:
        world, address = self._joined(), (source, self._rank, tag)
        yield Condition(lambda: address in world.messages)
        with world.lock:
            messages = world.messages[address]
            array, sender = messages[0].array, world.global_ranks[source]
            refuse_other_message(array.size, array.dtype, count, dtype, sender, tag)
            message = messages.popleft()
            if not messages:
                del world.messages[address]
        content = message.open()
        # The sender of a copy waits for nothing.
        if not message.is_copy:
            with world.lock:  # the sender may sleep until the message is taken
                message.is_taken = True
                world.wake([source])
        return content


def _forget(environment_id: str, world: World) -> None:
    """Remove ``world`` from its environment, so that no rank enters it from now on."""
    with _environments_lock:
        worlds = [other for other in _environments.pop(environment_id, []) if other is not world]
        if worlds:
            _environments[environment_id] = worlds
