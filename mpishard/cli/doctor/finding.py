"""A finding of ``mpishard doctor``, and how findings are shown to people and programs."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.console import Console
from rich.text import Text

from mpishard.base import settings
from mpishard.cli.wording import counted

_TITLES = {
    "host": "Python and this machine",
    "numpy": "NumPy and its libraries",
    "mpi": "MPI",
    "memory": "Shared memory",
    "gpu": "GPUs",
    "slurm": "SLURM",
    "job": "Two ranks that communicate",
    "hosts": "Several hosts",
}
_VERDICT, _LABEL = 9, 14
_INDENT = 2 + _VERDICT + _LABEL
_WIDEST = 100
_FIELDS = ("name", "verdict", "text", "value", "fix")


class Verdict(StrEnum):
    """Meaning of a finding for the user."""

    OK = "ok"
    NOTE = "note"
    """It works, but could be better, or may surprise the user."""
    PROBLEM = "problem"
    """A feature that this environment is made for does not work."""


_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Parameters
    ----------
    name : str
        ``group.fact`` in lower case. Names do not change between versions.
    text : str
        The fact and its meaning, for people.
    value : object, optional
        The same fact for programs, in a type that JSON has.
    fix : str, optional
        The shell command that fixes it; None if nothing needs to be done.
    is_problem : bool
        Whether the fact of a finding with a command is a problem and not a note.
    """

    name: str
    text: str
    value: object = None
    fix: str | None = None
    is_problem: bool = False

    @property
    def verdict(self) -> Verdict:
        """Meaning for the user. A finding without a command that helps is never a problem."""
        if self.fix is None:
            return Verdict.OK
        return Verdict.PROBLEM if self.is_problem else Verdict.NOTE


def examined(group: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield ``findings``. If an examination raises, the last one reports the exception."""
    try:
        yield from findings
    except Exception as error:  # noqa: BLE001 - a report on a broken machine must not break
        kind = type(error).__name__
        fix = "mpishard doctor --json > doctor.json  # to attach to a bug report"
        yield Finding(f"{group}.error", f"the rest cannot be examined: {kind}: {error}", kind, fix)


def pip_install(*packages: str) -> str:
    """Return the command that installs ``packages`` for the Python that runs this."""
    # Not pip alone, which on PATH may belong to another Python.
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.join(packages)}"


def shortened(text: str, length: int = 200) -> str:
    """Return ``text`` on one line of at most ``length`` characters."""
    # Libraries may give a page of text as the reason of one failure.
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 3]}..."


def show_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Print each finding as it comes, under its group, and the summary; return them all."""
    # rich would take brackets in a path for markup, and break commands that users copy.
    console = Console(highlight=False, markup=False, soft_wrap=True)
    # Longer lines are hard to read, however wide the terminal is.
    columns = max(min(settings.terminal_columns() or console.width, _WIDEST), _INDENT + 20)
    shown: list[Finding] = []
    last = ""
    for finding in findings:
        group, _, fact = finding.name.partition(".")
        if group != last:
            console.print(Text("\n" * bool(shown) + _TITLES[group], "bold"))
        last, label = group, fact.replace("_", " ")
        # Not a table of rich, which would break paths: users copy them.
        lines = textwrap.wrap(
            finding.text, columns - _INDENT, break_long_words=False, break_on_hyphens=False
        )
        verdict = (f"{finding.verdict:<{_VERDICT}}", _STYLES[finding.verdict])
        text = f"\n{' ' * _INDENT}".join(lines)
        console.print(Text.assemble("  ", verdict, f"{label:<{_LABEL}}", text))
        if finding.fix is not None:  # on one line, however long, for the same reason
            console.print(Text.assemble(" " * (2 + _VERDICT), ("fix: ", "bold"), finding.fix))
        shown.append(finding)
    console.print(f"\n{summary(shown)}")
    return shown


def summary(findings: Sequence[Finding]) -> str:
    """Return the numbers of problems and notes, and their names."""
    parts = []
    for verdict in (Verdict.PROBLEM, Verdict.NOTE):
        names = [finding.name for finding in findings if finding.verdict is verdict]
        named = f" ({', '.join(names)})" if names else ""
        parts.append(f"{counted(len(names), verdict.value)}{named}")
    return ", ".join(parts)


def as_json(findings: Sequence[Finding]) -> str:
    """Return the JSON object of ``schema``, ``problems``, ``notes`` and ``findings`` in order."""
    verdicts = [finding.verdict for finding in findings]
    report = {
        # Counted up if a field changes its meaning, so that a program can refuse the report.
        "schema": 2,
        "problems": verdicts.count(Verdict.PROBLEM),
        "notes": verdicts.count(Verdict.NOTE),
        "findings": [{name: getattr(each, name) for name in _FIELDS} for each in findings],
    }
    return json.dumps(report, indent=1)
