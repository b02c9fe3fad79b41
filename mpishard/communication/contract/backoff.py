"""The backoff of an MPI rank that waits: it spins or yields, dozes, and checks its peers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

READ_EVERY = 0.5
"""Most seconds between two readings of a `RunningClock` during a wait."""

_CHECK_SECONDS = 0.05
_SPIN_SECONDS = 2e-4
"""Seconds of polls of memory without a pause, in which most peers that run now arrive."""

_YIELD_SECONDS = 2e-3
"""Seconds of a wait in which a rank yields the core after each poll."""

_DOZE_SECONDS = 1e-5  # lasts about 0.07 ms, because Linux adds the process's timer slack
_SUSPENDED_SECONDS = 2 * READ_EVERY


def yield_processor() -> None:
    """Offer this core to another process that is ready to run."""
    # Not on Windows, where a sleep of 0 gives up the turn.
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


class RunningClock:
    """A clock that counts only the time in which this process runs.

    A job may be suspended (Ctrl-Z, SIGSTOP, a frozen cgroup) and resumed hours later. No rank was
    late meanwhile, so the time does not count against a time limit. The operating system does not
    report a suspension. But a running process reads this clock about every `READ_EVERY` seconds, so
    two readings much further apart mean that it was suspended in between. Such a gap counts as
    `READ_EVERY` seconds, so limits are also reached on a machine so busy that every gap is long.

    Any thread may read the clock, and one must read it every `READ_EVERY` seconds during a wait.
    The watchdog does so in an MPI process; a thread-rank waits in slices of that length.

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
        # The watchdog and the thread that waits may read at once, and a gap must count once only.
        self._lock = threading.Lock()
        self._last = read()
        self._suspended = 0.0

    def now(self) -> float:
        """Return the seconds on this clock; only differences of readings have a meaning."""
        with self._lock:
            present = self._read()
            gap, self._last = present - self._last, present
            # Twice the period, because a reading may come late by nearly a period on a busy
            # machine.
            if gap > _SUSPENDED_SECONDS:
                self._suspended += gap - READ_EVERY
            return present - self._suspended


class Backoff:
    """One wait, from its first unsuccessful poll to its end.

    A rank polls for a short time, and then sleeps between two polls: a rank that waits longer takes
    no processor time from its core, which other ranks and programs may need, and adds less than
    0.1 ms to the wait.

    Parameters
    ----------
    yields : bool
        Whether the rank yields its core between the first polls: if the node has more ranks than
        cores, or each poll calls MPI. Otherwise it polls memory without a pause.
    check : callable
        Called about 20 times a second. It may raise, and so end the wait. It need not check the
        time limit, which the watchdog does.
    """

    __slots__ = ("_check", "_checked", "_start", "_yields")

    def __init__(self, yields: bool, check: Callable[[], None]) -> None:
        self._yields = yields
        self._check = check
        self._start = self._checked = time.monotonic()

    def pause(self) -> None:
        """Pause for a short time. Call it after each poll that found nothing."""
        # By the clock and not by the number of polls, which take long if others use the core.
        now = time.monotonic()
        waited = now - self._start
        if waited > (_YIELD_SECONDS if self._yields else _SPIN_SECONDS):
            time.sleep(_DOZE_SECONDS)
        elif self._yields:
            yield_processor()
        if now - self._checked > _CHECK_SECONDS:
            self._checked = now
            self._check()
