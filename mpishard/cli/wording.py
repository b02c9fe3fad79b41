"""Text for people: counts, bytes and times in words; messages, and refusals with exit code 2."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

import typer

from mpishard.base import nearest, settings

# KB is decimal and KIB binary (IEC 80000-13). In upper case, because any case is accepted.
_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}

_NO_BREAK = "\N{NO-BREAK SPACE}"


def milliseconds(seconds: float) -> str:
    """Return a time as text, with as many digits as are meaningful; long ones in larger units."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 10:
        return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"
    return f"{seconds * 1e3:.{2 if seconds < 0.1 else 1}f} ms"


def counted(number: int, noun: str) -> str:
    """``1 layer``, ``2 layers``, ``3 batches``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}{'es' if noun.endswith('ch') else 's'}"


def bytes_text(nbytes: int | None) -> str:
    """Return a number of bytes as text: exact below 1 KiB, then in KiB, MiB or GiB."""
    # A figure that was not measured has an empty cell.
    if nbytes is None:
        return ""
    amount, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while amount >= 1024 and unit != "GiB":
        amount, unit = amount / 1024, next(units)
    return f"{amount:.4g} {unit}"


def parse_bytes(text: str) -> int:
    """Return the number of bytes that ``8B``, ``64KiB``, ``1.5MiB`` or ``5GB`` names, in any case.

    Raises
    ------
    ValueError
        For any other text, and for less than 1 byte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?", text.strip().upper())
    size = float(found[1]) * _UNITS.get(found[2] or "B", 0) if found is not None else 0.0
    if size < 1:
        raise ValueError(
            "a size is a number with B, KiB, MiB or GiB, or KB, MB or GB for powers of 1000, as "
            f"64KiB or 5GB; got {text!r}"
        )
    return int(size)


def wrapped(text: str, stream: IO[str]) -> str:
    """Return text with lines that end between words on a terminal, not in backticks."""
    if not stream.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    # A space in a command is no place to end a line: users copy commands.
    kept = re.sub(r"`[^`\n]*`", lambda found: found[0].replace(" ", _NO_BREAK), text)
    fit = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in kept.split("\n"):
        fit.subsequent_indent = " " * (len(line) - len(line.lstrip()))
        lines.append(fit.fill(line) if len(line) > columns else line)
    return "\n".join(lines).replace(_NO_BREAK, " ")


def echo(text: str, *, err: bool = False) -> None:
    """Print sentences, `wrapped`."""
    typer.echo(wrapped(text, sys.stderr if err else sys.stdout), err=err)


def say(command: str, message: object) -> None:
    """Print ``message`` of ``mpishard <command>`` to stderr, apart from its results on stdout."""
    echo(f"mpishard {command}: {message}", err=True)


def refuse(command: str, message: object, code: int = 2) -> NoReturn:
    """`say` ``message``, and end with exit code 2 or another.

    Raises
    ------
    typer.Exit
        Always.
    """
    say(command, message)
    raise typer.Exit(code) from None


def given_path(command: str, flag: str, text: str) -> Path:
    """Return the path of an option; refuse a blank one, whose `Path` is the working directory."""
    if not text.strip():
        refuse(command, f"{flag} must not be blank, as an unset variable of the shell makes it")
    return Path(text)


@contextmanager
def refusing(
    command: str,
    what: str = "",
    code: int = 2,
    errors: tuple[type[Exception], ...] = (OSError, ValueError),
) -> Iterator[None]:
    """Inside, `refuse` with ``what`` and the message of an exception of ``errors``.

    A closed pipe, as of ``| head``, is left to `typer`, which ends the command without a message.
    """
    try:
        yield
    # A subclass of OSError, which would be refused like the others.
    except BrokenPipeError:
        raise
    except errors as error:
        refuse(command, f"{what}{error}", code)


def check_start(command: str, advice: str, *, starts_ranks: bool = True) -> None:
    """Refuse MPISHARD_ variables that ranks refuse, and to start ranks in one of another job."""
    # Here, so that one line names the variable, and not a traceback of each rank.
    with refusing(command):
        settings.check()
    # An mpiexec that a rank starts would fail, or add its ranks to the job that runs.
    variable = settings.launcher_variable()
    if starts_ranks and variable is not None:
        refuse(command, f"this process is a rank already ({variable} is set): {advice}")


def choice(command: str, names: Iterable[str], help_text: str = "One of {}.") -> object:
    """Return an option that takes one of ``names``, in any case, or several if it is a list.

    The names stand for ``{}`` in ``help_text``.
    """
    # Not a Literal: the names come from tables of other rooms, any case is accepted, and the
    # refusal names the nearest one.
    known = list(names)

    def check(option: typer.CallbackParam, given: str | list[str] | None) -> str | list[str] | None:
        """Return what was given in lower case; refuse other names."""
        if given is None:
            return None
        chosen = [each.lower() for each in ([given] if isinstance(given, str) else given)]
        for each in chosen:
            if each not in known:
                text = f"must be one of {', '.join(known)}; got {each!r}{nearest(each, known)}"
                refuse(command, f"{option.opts[0]} {text}")
        return chosen[0] if isinstance(given, str) else chosen

    return typer.Option(help=help_text.format(", ".join(known)), callback=check)
