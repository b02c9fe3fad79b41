"""The watchdog thread of an MPI process: time limits of waits, dead ranks, and signals.

A rank that waits for others polls, and learns by this that they failed or left. It cannot check the
time while it is stuck inside MPI: in ``init`` while ranks are missing, in a split, in a call of
the user's own. Therefore the thread alone checks the time, for all waits. It warns after
``MPISHARD_WARN_AFTER`` and ends the job after the wait's `TimeLimit`. It also detects that the
process of another rank of the node, or of the launcher, is gone.

The thread receives signals even while the main thread is stuck in C. Python runs a signal handler
on the main thread, between two of its steps. A main thread inside MPI, or inside a long NumPy call,
makes no steps. But Python also writes each signal with a handler as a byte into a pipe
(`signal.set_wakeup_fd`), and this thread reads it.

SIGUSR1 is a preemption notice. A rank receives it from ``import mpishard`` on, because it is not
repeated, and the rank may still build a model, read data or load a checkpoint. Before the import
the rank has no handler. `mpishard run` starts ranks with the signal blocked, so an early notice
waits until the import; if ranks are started otherwise, it ends the process. From MPI_Init on MPICH
has a handler of its own, which calls the handler that it found.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Self

from mpishard.base import settings
from mpishard.communication.contract.backoff import READ_EVERY, RunningClock
from mpishard.communication.failure.abort import (
    COLLECTIVE_LIMIT,
    STDERR,
    Termination,
    TimeLimit,
    launched_ending,
    print_to_stderr,
)

_STUCK_SECONDS = 2.0  # after Ctrl-C, without a step of the main thread


def is_free(number: signal.Signals) -> bool:
    """Return whether a signal has no handler, or one of this package."""
    present = signal.getsignal(number)
    if present is signal.SIG_DFL:
        return True
    return isinstance(getattr(present, "__self__", None), SignalPipe | PreemptionNotice)


class PreemptionNotice:
    """The notice by SIGUSR1, kept from its arrival until a training loop obeys it."""

    def __init__(self) -> None:
        self.is_given = False
        self._was_obeyed = False
        self._process = 0

    def listen(self) -> None:
        """Receive it from now on, unless the user has a handler. Main thread only. Idempotent."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            self._process = os.getpid()
            signal.signal(signal.SIGUSR1, self._handle)
            atexit.register(self.report_if_ignored)
        # Only `mpishard run` has blocked it; a user's own block is left as it is.
        if settings.job_folder() is not None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))

    def obey(self) -> None:
        """Record that a training loop has obeyed: the ranks save and end."""
        self.is_given = False
        self._was_obeyed = True

    def report_if_ignored(self) -> None:
        """Report, at the end of the process, a notice that no training loop obeyed."""
        if not self.is_given or self._was_obeyed or os.getpid() != self._process:
            return
        folder = settings.job_folder()
        try:
            if folder is not None and folder.is_dir():
                (folder / "unobeyed").touch(exist_ok=False)
        except FileExistsError:
            return  # another rank of the job has reported it
        except OSError:  # such as a full disk: then several ranks may report it
            pass
        print_to_stderr(
            f"mpishard: {launched_ending().name} was preempted by SIGUSR1, and nothing obeyed "
            "it: no step of an optimize(checkpoint=FOLDER) came after it"
        )

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # A process that the rank forked, such as a data loader, is no rank: the signal ends it.
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.is_given = True


preemption_notice = PreemptionNotice()
"""The notice of this process, which receives it if a launcher started it as a rank."""


