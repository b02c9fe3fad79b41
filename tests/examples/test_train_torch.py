"""The PyTorch examples, small: alone, and on processes."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'")

SCRIPT = Path(__file__).parents[2] / "examples" / "train_torch.py"

pytestmark = [pytest.mark.spawned, pytest.mark.timeout(180)]


@pytest.mark.parametrize("launcher", [[], ["-m", "mpishard", "run", "-n", "2"]])
def test_trains_and_saves(launcher: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), "12"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (last,) = [line for line in ended.stdout.splitlines() if "nats per byte" in line]
    assert last.startswith(f"{2 if launcher else 1} rank(s)")
    assert float(last.split("validation loss ")[1].split()[0]) < 4  # the first is log 256 = 5.5
    assert (tmp_path / "runs" / "torch" / "latest").read_text() == "step-00000012\n"


@pytest.mark.parametrize("launcher", [[], ["-m", "mpishard", "run", "-n", "2"]])
def test_a_loop_with_two_more_lines(launcher: list[str], tmp_path: Path) -> None:
    script = SCRIPT.with_name("train_torch_loop.py")
    ended = subprocess.run(
        [sys.executable, *launcher, str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert f"{2 if launcher else 1} rank(s), fsdp: 100.0% of the points" in ended.stdout
    assert (tmp_path / "runs" / "torch_loop" / "manifest.json").is_file()
