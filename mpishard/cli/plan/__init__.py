"""``mpishard plan``: the cost of a run, before it starts.

``schedule.py`` simulates pipeline schedules; ``memory.py`` prints the memory of each rank and host,
``step.py`` the time of a step, and ``mesh.py`` the fastest mesh that fits a memory; ``options.py``
has the options that these three share.
The table below has the function of each command.
"""

from __future__ import annotations

import typer

from mpishard.cli.plan.memory import memory
from mpishard.cli.plan.mesh import mesh
from mpishard.cli.plan.schedule import schedule
from mpishard.cli.plan.step import step

__all__ = ["plan"]

plan = typer.Typer(rich_markup_mode=None)
for command in (memory, step, mesh, schedule):
    plan.command()(command)
