"""How an MPI rank waits: spin, let others run, doze, and look round now and then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["Backoff", "yield_processor"]

_SPINS = 32
_LOOK_EVERY = 256
_LOOK_SECONDS = 0.05
_CROWDED_DOZE_AFTER = 0.002
_DOZE_AFTER = 2.0
_DOZE_SECONDS = 1e-4


def yield_processor() -> None:
    """Let another process have this core, if one wants it."""
    if hasattr(os, "sched_yield"):
        os.sched_yield()
    else:
        time.sleep(0)


class Backoff:
    """One wait, from its first unsuccessful poll to its end.

    Polling without yielding is ruinous where more ranks than cores run, and yielding costs
    nothing where they do not. Where they do, a rank that has waited for long enough to show that
    the others compute dozes, and leaves them the core.

    Parameters
    ----------
    crowded : bool
        Whether the node has more ranks than cores.
    look : callable
        Called about 20 times a second. It may raise. For how long is the watchdog's business.
    """

    __slots__ = ("_crowded", "_doze", "_look", "_looked", "_polls", "_start")

    def __init__(self, crowded: bool, look: Callable[[], None]) -> None:
        self._crowded = crowded
        self._look = look
        self._polls = 0
        self._start = 0.0
        self._looked = 0.0
        self._doze = False

    def pause(self) -> None:
        """Let a little time pass. Call after each poll that found nothing."""
        self._polls += 1
        if self._doze:
            time.sleep(_DOZE_SECONDS)
            self._clock()
        elif self._polls > _SPINS or self._crowded:
            yield_processor()
            if self._polls % _LOOK_EVERY == 0:
                self._clock()

    def _clock(self) -> None:
        now = time.monotonic()
        if not self._start:
            self._start = self._looked = now
        waited = now - self._start
        self._doze = waited > (_CROWDED_DOZE_AFTER if self._crowded else _DOZE_AFTER)
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._look()
