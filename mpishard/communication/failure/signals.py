"""Signals that are sent to a rank, heard even while its main thread is stuck in C.

Python runs a signal's handler on the main thread, between two of its steps. A main thread inside
MPI, or inside a long NumPy call, makes none. But each signal that has a handler is also written as
a byte into a pipe (`signal.set_wakeup_fd`), and the watchdog's thread reads that.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import threading
from types import FrameType

from mpishard.communication.failure.preemption import OrderToMakeRoom

__all__ = ["SignalPipe", "is_free"]

_OURS = (signal.SIGTERM, signal.SIGQUIT)
_STDERR = 2


def is_free(number: signal.Signals) -> bool:
    """Whether nobody but this package has a handler for a signal."""
    present = signal.getsignal(number)
    if present is signal.SIG_DFL:
        return True
    return isinstance(getattr(present, "__self__", None), SignalPipe | OrderToMakeRoom)


class SignalPipe:
    """Where one thread waits for signals, for so long, or until it is woken.

    Who has handlers or a wakeup descriptor of their own keeps them: asyncio, Jupyter, the user.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._installed: list[signal.Signals] = []
        self._is_wakeup = False
        self._is_watched = False
        # A process that this one forks is no rank: multiprocessing ends its own by SIGTERM.
        os.register_at_fork(after_in_child=self.restore)

    def install(self) -> None:
        """Hear SIGTERM and SIGQUIT, where nobody else does, and Ctrl-C. On the main thread alone.

        SIGQUIT also makes Python's faulthandler print the stacks of all threads, at once, whatever
        they do.
        """
        self._is_watched = True
        if self._installed or threading.current_thread() is not threading.main_thread():
            return
        for number in _OURS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._heard)
                self._installed.append(number)
        if signal.SIGQUIT in self._installed:
            faulthandler.register(signal.SIGQUIT, file=_STDERR, all_threads=True, chain=True)
        theirs = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._is_wakeup = theirs == -1
        if not self._is_wakeup:
            signal.set_wakeup_fd(theirs)

    def restore(self) -> None:
        """Leave signals as they were found. Idempotent.

        Another thread than the main one cannot: the handlers stay, and do what there was before.
        """
        self._is_watched = False
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._installed:
            if number is signal.SIGQUIT:
                faulthandler.unregister(number)
            if signal.getsignal(number) == self._heard:
                signal.signal(number, signal.SIG_DFL)
        self._installed.clear()
        if self._is_wakeup:
            self._is_wakeup = False
            present = signal.set_wakeup_fd(-1)
            if present != self._write:
                signal.set_wakeup_fd(present)

    def wait(self, seconds: float) -> set[int]:
        """The signals that have come and are nobody else's, after at most ``seconds``."""
        if not select.select([self._read], [], [], seconds)[0]:
            return set()
        # Python writes a byte for every handler's signal, a user's flag for a checkpoint included.
        return {number for number in os.read(self._read, 4096) if number and self._is_ours(number)}

    def _is_ours(self, number: int) -> bool:
        present = signal.getsignal(number)
        if number == signal.SIGINT:
            return present is signal.default_int_handler
        return present == self._heard

    def wake(self) -> None:
        """Let `wait` return."""
        os.write(self._write, b"\0")

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_watched:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        present = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if present != self._write:  # somebody else's since, who alone has the byte
            signal.set_wakeup_fd(present)
            os.write(self._write, bytes([number]))
