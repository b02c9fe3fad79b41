"""``mpishard plan``: the cost of a run, before it starts.

``schedule.py`` simulates pipeline schedules; ``memory.py`` prints the memory of each rank and host.
The table below has the function of each command.
"""

from __future__ import annotations

import typer

from mpishard.cli.plan.memory import memory
from mpishard.cli.plan.schedule import schedule

__all__ = ["plan"]

plan = typer.Typer(rich_markup_mode=None)
for command in (memory, schedule):
    plan.command()(command)
