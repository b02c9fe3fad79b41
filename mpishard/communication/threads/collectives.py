"""The collectives and messages of threads as ranks, as generators that wait at meetings.

A collective is a chain of *meetings*. At a meeting each rank leaves a value, and goes on when
all have come. Between the first meeting and the last a rank's arrays are readable by all.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpishard import settings
from mpishard.arrays import (
    Array,
    address,
    array_namespace,
    beside,
    copy_into,
    is_device_array,
    synchronize,
)
from mpishard.communication.contract.arena import anonymous_memory
from mpishard.communication.contract.backend import CommunicationBackend, refuse_other_message
from mpishard.communication.contract.call import Call
from mpishard.communication.contract.work import Steps
from mpishard.communication.threads.messages import Delivery, Letter, Taken
from mpishard.communication.threads.world import World
from mpishard.layout import ShardLayout

__all__ = ["MemoryCollectives"]


class MemoryCollectives(CommunicationBackend):
    """The part of the in-memory backend that moves data. Its subclass has the life cycle."""

    def __init__(self) -> None:
        super().__init__()
        # Receives under way, by where the letter comes from: this thread's alone.
        self._lines: dict[tuple[int, int, int], deque[Delivery]] = {}

    @abstractmethod
    def _joined(self) -> World:
        """The world that this rank is in; an error where it is in none."""

    # ------------------------------------------------------------------------------- collectives

    def _open(self, call: Call, value: Any, *arrays: Array) -> Steps:
        """First meeting of a collective: check the calls, give back the ranks' values.

        The others may use ``arrays`` from here on, and those of `_exchange` from there on.
        """
        _finish(arrays)
        arrival = self._joined().meet(call, 0, self.rank, (call, value))
        yield arrival
        pairs = [left[0] for left in arrival.meeting.values]
        self._verify([peer for peer, _ in pairs])
        return [other for _, other in pairs]

    def _exchange(self, call: Call, value: Any, *arrays: Array, phase: int = 1) -> Steps:
        """The second meeting, or a later one: the ranks' values."""
        _finish(arrays)
        arrival = self._joined().meet(call, phase, self.rank, value)
        yield arrival
        return [left[0] for left in arrival.meeting.values]

    def _steps_barrier(self, call: Call) -> Steps:
        yield from self._open(call, None)

    def _steps_all_reduce(self, call: Call, array: Array, out: Array) -> Steps:
        left = yield from self._open(call, (array, self._places(array, out)), array)
        flat = [a.reshape(-1) for a, _ in left]
        places = [where for _, where in left]
        layout = ShardLayout(int(array.size), self.world_size)
        mine = layout.slice(self.rank)
        piece = array_namespace(array).empty(layout.size(self.rank), array.dtype)
        assert call.operation is not None
        near = [beside(a[mine], array) for a in flat]
        self._reducer.reduce(near, call.operation, piece)
        pieces = yield from self._exchange(call, piece, piece)
        result = out.reshape(-1)
        out_is_shared = self.topology.results_are_shared(places)
        nodes = self.topology
        for rank, other in enumerate(pieces):
            if not out_is_shared or nodes.agent(rank) == self.rank:
                copy_into(result[layout.slice(rank)], other)
        if self.topology.arrays_are_shared(places) and out_is_shared:
            self.traffic.count_shared_reduce(layout.sizes, array.dtype)
            self.traffic.count_shared_gather(layout.sizes, array.dtype)
        else:
            self.traffic.count_all_reduce(call, layout.sizes)
        # A piece in GPU memory would be used for something else as soon as its rank lets it go.
        if out_is_shared or any(is_device_array(a) for a in flat):
            yield from self._exchange(call, None, result, phase=2)
        return out

    def _steps_reduce_scatter(
        self, call: Call, array: Array, counts: tuple[int, ...], out: Array
    ) -> Steps:
        left = yield from self._open(call, (array, self._places(array, out)), array)
        arrays = [a for a, _ in left]
        start = sum(counts[: self.rank])
        mine = slice(start, start + counts[self.rank])
        assert call.operation is not None
        xp = array_namespace(array)
        # Of this rank's array the others read all but its own piece.
        overlaps = xp.may_share_memory(array, out) and address(array[mine]) != address(out)
        piece = xp.empty(out.size, out.dtype) if overlaps else out
        near = [beside(a[mine].reshape(-1), array) for a in arrays]
        self._reducer.reduce(near, call.operation, piece.reshape(-1))
        yield from self._exchange(call, None, piece)
        if piece is not out:
            out[...] = piece.reshape(out.shape)
        if self.topology.arrays_are_shared([where for _, where in left]):
            row = math.prod(array.shape[1:])
            self.traffic.count_shared_reduce([count * row for count in counts], array.dtype)
        else:
            self.traffic.count_reduce_scatter(call, counts)
        return out

    def _steps_all_gather(self, call: Call, array: Array, out: Array | None) -> Steps:
        left = yield from self._open(call, (array, self._places(array, out)), array)
        arrays = [a for a, _ in left]
        lengths = [a.shape[0] for a in arrays]
        out_is_shared = self.topology.results_are_shared([where for _, where in left])
        nodes = self.topology
        if out is None:
            out = array_namespace(array).empty((sum(lengths), *array.shape[1:]), array.dtype)
        start = sum(lengths[: self.rank])
        askew = _overlap_askew(array, out, out[start : start + array.shape[0]])
        # Peers read this rank's array until the next meeting: a result on top of it waits so long.
        target = array_namespace(array).empty(out.shape, out.dtype) if askew else out
        start = 0
        for rank, other in enumerate(arrays):
            part = target[start : start + other.shape[0]]
            start += other.shape[0]
            if out_is_shared and nodes.agent(rank) != self.rank:
                continue  # another rank of this node writes it
            if other is not array or address(part) != address(array):
                copy_into(part, other)
        yield from self._exchange(call, None, target)
        if askew:
            out[...] = target
        if out_is_shared:
            row = math.prod(array.shape[1:])
            self.traffic.count_shared_gather([length * row for length in lengths], array.dtype)
        else:
            self.traffic.count_all_gather(array)
        return out

    def _steps_broadcast(self, call: Call, array: Array | None, root: int) -> Steps:
        arrays = yield from self._open(call, array, *([] if array is None else [array]))
        sent = arrays[root]
        if self.rank != root:
            if array is None:
                array = array_namespace(sent).empty(sent.shape, sent.dtype)
            copy_into(array, sent)
        assert array is not None
        yield from self._exchange(call, None, array)
        self.traffic.count_broadcast(array, root)
        return array

    def _steps_scatter(
        self, call: Call, array: Array | None, counts: tuple[int, ...] | None, root: int
    ) -> Steps:
        given = [array] if self.rank == root and array is not None else []
        values = yield from self._open(call, (array, counts) if self.rank == root else None, *given)
        sent, pieces = values[root]
        start = sum(pieces[: self.rank])
        piece = sent[start : start + pieces[self.rank]].copy()
        yield from self._exchange(call, None, piece)
        self.traffic.count_scatter(sent if self.rank == root else None, piece)
        return piece

    def _steps_gather(self, call: Call, array: Array, root: int) -> Steps:
        arrays = yield from self._open(call, array, array)
        result = None
        if self.rank == root:
            near = [beside(a, array) for a in arrays]
            result = array_namespace(array).concatenate(near, axis=0)
        yield from self._exchange(call, None, array)
        self.traffic.count_gather(array, root)
        return result

    def _steps_all_to_all(self, call: Call, parts: Sequence[Array]) -> Steps:
        values = yield from self._open(call, parts, *parts)
        received = [sent[self.rank].copy() for sent in values]
        yield from self._exchange(call, None, *received)
        self.traffic.count_all_to_all(parts)
        return received

    def _steps_allocate_shared(self, call: Call, nbytes: int) -> Steps:
        yield from self._open(call, None)
        first = self.peers[0]
        makes = self.rank == first and settings.arena_sources()
        given = yield from self._exchange(call, anonymous_memory(nbytes) if makes else None)
        return given[first]

    # ------------------------------------------------------------------------------- messages

    def _send(self, array: Array, destination: int, tag: int) -> None:
        message = array.copy()
        synchronize(message)
        self._post(Letter(message, is_copy=True), destination, tag)

    def _steps_send(self, array: Array, destination: int, tag: int) -> Steps:
        synchronize(array)
        letter = Letter(array, is_copy=False)
        self._post(letter, destination, tag)
        yield Taken(letter, destination)

    def _post(self, letter: Letter, destination: int, tag: int) -> None:
        world = self._joined()
        with world.changed:
            queue = world.letters.setdefault((self.rank, destination, tag), deque())
            queue.append(letter)
            world.changed.notify_all()

    def _steps_receive(
        self, source: int, count: int, tag: int, dtype: np.dtype[Any] | None
    ) -> Steps:
        world = self._joined()
        key = (source, self.rank, tag)
        # Who receives first takes first, whoever waits first.
        with Delivery(world.letters, key, self._lines) as delivery:
            yield delivery
            with world.changed:
                letter = world.letters[key][0]
                refuse_other_message(
                    letter.array.size, letter.array.dtype, count, dtype,
                    world.global_ranks[source], tag,
                )  # fmt: skip
                world.letters[key].popleft()
                if not world.letters[key]:
                    del world.letters[key]
        message = letter.open()
        if not letter.is_copy:
            with world.changed:  # the sender may wait for it
                letter.is_taken = True
                world.changed.notify_all()
        return message


def _finish(arrays: Sequence[Array]) -> None:
    """Wait for what a GPU still does to or with them, before other ranks touch them."""
    for array in arrays:
        synchronize(array)


def _overlap_askew(array: Array, out: Array, part: Array) -> bool:
    """Whether ``array`` lies in ``out``, and not just where its ``part`` of it is."""
    overlap = bool(array_namespace(out).may_share_memory(array, out))
    return overlap and address(array) != address(part)
