"""A finding of ``mpishard doctor``, and how findings are shown to people and programs."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.text import Text

from mpishard import settings
from mpishard.cli.wording import counted

__all__ = [
    "Finding", "Verdict", "as_json", "examined", "note", "ok", "pip_install", "problem",
    "shortened", "show_findings", "summary",
]  # fmt: skip

_TITLES = {
    "host": "Python and this machine",
    "numpy": "NumPy",
    "mpi": "MPI",
    "memory": "Shared memory",
    "gpu": "GPUs",
    "slurm": "SLURM",
    "job": "Two ranks that communicate",
    "packages": "Optional packages",
}
_VERDICT, _LABEL = 9, 14
_WIDEST = 100
_SCHEMA = 1


class Verdict(StrEnum):
    """Meaning of a finding for the user."""

    OK = "ok"
    NOTE = "note"
    """It works, and could be better, or will surprise."""
    PROBLEM = "problem"
    """Something that this environment is made for does not work."""


_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; made by `ok`, `note` and `problem`.

    Parameters
    ----------
    name : str
        ``group.fact``, lower case: stable between versions.
    verdict : Verdict
        Its meaning.
    text : str
        For people: what was found, and what it means.
    value : object, optional
        For programs: the same fact, as something that JSON can hold.
    mend : str, optional
        The shell command that fixes it; None if the verdict is ok.
    """

    name: str
    verdict: Verdict
    text: str
    value: Any = None
    mend: str | None = None

    @property
    def group(self) -> str:
        """The section of the report that it belongs to."""
        return self.name.partition(".")[0]


def ok(name: str, text: str, value: Any = None) -> Finding:
    """Return a finding that needs nothing to be done."""
    return Finding(name, Verdict.OK, text, value)


def note(name: str, text: str, value: Any, mend: str) -> Finding:
    """Return a finding of something that works and could be better."""
    return Finding(name, Verdict.NOTE, text, value, mend)


def problem(name: str, text: str, value: Any, mend: str) -> Finding:
    """Return a finding of something that does not work."""
    return Finding(name, Verdict.PROBLEM, text, value, mend)


def examined(group: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield the findings of ``look``; if it raises, those until then and one that says so."""
    try:
        yield from look()
    except Exception as error:  # noqa: BLE001 - a report on a broken machine must not break
        yield note(
            f"{group}.error",
            f"the rest could not be examined: {type(error).__name__}: {error}",
            type(error).__name__,
            "mpishard doctor --json > doctor.json  # to attach to a bug report",
        )


def pip_install(*packages: str) -> str:
    """Return the command that installs ``packages`` for the Python that runs this."""
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join(packages)}"


def shortened(text: str, length: int = 200) -> str:
    """Return ``text`` on one line of at most ``length`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 3]}..."


def show_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Print each finding as it comes, under its group, and the summary; return them all."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    columns = min(settings.terminal_columns() or console.width, _WIDEST)
    shown: list[Finding] = []
    for finding in findings:
        if not shown or shown[-1].group != finding.group:
            console.print(Text("\n" * bool(shown) + _TITLES[finding.group], "bold"))
        console.print(*_lines(finding, columns), sep="\n")
        shown.append(finding)
    console.print(f"\n{summary(shown)}")
    return shown


def _lines(finding: Finding, columns: int) -> list[Text]:
    label = finding.name.partition(".")[2].replace("_", " ")
    indent = 2 + _VERDICT + _LABEL
    # Paths are not broken, because users copy them. A table of rich would break them.
    wrapped = textwrap.wrap(
        finding.text, max(columns - indent, 20), break_long_words=False, break_on_hyphens=False
    ) or [""]
    verdict = (f"{finding.verdict.value:<{_VERDICT}}", _STYLES[finding.verdict])
    first = Text.assemble("  ", verdict, f"{label:<{_LABEL}}{wrapped[0]}")
    lines = [first, *(Text(" " * indent + line) for line in wrapped[1:])]
    if finding.mend is not None:
        # On one line, however long, for the same reason.
        lines.append(Text.assemble(" " * (2 + _VERDICT), ("mend: ", "bold"), finding.mend))
    return lines


def summary(findings: Sequence[Finding]) -> str:
    """Return the numbers of problems and notes, and their names."""
    parts = []
    for verdict in (Verdict.PROBLEM, Verdict.NOTE):
        names = [finding.name for finding in findings if finding.verdict is verdict]
        named = f" ({', '.join(names)})" if names else ""
        parts.append(f"{counted(len(names), verdict.value)}{named}")
    return ", ".join(parts)


def as_json(findings: Sequence[Finding]) -> str:
    """Return one object: ``schema``, ``problems``, ``notes``, and ``findings`` in order."""
    verdicts = [finding.verdict for finding in findings]
    report = {
        "schema": _SCHEMA,
        "problems": verdicts.count(Verdict.PROBLEM),
        "notes": verdicts.count(Verdict.NOTE),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=1)
