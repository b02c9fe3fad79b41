"""Parameters and buffers are those of PyTorch's own DistributedDataParallel over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpishard import run_in_threads

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402

pytestmark = [pytest.mark.spawned, pytest.mark.timeout(180)]
WORLD_SIZE = 2

# Batch normalisation sees each rank's own samples, which no single process does.
THEIRS = """
import os, sys, torch, torch.distributed as dist, torch_nets as nets
rank = int(sys.argv[1])
dist.init_process_group("gloo", f"file://{sys.argv[2]}/store", rank=rank, world_size=2)
for name in nets.MODELS:
    factory, loss_of = nets.MODELS[name]
    model = torch.nn.parallel.DistributedDataParallel(nets.make(factory))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(20):
        loss = loss_of(model, *(values[rank::2] for values in nets.batch(name)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        torch.save(model.module.state_dict(), f"{sys.argv[2]}/{name}")
dist.barrier()
os._exit(0)
"""


def ours(backend: Any, strategy: str) -> dict[str, Any]:
    mst.init()
    found = {}
    for name, (factory, loss_of) in nets.MODELS.items():
        model = mst.shard(nets.make(factory), strategy, minimum_unit_size=1)
        optimizer = mst.optimizer(torch.optim.AdamW, model, lr=1e-3)
        data = nets.mine(backend, nets.batch(name))
        for _ in range(20):
            loss = loss_of(model, *data)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found[name] = {key: value.clone() for key, value in model.state_dict().items()}
        backend.barrier()
    return found


def test_twenty_steps_of_four_models(tmp_path: Path) -> None:
    helpers = str(Path(nets.__file__).parent)
    environment = os.environ | {"PYTHONPATH": helpers, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", THEIRS, str(rank), str(tmp_path)],
            env=environment,
            text=True,
            stderr=subprocess.PIPE,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = [rank.communicate(timeout=150)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    for strategy in ("ddp", "fsdp"):
        found = run_in_threads(WORLD_SIZE, lambda backend, s=strategy: ours(backend, s))[0]
        for name, state in found.items():
            expected = torch.load(tmp_path / name, weights_only=True)
            assert state.keys() == expected.keys()
            for key, value in state.items():
                assert torch.allclose(value, expected[key], rtol=0, atol=1e-12), (name, key)
