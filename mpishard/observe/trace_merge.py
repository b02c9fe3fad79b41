"""All ranks of a job in one trace, with arrows from each message's sender to its receiver."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpishard.communication.tracing.recorder import encode, first_line, last_line
from mpishard.observe.trace_reader import JobTrace

__all__ = ["merge_traces"]

_ENDS = {"send": "s", "receive": "f"}


def merge_traces(trace: JobTrace, path: str | os.PathLike[str]) -> None:
    """Write ``trace`` as one file that Perfetto (https://ui.perfetto.dev) and Chrome show.

    A rank is a process, its rows are threads. The file appears when it is complete.

    Parameters
    ----------
    trace : JobTrace
        What `open_trace` gave.
    path : path
        The file; one that is there is replaced.

    Raises
    ------
    ValueError
        Where a rank's file is damaged; nothing is written then.
    OSError
        Where the file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"job": trace.job, "world_size": trace.world_size, "ranks": trace.ranks}
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(first_line(about))
            comma = ""
            for event in _with_arrows(trace.events()):
                stream.write(f"{comma}{encode(event)}\n")
                comma = ","
            ends = [
                {"rank": r, "reason": e.reason, "until_us": e.until, "dropped": e.dropped}
                for r, e in sorted(trace.endings.items())
            ]
            stream.write(last_line({"ranks": ends}))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _with_arrows(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The events, and two more for each message whose sender and receiver are both among them.

    The k-th message of a world, sender, receiver and tag is the same on both sides. What arrives
    before it was sent was sent before the trace began, or the clocks are wrong: it has no arrow.
    """
    waiting: dict[tuple[Any, ...], dict[str, Any]] = {}
    count = 0
    for event in events:
        yield event
        if event.get("cat") != "communication" or "number" not in event.get("args", ()):
            continue
        given = event["args"]
        key = tuple(given[name] for name in ("group", "source", "destination", "tag", "number"))
        other = waiting.pop(key, None)
        if other is None:
            waiting[key] = event
            continue
        sent, received = sorted((event, other), key=lambda e: bool(e["name"] == "receive"))
        # The last nanosecond of the receiver's span is still inside of it.
        arrival = received["ts"] + max(0.0, received["dur"] - 0.001)
        if sent["ts"] <= arrival:
            count += 1
            for side, at in ((sent, sent["ts"]), (received, arrival)):
                phase = _ENDS[side["name"]]
                yield {
                    "name": "message", "cat": "message", "ph": phase, "id": count,
                    "pid": side["pid"], "tid": side["tid"], "ts": round(at, 3),
                    **({"bp": "e"} if phase == "f" else {}),
                }  # fmt: skip
