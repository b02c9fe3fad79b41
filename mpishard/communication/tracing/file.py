"""One rank's trace on disk: Chrome's JSON Object Format, an event per line.

The first line has what is known at the start, the last how it ended. A file without its last line
is that of a rank that was killed: what stands in whole lines can be read.
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

__all__ = [
    "TRACE_FORMAT",
    "TRACE_VERSION",
    "TraceFile",
    "encode",
    "first_line",
    "last_line",
    "rank_file",
]

TRACE_FORMAT = "mpishard trace"
TRACE_VERSION = 1

encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one each time
"""A value as JSON, on one line."""

_ROW_NAMES = {1: "step", 2: "compute", 3: "wait", 4: "communication"}


def rank_file(folder: Path, rank: int) -> Path:
    """Where the trace of ``rank`` stands."""
    return folder / f"rank_{rank}.json"


def first_line(about: Mapping[str, Any]) -> str:
    """The line that opens a trace, with what it is ``about``."""
    text = encode({"displayTimeUnit": "ms", "otherData": about})
    return f'{text[:-1]},"traceEvents":[\n'


def last_line(end: Mapping[str, Any]) -> str:
    """The line that closes a trace, with how it ended."""
    return f'],"end":{encode(end)}}}\n'


class TraceFile:
    """A rank's trace while it is written. It appears under its name with its first lines in it.

    Parameters
    ----------
    path : Path
        The file; one that is there is replaced.
    about : mapping
        What the first line tells: rank, node, world size, clock.
    origin : int
        The time, in nanoseconds, from which events are counted.

    Raises
    ------
    OSError
        Where the file cannot be written.
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
            self._metadata("process_name", {"name": name}, first=True)
            self._metadata("process_sort_index", {"sort_index": about["rank"]})
            self._stream.flush()
            temporary.replace(path)
        except BaseException:
            self._stream.close()
            raise

    def write(
        self,
        tid: int,
        name: str,
        category: str,
        start: int,
        end: int,
        arguments: Mapping[str, Any] | None,
    ) -> None:
        """Append a span in row ``tid``, from ``start`` to ``end`` in nanoseconds."""
        if tid not in self._named:
            self._named.add(tid)
            label = _ROW_NAMES.get(tid) or f"communication {tid - 3}"
            self._metadata("thread_name", {"name": label}, tid=tid)
            self._metadata("thread_sort_index", {"sort_index": tid}, tid=tid)
        # Whole nanoseconds as decimals: spans that touch do not overlap by a rounding error. The
        # line is put together by hand, in a third of the time that the encoder takes.
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
        """Hand what was written to the system, so that it outlives this process."""
        self._stream.flush()

    def _metadata(
        self, kind: str, arguments: Mapping[str, Any], *, tid: int = 0, first: bool = False
    ) -> None:
        event = {"name": kind, "ph": "M", "pid": self._pid, "tid": tid, "args": arguments}
        self._append(event, first=first)

    def _append(self, event: Mapping[str, Any], *, first: bool = False) -> None:
        self._stream.write(f"{'' if first else ','}{encode(event)}\n")