class SignalPipe:
    """The pipe on which one thread waits for signals, for a time or until it is woken.

    Handlers and wakeup descriptors of asyncio, Jupyter or the user are left as they are.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        # Python writes to it inside a signal handler, which must never block.
        os.set_blocking(self._write, False)
        self._installed: list[signal.Signals] = []
        self._is_wakeup = False
        self._is_watched = False
        # A forked process is no rank, and multiprocessing must be able to end it by SIGTERM.
        os.register_at_fork(after_in_child=self.restore)

    def install(self) -> None:
        """Receive Ctrl-C, and SIGTERM and SIGQUIT if they have no handler. Main thread only.

        On SIGQUIT Python's faulthandler also prints the stacks of all threads at once, even of
        threads that are stuck.
        """
        self._is_watched = True
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGQUIT):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._handle)
                self._installed.append(number)
        if signal.SIGQUIT in self._installed:
            faulthandler.register(signal.SIGQUIT, file=STDERR, all_threads=True, chain=True)
        self._is_wakeup = _exchange_wakeup(self._write, -1)

    def restore(self) -> None:
        """Restore the earlier handlers. Idempotent.

        Only the main thread can do so. On another thread the handlers stay, and act as the earlier
        ones did.
        """
        self._is_watched = False
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._installed:
            if number is signal.SIGQUIT:
                faulthandler.unregister(number)
            # Another library may have put its own handler in place since, which stays.
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)
        self._installed.clear()
        if self._is_wakeup:
            self._is_wakeup = False
            _exchange_wakeup(-1, self._write)

    def wait(self, seconds: float) -> set[int]:
        """Return the signals of this package that have arrived, after at most ``seconds``."""
        if not select.select([self._read], [], [], seconds)[0]:
            return set()
        # Python writes a byte for each signal with a handler, also for those of the user's.
        # Ctrl-C has Python's own handler, and counts as ours as long as nobody has replaced it.
        ours: dict[int, object] = {signal.SIGINT: signal.default_int_handler}
        return {
            number
            for number in os.read(self._read, 4096)
            if number and signal.getsignal(number) == ours.get(number, self._handle)
        }

    def wake(self) -> None:
        """Make `wait` return."""
        os.write(self._write, b"\0")

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_watched:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if not _exchange_wakeup(self._write, self._write):
            # Another library has set its own descriptor since, and alone received the byte.
            os.write(self._write, bytes([number]))


def _exchange_wakeup(new: int, expected: int) -> bool:
    """Set ``new`` as wakeup descriptor if ``expected`` is set; return whether it was."""
    present = signal.set_wakeup_fd(new, warn_on_full_buffer=False)
    if present != expected:
        signal.set_wakeup_fd(present)
    return present == expected


@dataclass(slots=True, eq=False)
class Wait:
    """A wait of this rank for others, from ``__enter__`` to ``__exit__``.

    Parameters
    ----------
    watchdog : Watchdog
        The thread that checks its time.
    where : callable
        Returns the place, such as ``in collective 3, ..``. Called by the watchdog's thread.
    ending : Termination
        Ends the job if the wait is too long.
    slack : float
        Seconds, beyond the limits, that the wait may take although no rank is late.
    limit : TimeLimit
        The longest time that it may take.
    """

    watchdog: Watchdog
    where: Callable[[], str]
    ending: Termination
    slack: float
    limit: TimeLimit
    since: float = 0.0
    is_warned: bool = False

    def __enter__(self) -> Self:
        self.since = self.watchdog.clock.now()
        self.watchdog.waits.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the wait. Idempotent."""
        if self in self.watchdog.waits:
            self.watchdog.waits.remove(self)


