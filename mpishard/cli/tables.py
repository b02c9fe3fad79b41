"""Tables that fit a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from mpishard.base import settings
from mpishard.cli.wording import bytes_text, milliseconds
from mpishard.observe import Timing

_USUAL = 80


def screen_width() -> int:
    """Return the columns of the user's terminal, 80 or more; 80 without a terminal."""
    console = Console()
    # Under `mpishard run` stdout is a pipe, and the launcher passes on the width of its terminal.
    columns = settings.terminal_columns()
    return max(columns or (console.width if console.is_terminal else _USUAL), _USUAL)


def show(table: Table) -> None:
    """Print a table that fits the user's terminal. Wider cells are folded."""
    # Without highlights, because rich would colour the numbers inside names and paths.
    Console(width=screen_width(), highlight=False).print(table)


def figures_table(
    title: str, columns: Sequence[str], words: Collection[str] = (), gap: int = 2
) -> Table:
    """Return an empty table of figures. Columns in ``words`` have text, which is not folded."""
    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,  # lines between columns would need 3 of the 80 characters each
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
    )
    for column in columns:
        if column in words:
            table.add_column(column, no_wrap=True)
        else:
            # A figure that is cut off would be wrong; one that is folded can still be read.
            table.add_column(column, justify="right", overflow="fold")
    return table


def timing_cells(seconds: Sequence[float]) -> tuple[str, str]:
    """Return median and spread of some times, as text."""
    timing = Timing(tuple(seconds))
    return milliseconds(timing.median), f"{timing.spread:.0%}"


def rate_cells(seconds: Sequence[float], nbytes: int) -> tuple[str, str, str]:
    """Return median, spread and bytes per second, as text; "" for a rate of 0 bytes."""
    rate = f"{bytes_text(int(nbytes / Timing(tuple(seconds)).median))}/s" if nbytes else ""
    return (*timing_cells(seconds), rate)
