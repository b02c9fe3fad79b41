"""A thread that moves messages while its rank computes.

MPI moves data only while it is called, and a collective has several messages, each after those
before it. So a rank that computes for 10 ms between two calls would add 10 ms to every message
between hosts, and the network would be idle meanwhile. Ranks that share memory need no such thread.
"""

from __future__ import annotations

import os
import threading
import time

from mpishard.communication.contract.call import Call, CollectiveKind
from mpishard.communication.contract.work import Session, Work
from mpishard.communication.failure.abort import finalizing

_PAUSE = 1e-3
"""Least seconds between two looks: a link of 1 Gbit/s moves 125 kB meanwhile."""

_SHARE = 10
"""The pause is as many times as long as the look before it took, which bounds the thread's part."""

_LINGER_SECONDS = 0.1
"""Seconds without a collective after which the thread sleeps: to wake it takes a system call."""

_BLOCKING = (CollectiveKind.SPLIT, CollectiveKind.ALLOCATE_SHARED)
"""Collectives in which MPI may block, and which the thread leaves to the rank."""


class ProgressThread:
    """The thread that advances the collectives of a rank's worlds while the rank computes.

    It begins with the first `wake`. While the rank communicates itself, the thread waits.

    Parameters
    ----------
    session : Session
        The state that the worlds share.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        self._awake = threading.Event()
        self._ended = threading.Event()

    def wake(self) -> None:
        """Advance collectives from now on: one was issued that is not complete."""
        if self._awake.is_set() or self._ended.is_set():
            return
        self._awake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpishard progress", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """End the thread. Idempotent."""
        self._ended.set()
        self._awake.set()
        # A forked process has no such thread.
        if self._thread is not None and self._process == os.getpid():
            self._thread.join()
        self._thread = None

    def _run(self) -> None:
        idle_since, pause = time.monotonic(), _PAUSE
        while True:
            self._awake.wait()
            # Not a sleep, because `end` joins the thread, and the pause may be long.
            if self._ended.wait(pause) or finalizing.is_set():
                return
            start = time.monotonic()
            if self._is_needed():
                # Not for ever, because a rank that communicates may end this thread.
                if self._session.turn.acquire(timeout=_LINGER_SECONDS):
                    start = time.monotonic()  # not of the time in which the rank communicated
                    try:
                        if not self._ended.is_set():
                            self._advance()
                    finally:
                        self._session.turn.release()
                idle_since = time.monotonic()
            elif start - idle_since > _LINGER_SECONDS:
                self._awake.clear()
                # Again, because `end` or a collective may have come since, and found it awake.
                if self._ended.is_set() or self._is_needed():
                    self._awake.set()
            pause = max(_PAUSE, _SHARE * (time.monotonic() - start))

    def _is_needed(self) -> bool:
        return any(world._pending for world in self._session.worlds())

    def _advance(self) -> None:
        for world in self._session.worlds():
            for work in tuple(world._pending):
                if isinstance(work.awaited, Call) and work.awaited.kind not in _BLOCKING:
                    _advance(work)
            world._forget_done()


def _advance(work: Work) -> None:
    try:
        work.advance()
    except BaseException:  # noqa: BLE001 - its wait raises it, on the rank's own thread
        work._has_raised = False
