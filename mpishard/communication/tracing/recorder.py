"""Record the activity of one rank: spans of computation, collectives in flight, waiting.

Nothing is recorded unless it is asked for, by `mpishard.observe.trace` or ``MPISHARD_TRACE``. Then
a context variable holds the `Recorder` of the rank; each thread-rank has its own.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum
from typing import Any, Protocol

from mpishard.arrays import Array
from mpishard.communication.tracing.file import TraceFile

__all__ = [
    "CollectiveInFlight", "InFlight", "MessageInFlight", "Recorder", "Row", "current_recorder",
]  # fmt: skip

_FLUSH_NANOSECONDS = 1_000_000_000
_FLUSH_EVENTS = 1024
_BUFFERED_EVENTS = 16384


class Row(IntEnum):
    """The rows of a rank on the time line. Their number is the ``tid``, which orders them."""

    STEP = 1
    COMPUTE = 2
    WAIT = 3
    COMMUNICATION = 4  # and further rows, if more than one call is in flight


class Recorder:
    """The events of one rank. It belongs to the rank's thread; another may call `finish`.

    Events are written to the rank's file between steps, about once a second. So memory is bounded,
    and a rank that is killed leaves its events.

    Parameters
    ----------
    file : TraceFile
        The file of the rank.
    maximum_events : int
        Number of events to keep; further ones are counted only.
    now : callable
        The clock, in nanoseconds. Processes of one machine share it.
    """

    def __init__(
        self, file: TraceFile, maximum_events: int, now: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.now = now
        self.file = file
        self.is_open = True
        """Whether events are still accepted."""
        self.lanes: list[int] = []
        """Rows for calls in flight that are free, as a heap."""
        self.lane_count = 0
        self.messages: Counter[object] = Counter()
        """Messages so far, by group, source, destination and tag: both sides count alike."""
        self._maximum = maximum_events
        self._kept = self._dropped = 0
        self._buffer: list[tuple[int, str, str, int, int, Mapping[str, Any] | None]] = []
        self._flushed = now()
        self._lock = threading.Lock()  # for the file: `finish` may come from another thread

    def add(
        self, tid: int, name: str, start: int, end: int,
        arguments: Mapping[str, Any] | None = None, category: str = "",
    ) -> None:  # fmt: skip
        """Keep one event, a span of time in row ``tid``.

        ``arguments`` may still change until the event is written.
        """
        if self._kept == self._maximum or not self.is_open:
            self._dropped += 1
            return
        self._kept += 1
        category = category or Row(min(tid, Row.COMMUNICATION)).name.lower()
        self._buffer.append((tid, name, category, start, end, arguments))
        if len(self._buffer) >= _BUFFERED_EVENTS:
            self.flush()

    @contextmanager
    def span(self, row: Row, name: str, arguments: Mapping[str, Any]) -> Iterator[None]:
        """A context whose time is an event in ``row``."""
        start = self.now()
        try:
            yield
        except BaseException as error:
            arguments = {**arguments, "error": type(error).__name__}
            raise
        finally:
            self.add(row, name, start, self.now(), arguments)
            # The rank computes nothing between steps: a good time to write.
            is_due = self.now() - self._flushed > _FLUSH_NANOSECONDS
            if row is Row.STEP and (is_due or len(self._buffer) >= _FLUSH_EVENTS):
                self.flush()

    def flush(self) -> None:
        """Write the events so far."""
        start = self.now()
        with self._lock:
            self._write()
            self.file.flush()
        self._flushed = self.now()
        self.add(Row.COMPUTE, "write the trace", start, self._flushed, category="trace")

    def finish(self, reason: str = "finished") -> None:
        """Write the last events and the ``reason`` of the end; later events are dropped."""
        with self._lock:
            if self.is_open:
                self._write()
                self.is_open = False
                self.file.close(reason=reason, events=self._kept, dropped=self._dropped)

    def disown(self) -> None:
        """Write nothing more: the file belongs to the process that forked this one."""
        self.is_open = False
        self._buffer.clear()

    def _write(self) -> None:
        if self.is_open:
            buffer, self._buffer = self._buffer, []
            for event in buffer:
                self.file.write(*event)


class InFlight:
    """A collective or a message, from its issue to its completion on this rank."""

    __slots__ = ("_arguments", "_name", "_recorder", "_tid", "start")

    def __init__(self, recorder: Recorder, name: str, arguments: dict[str, Any]) -> None:
        self._recorder = recorder
        self._name = name
        self._arguments = arguments
        if not recorder.lanes:
            recorder.lanes.append(Row.COMMUNICATION + recorder.lane_count)
            recorder.lane_count += 1
        self._tid = heapq.heappop(recorder.lanes)
        self.start = recorder.now()

    def done(self, error: BaseException | None = None, result: Any = None) -> None:
        """Record that it is complete or has failed."""
        recorder = self._recorder
        if error is not None:
            self._arguments["error"] = type(error).__name__
        recorder.add(self._tid, self._name, self.start, recorder.now(), self._arguments)
        heapq.heappush(recorder.lanes, self._tid)

    def now(self) -> int:
        """The time in nanoseconds."""
        return self._recorder.now()

    def blocked(self, since: int) -> None:
        """Record that the rank's thread waited for it from ``since`` until now."""
        self._recorder.add(Row.WAIT, self._name, since, self.now(), self._arguments)


class RecordedCall(Protocol):
    """The part of a collective's call that a trace shows."""

    sequence: int
    filename: str
    line: int
    kind: Any  # with a label

    @property
    def nbytes(self) -> int: ...


class CollectiveInFlight(InFlight):
    """A collective. It has the same group and sequence number on every rank."""

    __slots__ = ()

    def __init__(self, recorder: Recorder, call: RecordedCall, group: str, axis: str) -> None:
        arguments = {"bytes": call.nbytes, "group": group, "sequence": call.sequence}
        if axis:
            arguments["axis"] = axis
        if call.filename:
            arguments["site"] = f"{call.filename.rpartition('/')[2]}:{call.line}"
        super().__init__(recorder, call.kind.label, arguments)


class MessageInFlight(InFlight):
    """A message: sent if an array is given, received otherwise. Both sides number them alike."""

    __slots__ = ()

    def __init__(self, recorder: Recorder, way: dict[str, Any], sent: Array | None) -> None:
        super().__init__(recorder, "receive" if sent is None else "send", way)
        if sent is not None:
            self._count(sent)

    def _count(self, array: Array) -> None:
        messages, key = self._recorder.messages, (self._name, *self._arguments.values())
        self._arguments |= {"bytes": array.nbytes, "number": messages[key]}
        messages[key] += 1

    def done(self, error: BaseException | None = None, result: Any = None) -> None:
        # A receive that failed has taken no message; receives that succeed take them in order.
        if self._name == "receive" and error is None:
            self._count(result)
        super().done(error)


current_recorder: ContextVar[Recorder | None] = ContextVar("current_recorder", default=None)
"""The recorder of the calling rank; None if nothing is recorded."""
