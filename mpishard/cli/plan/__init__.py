"""``mpishard plan``: the cost of a run, before it starts.

``schedule.py`` simulates pipeline schedules; ``memory.py`` prints the memory of each rank and host;
``step.py`` the time of a step.
A command is a function here in the table below.
"""

from __future__ import annotations

import typer

from mpishard.cli.plan.schedule import schedule
from mpishard.cli.plan.step import step

__all__ = ["plan"]

plan = typer.Typer(rich_markup_mode=None)


@plan.callback()
def _group() -> None:
    """Make each a command of a group."""


plan.command()(schedule)
plan.command()(step)
