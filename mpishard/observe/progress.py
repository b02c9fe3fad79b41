"""The line of progress of a training run."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TextIO

from mpishard.base import as_count, require_type, settings

if TYPE_CHECKING:
    from mpishard.observe.live_line import LiveLine

_WINDOW = 15.0  # seconds over which throughput is averaged
_REFRESH = 0.1  # least seconds between two updates of the live line


class Progress:
    """Step, loss, throughput and time left, on a terminal as one live line.

    It prints plain lines if the stream, or the output of the launcher, is no terminal: the first
    step, then at most one every ``interval`` seconds, one for each validation, and the last step.
    An error of the stream ends the output and never the training.

    Use it as a context manager, on one rank.

    Parameters
    ----------
    total_steps : int or None
        Steps of the whole run, those before ``start`` included; None if it is not known.
    start : int
        Number of steps before a resumed run.
    unit : str
        Unit of throughput: ``"tokens/s"``, ``"samples/s"``.
    stream : text file, optional
        The output. Default: ``sys.stdout``.
    interval : float
        Least seconds between plain lines.
    stamp : str
        Format (`time.strftime`) of the time before each plain line, if the stream is no terminal.
    clock : callable
        Returns seconds, as `time.monotonic`.

    Raises
    ------
    TypeError, ValueError
        For steps that are no integers of 0 or more, a unit that is no text, or an interval that is
        negative or NaN.

    Examples
    --------
    >>> seconds = iter(range(9))
    >>> with Progress(2, unit="tokens/s", clock=seconds.__next__, stamp="") as progress:
    ...     progress.update(1, loss=2.5, amount=640)
    ...     progress.update(2, loss=2.25, amount=640)
    ...     progress.validation(2, 2.375, accuracy=0.5)
    step 1/2  loss 2.5000  640 tokens/s
    step 2/2  loss 2.2500  640 tokens/s  0:02 in all
    step 2/2  loss 2.2500  validation loss 2.3750  accuracy 50.0%
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        start: int = 0,
        unit: str = "samples/s",
        stream: TextIO | None = None,
        interval: float = 10.0,
        stamp: str = "%Y-%m-%d %H:%M:%S  ",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = math.inf if total_steps is None else as_count("total_steps", total_steps, 0)
        self._step = as_count("start", start, 0)
        require_type("unit", unit, str)
        # Not `interval < 0`, which is False for NaN.
        if not interval >= 0:
            raise ValueError(f"interval must be 0 or more seconds, got {interval}")
        self._unit = unit
        self._enabled = True  # until the end, or an error of the stream
        self._stream = sys.stdout if stream is None else stream
        self._interval = interval
        self._stamp = stamp
        self._clock = clock
        self._live: LiveLine | None = None
        self._closing = ""
        self._loss: float | None = None
        self._validation = ""
        self._amount = 0.0
        self._began = self._now = self._shown = 0.0
        self._is_shown = True
        self._first: tuple[int, float] | None = None  # number of the run's first step, its end
        self._marks: deque[tuple[float, float]] = deque()  # (time, amount processed before it)

    def __enter__(self) -> Self:
        self._began = self._now = self._clock()
        self._shown = -math.inf  # so that the first step is shown at once
        self._marks.append((self._began, 0.0))
        self._attempt(self._open)
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled and not self._is_shown:
            self._attempt(self._show)
        # Cleared first, so that an error of stop() does not stop it again.
        live, self._live = self._live, None
        if live is not None:
            self._attempt(live.stop)
        if self._enabled and self._closing:
            self._attempt(lambda: self._print(self._closing))
        self._enabled = False

    def announce(self, line: str) -> None:
        """Print a line before the first step; the live line begins below it."""
        if self._enabled:
            self._attempt(lambda: self._print(line))

    def conclude(self, line: str) -> None:
        """Set the line to print after the last step, when the live line has ended."""
        self._closing = line

    def update(self, step: int, *, loss: float, amount: float = 0.0) -> None:
        """Report a step that is done.

        Parameters
        ----------
        step : int
            Number of steps done, this one and those before ``start`` included.
        loss : float
            Loss of the step.
        amount : float
            Amount that all ranks together processed, in the numerator of ``unit``.
        """
        if not self._enabled:
            return
        self._step, self._loss = step, float(loss)
        self._amount += float(amount)
        self._now = self._clock()
        self._first = self._first or (step, self._now)
        self._marks.append((self._now, self._amount))
        # At least two marks stay, because a rate needs two.
        while len(self._marks) > 2 and self._marks[1][0] <= self._now - _WINDOW:
            self._marks.popleft()
        self._is_shown = False
        pause = self._interval if self._live is None else _REFRESH
        if step >= self._total or self._now - self._shown >= pause:
            self._attempt(self._show)

    def validation(self, step: int, loss: float, accuracy: float | None = None) -> None:
        """Report the validation loss after ``step`` steps, and the accuracy for classes.

        The time since the last `update` counts as validation, and not for throughput.
        """
        if not self._enabled:
            return
        now = self._clock()
        pause = now - self._now
        # Shift the window by the validation's time, so that throughput counts training alone.
        self._marks = deque((moment + pause, amount) for moment, amount in self._marks)
        self._step, self._now = step, now
        self._validation = f"validation loss {_loss(float(loss))}"
        if accuracy is not None:
            self._validation += f"  accuracy {accuracy:.1%}"
        if self._live is None:
            words = [self._position(), *self._losses()]
            self._validation = ""
            self._attempt(lambda: self._print("  ".join(words)))
        else:
            self._attempt(self._show)

    # ------------------------------------------------------------------------------------- words

    def _position(self) -> str:
        if self._total == math.inf:
            return f"step {self._step}"
        return f"step {self._step:{len(str(self._total))}}/{self._total}"

    def _losses(self) -> list[str]:
        words = [] if self._loss is None else [f"loss {_loss(self._loss)}"]
        return [*words, self._validation] if self._validation else words

    def _pace(self) -> list[str]:
        words = []
        (before, least), (now, most) = self._marks[0], self._marks[-1]
        if most > least and now > before:
            words.append(f"{_quantity((most - least) / (now - before))} {self._unit}")
        # The mean of all steps but the first, which compiles loops and allocates memory. The latest
        # steps alone would make the estimate jump.
        first, end = self._first or (self._step, self._now)
        if self._step >= self._total:
            words.append(f"{_duration(self._now - self._began)} in all")
        elif self._step > first and self._total < math.inf:
            pace = (self._now - end) / (self._step - first)
            words.append(f"{_duration(pace * (self._total - self._step))} left")
        return words

    # ------------------------------------------------------------------------------------ output

    def _open(self) -> None:
        # Under `mpishard run` this stream is a pipe, and the launcher tells the width of the
        # terminal at its end.
        columns = settings.terminal_columns() if self._stream is sys.stdout else None
        is_terminal = columns is not None
        # Open MPI's launcher gives its ranks terminals, also if its own output is a file.
        if not is_terminal and self._stream.isatty():
            is_terminal = self._stream is not sys.stdout or not settings.output_is_passed_on()
        if not is_terminal:
            return
        self._stamp = ""
        # Imported here, so that programs without a live line do not import rich.
        from mpishard.observe.live_line import LiveLine

        live = LiveLine(self._stream, self._total, columns)
        if live.can_draw:
            self._live = live
            live.start()

    def _show(self) -> None:
        if self._live is None:
            self._print("  ".join([self._position(), *self._losses(), *self._pace()]))
        else:
            words = "  ".join([*self._losses(), *self._pace()])
            self._live.show(self._position(), self._step, words)
        self._shown = self._now
        self._is_shown = True

    def _print(self, line: str) -> None:
        self._stream.write(time.strftime(self._stamp) + line + "\n")
        # A file or a pipe would keep the line back until its buffer is full.
        self._stream.flush()

    def _attempt(self, action: Callable[[], object]) -> None:
        """Do ``action``, which writes to the stream; end the output if it fails."""
        try:
            action()
        except Exception:  # noqa: BLE001 - no error of a terminal may end training
            self._enabled = False
            live, self._live = self._live, None
            if live is not None:
                with suppress(Exception):
                    live.stop()


def _loss(value: float) -> str:
    return f"{value:.4f}" if 1e-2 <= abs(value) < 1e4 or value == 0 else f"{value:.3e}"


def _quantity(value: float) -> str:
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{letter}"
    return f"{value:.3g}"


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
