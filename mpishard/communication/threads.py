"""Run a function on several ranks that are threads of this process."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import threadpoolctl

from mpishard import settings
from mpishard.communication.memory import InMemoryCommunicationBackend
from mpishard.errors import CommunicationError, PeerError

__all__ = ["current_backend", "run_in_threads"]

T = TypeVar("T")

current_backend: ContextVar[InMemoryCommunicationBackend | None] = ContextVar(
    "current_backend", default=None
)
"""The backend of the thread-rank that asks; None outside `run_in_threads`."""

_numbers = itertools.count()


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
    Exception
        The first failure, with a note that names its rank. The others were told, and have ended.

    Examples
    --------
    >>> run_in_threads(3, lambda backend: backend.rank ** 2)
    [0, 1, 4]
    """
    if world_size < 1:
        raise ValueError(f"world_size must be 1 or more, got {world_size}")
    environment = f"threads-{next(_numbers)}"
    backends = [
        InMemoryCommunicationBackend(rank, world_size, environment, timeout=timeout)
        for rank in range(world_size)
    ]
    for backend in backends:
        backend.initialize()
    results: list[Any] = [None] * world_size
    failures: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        backend = backends[rank]
        current_backend.set(backend)
        try:
            results[rank] = fn(backend, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised below, by the caller
            failures.append((rank, error))
            backend.abort(error)
        else:
            backend.shutdown()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    try:
        with _one_blas_thread(world_size):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    except BaseException as error:  # Ctrl-C reaches the thread that joins
        alive = next((backend for backend in backends if backend.is_initialized), None)
        if alive is not None:
            with suppress(CommunicationError):  # it may leave just now; nobody waits then
                alive.abort(error)
        raise
    finally:
        InMemoryCommunicationBackend.clear_environment(environment)
    _raise_first(failures, world_size)
    return results


def _raise_first(failures: list[tuple[int, BaseException]], world_size: int) -> None:
    """Raise the failure that began it all, if there is one."""
    if failures:
        # A PeerError is an echo of another rank's failure: prefer the voice to the echo.
        rank, first = next((f for f in failures if not isinstance(f[1], PeerError)), failures[0])
        if world_size > 1:
            first.add_note(f"raised on rank {rank} of {world_size}")
        raise first
