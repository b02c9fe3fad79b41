"""The command line: ``mpishard run``, ``doctor``, ``verify``, ``plan``, ``bench`` and more.

Each command is a folder that begins with ``command.py``, or one module: ``run/`` starts a script on
N ranks and watches it, ``doctor/`` examines an installation, ``verify/`` compares sharded with
plain training, ``bench/`` measures, ``plan/`` plans a run; ``watch.py`` shows a run on a page,
``checkpoint.py``, ``trace.py`` and ``plot.py`` read the files of a run.
``resize`` is in ``run/``, whose jobs it changes. This file has the table of commands. A command is
imported when it is called, so that ``mpishard run`` does not wait for models.

Commands share ``wording.py`` (text, messages, refusals), ``tables.py``, ``outputs.py`` (files that
they write), ``factories.py`` (functions that a command line names), ``probe.py`` (programs with
a time limit) and ``machine.py``. They may import those,
``run/``, and every other room of mpishard; they do not import each other.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from mpishard.base import nearest, settings
from mpishard.cli.machine import installed_version
from mpishard.cli.wording import wrapped

__all__ = ["app", "main"]

_COMMANDS = {
    "run": ("run.command", "Run SCRIPT on N MPI ranks."),
    "doctor": ("doctor.command", "Examine this environment, and name commands that fix it."),
    "verify": (
        "verify.command",
        "Compare sharded training of FACTORY's model with training it in one process.",
    ),
    "plan": ("plan", "Plan a run before it starts: its memory, its time, its mesh, its schedule."),
    "bench": ("bench.command", "Measure collectives and training steps on these ranks."),
    "checkpoint": (
        "checkpoint", "Inspect checkpoints, check them, convert them for other programs."
    ),
    "resize": ("run.resizing", "Change the number of ranks of a running job to N."),
    "trace": ("trace", "Record each rank over time; merge the traces for Perfetto, sum them up."),
    "plot": ("plot", "Draw the losses of one run, or of several."),
    "watch": (
        "watch",
        "Show a run on a local page, live: losses, throughput, memory, and the state of each rank.",
    ),
}  # fmt: skip
"""The module and the summary of each command, in the order of the help."""


# What is meant by words of other tools, and by names of subcommands: of those that begin with a
# command, the first.
_MEANT = {
    "list": ("inspect FOLDER", "checkpoint inspect FOLDER"),
    "ls": ("inspect FOLDER", "checkpoint inspect FOLDER"),
    "show": ("inspect",),
    "verify": ("check",),
    "export": ("convert",),
    "inspect": ("checkpoint inspect",),
    "convert": ("checkpoint convert",),
    "memory": ("plan memory",),
    "train": ("run SCRIPT",),
    "launch": ("run SCRIPT",),
}


# Values of options that name none of their own; typer would write "<int range>" or "<str>".
_VALUES = {"int range": "N", "int": "N", "float": "X", "str": "NAME", "path": "FILE"}


class _Group(TyperGroup):
    """The commands of a command; an unknown one is refused with the names of all."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not args[0].startswith("-"):
            meant = [m for m in _MEANT.get(args[0], ()) if m.split(" ")[0] in self.commands]
            hint = f"; did you mean {meant[0]}?" if meant else ""
            text = f"there is no command {args[0]!r}; the commands of {ctx.info_name} are "
            text += f"{', '.join(self.commands)}{hint or nearest(args[0], self.commands)}"
            # typer puts "Error: " before it, which the lines have room for.
            ctx.fail(wrapped(f"Error: {text}", sys.stderr).removeprefix("Error: "))
        return super().resolve_command(ctx, args)


class _Commands(_Group):
    """Imports a command when it is called; the list of all needs none of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: dict[str, Any] = dict.fromkeys(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _COMMANDS and self.commands[cmd_name] is None:
            place, summary = _COMMANDS[cmd_name]
            found = getattr(importlib.import_module(f"mpishard.cli.{place}"), cmd_name)
            holder = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
            if isinstance(found, typer.Typer):
                holder.add_typer(
                    found, name=cmd_name, help=summary, no_args_is_help=True, cls=_Group
                )
            else:
                # The words after SCRIPT are its own, also those that look like options.
                is_run = cmd_name == "run"
                settings = {"allow_extra_args": is_run, "allow_interspersed_args": not is_run}
                holder.command(cmd_name, context_settings=settings)(found)
            self.commands[cmd_name] = get_group(holder).commands[cmd_name]
            leaves = getattr(self.commands[cmd_name], "commands", {"": self.commands[cmd_name]})
            for option in (each for leaf in leaves.values() for each in leaf.params):
                if not option.metavar and option.param_type_name == "option":
                    option.metavar = _VALUES.get(option.type.name)
            # A list of commands would cut a summary that is not given to one line.
            for each in getattr(self.commands[cmd_name], "commands", {}).values():
                each.short_help = (each.help or "").partition("\n\n")[0].replace("\n", " ")
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


app = typer.Typer(
    name="mpishard",
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    # Tracebacks in Python's own form, which users can search for and send.
    pretty_exceptions_enable=False,
    # Without rich's frames: users copy paths and commands from help and errors.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the ``mpishard`` script."""
    try:
        app(prog_name="mpishard")
    except BlockingIOError as error:  # of a new process
        fix = "raise the limit (`ulimit -u`), or end other programs"
        text = f"the system allows no more processes ({error}): {fix}"
        typer.echo(f"mpishard {sys.argv[1]}: {text}", err=True)
        raise SystemExit(settings.EXIT_FAILURE) from None


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
    """Train models in NumPy, autograd, JAX or PyTorch, sharded over MPI ranks."""
