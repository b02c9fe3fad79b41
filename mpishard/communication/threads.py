"""Run a function on several ranks that are threads of this process."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import threadpoolctl

from mpishard import settings
from mpishard.communication.memory import InMemoryCommunicationBackend
from mpishard.communication.recording import record_if_asked
from mpishard.errors import NotInitializedError, PeerError

__all__ = ["current_backend", "run_in_threads"]

T = TypeVar("T")

current_backend: ContextVar[InMemoryCommunicationBackend | None] = ContextVar(
    "current_backend", default=None
)
"""The backend of the thread-rank that asks; None outside `run_in_threads`."""

_numbers = itertools.count()
_LISTEN_SECONDS = 0.5


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

    Returns
    -------
    list
        What each rank returned, in rank order.

    Raises
    ------
    ValueError
        For a world below 1.
    Exception
        The first failure, with a note that names its rank. The others were told, and have ended.

    Examples
    --------
    >>> run_in_threads(3, lambda backend: backend.rank ** 2)
    [0, 1, 4]
    """
    if world_size < 1:
        raise ValueError(f"world_size must be 1 or more, got {world_size}")
    world = _ThreadWorld(world_size, timeout)
    results: list[Any] = [None] * world_size

    def body(backend: InMemoryCommunicationBackend) -> None:
        results[backend.rank] = fn(backend, *args, **kwargs)

    world.run(body)
    return results


class _ThreadWorld:
    """Threads that are the ranks of one world, from their start to their end."""

    def __init__(self, world_size: int, timeout: float) -> None:
        self.environment = f"threads-{next(_numbers)}"
        self.backends = [
            InMemoryCommunicationBackend(rank, world_size, self.environment, timeout=timeout)
            for rank in range(world_size)
        ]
        self.failures: list[tuple[int, BaseException]] = []

    def run(self, body: Callable[[InMemoryCommunicationBackend], None]) -> None:
        """Call ``body`` on every rank; when all have ended, raise the first failure."""
        threads = [
            threading.Thread(
                target=self._run_rank, args=(backend, body), name=f"rank-{rank}", daemon=True
            )
            for rank, backend in enumerate(self.backends)
        ]
        try:
            for backend in self.backends:
                backend.initialize()
            with _one_blas_thread(len(threads)):
                for thread in threads:
                    thread.start()
                for thread in threads:
                    _join(thread)
        except BaseException as error:  # Ctrl-C reaches the thread that joins
            _tell(error, self.backends)
            raise
        finally:
            InMemoryCommunicationBackend.clear_environment(self.environment)
        self._raise_first()

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
            self.failures.append((backend.rank, error))
            _tell(error, [backend])
        else:
            backend.shutdown()

    def _raise_first(self) -> None:
        """Raise the failure that began it all, if there is one."""
        if self.failures:
            # A PeerError is an echo of another rank's failure: prefer the voice to the echo.
            voices = [f for f in self.failures if not isinstance(f[1], PeerError)]
            rank, first = (voices or self.failures)[0]
            if len(self.backends) > 1:
                first.add_note(f"raised on rank {rank} of {len(self.backends)}")
            raise first


def _tell(error: BaseException, backends: Sequence[InMemoryCommunicationBackend]) -> None:
    """Let the ranks know of ``error`` through the first backend that has not left."""
    for backend in backends:
        with suppress(NotInitializedError):  # it left, perhaps just now
            backend.abort(error)
            return


def _join(thread: threading.Thread) -> None:
    # Ctrl-C in the instant before a wait without limit is only heard when the wait is over.
    thread.join(_LISTEN_SECONDS)
    while thread.is_alive():
        thread.join(_LISTEN_SECONDS)
