"""The words of the user: machines of ``--hosts``, and the program that each rank runs."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

__all__ = ["Host", "parse_hosts", "python_arguments"]

_LABEL = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
_HOST_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
_LONGEST_NAME = 253


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that takes up to ``slots`` ranks, before the next one is filled."""

    name: str
    slots: int


def parse_hosts(text: str, world_size: int) -> list[Host]:
    """Return the machines of ``a,b:slots``; those without a number share the rest evenly.

    Raises
    ------
    ValueError
        If a name or number is wrong, or the ranks do not fit the machines.
    """
    if not text:
        return []
    entries = [entry.strip().partition(":") for entry in text.split(",")]
    if any(not name for name, _, _ in entries):
        raise ValueError(f"--hosts has an empty name: {text!r}")
    if len(entries) > world_size:
        raise ValueError(f"--hosts names {len(entries)} machines for {world_size} ranks")
    for name, colon, number in entries:
        if not _HOST_NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
            raise ValueError(
                f"--hosts takes names or addresses of machines: labels of 1 to 63 letters, digits, "
                f"- and _ with dots between them, {_LONGEST_NAME} characters at most, the first "
                f"no -; got {name!r}"
            )
        if colon and not (number.isdecimal() and int(number)):
            raise ValueError(
                f"--hosts takes NAME or NAME:SLOTS, with 1 slot or more; got {name}:{number}"
            )
    given = sum(int(number) for _, _, number in entries if number)
    rest = [name for name, _, number in entries if not number]
    if given + len(rest) > world_size and rest:
        raise ValueError(
            f"--hosts {text} leaves no rank of {world_size} for {', '.join(rest)}: "
            f"the others take {given}"
        )
    if given < world_size and not rest:
        raise ValueError(f"--hosts {text} has {given} slots for {world_size} ranks")
    share = -(-(world_size - given) // len(rest)) if rest else 0
    return [Host(name, int(number) if number else share) for name, _, number in entries]


def slots_are_even(hosts: Sequence[Host]) -> bool:
    """True if all machines take the same number of ranks."""
    return len({host.slots for host in hosts}) == 1


def python_arguments(words: Sequence[str], is_module: bool = False) -> list[str]:
    """Return the arguments with which Python runs a script or module, as the user means it.

    A leading ``python`` is left out, and a folder is run if it has a ``__main__.py``.

    Parameters
    ----------
    words : sequence of str
        A script or the name of a module, and its arguments.
    is_module : bool
        Whether the first word names a module.

    Raises
    ------
    ValueError
        If there is no such script or module, naming one that is spelled alike.
    """
    script, *arguments = words
    path = Path(script)
    if is_module:
        name = script.partition(".")[0]
        # Only looked for, because importing it could start anything. Python adds this folder.
        if not (find_spec(name) or PathFinder.find_spec(name, [str(Path.cwd())])):
            raise ValueError(f"-m {script}: there is no module {name}, here or on Python's path")
        return ["-m", script, *arguments]
    if re.fullmatch(r"python[\d.]*", path.name) and not path.is_dir():
        if path.parent != Path() and path.parent.absolute() != Path(sys.executable).parent:
            raise ValueError(
                f"ranks run in {sys.executable}, not in {script}: leave it out, or start "
                f"`{script} -m mpishard run`"
            )
        if not arguments:
            raise ValueError(f"there is no script after {script}")
        return arguments if arguments[0].startswith("-") else python_arguments(arguments)
    if path.is_dir() and not (path / "__main__.py").is_file():
        scripts = sorted(path.glob("*.py"))
        raise ValueError(f"{script} is a folder without __main__.py{_did_you_mean(scripts[:3])}")
    if not (path.is_file() or path.is_dir()):
        folder = path.parent if path.parent.is_dir() else Path()
        found = {each.name: each for each in folder.glob("*.py")}
        alike = difflib.get_close_matches(path.name, found, 1)
        raise ValueError(f"there is no script {script}{_did_you_mean([found[n] for n in alike])}")
    return list(words)


def _did_you_mean(paths: Sequence[Path]) -> str:
    return f"; did you mean {' or '.join(map(str, paths))}?" if paths else ""
