"""The start and the end of a rank's trace: clocks are compared, files opened and closed."""

from __future__ import annotations

import platform
import secrets
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mpishard import settings
from mpishard.communication.tracing.file import TRACE_FORMAT, TRACE_VERSION, TraceFile, rank_file
from mpishard.communication.tracing.recorder import Recorder, current_recorder

if TYPE_CHECKING:
    from mpishard.communication.contract.backend import CommunicationBackend

__all__ = ["Clock", "compare_clocks", "record_if_asked", "start_recording", "stop_recording"]

_ROUNDS = 16
_TAG = settings.MAXIMUM_TAG


@dataclass(frozen=True, slots=True)
class Clock:
    """A rank's clock beside rank 0's, and what rank 0 calls the job.

    Parameters
    ----------
    job : str
        The same on all ranks of one recording, and in no other.
    offset, uncertainty : int
        Nanoseconds to add to this rank's time to have rank 0's, and how wrong that may be.
    """

    job: str
    offset: int
    uncertainty: int


def compare_clocks(
    backend: CommunicationBackend, now: Callable[[], int] = time.perf_counter_ns
) -> Clock:
    """Learn how this rank's clock differs from rank 0's. Collective.

    Ranks of rank 0's node read the same clock. The others ask it for the time, and take the answer
    that came back soonest: rank 0 has read its clock somewhere between question and answer, so
    that half of that time is the largest error (Cristian, "Probabilistic clock synchronization",
    Distributed Computing 3, 1989). Clocks that later drift apart are not noticed.
    """
    nodes = backend.nodes
    rounds = [1 if node == nodes[0] else _ROUNDS for node in nodes]
    if backend.rank == 0:
        job = secrets.randbits(62)
        for rank in range(1, backend.world_size):
            for _ in range(rounds[rank]):
                backend.receive(rank, 1, _TAG)
                backend._send(np.array([now(), job]), rank, _TAG)
        return Clock(f"{job:x}", 0, 0)
    best: tuple[int, int] | None = None
    for _ in range(rounds[backend.rank]):
        asked = now()
        backend._send(np.zeros(1, np.int64), 0, _TAG)
        there, job = (int(value) for value in backend.receive(0, 2, _TAG))
        answered = now()
        half = (answered - asked + 1) // 2
        if best is None or half < best[0]:
            best = half, there - (asked + half)
    assert best is not None
    if nodes[backend.rank] == nodes[0]:
        return Clock(f"{job:x}", 0, 0)
    return Clock(f"{job:x}", best[1], best[0] + 1)


def start_recording(backend: CommunicationBackend, folder: Path, maximum_events: int) -> Recorder:
    """Record what this rank does from now on, in ``folder``. Collective.

    Raises
    ------
    RuntimeError
        Where this rank records already.
    NotInitializedError
        Where the backend is not initialised.
    OSError
        Where the file cannot be written.
    """
    present = current_recorder.get()
    if present is not None and present.is_open:
        raise RuntimeError(
            f"rank {backend.rank} records a trace already, to {present.file.path}; end that one "
            "first (MPISHARD_TRACE records the whole run)"
        )
    backend._ready()
    folder.mkdir(parents=True, exist_ok=True)
    if backend.rank == 0:
        _forget_other_ranks(folder, backend.world_size)
    clock = compare_clocks(backend)  # nobody has a file yet: rank 0 answers when it has tidied
    origin = time.perf_counter_ns()
    about = {
        "format": TRACE_FORMAT,
        "version": TRACE_VERSION,
        "job": clock.job,
        "rank": backend.rank,
        "world_size": backend.world_size,
        "node": backend.nodes[backend.rank],
        "host": platform.node(),
        "origin_us": origin / 1000,
        "clock_offset_us": clock.offset / 1000,
        "clock_uncertainty_us": clock.uncertainty / 1000,
    }
    recorder = Recorder(TraceFile(rank_file(folder, backend.rank), about, origin), maximum_events)
    backend.recorder = recorder
    current_recorder.set(recorder)
    weakref.finalize(backend, _finish_at_exit, recorder)
    return recorder


def stop_recording(backend: CommunicationBackend, error: BaseException | None = None) -> None:
    """Finish what ``backend`` records, if it does; ``error`` is why it ends early."""
    recorder = backend.recorder
    if recorder is None:
        return
    backend.recorder = None
    recorder.finish("finished" if error is None else _brief(error))
    if current_recorder.get() is recorder:
        current_recorder.set(None)


def record_if_asked(backend: CommunicationBackend) -> None:
    """Record this rank's run where ``MPISHARD_TRACE`` says so. Collective."""
    folder = settings.trace_folder()
    if folder is not None and current_recorder.get() is None:
        start_recording(backend, folder, settings.TRACE_EVENTS)


def _forget_other_ranks(folder: Path, world_size: int) -> None:
    """Remove what a larger world has left in ``folder``: all other files are replaced."""
    for path in folder.glob("rank_*.json"):
        number = path.stem.removeprefix("rank_")
        if number.isdecimal() and int(number) >= world_size:
            path.unlink()


def _finish_at_exit(recorder: Recorder) -> None:
    # The interpreter has put the exception that ends the script here, and shown it.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    recorder.finish("finished" if error is None else _brief(error))


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
