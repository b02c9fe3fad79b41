"""The JAX example: alone, and on processes."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax", reason="JAX is not installed here; pip install 'mpishard[jax]'")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_jax.py"


@pytest.mark.spawned
@pytest.mark.parametrize("launcher", [[], ["-m", "mpishard", "run", "-n", "2"]])
def test_a_loss_in_jax(launcher: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT)],
        cwd=tmp_path, capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    right = ended.stdout.split(f"{2 if launcher else 1} rank(s), fsdp: ")[1].split("%")[0]
    assert float(right) > 97
    assert "XLA has" not in ended.stderr
    assert (tmp_path / "runs" / "jax" / "manifest.json").is_file()
