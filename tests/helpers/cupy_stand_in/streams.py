"""Streams and events of the stand-in, for NCCL: their work is done late, on a thread of its own.

Arrays for which NCCL may still be at work may not be used.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from cupy_stand_in.cuda import Memory, current

__all__ = ["LIMIT_SECONDS", "Event", "Stream", "begun", "streams"]

LIMIT_SECONDS = 60.0
"""Longest wait for another rank, where NCCL would hang."""

begun: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Number of kernels and copies that were begun on each thread's own stream."""
streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
"""The streams, by their address."""
_numbers = itertools.count(0x1000)


class Stream:
    """``cupy.cuda.Stream``, on which only NCCL works."""

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        if not non_blocking:
            raise AssertionError("a stream that is not non_blocking waits for the null stream")
        self.ptr = next(_numbers)
        self.device = current.device
        self.seen: dict[Any, int] = {}
        """How much of each thread's work was begun before the event for which it waits."""
        self.pending: list[tuple[int, int, bool, int]] = []
        """Ranges of addresses in use: start, stop, whether they are written, number of the work."""
        self.put = 0
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        streams[self.ptr] = self

    def wait_event(self, event: Event) -> None:
        """Let later work wait for ``event``, of a thread's own stream."""
        self.seen[event.stream] = max(self.seen.get(event.stream, 0), event.number)

    def add(self, work: Callable[[], None]) -> int:
        """Put work on the stream; return its number."""
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._work,), daemon=True)
            self._thread.start()
        self._work.put(work)
        self.put += 1
        return self.put

    def is_done_up_to(self, number: int) -> None:
        """Note that the caller knows it."""
        self.pending = [entry for entry in self.pending if entry[3] > number]

    def synchronize(self) -> None:
        """Wait until all work is done."""
        event = Event()
        event.record(self)
        event.synchronize()


def _run(work: queue.SimpleQueue[Callable[[], None]]) -> None:
    while True:
        work.get()()


class Event:
    """``cupy.cuda.Event``."""

    def __init__(
        self, block: bool = False, disable_timing: bool = False, interprocess: bool = False
    ) -> None:
        self.stream: Any = None
        self.number = 0
        self._happened = threading.Event()

    def record(self, stream: Any = None) -> None:
        """Let it happen after the work that was put on ``stream`` so far."""
        self.stream = current.stream if stream is None else stream
        if isinstance(self.stream, Stream):
            self.number = self.stream.add(self._happened.set)
        else:
            self.number = begun.get(self.stream, 0)
            self._happened.set()

    @property
    def done(self) -> bool:
        """Whether it has happened."""
        happened = self._happened.is_set()
        if happened and isinstance(self.stream, Stream):
            self.stream.is_done_up_to(self.number)
        return happened

    def synchronize(self) -> None:
        """Wait until it has happened."""
        assert self._happened.wait(LIMIT_SECONDS), "the event never happens"
        assert self.done


_begin = Memory._begin


def _begin_beside_nccl(memory: Memory, host: np.ndarray[Any, Any], *, writes: bool) -> None:
    _begin(memory, host, writes=writes)
    begun[current.stream] = begun.get(current.stream, 0) + 1
    low, high = byte_bounds(host)
    for stream in tuple(streams.values()):
        for start, stop, nccl_writes, _ in stream.pending:
            if host.size and start < high and low < stop and (writes or nccl_writes):
                raise AssertionError(
                    f"a race: NCCL may still {'write' if nccl_writes else 'read'} this array: no "
                    "event that was recorded after its work has been seen"
                )


Memory._begin = _begin_beside_nccl  # type: ignore[method-assign]
