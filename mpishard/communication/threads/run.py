"""Run a function on several ranks that are threads of this process."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import threadpoolctl

from mpishard.base import NotInitializedError, PeerError, as_count
from mpishard.communication.failure import report
from mpishard.communication.threads.backend import InMemoryCommunicationBackend
from mpishard.communication.threads.world import NO_RANK
from mpishard.communication.tracing.recorder import record_if_asked

T = TypeVar("T")

current_backend: ContextVar[InMemoryCommunicationBackend | None] = ContextVar(
    "current_backend", default=None
)
"""The backend of the calling thread-rank; None outside `run_in_threads`."""

_logger = logging.getLogger("mpishard")
_numbers = itertools.count()
_LISTEN_SECONDS = 0.5
_GRACE_SECONDS = 5.0  # for the other ranks to end after a failure
_INTERRUPT_SECONDS = 2.0  # for all ranks to end after Ctrl-C

MOST_RANKS = 4096
"""Most threads of a process that are ranks."""

# Made once, because it looks through all loaded libraries.
_thread_pools = functools.cache(threadpoolctl.ThreadpoolController)


def run_in_threads(
    world_size: int,
    fn: Callable[..., T],
    /,
    *args: object,
    timeout: float | None = None,
    on_failure: report.OnFailure = "abort",
    **kwargs: object,
) -> list[T]:
    """Call ``fn(backend, *args, **kwargs)`` on ``world_size`` thread-ranks.

    Parameters
    ----------
    world_size : int
        Number of ranks, 1 to 4096.
    fn : callable
        The program of each rank. Its backend is initialised, and shut down when it returns.
    timeout : float, optional
        Seconds that a rank waits for the others before `CollectiveTimeoutError`; 0 means no limit.
        By default ``MPISHARD_TIMEOUT``, or 300.
    on_failure : {"abort", "shrink"}
        With "abort" one rank's exception ends all ranks. With "shrink" it ends its own thread; the
        others raise `PeerError`, and may go on with `CommunicationBackend.shrink`.

    Returns
    -------
    list
        The results of the ranks, in rank order. None for a rank that left by ``sys.exit(0)``; with
        "shrink" also for ranks that failed, and a warning is logged for each.

    Raises
    ------
    TypeError
        For a world size that is no integer, or an object that cannot be called.
    ValueError
        For another world size, a negative timeout, or another ``on_failure``.
    Exception
        The first failure (with "shrink" only if no rank is left), with a note that names its
        rank. Its traceback has no frames inside mpishard except the last, unless
        ``MPISHARD_LOG=debug``. The other ranks were notified, and have ended. A rank that has not
        ended after 5 seconds, because it sleeps or computes, is left running. A second note then
        says where it is, and its next collective raises `PeerError`. An uncaught exception in any
        other thread of the process is also such a failure, as under MPI.
    SystemExit
        If every rank left by ``sys.exit(0)``.
    KeyboardInterrupt
        After Ctrl-C. The ranks are notified, and have 2 seconds to end.

    Examples
    --------
    >>> run_in_threads(3, lambda backend: backend.rank ** 2)
    [0, 1, 4]
    """
    if as_count("world_size", world_size) > MOST_RANKS:
        raise ValueError(
            f"world_size must be 1 to {MOST_RANKS}, because each rank is a thread of this process, "
            f"got {world_size}; start ranks as processes with mpishard run -n"
        )
    if not callable(fn):
        raise TypeError(f"each rank calls a function with its backend, and {fn!r} is no function")
    report.check_on_failure(on_failure)
    # Now, on one thread: rooms are imported when they are first used, and Python's import locks
    # could let thread-ranks wait for each other.
    sys.modules[__name__.partition(".")[0]].load_rooms()
    ranks = _ThreadRanks(world_size, timeout, survives=on_failure == "shrink")
    try:
        error = ranks.run(lambda backend: fn(backend, *args, **kwargs))
    except KeyboardInterrupt as interrupt:
        report.drop_internal_frames(interrupt)
        raise
    if error is not None:
        report.drop_internal_frames(error)
        raise error
    return ranks.results


class _ThreadRanks:
    """Threads that are the ranks of one world, from their start to their end."""

    def __init__(self, world_size: int, timeout: float | None, *, survives: bool) -> None:
        # A new id for each call, so that worlds of nested or parallel calls stay apart.
        environment = f"threads-{next(_numbers)}"
        self.backends = [
            InMemoryCommunicationBackend(rank, world_size, environment, timeout=timeout)
            for rank in range(world_size)
        ]
        self.survives = survives
        self.results: list[Any] = [None] * world_size
        # Appended to by several threads, which a list of CPython allows without a lock.
        self.failures: list[tuple[str, BaseException]] = []
        """Each exception, after the place where it was raised."""
        self.exits: list[SystemExit] = []
        """Those of ranks that left by ``sys.exit()``, which is no failure."""
        self.threads: list[threading.Thread] = []

    def run(self, body: Callable[[InMemoryCommunicationBackend], object]) -> BaseException | None:
        """Call ``body`` on every rank; when all have ended, return the first failure or exit."""
        self.threads = [
            threading.Thread(
                target=self._run_rank, args=(backend, body), name=f"rank-{rank}", daemon=True
            )
            for rank, backend in enumerate(self.backends)
        ]
        try:
            for backend in self.backends:
                backend.initialize()
            # One BLAS thread for each rank, because several pools would compete for the same cores.
            pools = nullcontext() if len(self.threads) == 1 else _thread_pools().limit(limits=1)
            with pools, _failures_of_other_threads(self):
                for thread in self.threads:
                    thread.start()
                while (running := self._running()) and (self.survives or not self.failures):
                    # A short wait, because Ctrl-C just before it is received only after it.
                    running[0].join(_LISTEN_SECONDS)
                self._wait(_GRACE_SECONDS)
        except BaseException as error:  # Ctrl-C reaches the thread that joins
            _abort(error, self.backends)
            self._wait(_INTERRUPT_SECONDS)
            self._name_running(error)
            raise
        finally:
            for backend in self.backends:
                # Both: the world may have been replaced by a smaller one of another id.
                for member in (backend, backend._newest):
                    member.clear_environment(member._environment_id)
        if len(self.failures) < (len(self.backends) if self.survives else 1):
            return self.exits[0] if len(self.exits) == len(self.backends) else None
        # A PeerError reports another rank's failure, which is preferred to it.
        origins = [f for f in self.failures if not isinstance(f[1], PeerError)]
        where, first = (origins or self.failures)[0]
        if len(self.backends) > 1:
            # A note and no new exception, so that the user catches the type that was raised.
            first.add_note(f"raised {where}")
        self._name_running(first)
        return first

    def fail_in_thread(self, name: str, error: BaseException) -> None:
        """Treat ``error``, not caught in a thread that is no rank, as a failure of the ranks."""
        who = f"thread {name!r}, which is no rank"
        self.failures.append((f"in {who}", error))
        for backend in self.backends:
            with suppress(NotInitializedError):
                backend._joined().fail(NO_RANK, f"{who},", "", error)
                return

    def _running(self) -> list[threading.Thread]:
        return [thread for thread in self.threads if thread.is_alive()]

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for thread in self._running():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run_rank(
        self,
        backend: InMemoryCommunicationBackend,
        body: Callable[[InMemoryCommunicationBackend], object],
    ) -> None:
        current_backend.set(backend)
        try:
            record_if_asked(backend)
            self.results[backend.rank] = body(backend)
        except BaseException as error:  # noqa: BLE001 - raised by `run_in_threads`
            if isinstance(error, SystemExit) and not error.code:  # it leaves, as an MPI rank does
                self.exits.append(error)
                backend._newest.shutdown()
                return
            self.failures.append((f"on rank {backend.rank} of {len(self.backends)}", error))
            newest = backend._newest
            if self.survives and not isinstance(error, PeerError):
                name = f"rank {newest.rank} of {newest.world_size}"
                then = "the others may go on"
                text = report.failure_report(error, name, "alone", then)
                _logger.warning("%s", text.removeprefix("mpishard: "))
            _abort(error, [newest])
        else:
            backend._newest.shutdown()

    def _name_running(self, error: BaseException) -> None:
        """Note on ``error`` which ranks have not ended, and the user's line that each is at."""
        frames = sys._current_frames()
        for rank, thread in enumerate(self.threads):
            place = report.user_place(frames.get(thread.ident or 0))
            if thread.is_alive() and place:
                error.add_note(f"rank {rank} still runs, at {place}")


def _abort(error: BaseException, backends: Sequence[InMemoryCommunicationBackend]) -> None:
    """Notify the ranks of ``error`` through the first backend that has not left."""
    for backend in backends:
        with suppress(NotInitializedError):  # the rank has left, perhaps just now
            backend.abort(error)
            return


@contextmanager
def _failures_of_other_threads(ranks: _ThreadRanks) -> Iterator[None]:
    """Pass uncaught exceptions of other threads to ``ranks``, too.

    The rank that started a thread is not known, so its exception counts for all running worlds.
    """
    before, is_over = threading.excepthook, False

    def uncaught(args: threading.ExceptHookArgs) -> None:
        error = None if is_over or args.exc_type is SystemExit else args.exc_value
        if error is not None:
            ranks.fail_in_thread("unknown" if args.thread is None else args.thread.name, error)
        # Python's own hook would print an exception that run_in_threads raises anyway.
        if error is None or before is not threading.__excepthook__:
            before(args)

    threading.excepthook = uncaught
    try:
        yield
    finally:
        # Worlds may end in another order than they began, so a later hook may still call this one.
        is_over = True
        if threading.excepthook is uncaught:
            threading.excepthook = before
