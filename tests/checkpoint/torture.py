"""The proofs of checkpoints at their nightly figures: ``scripts/torture.sh checkpoint`` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TESTS = {
    "kills": "test_kills.py",
    "states": "test_crash_states.py",
    "mutations": "test_mutations.py",
    "disk": "test_disk_errors.py",
    "machine": "test_machine.py",
    "layouts": "test_layouts.py",
    "faults": "test_faults_in_saves.py",
}
"""The rows, and the tests that are their proof."""

console = Console()


def main(
    subject: Annotated[str, typer.Argument(help="What to torture: checkpoint.")],
    row: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(TESTS)}.")] = None,
    count: Annotated[int, typer.Option(help="Trials of a row; 0 is its nightly figure.")] = 0,
    seed: Annotated[int, typer.Option(help="Of all that is drawn.")] = 0,
) -> None:
    """Hurt saves in every way, and see that no checkpoint is torn and none is lost."""
    if subject != "checkpoint":
        raise typer.BadParameter(f"there is 'checkpoint', not {subject!r}", param_hint="SUBJECT")
    rows = row or [*TESTS]
    if unknown := set(rows) - TESTS.keys():
        raise typer.BadParameter(f"there are {[*TESTS]}, not {sorted(unknown)}", param_hint="--row")
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report"
        for name in rows:
            report.write_text("")
            order = json.dumps({"count": count, "seed": seed, "report": str(report)})
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
            done = subprocess.run(
                [*command, FOLDER / TESTS[name]],
                env=os.environ | {"MPISHARD_TEST_TORTURE": order, "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            failed += bool(done.returncode)
            if done.returncode:
                console.print(done.stdout + done.stderr, markup=False, highlight=False)
            console.print(f"{name}: {'FAILED' if done.returncode else 'passed'}", highlight=False)
            console.print(report.read_text(), end="", markup=False, highlight=False)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
