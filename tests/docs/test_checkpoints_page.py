"""The commands of docs/checkpoints.md do what the page says, on what its Python blocks leave."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mpishard as ms
from mpishard.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    first = re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert first is not None
    with contextlib.redirect_stdout(io.StringIO()):
        exec(first[1], {"__name__": "page"})
    commands = re.findall(r"^mpishard (checkpoint [^#\n]+)", text, re.MULTILINE)
    assert len(commands) == 12
    for command in commands:
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 0, f"{command}: {result.output}"
    wanted = ms.checkpoint.load_arrays("runs/mlp")
    for made in ("imported", "copy", "from-hf"):
        for name, array in ms.checkpoint.load_arrays(f"runs/{made}").items():
            assert array.tobytes() == wanted[name].tobytes()
    assert len(list(Path("hf").iterdir())) == 3
    newest = (Path("runs/mlp") / "latest").read_text().strip()
    file = next(Path("runs/mlp", newest).glob("rank*"))
    file.write_bytes(file.read_bytes()[:-1])
    assert CliRunner().invoke(app, ["checkpoint", "check", "runs/mlp", "--all"]).exit_code == 1
    assert CliRunner().invoke(app, ["checkpoint", "check", "nowhere"]).exit_code == 2