class Watchdog:
    """The thread, from `start` to the last `release`, and the waits and jobs that it watches."""

    def __init__(self, clock: RunningClock | None = None) -> None:
        self.clock = clock or RunningClock()
        """The clock of all waits, which does not count the time in which the job is suspended."""
        self.waits: list[Wait] = []
        """The present waits of this rank: one, unless several of its threads communicate."""
        self._jobs: list[Termination] = []
        self.last: Termination | None = None
        """The job that was released last; its records can be read until the process ends."""
        self._signals = SignalPipe()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._interrupted: tuple[float, object] | None = None
        self._parent = 0
        # Threads do not survive a fork, and the child is no rank.
        os.register_at_fork(after_in_child=self._forget)

    def start(self) -> None:
        """Begin to watch. Idempotent."""
        if self._thread is None:
            self._stopped = False
            # The first parent: after the launcher's end the system gives the process another one.
            self._parent = self._parent or os.getppid()
            self._signals.install()
            self._thread = threading.Thread(target=self._run, name="mpishard-watchdog", daemon=True)
            self._thread.start()

    def guard(self, job: Termination) -> None:
        """Watch over ``job`` until `release`. Idempotent."""
        if job not in self._jobs:
            self._jobs.append(job)
        self.start()

    def release(self, job: Termination) -> None:
        """Stop watching ``job``; the thread ends with the last job. Idempotent."""
        if job in self._jobs:
            self.last = job
            self._jobs.remove(job)
            if not self._jobs:
                self._stopped = True
                self._signals.restore()
                if self._thread is not None and self._thread is not threading.current_thread():
                    self._signals.wake()
                    self._thread.join()
                self._thread = None

    def wait(
        self,
        where: Callable[[], str],
        ending: Termination | None = None,
        slack: float = 0.0,
        limit: TimeLimit = COLLECTIVE_LIMIT,
    ) -> Wait:
        """Return a context in which this rank waits at ``where`` for others."""
        return Wait(self, where, ending or launched_ending(), slack, limit)

    def _forget(self) -> None:
        self._thread, self._parent, self.last = None, 0, None
        self._jobs.clear()
        self.waits.clear()

    # ------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._stopped:
            for number in self._signals.wait(self.pause(self.clock.now())):
                self.receive(number, self.clock.now())
            if not self._stopped:
                self.check(self.clock.now())

    def pause(self, now: float) -> float:
        """Return the seconds from ``now`` until a warning or a time limit may be due."""
        left = [READ_EVERY]
        for wait in tuple(self.waits):
            limits = (0.0 if wait.is_warned else settings.mpi_warning(), wait.limit.seconds())
            # A limit that has passed since the last check is due at once, not one period later.
            left += [max(0.0, wait.since + wait.slack + limit - now) for limit in limits if limit]
        return min(left)

    def check(self, now: float) -> None:
        """Check time limits, the launcher and the other ranks of the node, at the time ``now``."""
        if self._interrupted is not None and now - self._interrupted[0] > _STUCK_SECONDS:
            (_, step), self._interrupted = self._interrupted, None
            if step == _main_thread_step():
                # Python raises KeyboardInterrupt between two steps of the main thread, which has
                # made none since the signal: it is stuck in C.
                self._ending().interrupt(self._doing())
        if self._parent and self._jobs and os.getppid() != self._parent:
            self._ending().report_lost_launcher(self._parent, self._doing())
        # A copy, because the main thread may release a job meanwhile.
        for job in tuple(self._jobs):
            dead = job.dead_rank()
            if dead is not None:
                job.report_dead_rank(dead, self._doing())
        warn_after = settings.mpi_warning()
        for wait in tuple(self.waits):
            waited, give_up_after = now - wait.since, wait.limit.seconds()
            if give_up_after and waited >= give_up_after + wait.slack:
                wait.ending.give_up(waited, wait.where(), wait.limit)
            if warn_after and waited >= warn_after + wait.slack and not wait.is_warned:
                wait.is_warned = True
                wait.ending.warn(waited, wait.where(), wait.limit)

    def receive(self, number: int, now: float) -> None:
        """Act on the signal ``number``."""
        if number == signal.SIGTERM:
            self._ending().terminate(self._doing())
        elif number == signal.SIGQUIT:
            # The activity of this rank in one piece.
            lines = [f"mpishard: {self._ending().name} was sent SIGQUIT, and goes on"]
            waits = [f"  waits {w.where()}, for {now - w.since:.1f} s" for w in self.waits]
            lines += waits or ["  waits for no other rank"]
            lines += [text for job in self._jobs if (text := job.describe())]
            names = ", ".join(f"{t.name} {t.ident:#018x}" for t in threading.enumerate())
            lines.append(f"  its threads, whose stacks stand above: {names}")
            print_to_stderr("\n".join(lines))
        elif number == signal.SIGINT and self._interrupted is None:
            self._interrupted = now, _main_thread_step()

    def _ending(self) -> Termination:
        return self._jobs[0] if self._jobs else launched_ending()

    def _doing(self) -> str:
        """Return the present work of this rank as a clause that begins with "while it"."""
        if self.waits:
            return f"while it waited {self.waits[-1].where()}"
        return "while it computed, or was in a call that is not mpishard's"


watchdog = Watchdog()
"""The watchdog of this process. It costs nothing until it is started."""


def _main_thread_step() -> object:
    """Return the present step of the main thread; it has made none if the value stays the same."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)
