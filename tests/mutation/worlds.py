"""Worlds in which a missing fence or wait always shows: late ranks, and work that is delayed."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mpishard.communication import InMemoryCommunicationBackend, Work, run_in_threads

PATHS = {
    "arena": {"MPISHARD_ARENA": "auto", "MPISHARD_VIRTUAL_NODES": "1"},
    "messages": {"MPISHARD_ARENA": "off", "MPISHARD_VIRTUAL_NODES": "1"},
    "two nodes": {"MPISHARD_ARENA": "auto", "MPISHARD_VIRTUAL_NODES": "2"},
}
PATIENCE = 10.0
"""Seconds that a rank waits for the others: a mutant may leave it alone."""


def run(body: Callable[[Any], Any], path: str = "messages", size: int = 3) -> list[Any]:
    """Call ``body(backend)`` on thread-ranks, on one of three paths of messages."""
    with mock.patch.dict(os.environ, PATHS[path]):
        return run_in_threads(size, body, timeout=PATIENCE)


@contextlib.contextmanager
def late(seconds: float, rank: int = 1) -> Iterator[None]:
    """In the block one rank returns late from every collective: the others are ahead of it.

    What nothing orders happens in the wrong order then, as long as ``seconds`` suffice for what
    the others do meanwhile.
    """
    wait = Work.wait

    def slow(self: Any) -> Any:
        result = wait(self)
        if self._driver.rank == rank:
            time.sleep(seconds)
        return result

    with mock.patch.object(Work, "wait", slow):
        yield


class IdleWork(Work):
    """A collective that does nothing before a wait for it, or for one that was issued later."""

    def __init__(self, backend: Any, call: Any, steps: Any, issue: Any) -> None:
        super().__init__(backend, steps, None, call)
        self.arrays: tuple[Any, ...] = ()
        self._issue = issue
        self._real: Work | None = None
        self.queue: deque[IdleWork] = backend.__dict__.setdefault("_idle", deque())
        self.queue.append(self)

    def wait(self) -> Any:
        while self._real is None:
            first = self.queue.popleft()
            first._real = self._issue(self._driver, first.awaited, first._steps)
        return self._real.wait()


@contextlib.contextmanager
def idle() -> Iterator[None]:
    """In the block collectives do nothing before a wait, which their contract allows.

    What uses the arrays of a collective that nobody has waited for raises, or reads what was there
    before.
    """
    backend = InMemoryCommunicationBackend
    issue = backend._issue

    def keep(self: Any, call: Any, steps: Any, in_flight: Any = None) -> Work:
        return IdleWork(self, call, steps, issue)

    def watched(name: str) -> Any:
        original = getattr(backend, name)

        def begin(self: Any, array: Any, *arguments: Any, **options: Any) -> Work:
            work = original(self, array, *arguments, **options)
            work.arrays = (array, *([] if options.get("out") is None else [options["out"]]))
            for other in tuple(work.queue)[:-1]:
                for mine, theirs in itertools.product(work.arrays, other.arrays):
                    assert not _overlap(mine, theirs), (
                        f"{_name(work)} uses memory of {_name(other)}, which is under way"
                    )
            return work

        return mock.patch.object(backend, name, begin)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(backend, "_issue", keep))
        for name in ("all_reduce_async", "reduce_scatter_async", "all_gather_async"):
            stack.enter_context(watched(name))
        yield


def _overlap(a: Any, b: Any) -> bool:
    on_host = isinstance(a, np.ndarray) and isinstance(b, np.ndarray)
    return on_host and np.may_share_memory(a, b)


def _name(work: Work) -> str:
    return f"collective {work.awaited.sequence}, {work.awaited}"


def refused(error: type[Exception], pattern: str, call: Callable[[], Any]) -> None:
    """Check that this rank raises an error of its own, and not another rank's."""
    with pytest.raises(error, match=pattern):
        call()


def close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


def agree(backend: Any, array: Any) -> None:
    """Check that all ranks have the same bits."""
    everyone = backend.all_gather(np.asarray(array)[None])
    assert (everyone == everyone[0]).all(), everyone
