"""Program that each rank runs, from the words that the user typed."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

__all__ = ["python_arguments"]


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
