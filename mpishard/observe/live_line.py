"""A line of a terminal that is drawn again and again, below all other output."""

from __future__ import annotations

import math
import sys
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BAR = 28


class LiveLine(Live):
    """A progress bar with the step and a text; see `Progress`.

    Parameters
    ----------
    stream : text file
        A terminal, or a pipe to a launcher whose output is a terminal.
    total_steps : float
        Number of steps at which the bar is full; infinity if it is not known, and without a bar.
    columns : int, optional
        Width of the launcher's terminal. Default: the width of ``stream``.
    """

    def __init__(self, stream: TextIO, total_steps: float, columns: int | None) -> None:
        self._total = total_steps
        # Other output must be printed above the line. rich can redirect only sys.stdout and
        # sys.stderr, which is right only if the line is drawn on sys.stdout.
        is_standard = stream is sys.stdout
        super().__init__(
            console=_PatientConsole(
                file=stream, force_terminal=True, force_jupyter=False, width=columns
            ),
            # Drawn by `show` alone: a thread of rich would take time from the steps.
            auto_refresh=False,
            redirect_stdout=is_standard,
            redirect_stderr=is_standard and sys.stderr.isatty(),
        )

    @property
    def can_draw(self) -> bool:
        """Whether the terminal can draw over a line."""
        return not self.console.is_dumb_terminal

    def show(self, position: str, step: int, words: str) -> None:
        """Draw the line anew: ``position``, the bar at ``step``, and ``words``."""
        left, right = Text(position), Text(words)
        width = self.console.width
        space = width - left.cell_len - right.cell_len - 5
        if space < _BAR // 3 or self._total == math.inf:  # no room for a bar, or no known end
            line = Text("  ").join([left, right])
            line.truncate(max(1, width - 1), overflow="crop")
            line.no_wrap = True
            self.update(line, refresh=True)
            return
        grid = Table.grid(padding=(0, 2))
        grid.add_column(no_wrap=True)
        grid.add_column(width=min(_BAR, space))
        grid.add_column(no_wrap=True)
        grid.add_row(left, ProgressBar(total=self._total, completed=step), right)
        self.update(grid, refresh=True)


class _PatientConsole(Console):
    """A console that raises on a broken pipe, on which rich would end the process.

    The cursor stays visible: nobody would show it again after the end of a rank that was killed.
    """

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError

    def show_cursor(self, show: bool = True) -> bool:
        return False
