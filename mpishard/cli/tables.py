"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from mpishard import settings
from mpishard.cli.wording import milliseconds

if TYPE_CHECKING:
    from mpishard.observe import Timing

__all__ = ["figures_table", "screen_width", "show", "timing_cells"]

_NARROWEST = 100


def screen_width() -> int:
    """Columns of the terminal at the other end; 100 where there is none, and at least."""
    console = Console()
    columns = settings.terminal_columns()
    width = columns or (console.width if console.is_terminal else _NARROWEST)
    return max(width, _NARROWEST)


def show(table: Table) -> None:
    """Print a table, as wide as the terminal at the other end."""
    Console(width=screen_width(), highlight=False).print(table)


def figures_table(title: str, columns: Sequence[str], words: Collection[str] = ()) -> Table:
    """A table of figures, as yet empty; columns among ``words`` hold text, which is never cut."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        is_text = column in words
        table.add_column(column, justify="left" if is_text else "right", no_wrap=is_text)
    return table


def timing_cells(timing: Timing) -> tuple[str, str]:
    """A median, and the spread around it."""
    return milliseconds(timing.median), f"{timing.spread:.0%}"
