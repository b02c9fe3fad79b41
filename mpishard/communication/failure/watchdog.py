"""The thread of an MPI process that watches over it: the clock of its waits, and who is gone.

A rank that waits for others polls, and can be told there that they failed or left. It cannot look
at the clock where it is stuck inside MPI: in ``init`` while ranks are missing, in a split, in a
call of the user's own. The thread can, and it alone does, for all waits: it warns after
``MPISHARD_WARN_AFTER`` and ends the job after ``MPISHARD_TIMEOUT``. It looks for ranks of the node
whose process is gone, and hears signals (`mpishard.communication.failure.signals`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Self

from mpishard import settings
from mpishard.communication.contract.backoff import READ_EVERY, RunningClock
from mpishard.communication.failure.abort import (
    COLLECTIVE_LIMIT,
    Ending,
    TimeLimit,
    launched_ending,
    say,
)
from mpishard.communication.failure.signals import SignalPipe

__all__ = ["Wait", "Watchdog", "watchdog"]

_STUCK_SECONDS = 2.0
_COMPUTING = "while it computed, or was in a call that is not mpishard's"


class Wait:
    """A wait of this rank for others, from ``__enter__`` to ``__exit__``.

    Parameters
    ----------
    watchdog : Watchdog
        Who looks at the clock meanwhile.
    where : callable
        Says where, as ``in collective 3, ..``. Called by another thread.
    ending : Ending
        How the job ends if it lasts too long.
    slack : float
        Seconds that it takes without anybody being late.
    limit : TimeLimit
        How long it may last.
    """

    __slots__ = ("_watchdog", "ending", "is_warned", "limit", "since", "slack", "where")

    def __init__(
        self,
        watchdog: Watchdog,
        where: Callable[[], str],
        ending: Ending,
        slack: float,
        limit: TimeLimit,
    ) -> None:
        self._watchdog = watchdog
        self.slack = slack
        self.limit = limit
        self.where = where
        self.ending = ending
        self.since = 0.0
        self.is_warned = False

    def __enter__(self) -> Self:
        self.since = self._watchdog.clock.now()
        self._watchdog.waits.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._watchdog.waits.remove(self)


class Watchdog:
    """The thread, from `start` to `stop`, and what it watches."""

    def __init__(self, clock: RunningClock | None = None) -> None:
        self.clock = clock or RunningClock()
        """The clock of all waits: a job that was suspended is not ended when it goes on."""
        self.waits: list[Wait] = []
        """Where this rank waits now: at one place, unless several of its threads talk."""
        self._jobs: list[Ending] = []
        self._signals = SignalPipe()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._interrupted: tuple[float, object] | None = None
        # Threads do not survive a fork, and the child is no rank.
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Begin to watch. Idempotent."""
        if self._thread is None:
            self._stopped = False
            self._signals.install()
            self._thread = threading.Thread(target=self._run, name="mpishard-watchdog", daemon=True)
            self._thread.start()

    def guard(self, job: Ending) -> None:
        """Watch over ``job`` until `release`. Idempotent."""
        if job not in self._jobs:
            self._jobs.append(job)
        self.start()

    def release(self, job: Ending) -> None:
        """Leave ``job`` alone; the thread ends with the last. Idempotent."""
        if job in self._jobs:
            self._jobs.remove(job)
            if not self._jobs:
                self._stop()

    def wait(
        self,
        where: Callable[[], str],
        ending: Ending | None = None,
        slack: float = 0.0,
        limit: TimeLimit = COLLECTIVE_LIMIT,
    ) -> Wait:
        """A context in which this rank waits ``where``."""
        return Wait(self, where, ending or launched_ending(), slack, limit)

    def _stop(self) -> None:
        self._stopped = True
        self._signals.restore()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._signals.wake()
            self._thread.join()
        self._thread = None

    def _forget(self) -> None:
        self._thread = None
        self._jobs.clear()
        self.waits.clear()

    # ------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._stopped:
            for number in self._signals.wait(self.pause(self.clock.now())):
                self.hear(number, self.clock.now())
            if not self._stopped:
                self.look(self.clock.now())

    def pause(self, now: float) -> float:
        """Seconds from ``now`` until there may be something to say."""
        left = [
            wait.since + wait.slack + seconds - now
            for wait in self.waits
            for seconds in (settings.mpi_warning(), wait.limit.seconds())
        ]
        return min([READ_EVERY, *(seconds for seconds in left if seconds > 0)])

    def look(self, now: float) -> None:
        """Look round, at the time ``now``."""
        if self._interrupted is not None and now - self._interrupted[0] > _STUCK_SECONDS:
            (_, step), self._interrupted = self._interrupted, None
            if step == _main_thread_step():
                # Ctrl-C is an exception between two steps of the main thread, and it makes none.
                self._ending().interrupt(self._doing())
        for job in tuple(self._jobs):
            dead = job.dead_rank()
            if dead is not None:
                job.mourn(dead, self._doing())
        warn_after = settings.mpi_warning()
        for wait in tuple(self.waits):
            waited, give_up_after = now - wait.since, wait.limit.seconds()
            if give_up_after and waited > give_up_after + wait.slack:
                wait.ending.give_up(waited, wait.where(), wait.limit)
            if warn_after and waited > warn_after + wait.slack and not wait.is_warned:
                wait.is_warned = True
                wait.ending.warn(waited, wait.where(), wait.limit)

    def hear(self, number: int, now: float) -> None:
        """Do what the signal ``number`` asks for."""
        if number == signal.SIGTERM:
            self._ending().terminate(self._doing())
        elif number == signal.SIGQUIT:
            self._describe(now)
        elif number == signal.SIGINT and self._interrupted is None:
            self._interrupted = now, _main_thread_step()

    def _ending(self) -> Ending:
        return self._jobs[0] if self._jobs else launched_ending()

    def _doing(self) -> str:
        """What this rank does now, behind "while it"."""
        if self.waits:
            return f"while it waited {self.waits[-1].where()}"
        return _COMPUTING

    def _describe(self, now: float) -> None:
        """Print what this rank does, as one piece."""
        lines = [f"mpishard: {self._ending().name} was sent SIGQUIT, and goes on"]
        lines += [f"  waits {w.where()}, for {now - w.since:.1f} s" for w in self.waits]
        if not self.waits:
            lines.append("  waits for no other rank")
        lines += [text for job in self._jobs if (text := job.describe())]
        names = ", ".join(f"{thread.name} {thread.ident:#018x}" for thread in threading.enumerate())
        lines.append(f"  its threads, whose stacks stand above: {names}")
        say("\n".join(lines))


watchdog = Watchdog()
"""The one of this process. It costs nothing until it is started."""


def _main_thread_step() -> object:
    """Where the main thread is: the same again where it has made no step."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)
