"""Preemption: a signal orders a run to save and end, after the same step on all ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

import numpy as np

from mpishard.communication import (
    CommunicationBackend,
    ReductionOperation,
    StatusPage,
    is_free,
    own_page,
    preemption_notice,
)

PREEMPTING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""The signals that order a run which saves checkpoints to save and end."""

_ONE_ORDER_SECONDS = 1.0
"""Seconds in which signals are one order, which SLURM, srun and `mpishard run` each pass on."""

_Handler = Callable[[int, FrameType | None], object] | int | None
"""A handler of a signal, in each form in which Python returns one."""


class Preemption:
    """The receiver of `PREEMPTING_SIGNALS` for all ranks, from ``__enter__`` to ``__exit__``.

    An earlier SIGUSR1, to a rank that a launcher started, counts if nothing has obeyed it yet
    (`mpishard.communication.failure.watchdog`).

    One rank that receives a signal is enough: all ranks learn of it in `is_asked`. A second
    SIGTERM, more than a second after the first, is passed to the earlier handler. At the end a
    signal that the run did not obey is sent again, to the earlier handler, unless an exception ends
    the run.

    Only the main thread of a process receives signals, and no thread-rank runs there. A handler
    that the user has set stays in place.

    Parameters
    ----------
    backend : CommunicationBackend
        The ranks that train together.
    resumable_by : tuple of int
        The fewest and the most ranks that can resume from the run's checkpoint; (0, 0) if they are
        not known. `mpishard resize` changes the number of ranks within these limits.
    """

    def __init__(
        self, backend: CommunicationBackend, resumable_by: tuple[int, int] = (0, 0)
    ) -> None:
        self._backend = backend
        self._resumable_by = resumable_by
        # A process that the rank forks inherits the handlers, and must not obey for the run.
        self._process = os.getpid()
        self._before: dict[signal.Signals, _Handler] = {}
        self._received: set[signal.Signals] = set()
        self._terminated_at: float | None = None
        self._may_be_asked = False
        self._is_obeyed = False
        self._page: StatusPage | None = None
        # Python calls handlers in the main thread, and lets no other thread set them.
        self._is_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        """Begin to receive signals. Collective."""
        received: list[signal.Signals] = []
        if self._is_main_thread:
            received = [number for number in PREEMPTING_SIGNALS if is_free(number)]
        # If no rank can receive signals, as in a world of threads, `is_asked` needs no exchange.
        self._may_be_asked = any(self._any_of(bool(received), self._is_ordered))
        for number in received:
            self._before[number] = signal.signal(number, self._receive)
        self._page = own_page() if received else None
        if self._page is not None:  # `mpishard run` gives ranks that save more time to end
            self._page.note_saving(True, self._resumable_by)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._page is not None and os.getpid() == self._process:
            self._page.note_saving(False)
        for number, handler in self._before.items():
            # A handler that the user has set meanwhile stays.
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)
        # The signal came after the last save: the earlier handler decides.
        if kind is None and not self._is_obeyed:
            for number in self._received:
                os.kill(os.getpid(), number)

    def is_asked(self) -> bool:
        """Return whether any rank was ordered to end. Collective, with a few bytes per rank."""
        return self._may_be_asked and self.is_asked_or()[0]

    def is_asked_or(self, *flags: bool) -> list[bool]:
        """Return `is_asked`, and for each flag whether any rank has set it. Collective."""
        # The flags of the caller travel in the same message: each step sends one.
        is_ordered = self._may_be_asked and self._is_ordered
        self._is_obeyed, *any_set = self._any_of(is_ordered, *flags)
        if self._is_obeyed and self._is_main_thread:
            preemption_notice.obey()
        return [self._is_obeyed, *any_set]

    @property
    def _is_ordered(self) -> bool:
        """Whether this rank was ordered to save and end."""
        return bool(self._received) or (self._is_main_thread and preemption_notice.is_given)

    def _any_of(self, *flags: bool) -> list[bool]:
        """Return for each flag whether any rank has set it."""
        any_set = np.array(flags, np.int64)
        if self._backend.world_size > 1:
            self._backend.all_reduce(any_set, ReductionOperation.MAX)
        return [bool(flag) for flag in any_set]

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # in a process that the rank forked: a data loader, say
            self._pass_on(number)
            return
        if number == signal.SIGTERM:
            now = time.monotonic()
            if self._terminated_at is None:
                self._terminated_at = now
            # A second order means at once, and not after the save.
            elif now - self._terminated_at > _ONE_ORDER_SECONDS:
                self._pass_on(number)
                return
        # Only noted: a handler may interrupt a collective, and must not begin another one.
        self._received.add(signal.Signals(number))

    def _pass_on(self, number: int) -> None:
        signal.signal(number, self._before[signal.Signals(number)])
        os.kill(os.getpid(), number)
