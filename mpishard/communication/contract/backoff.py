"""The backoff of an MPI rank that waits: it spins, yields, dozes, and checks its peers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

READ_EVERY = 0.5
"""Most seconds between two readings of a `RunningClock` during a wait."""

_SPINS = 300
"""Polls of memory without a pause: about 0.2 ms, in which most peers that run now arrive."""

_MESSAGE_SPINS = 8
"""Polls of messages without a pause: each calls MPI several times."""

_CHECK_SECONDS = 0.05
# Seconds of a wait after which a rank dozes. With more ranks than cores it is soon, because the
# others need the core to arrive.
_EARLY_DOZE_AFTER = 0.002
_DOZE_AFTER = 2.0
LONG_POLL = 1e-3
"""Seconds that a poll or a yield takes only if other programs run on this core."""

_DOZE_SECONDS = 1e-5  # lasts about 0.07 ms, because Linux adds the process's timer slack
SHARES_CORE_SECONDS = 0.1
"""Seconds for which a rank dozes in each wait, once it has found other programs on its core."""

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

    Polling without pauses is ruinous if more ranks than cores run, and yielding costs nothing if
    fewer do. With more ranks than cores, a rank dozes once it has waited so long that the others
    must be computing, and leaves them the core. A rank also dozes if a yield takes long, because
    other programs run on its core: a yield gives up the process's whole turn, but after a short
    sleep the scheduler gives the core back at once.

    Parameters
    ----------
    crowded : bool
        Whether the node has more ranks than cores.
    check : callable
        Called about 20 times a second. It may raise, and so end the wait. It need not check the
        time limit, which the watchdog does.
    dozes : bool
        Whether this rank has lately found other programs on its core.
    by_messages : bool
        Whether it waits for messages and not for memory that ranks share. A poll then takes longer,
        and so does a message: the rank dozes after milliseconds.

    Attributes
    ----------
    dozes : bool
        Whether each pause is a short sleep.
    """

    __slots__ = ("_check", "_checked", "_doze_after", "_polls", "_spins", "_start", "dozes")

    def __init__(
        self,
        crowded: bool,
        check: Callable[[], None],
        *,
        dozes: bool = False,
        by_messages: bool = False,
    ) -> None:
        self._spins = 0 if crowded else _MESSAGE_SPINS if by_messages else _SPINS
        self._doze_after = _EARLY_DOZE_AFTER if crowded or by_messages else _DOZE_AFTER
        self._check = check
        self._polls = 0
        self._start = 0.0
        self._checked = 0.0
        self.dozes = dozes

    def pause(self) -> None:
        """Pause for a short time. Call it after each poll that found nothing."""
        self._polls += 1
        # No clock is read in these polls, in which most waits end.
        if self._polls <= self._spins:
            return
        before = time.monotonic()
        # Begun here and not in the constructor: short waits never come to this line.
        if not self._start:
            self._start = self._checked = before
        if self.dozes:
            time.sleep(_DOZE_SECONDS)
        else:
            yield_processor()
        now = time.monotonic()
        # Dozing adds up to 0.1 ms to a wait, which is little after milliseconds and much before.
        is_long = now - self._start > self._doze_after
        self.dozes |= is_long or now - before > LONG_POLL
        if now - self._checked > _CHECK_SECONDS:
            self._checked = now
            self._check()
