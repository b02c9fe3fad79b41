"""Trainer, accelerate and Fabric: the programs of their page equal the libraries' own programs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainer-accelerate-fabric.md").read_text()

# What the page has -> what a program of one process has; "" if it has no such line.
CHANGES = {
    "import mpishard.torch as mst\n": "",
    r"mst\.init\(\)\n": "",
    r".*\.process_index = .*\n": "",
    r"torch.nn.utils.clip_grad_norm_ = .*\n": "",
    r"mst.save\(.*\n": "",
    r"mst\.shard\((.*)\)\n": r"\1\n",
    r"mst\.optimizer\((\S+), model, ": r"\1(model.parameters(), ",
    r"\[mst\.rank\(\).*\]": "",
    r"mst\.DataLoader": "torch.utils.data.DataLoader",
    r"mst\.clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
}
# For a comparison: float64, also in losses that call float(), one order of samples, no dropout.
EXACT = {
    "import torch\n": "import torch\ntorch.set_default_dtype(torch.float64)\n"
    "torch.Tensor.float = torch.Tensor.double\n",
    "shuffle=True": "shuffle=False",
    "report_to": 'disable_tqdm=True, train_sampling_strategy="sequential", report_to',
    "resid_pdrop=0.0": "resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0",
}
AT_END = """
torch.save(getattr(model, "module", model).state_dict(), "FILE")
"""
ON_RANKS = """
assert PROCESS == mst.rank()
whole = {n: v.clone() for n, v in getattr(model, "module", model).state_dict().items()}
if mst.rank() == 0:
    torch.save(whole, "FILE")
"""
PROCESS = {"transformers": "args.process_index", "accelerate": "accelerator.process_index"}


def program(library: str) -> str:
    """The page's program that imports a library."""
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [text for text in programs if f"from {library}" in text]
    return str(found)


def replaced(text: str, changes: dict[str, str], *, patterns: bool) -> str:
    for old, new in changes.items():
        text = re.sub(old, new, text) if patterns else text.replace(old, new)
    return text


def run(text: str, folder: Path, ranks: int, **variables: str) -> dict[str, torch.Tensor]:
    """Run a program on ranks (0: in one process without MPI), and return what it saved."""
    folder.mkdir()
    path = folder / "program.py"
    path.write_text(text.replace("FILE", str(folder / "model.pt")))
    launcher = [str(Path(sys.prefix) / "bin" / "mpiexec"), "-n", str(ranks)] if ranks else []
    if launcher and not Path(launcher[0]).exists():
        launcher[0] = "mpiexec"
    ended = subprocess.run(
        [*launcher, sys.executable, str(path)],
        cwd=folder, capture_output=True, text=True, timeout=240, check=False,
        stdin=subprocess.DEVNULL, env={**os.environ, **variables},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(torch.load(folder / "model.pt"))


@pytest.mark.spawned
@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", ["transformers", "accelerate", "lightning"])
def test_the_pages_program_equals_that_of_one_process(library: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed here; scripts/test_frameworks.sh installs it")
    page = program(library)
    own = replaced(page, CHANGES, patterns=True)
    assert "mst" not in own
    assert page.count("\n") - 1 - own.count("\n") <= 4, "without mst.save, at most 4 lines more"
    page, own = (replaced(text, EXACT, patterns=False) for text in (page, own))
    own = own.replace("per_device_train_batch_size=8", "per_device_train_batch_size=24")
    expected = run(own + AT_END, tmp_path / "alone", 0)
    ends = ON_RANKS.replace("PROCESS", PROCESS.get(library, "mst.rank()"))
    for ranks, variables in ((2, {}), (3, {"MPISHARD_ARENA": "off"})):
        text = page.replace(
            "per_device_train_batch_size=8", f"per_device_train_batch_size={24 // ranks}"
        )
        found = run(text + ends, tmp_path / str(ranks), ranks, **variables)
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values, rtol=0, atol=1e-12)
