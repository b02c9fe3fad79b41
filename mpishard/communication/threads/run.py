"""Run a function on several ranks that are threads of this process."""

from __future__ import annotations

import functools
import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

import threadpoolctl

from mpishard import settings
from mpishard.communication.failure.report import failure_report
from mpishard.communication.failure.tracebacks import drop_internal_frames, is_internal
from mpishard.communication.mpi.ulfm import OnFailure, check_on_failure
from mpishard.communication.threads.backend import InMemoryCommunicationBackend
from mpishard.communication.tracing.session import record_if_asked
from mpishard.errors import NotInitializedError, PeerError

__all__ = ["current_backend", "run_in_threads"]

T = TypeVar("T")

current_backend: ContextVar[InMemoryCommunicationBackend | None] = ContextVar(
    "current_backend", default=None
)
"""The backend of the thread-rank that asks; None outside `run_in_threads`."""

_logger = logging.getLogger("mpishard")
_numbers = itertools.count()
_LISTEN_SECONDS = 0.5
_GRACE_SECONDS = 5.0
_INTERRUPT_SECONDS = 2.0


@functools.cache
def _thread_pools() -> threadpoolctl.ThreadpoolController:
    return threadpoolctl.ThreadpoolController()


def _one_blas_thread(world_size: int) -> AbstractContextManager[Any]:
    """Several thread-ranks with a BLAS pool each would fight for the same cores."""
    return nullcontext() if world_size == 1 else _thread_pools().limit(limits=1)


def run_in_threads(
    world_size: int,
    fn: Callable[..., T],
    /,
    *args: Any,
    timeout: float = settings.MEMORY_TIMEOUT,
    on_failure: OnFailure = "abort",
    **kwargs: Any,
) -> list[T]:
    """Call ``fn(backend, *args, **kwargs)`` on ``world_size`` thread-ranks.

    Parameters
    ----------
    world_size : int
        Number of ranks, 1 or more.
    fn : callable
        What each rank does. Its backend is initialised, and shut down when it returns.
    timeout : float
        Seconds that a rank waits for the others before `CollectiveTimeoutError`; 0 is for ever.
    on_failure : {"abort", "shrink"}
        Whether one rank's exception ends all, or its own thread alone: the others raise
        `PeerError`, and may go on with `CommunicationBackend.shrink`.

    Returns
    -------
    list
        What each rank returned, in rank order; with "shrink", None for ranks that failed, of which
        a warning is logged.

    Raises
    ------
    ValueError
        For a world below 1, or another ``on_failure``.
    Exception
        The first failure, with "shrink" only where no rank is left, with a note that names its
        rank; its traceback has no frames inside mpishard but the last, unless
        ``MPISHARD_LOG=debug``. The others were told, and have ended;
        one that has not after 5 seconds, because it sleeps or computes, is left alone: a second
        note says where it is, and its next collective raises `PeerError`. An exception that
        nobody catches in any other thread of the process is such a failure, too, as under MPI.
    KeyboardInterrupt
        After Ctrl-C. The ranks are told, and given 2 seconds.

    Examples
    --------
    >>> run_in_threads(3, lambda backend: backend.rank ** 2)
    [0, 1, 4]
    """
    if world_size < 1:
        raise ValueError(f"world_size must be 1 or more, got {world_size}")
    check_on_failure(on_failure)
    sys.modules[__name__.partition(".")[0]].load_rooms()
    world = _ThreadWorld(world_size, timeout, survives=on_failure == "shrink")
    results: list[Any] = [None] * world_size

    def body(backend: InMemoryCommunicationBackend) -> None:
        results[backend.rank] = fn(backend, *args, **kwargs)

    error = world.run(body)
    if error is not None:
        drop_internal_frames(error)
        raise error
    return results


