"""Time of a call and memory of a process, for benchmarks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mpishard.communication import CommunicationBackend

_BLOCK_SECONDS = 2e-3
"""Shorter calls are timed in blocks of this length, because clock and barrier take microseconds."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of the repeats of one call or step.

    Parameters
    ----------
    seconds : tuple of float
        Seconds of each repeat, in order; at least one.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the times in seconds."""
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile of the times, in seconds."""
        # Quartiles, because a single disturbed repeat would decide the range and the deviation.
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(low), float(high)

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a fraction of the median."""
        low, high = self.quartiles
        return (high - low) / self.median if self.median else 0.0


def time_chain(step: Callable[[], object], repeats: int, warmup: int = 0) -> Timing:
    """Time steps that follow each other as in training, without a barrier between them.

    The collectives of a step keep the ranks together, so any rank's times are those of the job.

    Parameters
    ----------
    step : callable
        Function that is timed.
    repeats : int
        Number of timed steps, 1 or more.
    warmup : int
        Number of steps before these, which are not timed.
    """
    # The first steps allocate buffers and compile loops.
    for _ in range(warmup):
        step()
    # One reading of the clock ends a step and begins the next, so that no time is left out.
    moments = [time.perf_counter()]
    for _ in range(repeats):
        step()
        moments.append(time.perf_counter())
    return Timing(tuple(float(seconds) for seconds in np.diff(moments)))


def time_alternately(
    backend: CommunicationBackend, calls: Sequence[Callable[[], object]], repeats: int
) -> list[Timing]:
    """Time several calls in turn, on all ranks at once. Collective.

    A disturbance of the machine then affects all of the calls. A repeat is a block of as many calls
    as take about two milliseconds, which all ranks begin together. Its time is that of the slowest
    rank.

    Parameters
    ----------
    backend : CommunicationBackend
        Backend of the ranks that make the calls.
    calls : sequence of callable
        Functions that are timed; every rank calls each.
    repeats : int
        Number of repeats of each call, 1 or more.

    Returns
    -------
    list of Timing
        Seconds of one call, for each of ``calls``; the same on every rank.
    """
    for call in calls:  # not timed: the first use allocates buffers, connections and pages
        call()
    # Most calls are collectives, so every rank must make the same number of them in a block.
    first = np.array([[_seconds_of(backend, call, 1) for call in calls]])
    # At least a nanosecond, because a clock may stand still for a short call.
    slowest = np.maximum(backend.all_gather(first).max(axis=0), 1e-9)
    lengths = np.clip(_BLOCK_SECONDS / slowest, 1, 1000).astype(int).tolist()
    own = np.empty((repeats, len(calls)))
    for repeat in range(repeats):
        for i, (call, length) in enumerate(zip(calls, lengths, strict=True)):
            own[repeat, i] = _seconds_of(backend, call, length)
    # After all repeats, so that no gather disturbs the next block.
    slowest = backend.all_gather(own[None]).max(axis=0)
    return [Timing(tuple(float(s) for s in slowest[:, i])) for i in range(len(calls))]


def _seconds_of(backend: CommunicationBackend, call: Callable[[], object], length: int) -> float:
    """Return the mean seconds of ``length`` calls in a row, which all ranks begin together."""
    backend.barrier()
    start = time.perf_counter()
    for _ in range(length):
        call()
    return (time.perf_counter() - start) / length


def proportional_memory(pid: int | str = "self") -> int | None:
    """Return the proportional set size (PSS) of a process in bytes.

    This is its resident memory, in which memory that n processes share counts as an n-th for each.
    So the sum over the ranks of a node is the memory of all of them. It is None on systems other
    than Linux, and for a process that has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)


def memory_while(step: Callable[[], object], repeats: int) -> tuple[int, int] | None:
    """Return the resident memory after the steps, and its peak in them, sampled every 2 ms.

    Returns
    -------
    (int, int) or None
        Bytes of this process; None if `proportional_memory` gives None.
    """
    samples: list[int] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(2e-3):
            samples.append(proportional_memory() or 0)

    # A thread, because the peak lies within a step.
    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        for _ in range(repeats):
            step()
    finally:
        done.set()
        sampler.join()
    resting = proportional_memory()
    return None if resting is None else (resting, max([*samples, resting]))
