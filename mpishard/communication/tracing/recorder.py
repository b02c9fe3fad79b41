"""What one rank does and when: spans of computation, collectives under way, waiting.

Nothing is recorded unless it is asked for (`mpishard.observe.trace`, or ``MPISHARD_TRACE``): then
the rank's `Recorder` stands in a context variable, which thread-ranks have one each of.
"""

from __future__ import annotations

import heapq
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from enum import IntEnum
from typing import Any

from mpishard.arrays import Array
from mpishard.communication.contract.call import Call
from mpishard.communication.tracing.file import TraceFile

__all__ = [
    "CollectiveInFlight",
    "InFlight",
    "MessageInFlight",
    "Recorder",
    "Row",
    "Span",
    "current_recorder",
]

_FLUSH_SECONDS = 1.0
_FLUSH_EVENTS = 1024
_BUFFERED_EVENTS = 16384


class Row(IntEnum):
    """The rows of a rank on the time line: their ``tid``, which also orders them."""

    STEP = 1
    COMPUTE = 2
    WAIT = 3
    COMMUNICATION = 4  # and further ones, where more than one is under way

    @property
    def label(self) -> str:
        """The category of what stands in the row."""
        return self.name.lower()


class Recorder:
    """The events of one rank. It belongs to the rank's thread; `finish` may come from another.

    Events are written to the rank's file between steps, about once a second, so that a rank that
    is killed leaves what it had, and memory is bounded.

    Parameters
    ----------
    file : TraceFile
        Where they go.
    maximum_events : int
        Events beyond these are counted and not kept.
    now : callable
        The clock, in nanoseconds. Processes of one machine share it.
    """

    def __init__(
        self,
        file: TraceFile,
        maximum_events: int,
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.now = now
        self._file = file
        self._maximum = maximum_events
        self._kept = self._dropped = 0
        self._buffer: list[tuple[int, str, str, int, int, Any]] = []
        self._lanes: list[int] = []
        self._lane_count = 0
        self._messages: Counter[object] = Counter()
        self._flushed = now()
        self._lock = threading.Lock()  # of the file: the end may come from another thread
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether events are still taken."""
        return not self._is_closed

    @property
    def file(self) -> TraceFile:
        """Where the events go."""
        return self._file

    def add(
        self, tid: int, name: str, start: int, end: int, arguments: Any = None, category: str = ""
    ) -> None:
        """Take one event, a span of time in row ``tid``; its arguments may be an `InFlight`."""
        if self._kept == self._maximum or self._is_closed:
            self._dropped += 1
            return
        self._kept += 1
        category = category or Row(min(tid, Row.COMMUNICATION)).label
        self._buffer.append((tid, name, category, start, end, arguments))
        if len(self._buffer) >= _BUFFERED_EVENTS:
            self.flush()

    def step_ended(self) -> None:
        """Write what has gathered, if it is much or old: nobody computes just now."""
        due = self.now() - self._flushed > _FLUSH_SECONDS * 1e9
        if self._buffer and (due or len(self._buffer) >= _FLUSH_EVENTS):
            self.flush()

    def flush(self) -> None:
        """Write what has gathered."""
        start = self.now()
        with self._lock:
            self._write()
            self._file.flush()
        self._flushed = self.now()
        self.add(Row.COMPUTE, "write the trace", start, self._flushed, category="trace")

    def finish(self, reason: str = "finished") -> None:
        """Write the rest and how it ended; from then on nothing is taken. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._write()
                self._is_closed = True
                self._file.close(reason=reason, events=self._kept, dropped=self._dropped)

    def disown(self) -> None:
        """Write nothing more: the file is another process's."""
        self._is_closed = True
        self._buffer.clear()

    def _write(self) -> None:
        if self._is_closed:
            return
        buffer, self._buffer = self._buffer, []
        for tid, name, category, start, end, given in buffer:
            arguments = given.describe() if isinstance(given, InFlight) else given
            self._file.write(tid, name, category, start, end, arguments)

    # ------------------------------------------------------------------------- communication

    def take_lane(self) -> int:
        """A row for something under way, in which nothing else is."""
        if self._lanes:
            return heapq.heappop(self._lanes)
        self._lane_count += 1
        return Row.COMMUNICATION + self._lane_count - 1

    def give_lane(self, tid: int) -> None:
        """Return a row."""
        heapq.heappush(self._lanes, tid)

    def count_message(self, key: object) -> int:
        """How many messages of ``key`` there were before: sender and receiver count alike."""
        self._messages[key] += 1
        return self._messages[key] - 1


class InFlight(ABC):
    """What was issued, from then to when this rank knows that it is done."""

    __slots__ = ("_error", "_name", "_recorder", "_tid", "start")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._error = ""
        self._tid = recorder.take_lane()
        self.start = recorder.now()

    def done(self, error: BaseException | None = None, result: Any = None) -> None:
        """It is complete, or has failed."""
        recorder = self._recorder
        self._error = "" if error is None else type(error).__name__
        recorder.add(self._tid, self._name, self.start, recorder.now(), self)
        recorder.give_lane(self._tid)

    def now(self) -> int:
        """The time."""
        return self._recorder.now()

    def blocked(self, since: int) -> None:
        """The rank's thread has been in it since then, and goes on now."""
        recorder = self._recorder
        recorder.add(Row.WAIT, self._name, since, recorder.now(), self)

    def describe(self) -> dict[str, Any]:
        """The arguments of its events."""
        arguments = self._describe()
        if self._error:
            arguments["error"] = self._error
        return arguments

    @abstractmethod
    def _describe(self) -> dict[str, Any]: ...


class CollectiveInFlight(InFlight):
    """A collective. The same one has the same group and sequence number on every rank."""

    __slots__ = ("_axis", "_call", "_group")

    def __init__(self, recorder: Recorder, call: Call, group: str, axis: str) -> None:
        super().__init__(recorder, call.kind.label)
        self._call = call
        self._group = group
        self._axis = axis

    def _describe(self) -> dict[str, Any]:
        call = self._call
        arguments = {"bytes": call.nbytes, "group": self._group, "sequence": call.sequence}
        if self._axis:
            arguments["axis"] = self._axis
        if call.filename:
            arguments["site"] = f"{call.filename.rpartition('/')[2]}:{call.line}"
        return arguments


class MessageInFlight(InFlight):
    """A message, sent where there is an array. Both sides number those of one way alike."""

    __slots__ = ("_nbytes", "_number", "_way")

    def __init__(self, recorder: Recorder, way: Mapping[str, Any], sent: Array | None) -> None:
        super().__init__(recorder, "receive" if sent is None else "send")
        self._way = way
        self._nbytes: int | None = None
        self._number = -1
        if sent is not None:
            self._count(sent)

    def _count(self, array: Array) -> None:
        self._nbytes = array.nbytes
        self._number = self._recorder.count_message((self._name, *self._way.values()))

    def done(self, error: BaseException | None = None, result: Any = None) -> None:
        # A receive that failed has taken no message; those that do take them in order.
        if self._name == "receive" and error is None:
            self._count(result)
        super().done(error)

    def _describe(self) -> dict[str, Any]:
        arguments = dict(self._way)
        if self._nbytes is not None:
            arguments |= {"bytes": self._nbytes, "number": self._number}
        return arguments


class Span:
    """A span of time of the rank's thread; a context manager."""

    __slots__ = ("_arguments", "_name", "_recorder", "_row", "_start")

    def __init__(
        self, recorder: Recorder, row: Row, name: str, arguments: Mapping[str, Any]
    ) -> None:
        self._recorder = recorder
        self._row = row
        self._name = name
        self._arguments = arguments

    def __enter__(self) -> None:
        self._start = self._recorder.now()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        recorder = self._recorder
        arguments = self._arguments if kind is None else {**self._arguments, "error": kind.__name__}
        recorder.add(self._row, self._name, self._start, recorder.now(), arguments)
        if self._row is Row.STEP:
            recorder.step_ended()


current_recorder: ContextVar[Recorder | None] = ContextVar("current_recorder", default=None)
"""The recorder of the rank that asks; None where nothing is recorded."""
