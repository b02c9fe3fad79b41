"""Readers of traces: of a job's folder, rank by rank on one time line, or of a merged file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from mpishard.base import Document
from mpishard.communication import (
    TRACE_FORMAT,
    TRACE_VERSION,
    encode,
    first_line,
    last_line,
    rank_file,
)

_KILLED = "its file has no end: the process was killed, or still runs"


class TraceEvent(TypedDict, total=False):
    """The fields of the Trace Event Format that mpishard writes. Events of one kind have some."""

    name: str
    cat: str
    ph: str
    pid: int
    tid: int
    ts: float
    dur: float
    id: int
    bp: str
    args: dict[str, Any]


class TraceFacts(TypedDict, total=False):
    """Facts about a rank and its clock, from the first line of its file; times in microseconds."""

    job: str
    version: int
    world_size: int
    rank: int
    node: int
    host: str
    origin_us: float
    start_us: float
    clock_offset_us: float
    clock_uncertainty_us: float
    ranks: list[TraceFacts]


@dataclass(frozen=True, slots=True)
class TraceEnd:
    """The end of one rank's trace.

    Parameters
    ----------
    reason : str
        ``finished``, or the reason of an early end.
    until : float
        End of the last event, in microseconds of the job's time line.
    dropped : int
        Number of events beyond the file's maximum, which were not kept.
    """

    reason: str
    until: float
    dropped: int

    @property
    def is_early(self) -> bool:
        """Whether the rank ended before the end of its program."""
        return self.reason != "finished"


class JobTrace:
    """The events of all ranks of a job, on rank 0's clock.

    Parameters
    ----------
    path : Path
        Folder of the files of all ranks, or a file that `merge_traces` wrote.

    Attributes
    ----------
    job : str
        Name of the job.
    ranks : list of dict
        Facts of each rank in order: ``rank``, ``node``, ``host``, and the alignment of its clock.
    endings : dict
        End of each rank; complete when `events` has come to its end.
    """

    def __init__(self, path: Path) -> None:
        self._is_merged = not path.is_dir()
        # All first lines are read now, so that files of several jobs are refused before any work.
        self._files = [_Lines(path)] if self._is_merged else _files_of_ranks(path)
        about = self._files[0].about
        if self._is_merged and "ranks" not in about:
            raise ValueError(
                f"{path} is the trace of rank {about['rank']} alone; give its folder, {path.parent}"
            )
        self.job: str = about["job"]
        own = [lines.about for lines in self._files]
        self.ranks: list[TraceFacts] = about["ranks"] if self._is_merged else own
        self.endings: dict[int, TraceEnd] = {}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def events(self) -> Iterator[TraceEvent]:
        """Yield every event, rank by rank, with ``ts`` counted from the job's start.

        Raises
        ------
        ValueError
            If a file is damaged; the message names the line.
        """
        if self._is_merged:
            (merged,) = self._files
            yield from merged.events()
            if merged.end is None:
                raise ValueError(f"{merged.path} is torn: its end is missing; merge it again")
            # The merged file has the ends that were found when it was made.
            for end in merged.end["ranks"]:
                self.endings[end["rank"]] = TraceEnd(end["reason"], end["until_us"], end["dropped"])
            return
        for about, lines in zip(self.ranks, self._files, strict=True):
            until = start = about["start_us"]
            for event in lines.events():
                # Events without a time name the rows.
                if "ts" in event:
                    # To a nanosecond, so that the sum of two floats is written with few digits.
                    event["ts"] = round(event["ts"] + start, 3)
                    until = max(until, event["ts"] + event["dur"])
                yield event
            end = lines.end or {"reason": _KILLED, "dropped": 0}
            self.endings[about["rank"]] = TraceEnd(end["reason"], until, end["dropped"])


def open_trace(path: str | os.PathLike[str]) -> JobTrace:
    """Return the trace in a folder of ``rank_<r>.json``, or in a file that was merged from one.

    Raises
    ------
    FileNotFoundError
        If there is none, or if ranks are missing, which are named.
    ValueError
        If a file is no trace, or the files are those of different jobs.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    return JobTrace(path)


