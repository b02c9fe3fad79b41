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
"""Calls shorter than this are timed several at once: a clock and a barrier cost microseconds."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one thing that was done again and again.

    Parameters
    ----------
    seconds : tuple of float
        One for each repeat, in order; at least one.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return float(np.median(self.seconds))

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the times is below the first, a quarter above the second."""
        low, high = np.quantile(self.seconds, (0.25, 0.75))
        return float(low), float(high)

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a part of the median."""
        low, high = self.quartiles
        return (high - low) / self.median if self.median else 0.0


def time_chain(step: Callable[[], object], repeats: int, warmup: int = 0) -> Timing:
    """Time steps that follow each other as in training, without a barrier between them.

    The collectives of a step keep the ranks together, so that any rank's times are the job's.

    Parameters
    ----------
    step : callable
        Function that is timed.
    repeats : int
        Number of repeats, 1 or more.
    warmup : int
        Steps before the first that counts.
    """
    for _ in range(warmup):
        step()
    moments = [time.perf_counter()]
    for _ in range(repeats):
        step()
        moments.append(time.perf_counter())
    return Timing(tuple(float(seconds) for seconds in np.diff(moments)))


def time_alternately(
    backend: CommunicationBackend, calls: Sequence[Callable[[], object]], repeats: int
) -> list[Timing]:
    """Time several calls in turn, all ranks at once. Collective.

    What disturbs the machine for a while then disturbs all of them. A repeat is a block of as
    many calls as take about two milliseconds, begun together; its time is that of the slowest
    rank.

    Parameters
    ----------
    backend : CommunicationBackend
        Backend of the ranks that make the calls.
    calls : sequence of callable
        Functions that are timed; every rank calls each.
    repeats : int
        Number of times that each is timed, 1 or more.

    Returns
    -------
    list of Timing
        Seconds of one call, for each of ``calls``; the same on every rank.
    """
    for call in calls:  # first use: buffers, connections, pages
        call()
    # Most calls are collectives, so every rank must make the same number of them in a block.
    first = np.array([[_seconds_of(backend, call, 1) for call in calls]])
    slowest = np.maximum(backend.all_gather(first).max(axis=0), 1e-9)
    lengths = np.clip(_BLOCK_SECONDS / slowest, 1, 1000).astype(int).tolist()
    own = np.empty((repeats, len(calls)))
    for repeat in range(repeats):
        for i, (call, length) in enumerate(zip(calls, lengths, strict=True)):
            own[repeat, i] = _seconds_of(backend, call, length)
    slowest = backend.all_gather(own[None]).max(axis=0)
    return [Timing(tuple(float(s) for s in slowest[:, i])) for i in range(len(calls))]


def _seconds_of(backend: CommunicationBackend, call: Callable[[], object], length: int) -> float:
    """Seconds of one of ``length`` calls in a row that all ranks begin together."""
    backend.barrier()
    start = time.perf_counter()
    for _ in range(length):
        call()
    return (time.perf_counter() - start) / length


def proportional_memory(pid: int | str = "self") -> int | None:
    """Resident memory of a process in bytes; what n processes share counts as an n-th for each.

    The proportional set size (PSS) of Linux: added up over the ranks of a node it is what the
    node holds. None on systems that do not tell, and for a process that has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), None)


def memory_while(step: Callable[[], object], repeats: int) -> tuple[int, int] | None:
    """Resident memory between steps and, sampled every 2 ms, its greatest value inside them.

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
