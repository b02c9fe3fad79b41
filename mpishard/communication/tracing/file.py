"""The trace of one rank on disk: Chrome's JSON Object Format, one event per line.

The first line holds the facts known at the start, the last line the reason of the end. A file
without a last line is that of a rank that was killed: its complete lines can be read.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

__all__ = [
    "TRACE_FORMAT", "TRACE_VERSION", "TraceFile", "encode", "first_line", "last_line", "rank_file",
]  # fmt: skip

TRACE_FORMAT = "mpishard trace"
TRACE_VERSION = 1

encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps makes an encoder each time
"""Return a value as JSON, on one line."""

_ROW_NAMES = {1: "step", 2: "compute", 3: "wait", 4: "communication"}


def rank_file(folder: Path, rank: int) -> Path:
    """The file of the trace of ``rank``."""
    return folder / f"rank_{rank}.json"


def first_line(about: Mapping[str, Any]) -> str:
    """The line that opens a trace, with the facts ``about`` it."""
    text = encode({"displayTimeUnit": "ms", "otherData": about})
    return f'{text[:-1]},"traceEvents":[\n'


def last_line(end: Mapping[str, Any]) -> str:
    """The line that closes a trace, with its ``end``: reason, number of events."""
    return f'],"end":{encode(end)}}}\n'


class TraceFile:
    """The trace of a rank, open for writing. Its file appears with the first lines in it.

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

    def __init__(self, path: Path, about: Mapping[str, Any], origin: int) -> None:
        self.path = path
        self._pid = about["rank"]
        self._origin = origin
        self._named: set[int] = set()
        temporary = path.with_name(f".{path.name}.tmp")
        self._stream: TextIO = temporary.open("w", encoding="utf-8")
        try:
            self._stream.write(first_line(about))
            name = f"rank {about['rank']} (node{about['node']})"
            self._metadata("process_name", {"name": name}, comma="")
            self._metadata("process_sort_index", {"sort_index": about["rank"]})
            self._stream.flush()
            temporary.replace(path)
        except BaseException:
            self._stream.close()
            raise

    def write(
        self, tid: int, name: str, category: str, start: int, end: int,
        arguments: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        """Append a span in row ``tid``, from ``start`` to ``end`` in nanoseconds."""
        if tid not in self._named:
            self._named.add(tid)
            label = _ROW_NAMES.get(tid) or f"communication {tid - 3}"
            self._metadata("thread_name", {"name": label}, tid=tid)
            self._metadata("thread_sort_index", {"sort_index": tid}, tid=tid)
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

    def flush(self) -> None:
        """Give the written events to the system, so that they outlive this process."""
        self._stream.flush()

    def _metadata(
        self, kind: str, arguments: Mapping[str, Any], *, tid: int = 0, comma: str = ","
    ) -> None:
        event = {"name": kind, "ph": "M", "pid": self._pid, "tid": tid, "args": arguments}
        self._stream.write(f"{comma}{encode(event)}\n")
