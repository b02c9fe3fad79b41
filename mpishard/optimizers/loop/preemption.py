"""A signal that tells a run to make room: it saves, and ends, on all ranks at the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

import numpy as np

from mpishard.communication import CommunicationBackend, ReductionOperation
from mpishard.communication.contract.status import StatusPage, own_page
from mpishard.communication.failure.preemption import preemption_notice
from mpishard.communication.failure.watchdog import is_free

__all__ = ["PREEMPTING_SIGNALS", "Preemption"]

PREEMPTING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Those that ask a run which saves checkpoints to save, and to end."""

_ONE_ORDER_SECONDS = 1.0
"""SLURM, srun and `mpishard run` each pass one order on: it arrives several times."""


class Preemption:
    """Hears `PREEMPTING_SIGNALS` for all ranks, from ``__enter__`` to ``__exit__``.

    A SIGUSR1 that came before, to a rank that a launcher started, counts where nobody has heeded it
    (`mpishard.communication.failure.preemption`).

    One rank that hears a signal is enough: all learn of it in `is_asked`. A second SIGTERM, which
    comes more than a second after the first, is for whoever would have heard it without this. So
    is, at the end, a signal that nobody has heeded: unless an exception ends the run, which says
    more.

    Signals are heard on the main thread of a process alone, where a thread-rank never runs, and
    only where nobody but mpishard has a handler for them: the user's own stays.

    Parameters
    ----------
    backend : CommunicationBackend
        The ranks that train together.
    """

    def __init__(self, backend: CommunicationBackend) -> None:
        self._backend = backend
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        self._heard: set[signal.Signals] = set()
        self._terminated_at: float | None = None
        self._may_be_asked = False
        self._is_heeded = False
        self._page: StatusPage | None = None
        self._is_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        """Begin to hear. Collective."""
        heard: list[signal.Signals] = []
        if self._is_main_thread:
            heard = [number for number in PREEMPTING_SIGNALS if is_free(number)]
        # Where no rank can hear anything, as in a world of threads, nobody asks at each step.
        self._may_be_asked = any(self._any_of(bool(heard), self._is_told))
        for number in heard:
            self._before[number] = signal.signal(number, self._hear)
        self._page = own_page() if heard else None
        if self._page is not None:  # `mpishard run` gives ranks that save more time to end
            self._page.note_saving(True)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._page is not None and os.getpid() == self._process:
            self._page.note_saving(False)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._hear:
                signal.signal(number, handler)
        if kind is None and not self._is_heeded:
            for number in self._heard:
                os.kill(os.getpid(), number)

    def is_asked(self) -> bool:
        """Whether any rank has been told to make room. Collective: a few bytes for each rank."""
        return self._may_be_asked and self.is_asked_or(False)[0]

    def is_asked_or(self, flag: bool) -> tuple[bool, bool]:
        """As `is_asked`, and whether any rank says ``flag``. Collective, and as small."""
        is_told = self._may_be_asked and self._is_told
        self._is_heeded, is_said = self._any_of(is_told, flag)
        if self._is_heeded and self._is_main_thread:
            preemption_notice.obey()
        return self._is_heeded, is_said

    @property
    def _is_told(self) -> bool:
        """Whether this rank has been told to make room."""
        return bool(self._heard) or (self._is_main_thread and preemption_notice.is_given)

    def _any_of(self, *flags: bool) -> list[bool]:
        """Which of the flags any rank has."""
        said = np.array(flags, np.int64)
        if self._backend.world_size > 1:
            self._backend.all_reduce(said, ReductionOperation.MAX)
        return [bool(flag) for flag in said]

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # forked by the rank, and no rank: a loader of data
            self._pass_on(number)
            return
        if number == signal.SIGTERM:
            now = time.monotonic()
            if self._terminated_at is None:
                self._terminated_at = now
            elif now - self._terminated_at > _ONE_ORDER_SECONDS:
                self._pass_on(number)
                return
        self._heard.add(signal.Signals(number))

    def _pass_on(self, number: int) -> None:
        signal.signal(number, self._before[signal.Signals(number)])
        os.kill(os.getpid(), number)
