"""Traces read back: a job's folder, rank by rank on one time line, or a merged file."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpishard.communication.tracing.recorder import (
    TRACE_FORMAT,
    TRACE_VERSION,
    encode,
    first_line,
    last_line,
    rank_file,
)

_KILLED = "its file has no end: the process was killed, or still runs"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of one rank's trace.

    Parameters
    ----------
    reason : str
        ``finished``, or what ended it.
    until : float
        End of the last event, in microseconds of the job's time line.
    dropped : int
        Events that were more than the file's maximum.
    """

    reason: str
    until: float
    dropped: int

    @property
    def is_early(self) -> bool:
        """True if the rank did not come to its end."""
        return self.reason != "finished"


class JobTrace(ABC):
    """The events of all ranks of a job, on rank 0's clock.

    Attributes
    ----------
    job : str
        Name of the job.
    ranks : list of dict
        Facts of each rank in order: ``rank``, ``node``, ``host``, and how its clock was aligned.
    endings : dict
        End of each rank, once `events` has come to its end.
    """

    job: str
    ranks: list[dict[str, Any]]

    def __init__(self) -> None:
        self.endings: dict[int, Ending] = {}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @abstractmethod
    def events(self) -> Iterator[dict[str, Any]]:
        """Every event, ``ts`` counted from the job's start, in no order; rank by rank.

        Raises
        ------
        ValueError
            If a file is damaged, naming the line.
        """


def open_trace(path: str | os.PathLike[str]) -> JobTrace:
    """The trace in a folder of ``rank_<r>.json``, or in a file that was merged of them.

    Raises
    ------
    FileNotFoundError
        If there is none, or ranks are missing, which are named.
    ValueError
        If files are no traces, or of different jobs.
    """
    path = Path(path)
    if path.is_dir():
        return _Folder(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    return _Merged(path)


class _Lines:
    """One trace file: its first line, its events, and its last line if it has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end: dict[str, Any] | None = None
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
                f"program's: {line[:60].strip()!r}"
            )
        self.about: dict[str, Any] = about
        if about["version"] != TRACE_VERSION:
            raise ValueError(
                f"{path} has version {about['version']}, and this mpishard reads {TRACE_VERSION}"
            )

    def events(self) -> Iterator[dict[str, Any]]:
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
                    torn = number  # half a line, where the process was killed: if it is the last


class _Folder(JobTrace):
    """The files that the ranks of a job have left."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        found: dict[int, _Lines] = {}
        for path in sorted(folder.glob("rank_*.json")):
            lines = _Lines(path)
            rank = lines.about.get("rank", -1)
            # Its first line says whose it is: a copy under another name would count twice.
            if path != rank_file(folder, rank):
                whose = f"rank {rank}" if rank >= 0 else "all ranks"
                raise ValueError(f"{path} is the trace of {whose}; it was renamed")
            found[rank] = lines
        if not found:
            raise FileNotFoundError(
                f"no trace of a rank (rank_<r>.json) is in {folder}; `mpishard trace run`, "
                "MPISHARD_TRACE=FOLDER or mpishard.observe.trace(FOLDER) records one"
            )
        # A folder that was used twice has files of both jobs: their clocks have no common origin.
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
        missing = [rank for rank in range(world_size) if rank not in found]
        if missing:
            names = ", ".join(rank_file(folder, rank).name for rank in missing)
            raise FileNotFoundError(
                f"{folder} has traces of {len(found)} of the job's {world_size} ranks, and not "
                f"{names}; if nodes have disks of their own, copy each node's files there"
            )
        self.ranks = [found[rank].about for rank in range(world_size)]
        self.job = self.ranks[0]["job"]
        self._files = [found[rank] for rank in range(len(found))]
        # The ranks of a node share a clock, and one of them measured it best.
        clocks: dict[int, tuple[float, float]] = {}
        for about in sorted(self.ranks, key=lambda about: about["clock_uncertainty_us"]):
            best = about["clock_offset_us"], about["clock_uncertainty_us"]
            clocks.setdefault(about["node"], best)
        starts = [about["origin_us"] + clocks[about["node"]][0] for about in self.ranks]
        for about, start in zip(self.ranks, starts, strict=True):
            offset, uncertainty = clocks[about["node"]]
            about["clock_offset_us"], about["clock_uncertainty_us"] = offset, uncertainty
            about["start_us"] = start - min(starts)

    def events(self) -> Iterator[dict[str, Any]]:
        for about, lines in zip(self.ranks, self._files, strict=True):
            until = start = about["start_us"]
            for event in lines.events():
                if "ts" in event:
                    event["ts"] = round(event["ts"] + start, 3)
                    until = max(until, event["ts"] + event["dur"])
                yield event
            end = lines.end or {"reason": _KILLED, "dropped": 0}
            self.endings[about["rank"]] = Ending(end["reason"], until, end["dropped"])


class _Merged(JobTrace):
    """A file that `merge_traces` wrote."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._lines = _Lines(path)
        about = self._lines.about
        if "ranks" not in about:
            raise ValueError(
                f"{path} is the trace of rank {about['rank']} alone; give its folder, {path.parent}"
            )
        self.job, self.ranks = about["job"], about["ranks"]

    def events(self) -> Iterator[dict[str, Any]]:
        yield from self._lines.events()
        if self._lines.end is None:
            raise ValueError(f"{self._lines.path} is torn: its end is missing; merge it again")
        for end in self._lines.end["ranks"]:
            self.endings[end["rank"]] = Ending(end["reason"], end["until_us"], end["dropped"])


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
    # Here, because it imports safetensors, which `mpishard doctor` does without.
    from mpishard.checkpoint.format.disk import replace_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (text.encode() for text in _merged(trace)))


def _merged(trace: JobTrace) -> Iterator[str]:
    """The parts of the one file of all ranks."""
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
        # Events come rank by rank: the first side of a message waits for the other.
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