class _Lines:
    """A trace file: its first line, its events, and its last line if it has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end: Document | None = None
        with path.open(encoding="utf-8", errors="replace") as stream:
            line = stream.readline()
        try:
            # The file is one JSON object; with its brackets closed, the first line parses alone.
            head = json.loads(f"{line.strip()}]}}")
            about = head["otherData"]
            known = about["format"] == TRACE_FORMAT
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise ValueError(
                f"{path} does not begin as a trace of mpishard does; it is torn, or another "
                f"program wrote it: {line[:60].strip()!r}"
            )
        self.about: TraceFacts = about
        if about["version"] != TRACE_VERSION:
            raise ValueError(
                f"{path} has version {about['version']}, and this mpishard reads {TRACE_VERSION}"
            )

    def events(self) -> Iterator[TraceEvent]:
        with self.path.open(encoding="utf-8", errors="replace") as stream:
            next(stream)
            torn = 0
            for number, line in enumerate(stream, 2):
                if torn:
                    raise ValueError(f"{self.path}, line {torn} is damaged, and others follow it")
                try:
                    if line.startswith("]"):
                        self.end = json.loads("{" + line[2:])["end"]
                    else:
                        yield json.loads(line.removeprefix(","))
                except (ValueError, KeyError):
                    torn = number  # the last line may be cut, if the process was killed in it


def _files_of_ranks(folder: Path) -> list[_Lines]:
    """Return the trace of each rank, in order, with the alignment of its clock in ``about``."""
    found: dict[int, _Lines] = {}
    for path in sorted(folder.glob("rank_*.json")):
        lines = _Lines(path)
        rank = lines.about.get("rank", -1)
        # The first line names the rank: a copy under another name would count twice.
        if path != rank_file(folder, rank):
            whose = f"rank {rank}" if rank >= 0 else "all ranks"
            raise ValueError(f"{path} is the trace of {whose}; it was renamed")
        found[rank] = lines
    if not found:
        raise FileNotFoundError(
            f"no trace of a rank (rank_<r>.json) is in {folder}; `mpishard trace run`, "
            "MPISHARD_TRACE=FOLDER or mpishard.observe.trace(FOLDER) records one"
        )
    # A folder that was used twice may have files of two jobs, without a common clock.
    jobs: dict[str, list[int]] = {}
    for rank, lines in sorted(found.items()):
        jobs.setdefault(lines.about["job"], []).append(rank)
    if len(jobs) > 1:
        parts = "; ".join(f"job {job}: ranks {ranks}" for job, ranks in jobs.items())
        raise ValueError(
            f"{folder} has traces of {len(jobs)} jobs ({parts}); remove those of old ones, or "
            "record each job in a folder of its own"
        )
    world_size = next(iter(found.values())).about["world_size"]
    # Without some ranks the others would seem to come last, and to wait for nobody.
    missing = [rank for rank in range(world_size) if rank not in found]
    if missing:
        names = ", ".join(rank_file(folder, rank).name for rank in missing)
        raise FileNotFoundError(
            f"{folder} has traces of {len(found)} of the job's {world_size} ranks, and not "
            f"{names}; if nodes have disks of their own, copy each node's files there"
        )
    files = [found[rank] for rank in range(len(found))]
    abouts = [lines.about for lines in files]
    # The ranks of a node share a clock: all take the most exact measurement of it.
    clocks: dict[int, tuple[float, float]] = {}
    for about in sorted(abouts, key=lambda about: about["clock_uncertainty_us"]):
        best = about["clock_offset_us"], about["clock_uncertainty_us"]
        clocks.setdefault(about["node"], best)
    starts = [about["origin_us"] + clocks[about["node"]][0] for about in abouts]
    for about, start in zip(abouts, starts, strict=True):
        offset, uncertainty = clocks[about["node"]]
        about["clock_offset_us"], about["clock_uncertainty_us"] = offset, uncertainty
        # From the first rank's start, because viewers expect times of 0 or more.
        about["start_us"] = start - min(starts)
    return files


_ENDS = {"send": "s", "receive": "f"}


def merge_traces(trace: JobTrace, path: str | os.PathLike[str]) -> None:
    """Write ``trace`` as one file that Perfetto (https://ui.perfetto.dev) and Chrome show.

    A rank is a process, its rows are threads. The file appears when it is complete.

    Parameters
    ----------
    trace : JobTrace
        The result of `open_trace`.
    path : path
        The file; one that is there is replaced.

    Raises
    ------
    ValueError
        If a rank's file is damaged; nothing is written then.
    OSError
        If the file cannot be written.
    """
    # Imported here, because it imports safetensors, without which `mpishard doctor` must work.
    from mpishard.checkpoint import replace_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (text.encode() for text in _merged(trace)))


def _merged(trace: JobTrace) -> Iterator[str]:
    """Yield the parts of the merged file."""
    about = {"job": trace.job, "world_size": trace.world_size, "ranks": trace.ranks}
    yield first_line(about)
    comma = ""
    for event in _with_arrows(trace.events()):
        yield f"{comma}{encode(event)}\n"
        comma = ","
    ends = [
        {"rank": r, "reason": e.reason, "until_us": e.until, "dropped": e.dropped}
        for r, e in sorted(trace.endings.items())
    ]
    yield last_line({"ranks": ends})


def _with_arrows(events: Iterator[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield the events, and the two ends of an arrow for each message with both of its sides.

    The k-th message of a world, sender, receiver and tag is the same on both sides. A message that
    arrives before it was sent has no arrow: the clocks are wrong, or a message that was sent before
    the trace began has shifted the numbers of one side.
    """
    waiting: dict[tuple[object, ...], TraceEvent] = {}
    count = 0
    for event in events:
        yield event
        if event.get("cat") != "communication" or "number" not in event.get("args", ()):
            continue
        given = event["args"]
        key = tuple(given[name] for name in ("group", "source", "destination", "tag", "number"))
        # Events come rank by rank: the first side of a message waits for the other.
        other = waiting.pop(key, None)
        if other is None:
            waiting[key] = event
            continue
        sent, received = sorted((event, other), key=lambda e: bool(e["name"] == "receive"))
        # An arrow must end inside the receiver's span: a nanosecond before its end.
        arrival = received["ts"] + max(0.0, received["dur"] - 0.001)
        if sent["ts"] <= arrival:
            count += 1
            for side, at in ((sent, sent["ts"]), (received, arrival)):
                phase = _ENDS[side["name"]]
                arrow: TraceEvent = {
                    "name": "message",
                    "cat": "message",
                    "ph": phase,
                    "id": count,
                    "pid": side["pid"],
                    "tid": side["tid"],
                    "ts": round(at, 3),
                }
                if phase == "f":
                    # Binds the arrow to the span around its end (Trace Event Format).
                    arrow["bp"] = "e"
                yield arrow
