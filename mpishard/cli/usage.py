"""Refusals: a command's message, and exit code 2."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

import typer

from mpishard.arguments import nearest

__all__ = ["check_choice", "refuse"]


def refuse(command: str, message: object) -> NoReturn:
    """Print ``message`` as that of ``mpishard <command>``, and end with exit code 2.

    Raises
    ------
    typer.Exit
        Always.
    """
    typer.echo(f"mpishard {command}: {message}", err=True)
    raise typer.Exit(2)


def check_choice(command: str, flag: str, given: str, choices: Iterable[str]) -> None:
    """Refuse a value of ``flag`` that is not among ``choices``."""
    names = list(choices)
    if given not in names:
        refuse(
            command,
            f"{flag} must be one of {', '.join(names)}; got {given!r}{nearest(given, names)}",
        )
