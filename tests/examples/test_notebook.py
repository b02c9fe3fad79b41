"""examples/notebook.ipynb, cell by cell, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


def test_every_cell_runs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    program = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    program = program.replace("plot_loss_curve(None", "figure = plot_loss_curve(None")
    program += "\nassert figure._repr_png_().startswith(b'\\x89PNG')\n"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "rank 3 owns 1088 of 4353 parameters" in ended.stdout
    difference = ended.stdout.partition("difference of a prediction: ")[2].split()[0]
    assert float(difference) < 1e-12
    assert "raised here: bad sample" in ended.stdout


def test_no_outputs_are_committed() -> None:
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        assert not cell.get("outputs")
