"""The command line: ``mpishard run``, ``doctor``, ``verify``, ``plan``, ``bench`` and more.

Each command is a folder that begins with ``command.py``, or one module: ``run/`` starts a script
on N ranks and watches it, ``doctor/`` examines an installation, ``verify/`` compares sharded with
plain training, ``bench/`` measures, ``watch/`` shows a run on a page; ``plan.py`` simulates
pipeline schedules; ``checkpoint.py``, ``trace.py`` and ``plot.py`` read what a run has written.
This file has the table of commands. A command is imported when it is called, so that
``mpishard run`` does not wait for models.

Commands share ``tables.py``, ``wording.py`` (and refusals), ``probe.py`` (programs with a time
limit) and ``machine.py``. They may import those, ``run/``, and every other room of mpishard; they
do not import each other.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from mpishard.cli.machine import installed_version

__all__ = ["app", "main"]

_COMMANDS: dict[str, dict[str, Any]] = {
    "run": {"allow_extra_args": True, "allow_interspersed_args": False},
    "doctor": {},
    "verify": {},
    "plan": {},
    "bench": {},
    "checkpoint": {},
    "trace": {},
    "plot": {},
    "watch": {},
}
"""The commands, in the order of the help, and how each takes its arguments."""

_FOLDERS = {"run", "doctor", "verify", "bench", "watch"}
"""Commands that are folders; the others are modules."""


class _Commands(TyperGroup):
    """Imports a command when it is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = dict.fromkeys(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _COMMANDS and self.commands[cmd_name] is None:
            module = f"mpishard.cli.{cmd_name}"
            if cmd_name in _FOLDERS:
                module += ".command"
            found = getattr(importlib.import_module(module), cmd_name)
            holder = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
            if isinstance(found, typer.Typer):
                holder.add_typer(found, name=cmd_name)
            else:
                holder.command(cmd_name, context_settings=_COMMANDS[cmd_name])(found)
            self.commands[cmd_name] = get_group(holder).commands[cmd_name]
            _keep_summaries_whole(self.commands[cmd_name])
        return super().get_command(ctx, cmd_name)


def _keep_summaries_whole(command: Any) -> None:
    """Let lists of commands fold a summary: one that is not given would be cut to a line."""
    command.short_help = (command.help or "").partition("\n\n")[0].replace("\n", " ")
    for each in getattr(command, "commands", {}).values():
        _keep_summaries_whole(each)


app = typer.Typer(
    name="mpishard",
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the ``mpishard`` script."""
    app(prog_name="mpishard")


def _print_version(wanted: bool) -> None:
    if wanted:
        number = installed_version("mpishard")
        typer.echo(number or "mpishard runs from its source folder and is not installed")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Train NumPy and CuPy models, sharded over MPI ranks."""
