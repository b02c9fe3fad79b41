"""Record the activity of one rank: spans of computation, collectives in flight, waiting.

Nothing is recorded unless `mpishard.observe.trace` or ``MPISHARD_TRACE`` asks for it. Then a
context variable holds the `Recorder` of the rank; each thread-rank has its own.

The trace on disk is in Chrome's JSON Object Format, one event per line. The first line holds the
facts known at the start, the last line the reason of the end. If a rank was killed, its file has no
last line; the complete lines can be read.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import logging
import platform
import secrets
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from pathlib import Path
from typing import Protocol, TextIO

import numpy as np

from mpishard.base import Array, settings

_log = logging.getLogger("mpishard")

# Events are written at the end of a step, if a second or these events have passed since the last
# write. A rank without steps writes when its buffer is full.
_FLUSH_NANOSECONDS = 1_000_000_000
_FLUSH_EVENTS = 1024
_BUFFERED_EVENTS = 16384
_ROUNDS = 16  # questions of a rank to rank 0 for its clock
_TAG = settings.MAXIMUM_TAG  # the tag that a script is least likely to use

TRACE_FORMAT = "mpishard trace"
TRACE_VERSION = 1

encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one in each call
"""Return a value as JSON, on one line."""


def rank_file(folder: Path, rank: int) -> Path:
    """Return the path of the trace of ``rank``."""
    return folder / f"rank_{rank}.json"


def first_line(about: Mapping[str, object]) -> str:
    """Return the line that opens a trace, with its format and the facts ``about`` it."""
    about = {"format": TRACE_FORMAT, "version": TRACE_VERSION, **about}
    text = encode({"displayTimeUnit": "ms", "otherData": about})
    return f'{text[:-1]},"traceEvents":[\n'


def last_line(end: Mapping[str, object]) -> str:
    """Return the line that closes a trace, with its ``end``: reason, numbers of events."""
    return f'],"end":{encode(end)}}}\n'


class Row(IntEnum):
    """A row of a rank on the time line. Its number is the ``tid``, by which rows are ordered."""

    STEP = 1
    COMPUTE = 2
    WAIT = 3
    COMMUNICATION = 4  # and further rows, if more than one call is in flight


class TraceFile:
    """The trace of a rank, open for writing. The file has its first lines when it appears.

    Parameters
    ----------
    path : Path
        The file; an earlier file there is replaced.
    about : mapping
        Content of the first line: rank, node, world size, clock.
    origin : int
        The time, in nanoseconds, from which events are counted.

    Raises
    ------
    OSError
        If the file cannot be written.
    """

    def __init__(self, path: Path, about: Mapping[str, object], origin: int) -> None:
        self.path = path
        self._pid = about["rank"]
        self._origin = origin
        self._named: set[int] = set()
        # Renamed when it has its first lines, so that a reader never finds an empty trace.
        temporary = path.with_name(f".{path.name}.tmp")
        self._stream: TextIO = temporary.open("w", encoding="utf-8")
        try:
            name = f"rank {self._pid} (node{about['node']})"
            self._stream.write(first_line(about) + self._name("process", name, self._pid))
            self._stream.flush()
            temporary.replace(path)
        except OSError as error:
            self.abandon()
            temporary.unlink(missing_ok=True)
            error.filename = error.filename or str(path)
            raise

    def write(
        self,
        tid: int,
        name: str,
        category: str,
        start: int,
        end: int,
        arguments: Mapping[str, object] | None,
    ) -> None:
        """Append a span in row ``tid``, from ``start`` to ``end`` in nanoseconds."""
        if tid not in self._named:
            self._named.add(tid)
            label = f"communication {tid - 3}" if tid > Row.COMMUNICATION else Row(tid).name.lower()
            self._stream.write("," + self._name("thread", label, tid, tid))
        # Decimals of whole nanoseconds keep adjacent spans from overlapping by a rounding error.
        # Formatting the line by hand takes a third of the encoder's time.
        given = f',"args":{encode(arguments)}' if arguments else ""
        self._stream.write(
            f',{{"name":{encode(name)},"cat":"{category}","ph":"X","pid":{self._pid},"tid":{tid},'
            f'"ts":{(start - self._origin) / 1000},"dur":{(end - start) / 1000}{given}}}\n'
        )

    def close(self, *, reason: str, events: int, dropped: int) -> None:
        """Write the last line."""
        self._stream.write(last_line({"reason": reason, "events": events, "dropped": dropped}))
        self._stream.close()

    def abandon(self) -> None:
        """Close the file as it is, without a last line."""
        with suppress(OSError):  # a full disk has no room for the rest of the buffer
            self._stream.close()

    def flush(self) -> None:
        """Pass the written events to the system, so that they outlive this process."""
        self._stream.flush()

    def _name(self, what: str, name: str, place: object, tid: int = 0) -> str:
        """Return lines that name a process or a thread (``what``) and give its ``place`` in order.

        ``tid`` is the row, or 0 for a process.
        """
        about = {"name": {"name": name}, "sort_index": {"sort_index": place}}
        event = {"ph": "M", "pid": self._pid, "tid": tid}
        lines = [encode({"name": f"{what}_{k}", **event, "args": a}) for k, a in about.items()]
        return "\n,".join(lines) + "\n"


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
    """

    def __init__(self, file: TraceFile, maximum_events: int) -> None:
        self.now = time.perf_counter_ns
        """The clock, in nanoseconds. Processes of one machine share it."""
        self.file = file
        self.is_open = True
        """Whether events are still accepted."""
        self.lanes: set[int] = set()
        """The rows that calls in flight have taken."""
        self.messages: Counter[object] = Counter()
        """Messages so far, by name, group, source, destination and tag: both ends count alike."""
        self._maximum = maximum_events
        self._kept = self._dropped = 0
        self._buffer: list[tuple[int, str, str, int, int, Mapping[str, object] | None]] = []
        self._flushed = self.now()
        self._lock = threading.Lock()  # guards the file: another thread may call `finish`

    def add(
        self,
        tid: int,
        name: str,
        start: int,
        end: int,
        arguments: Mapping[str, object] | None = None,
        category: str = "",
    ) -> None:
        """Keep one event, a span of time in row ``tid``.

        ``arguments`` may still change until the event is written.
        """
        # The first events are kept and not the last, because a file cannot forget its beginning.
        if self._kept == self._maximum or not self.is_open:
            self._dropped += 1
            return
        self._kept += 1
        category = category or Row(min(tid, Row.COMMUNICATION)).name.lower()
        self._buffer.append((tid, name, category, start, end, arguments))
        if len(self._buffer) >= _BUFFERED_EVENTS:
            self.flush()

    @contextmanager
    def span(self, row: Row, name: str, arguments: Mapping[str, object]) -> Iterator[None]:
        """Context whose time is recorded as an event in ``row``."""
        start = self.now()
        try:
            yield
        except BaseException as error:
            arguments = {**arguments, "error": type(error).__name__}
            raise
        finally:
            self.add(row, name, start, self.now(), arguments)
            # Written between steps, when the rank computes nothing that a write would delay.
            is_due = self.now() - self._flushed > _FLUSH_NANOSECONDS
            if row is Row.STEP and (is_due or len(self._buffer) >= _FLUSH_EVENTS):
                self.flush()

    def flush(self) -> None:
        """Write the events so far; do nothing after `finish`, which may come during a step."""
        start = self.now()
        with self._lock:
            if not self.is_open:
                return
            self._write(self.file.flush)
        self._flushed = self.now()
        self.add(Row.COMPUTE, "write the trace", start, self._flushed, category="trace")

    def finish(self, reason: str = "finished") -> None:
        """Write the last events and the ``reason`` of the end; later events are dropped."""
        with self._lock:
            if self.is_open:
                counts = {"events": self._kept, "dropped": self._dropped}
                self._write(lambda: self.file.close(reason=reason, **counts))
                self.is_open = False

    def disown(self) -> None:
        """Write nothing more, because the file belongs to the process that forked this one."""
        self.is_open = False
        self._buffer.clear()

    def _write(self, then: Callable[[], None]) -> None:
        """Write the events so far, and call ``then``; a full disk ends the trace, not the run."""
        buffer, self._buffer = self._buffer, []
        try:
            for event in buffer:
                self.file.write(*event)
            then()
        except OSError as error:
            self.is_open = False
            self.file.abandon()
            _log.warning("the trace %s is cut off: %s. Training goes on", self.file.path, error)


