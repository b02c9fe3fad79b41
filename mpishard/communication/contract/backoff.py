"""How an MPI rank waits: spin, let others run, doze, and look round now and then."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

__all__ = ["LONG_POLL", "READ_EVERY", "Backoff", "RunningClock", "yield_processor"]

READ_EVERY = 0.5
"""Seconds between two readings of a `RunningClock` by those who wait with it."""

_SPINS = 32
_LOOK_EVERY = 8
"""Yields between two looks at the clock. On a busy machine each yield takes up to 20 ms."""
_LOOK_SECONDS = 0.05
_CROWDED_DOZE_AFTER = 0.002
_DOZE_AFTER = 2.0
LONG_POLL = 1e-3
"""Seconds of a poll or a yield that show that other programs run on this core."""

_DOZE_SECONDS = 1e-4
_SUSPENDED_SECONDS = 2 * READ_EVERY


def yield_processor() -> None:
    """Let another process have this core, if one wants it."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


class RunningClock:
    """A clock that counts only the time in which this process runs.

    A job may be suspended (Ctrl-Z, SIGSTOP, a frozen cgroup) and resumed hours later. No rank was
    late meanwhile, so the time does not count against a time limit. The operating system does not
    report a suspension. But a process that runs reads this clock about every `READ_EVERY` seconds,
    so two readings further apart mean that it was suspended in between. Such a gap counts as
    `READ_EVERY` seconds: a machine so busy that every gap is long still reaches its limits.

    Any thread may read the clock. Somebody must read it every `READ_EVERY` seconds during a wait:
    the watchdog does so in an MPI process, and a thread-rank waits in slices of that length.

    Parameters
    ----------
    read : callable
        Seconds of a clock that goes on while the process is suspended.

    Examples
    --------
    >>> seconds = iter([100.0, 100.25, 4000.0, 4000.25])
    >>> clock = RunningClock(lambda: next(seconds))
    >>> clock.now(), clock.now(), clock.now()
    (100.25, 100.75, 101.0)
    """

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._last = read()
        self._suspended = 0.0

    def now(self) -> float:
        """Seconds on this clock; only differences of readings have a meaning."""
        with self._lock:
            present = self._read()
            gap, self._last = present - self._last, present
            if gap > _SUSPENDED_SECONDS:
                self._suspended += gap - READ_EVERY
            return present - self._suspended


class Backoff:
    """One wait, from its first unsuccessful poll to its end.

    Polling without yielding is ruinous where more ranks than cores run, and yielding costs
    nothing where they do not. Where they do, a rank that has waited for long enough to show that
    the others compute dozes, and leaves them the core. So does a rank whose yields take long,
    because other programs run on its core: a process that has slept gets the core back sooner.

    Parameters
    ----------
    crowded : bool
        Whether the node has more ranks than cores.
    look : callable
        Called about 20 times a second. It may raise. For how long is the watchdog's business.
    is_slow : bool
        Whether polls before the first pause took long, for the same reason as long yields.
    """

    __slots__ = ("_clocked", "_crowded", "_doze", "_look", "_looked", "_polls", "_start")

    def __init__(self, crowded: bool, look: Callable[[], None], *, is_slow: bool = False) -> None:
        self._crowded = crowded
        self._look = look
        self._polls = 0
        self._start = 0.0
        self._looked = 0.0
        self._clocked = 0.0
        self._doze = is_slow

    def pause(self) -> None:
        """Let a little time pass. Call after each poll that found nothing."""
        self._polls += 1
        if self._doze:
            time.sleep(_DOZE_SECONDS)
            self._clock()
        elif self._polls > _SPINS or self._crowded:
            yield_processor()
            if self._polls % _LOOK_EVERY == 0:
                self._clock()

    def _clock(self) -> None:
        now = time.monotonic()
        if not self._start:
            self._start = self._looked = self._clocked = now
        is_long = now - self._start > (_CROWDED_DOZE_AFTER if self._crowded else _DOZE_AFTER)
        self._doze |= is_long or now - self._clocked > _LOOK_EVERY * LONG_POLL
        self._clocked = now
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._look()
