"""Start and stop the trace of a rank: compare clocks, open and close its file."""

from __future__ import annotations

import platform
import secrets
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from mpishard import settings
from mpishard.arrays import Array
from mpishard.communication.tracing.recorder import (
    Recorder,
    TraceFile,
    current_recorder,
    rank_file,
)  # fmt: skip

__all__ = ["Clock", "compare_clocks", "record_if_asked", "start_recording", "stop_recording"]

_ROUNDS = 16
_TAG = settings.MAXIMUM_TAG


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
        Nanoseconds to add to this rank's time to get rank 0's, and the largest error of that.
    """

    job: str
    offset: int
    uncertainty: int


def compare_clocks(backend: Recorded, now: Callable[[], int] = time.perf_counter_ns) -> Clock:
    """Measure the difference between this rank's clock and rank 0's. Collective.

    Ranks on the node of rank 0 read the same clock. The others ask rank 0 for the time several
    times, and use the answer that came back soonest: rank 0 has read its clock between question
    and answer, so that half of that time is the largest error (Cristian, "Probabilistic clock
    synchronization", Distributed Computing 3, 1989). A later drift of the clocks is not noticed.
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
        If this rank records already.
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
        # The files of ranks that only a larger world had; the others are replaced.
        for path in folder.glob("rank_*.json"):
            number = path.stem.removeprefix("rank_")
            if number.isdecimal() and int(number) >= len(nodes):
                path.unlink()
    # Rank 0 has removed old files before it answers, and only then other ranks make theirs.
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
    weakref.finalize(backend, _finish_at_exit, recorder)
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


def _finish_at_exit(recorder: Recorder) -> None:
    # The interpreter has stored the exception that ends the script here.
    recorder.finish(_reason(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)))


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
