"""What ``mpishard doctor`` finds: a fact of this environment, whether it is well, what mends it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Finding", "Verdict", "examined", "pip_install", "some"]


class Verdict(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    NOTE = "note"
    """It works, and could be better, or will surprise."""
    PROBLEM = "problem"
    """Something that this environment is made for does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Parameters
    ----------
    name : str
        ``group.fact``, lower case: stable between versions.
    verdict : Verdict
        How it is to be taken.
    text : str
        For people: what was found, and what it means.
    value : object, optional
        The same for programs: what JSON can hold.
    mend : str, optional
        The line that mends it, as it is typed into a shell; None where the verdict is ok.
    """

    name: str
    verdict: Verdict
    text: str
    value: Any = None
    mend: str | None = None

    @property
    def group(self) -> str:
        """What the report puts it under."""
        return self.name.partition(".")[0]


Look = Callable[[], Iterator[Finding]]


def examined(group: str, look: Look) -> Iterator[Finding]:
    """The findings of ``look``; where it raises, those until then and one that says so."""
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001 - a report on a broken machine must not break
        yield Finding(
            f"{group}.error",
            Verdict.NOTE,
            f"the rest could not be examined: {type(error).__name__}: {error}",
            type(error).__name__,
            "mpishard doctor --json > doctor.json  # to be sent with a report of this",
        )


def pip_install(*packages: str) -> str:
    """The line that installs ``packages`` for the Python that runs this."""
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join(packages)}"


def some(text: str, length: int = 200) -> str:
    """``text`` on one line, and no longer than a line of a report may be."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 3]}..."
