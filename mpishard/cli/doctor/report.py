"""How ``mpishard doctor`` shows what it found: lines for people, one JSON object for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from mpishard import settings
from mpishard.cli.doctor.finding import Finding, Verdict
from mpishard.cli.wording import counted

__all__ = ["as_json", "show_findings", "summary"]

_TITLES = {
    "host": "Python and this machine",
    "numpy": "NumPy",
    "mpi": "MPI",
    "memory": "Shared memory",
    "gpu": "GPUs",
    "slurm": "SLURM",
    "job": "Two ranks that talk",
    "packages": "Optional packages",
}
_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}
_VERDICT, _LABEL = 9, 14
_WIDEST = 100
_SCHEMA = 1


def show_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Print each finding as it comes, under its group, and the summary; returns them all."""
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
    # Paths are left whole: they are copied.
    wrapped = textwrap.wrap(
        finding.text, max(columns - indent, 20), break_long_words=False, break_on_hyphens=False
    ) or [""]
    first = Text("  ")
    first.append(f"{finding.verdict.value:<{_VERDICT}}", _STYLES[finding.verdict])
    first.append(f"{label:<{_LABEL}}{wrapped[0]}")
    lines = [first, *(Text(" " * indent + line) for line in wrapped[1:])]
    if finding.mend is not None:
        # On one line, however long: it is copied too.
        lines.append(Text(" " * (2 + _VERDICT)).append("mend: ", "bold").append(finding.mend))
    return lines


def summary(findings: Sequence[Finding]) -> str:
    """How many problems and notes, and which."""
    parts = []
    for verdict in (Verdict.PROBLEM, Verdict.NOTE):
        names = [finding.name for finding in findings if finding.verdict is verdict]
        named = f" ({', '.join(names)})" if names else ""
        parts.append(f"{counted(len(names), verdict.value)}{named}")
    return ", ".join(parts)


def as_json(findings: Sequence[Finding]) -> str:
    """One object: ``schema``, ``problems``, ``notes``, and ``findings`` in order."""
    counts = [finding.verdict for finding in findings]
    report: dict[str, Any] = {
        "schema": _SCHEMA,
        "problems": counts.count(Verdict.PROBLEM),
        "notes": counts.count(Verdict.NOTE),
        "findings": [asdict(finding) for finding in findings],
    }
    return json.dumps(report, indent=1)