class InFlight:
    """A collective or a message, from its issue to its completion on this rank.

    Parameters
    ----------
    recorder : Recorder
        The recorder of this rank.
    name : str
        The collective, ``send`` or ``receive``.
    arguments : dict
        Facts shown with it. Those of a message name its group, source, destination and tag.
    sent : Array, optional
        The message, if it is sent.
    """

    __slots__ = ("_arguments", "_name", "_recorder", "_tid", "start")

    def __init__(
        self, recorder: Recorder, name: str, arguments: dict[str, object], sent: Array | None = None
    ) -> None:
        self._recorder = recorder
        self._name = name
        self._arguments = arguments
        self._tid = next(row for row in count(Row.COMMUNICATION) if row not in recorder.lanes)
        # A row of its own for each call in flight: spans that overlap in one row cannot be drawn.
        recorder.lanes.add(self._tid)
        self.start = recorder.now()
        if sent is not None:
            self._number(sent)

    def done(self, error: BaseException | None = None, result: Array | None = None) -> None:
        """Record that the operation is complete or, with an ``error``, has failed."""
        recorder = self._recorder
        if error is not None:
            self._arguments["error"] = type(error).__name__
        # A failed receive has taken no message, and counts none.
        elif self._name == "receive" and result is not None:
            self._number(result)
        recorder.add(self._tid, self._name, self.start, recorder.now(), self._arguments)
        recorder.lanes.remove(self._tid)

    def now(self) -> int:
        """Return the time in nanoseconds."""
        return self._recorder.now()

    def blocked(self, since: int) -> None:
        """Record that the rank's thread waited for it from ``since`` until now."""
        self._recorder.add(Row.WAIT, self._name, since, self.now(), self._arguments)

    def _number(self, message: Array) -> None:
        """Number ``message`` among those of its key: receives take messages in order of sends."""
        messages, key = self._recorder.messages, (self._name, *self._arguments.values())
        self._arguments |= {"bytes": message.nbytes, "number": messages[key]}
        messages[key] += 1


