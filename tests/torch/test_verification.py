"""`mpishard verify` of a script: one rank and several make the same steps."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.cli.verify.comparison import Comparison, Recording, compare_steps

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402

MODELS = {**nets.MODELS, "fourier": (nets.fourier, nets.squared)}
SCRIPT = """
import sys, mpishard.torch as mst, torch
from torch import nn
mst.init()
torch.manual_seed(0)
x = torch.randn(40, 3)
model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
for _ in sys.argv[1:]:
    model = mst.convert_sync_batchnorm(model)
model = mst.shard(model, "fsdp", minimum_unit_size=1)
optimizer = mst.optimizer(torch.optim.AdamW, model, lr=1e-2)
data = torch.utils.data.TensorDataset(x, x[:, :1] ** 2)
while True:
    for inputs, targets in mst.DataLoader(data, 8, shuffle=True):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        mst.save("saved", model, optimizer)
"""


def train(backend: Any, name: str, strategy: str, fault: str = "") -> None:
    mst.init()
    factory, loss_of = MODELS[name]
    batch = nets.batch("mlp" if name == "fourier" else name)
    model = nets.make(factory)
    if name == "conv":
        model = mst.convert_sync_batchnorm(model)
    mst.shard(model, strategy, minimum_unit_size=8)
    optimizer = mst.optimizer(torch.optim.AdamW, model, lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, *nets.mine(backend, batch)).backward()
        parameter = list(model.parameters())[-1]
        if fault == "gradient" and step == 1 and backend.rank == 2:
            parameter.grad.to_local()[-1] += 1e-7
        if fault == "sum":
            optimizer.zero_grad()
            x, y = nets.mine(backend, batch)
            ((model(x) - y) ** 2).sum().backward()
        if fault == "none" and backend.world_size > 1:
            parameter.grad = None
        if fault == "rate" and step == 2:
            optimizer.param_groups[0]["lr"] *= backend.world_size
        optimizer.step()


def recorded(folder: Path, monkeypatch: Any, *arguments: str) -> list[Recording]:
    recordings = []
    for ranks in (1, 3):
        recording = Recording(folder / str(ranks), ranks)
        recording.folder.mkdir()
        monkeypatch.setenv("MPISHARD_VERIFY", f"9:{recording.folder}")
        ms.run_in_threads(ranks, train, *arguments)
        recordings.append(recording)
    assert [recording.steps for recording in recordings] == [3, 3]
    return recordings


def compared(recordings: list[Recording]) -> Comparison:
    return compare_steps(recordings[0], recordings[1], 1e-10)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("mlp", "ddp"), ("conv", "zero1"), ("gpt", "zero2"), ("encoder", "fsdp"),
        ("fourier", "ddp"), ("fourier", "fsdp"),
    ],
)  # fmt: skip
def test_all_parts_of_all_ranks_are_compared(name, strategy, tmp_path, monkeypatch):
    recordings = recorded(tmp_path, monkeypatch, name, strategy)
    found = compared(recordings)
    assert found.is_equal
    assert found.worst("gradients", "parameters") < 1e-13
    trained = {key for key, p in MODELS[name][0]().named_parameters() if p.requires_grad}
    assert {label for (label,) in found.labels} == trained
    for kind in ("gradients", "parameters"):
        seen = set()
        for step, rank in itertools.product((1, 2, 3), range(3)):
            path = recordings[1].folder / f"{kind}-{step}-{rank}.npz"
            right = path.read_bytes()
            with np.load(path) as parts:
                np.savez(path, **{key: parts[key] + 1 for key in parts})
            wrong = compared(recordings)
            path.write_bytes(right)
            errors = wrong.errors[kind] > 0.1
            assert (wrong.first_difference(), not wrong.is_equal) == ((step, kind), True)
            assert np.argwhere(errors.any(axis=2)).tolist() == [[rank, step]]
            seen |= set(np.flatnonzero(errors.any(axis=(0, 1))))
        assert len(seen) == len(trained)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("gradient", (2, "gradients")),
        ("none", (1, "gradients")),
        ("sum", (1, "gradients")),
        ("rate", (3, "parameters")),
    ],
)
def test_the_first_wrong_step_is_named(fault, expected, tmp_path, monkeypatch):
    strategy = "zero1" if fault == "gradient" else "ddp"
    found = compared(recorded(tmp_path, monkeypatch, "mlp", strategy, fault))
    assert found.first_difference() == expected
    assert found.lines()[0].startswith(f"step {expected[0]}, rank ")
    assert found.lines()[1].startswith("DIFFERENT: ")
    is_named = "the gradient is 1/3 of that of one rank, in every parameter" in found.lines()[0]
    assert is_named == (fault == "sum")


def test_updates_by_rounding_noise_are_left_out(tmp_path):
    """As Adam makes them of a bias that the loss does not see."""
    for ranks, noise in ((1, 1e-17), (2, -1e-17)):
        (tmp_path / str(ranks)).mkdir()
        for rank in range(ranks):
            part = {"0/bias/0/2": np.array([1.0, noise])}
            np.savez(tmp_path / f"{ranks}/gradients-1-{rank}.npz", **part)
            part = {"0/bias/0/2": np.array([0.5, 1e-3 * np.sign(noise)])}
            np.savez(tmp_path / f"{ranks}/parameters-1-{rank}.npz", **part)
    found = compared([Recording(tmp_path / "1", 1), Recording(tmp_path / "2", 2)])
    assert found.errors["parameters"].shape == (2, 2, 1)
    assert found.worst("gradients", "parameters") < 1e-16


@pytest.mark.spawned
@pytest.mark.timeout(150)
@pytest.mark.parametrize("arguments", [[], ["--", "synchronised"]])
def test_a_script_is_run_on_one_rank_and_on_several(arguments, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, "-m", "mpishard", "verify", "train.py", "--steps", "3", *arguments],
        cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=140, check=False,
    )  # fmt: skip
    said = ended.stdout + ended.stderr
    assert ended.returncode == (0 if arguments else 1), said
    if arguments:
        assert "EQUAL: 6 parameters and gradients on 2 ranks are within 1e-04 in 3 steps" in said
    else:
        assert "\nstep 1, rank 0: batch normalisation '1' uses each rank's own samples" in said
        assert "call mst.convert_sync_batchnorm(model) before" in said
        assert " of 6 parameters exceed 1e-04 in 3 steps (worst " in said
    assert not (tmp_path / "saved").exists()