class _ThreadWorld:
    """Threads that are the ranks of one world, from their start to their end."""

    def __init__(self, world_size: int, timeout: float, *, survives: bool) -> None:
        self.environment = f"threads-{next(_numbers)}"
        self.backends = [
            InMemoryCommunicationBackend(rank, world_size, self.environment, timeout=timeout)
            for rank in range(world_size)
        ]
        self.survives = survives
        self.failures: list[tuple[str, BaseException]] = []
        """Where and what, in order; where is a rank, or another thread."""
        self._threads: list[threading.Thread] = []

    def run(self, body: Callable[[InMemoryCommunicationBackend], None]) -> BaseException | None:
        """Call ``body`` on every rank; when all have ended, return the first failure."""
        self._threads = [
            threading.Thread(
                target=self._run_rank, args=(backend, body), name=f"rank-{rank}", daemon=True
            )
            for rank, backend in enumerate(self.backends)
        ]
        try:
            for backend in self.backends:
                backend.initialize()
            with _one_blas_thread(len(self._threads)), _hear_other_threads(self):
                for thread in self._threads:
                    thread.start()
                self._join()
        except BaseException as error:  # Ctrl-C reaches the thread that joins
            _tell(error, self.backends)
            self._wait_until(time.monotonic() + _INTERRUPT_SECONDS)
            self._name_running(error)
            raise
        finally:
            InMemoryCommunicationBackend.clear_environment(self.environment)
            for backend in self.backends:
                InMemoryCommunicationBackend.clear_environment(backend._newest._environment_id)
        if self.survives and len(self.failures) < len(self.backends):
            return None
        return self._first_failure()

    def fail_in_thread(self, name: str, error: BaseException) -> None:
        """Take ``error``, which nobody caught in a thread that is no rank, for the ranks'."""
        self.failures.append((f"in thread {name!r}, which is no rank", error))
        for backend in self.backends:
            with suppress(NotInitializedError):
                backend._joined().fail_in_thread(name, error)
                return

    def _running(self) -> list[threading.Thread]:
        return [thread for thread in self._threads if thread.is_alive()]

    def _join(self) -> None:
        """Return when all ranks have ended, or one has failed and the others had time to hear."""
        while (running := self._running()) and (self.survives or not self.failures):
            # Ctrl-C in the instant before a wait without limit is only heard when that is over.
            running[0].join(_LISTEN_SECONDS)
        self._wait_until(time.monotonic() + _GRACE_SECONDS)

    def _wait_until(self, deadline: float) -> None:
        for thread in self._running():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run_rank(
        self,
        backend: InMemoryCommunicationBackend,
        body: Callable[[InMemoryCommunicationBackend], None],
    ) -> None:
        current_backend.set(backend)
        try:
            record_if_asked(backend)
            body(backend)
        except BaseException as error:  # noqa: BLE001 - raised below, by the caller
            self.failures.append((f"on rank {backend.rank} of {len(self.backends)}", error))
            newest = backend._newest
            if self.survives and not isinstance(error, PeerError):
                name = f"rank {newest.rank} of {newest.world_size}"
                report = failure_report(error, name, newest.rank, "alone", "the others may go on")
                _logger.warning("%s", report.removeprefix("mpishard: "))
            _tell(error, [newest])
        else:
            backend._newest.shutdown()

    def _first_failure(self) -> BaseException | None:
        if not self.failures:
            return None
        # A PeerError is an echo of another rank's failure: prefer the voice to the echo.
        voices = [f for f in self.failures if not isinstance(f[1], PeerError)]
        where, first = (voices or self.failures)[0]
        if len(self.backends) > 1:
            first.add_note(f"raised {where}")
        self._name_running(first)
        return first

    def _name_running(self, error: BaseException) -> None:
        """Note on ``error`` which ranks have not ended, and where they are."""
        frames = sys._current_frames()
        for rank, thread in enumerate(self._threads):
            frame = frames.get(thread.ident or 0)
            if thread.is_alive() and frame is not None:
                error.add_note(f"rank {rank} still runs, at {_place(frame)}")


def _tell(error: BaseException, backends: Sequence[InMemoryCommunicationBackend]) -> None:
    """Let the ranks know of ``error`` through the first backend that has not left."""
    for backend in backends:
        with suppress(NotInitializedError):  # it left, perhaps just now
            backend.abort(error)
            return


def _place(frame: FrameType) -> str:
    """The line of the user's that ``frame`` was called from."""
    inner: FrameType | None = frame
    while inner is not None and is_internal(inner.f_code.co_filename):
        inner = inner.f_back
    frame = inner or frame
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"


# Which thread a thread was started by is not known: an exception in one is all worlds' that run.
_worlds: list[_ThreadWorld] = []
_worlds_lock = threading.Lock()
_previous: list[Callable[[threading.ExceptHookArgs], object]] = []


@contextmanager
def _hear_other_threads(world: _ThreadWorld) -> Iterator[None]:
    """Hand exceptions that nobody catches in a thread to ``world`` as well."""
    with _worlds_lock:
        _worlds.append(world)
        if len(_worlds) == 1:
            _previous.append(threading.excepthook)
            threading.excepthook = _uncaught
    try:
        yield
    finally:
        with _worlds_lock:
            _worlds.remove(world)
            if not _worlds:
                previous = _previous.pop()
                if threading.excepthook is _uncaught:
                    threading.excepthook = previous


def _uncaught(args: threading.ExceptHookArgs) -> None:
    with _worlds_lock:
        worlds, previous = tuple(_worlds), tuple(_previous)
    if args.exc_value is not None and args.exc_type is not SystemExit:
        name = "unknown" if args.thread is None else args.thread.name
        for world in worlds:
            world.fail_in_thread(name, args.exc_value)
    for hook in previous:
        if hook is not threading.__excepthook__:  # run_in_threads raises it: shown once is enough
            hook(args)