current_recorder: ContextVar[Recorder | None] = ContextVar("current_recorder", default=None)
"""The recorder of the calling rank; None if nothing is recorded."""


# ----------------------------------------------------------------------------------- start and stop


class Recorded(Protocol):
    """A backend, as far as recording needs it."""

    recorder: Recorder | None

    @property
    def rank(self) -> int: ...
    @property
    def nodes(self) -> tuple[int, ...]: ...
    def receive(self, source_rank: int, count: int, tag: int = 0) -> Array: ...
    def _send(self, array: Array, destination: int, tag: int) -> None: ...
    def _ready(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a rank compared with that of rank 0, and the name of the job.

    Parameters
    ----------
    job : str
        The same on all ranks of one recording, and in no other.
    offset, uncertainty : int
        Nanoseconds to add to this rank's time to get rank 0's, and the largest error of the sum.
    """

    job: str
    offset: int
    uncertainty: int


def compare_clocks(backend: Recorded, now: Callable[[], int] = time.perf_counter_ns) -> Clock:
    """Measure the difference between this rank's clock and rank 0's. Collective.

    Ranks on the node of rank 0 read the same clock. The others ask rank 0 for the time several
    times, and use the answer with the shortest round trip. Rank 0 has read its clock between
    question and answer, so half of the round trip is the largest error (Cristian, "Probabilistic
    clock synchronization", Distributed Computing 3, 1989). Later drift of the clocks is not seen.
    """
    nodes, rank = backend.nodes, backend.rank
    rounds = [1 if node == nodes[0] else _ROUNDS for node in nodes]
    if rank == 0:
        job = secrets.randbits(62)
        for peer in range(1, len(nodes)):
            for _ in range(rounds[peer]):
                backend.receive(peer, 1, _TAG)
                backend._send(np.array([now(), job]), peer, _TAG)
        return Clock(f"{job:x}", 0, 0)
    half, offset = sys.maxsize, 0
    for _ in range(rounds[rank]):
        asked = now()
        backend._send(np.zeros(1, np.int64), 0, _TAG)
        there, job = (int(value) for value in backend.receive(0, 2, _TAG))
        took = (now() - asked + 1) // 2
        if took < half:
            half, offset = took, there - (asked + took)
    return Clock(f"{job:x}", *((0, 0) if nodes[rank] == nodes[0] else (offset, half + 1)))


def start_recording(backend: Recorded, folder: Path, maximum_events: int) -> Recorder:
    """Record the activity of this rank from now on, in ``folder``. Collective.

    Raises
    ------
    RuntimeError
        If this rank already records a trace.
    NotInitializedError
        If the backend is not initialised.
    OSError
        If the file cannot be written.
    """
    present = current_recorder.get()
    if present is not None and present.is_open:
        raise RuntimeError(
            f"rank {backend.rank} records a trace already, to {present.file.path}; end that one "
            "first (MPISHARD_TRACE records the whole run)"
        )
    backend._ready()
    rank, nodes = backend.rank, backend.nodes
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        # Removes the files of ranks that only an earlier, larger world had; others are replaced.
        for path in folder.glob("rank_*.json"):
            number = path.stem.removeprefix("rank_")
            if number.isdecimal() and int(number) >= len(nodes):
                path.unlink()
    # Rank 0 answers after it has removed old files, so no other rank's new file is removed.
    clock = compare_clocks(backend)
    origin = time.perf_counter_ns()
    about = {
        "job": clock.job, "rank": rank, "world_size": len(nodes), "node": nodes[rank],
        "host": platform.node(), "origin_us": origin / 1000, "clock_offset_us": clock.offset / 1000,
        "clock_uncertainty_us": clock.uncertainty / 1000,
    }  # fmt: skip
    recorder = Recorder(TraceFile(rank_file(folder, rank), about, origin), maximum_events)
    backend.recorder = recorder
    current_recorder.set(recorder)

    def finish_at_exit() -> None:
        # The interpreter has stored the exception that ends the script in ``sys``.
        recorder.finish(_reason(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)))

    # At exit or when the backend is dropped, so that a script need not end its trace.
    weakref.finalize(backend, finish_at_exit)
    return recorder


def stop_recording(backend: Recorded, error: BaseException | None = None) -> None:
    """Finish the trace of ``backend``, if there is one; ``error`` is the reason of an early end."""
    recorder, backend.recorder = backend.recorder, None
    if recorder is not None:
        recorder.finish(_reason(error))
        if current_recorder.get() is recorder:
            current_recorder.set(None)


def record_if_asked(backend: Recorded) -> None:
    """Record the run of this rank if ``MPISHARD_TRACE`` is set. Collective."""
    folder = settings.trace_folder()
    if folder is not None and current_recorder.get() is None:
        start_recording(backend, folder, settings.TRACE_EVENTS)


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
