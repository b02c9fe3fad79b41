"""Traces, comparison of replicas, preemption and killed ranks, in loops of PyTorch."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpishard.errors import ReplicaError
from mpishard.observe import open_trace, summarize_trace, trace
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402
from mpishard.torch.sharded import module_of  # noqa: E402

RUNNING = """
import os, signal, sys, mpishard as ms, mpishard.torch as mst, torch
backend = mst.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 2)
alone = torch.get_rng_state()
model = mst.shard(model, "fsdp")
drawn = torch.rand(8)  # by rank 0 as by one process, and differently by the others
torch.set_rng_state(alone)
assert torch.equal(drawn, torch.rand(8)) == (mst.rank() == 0)
assert not torch.distributed.is_initialized()
optimizer = mst.optimizer(torch.optim.AdamW, model)
folder, fault = sys.argv[1], sys.argv[2]
done = mst.load(folder, model, optimizer)["step"] if os.path.exists(folder) else 0
mst.print(f"begins after {done}", flush=True)
with ms.callbacks.running([], backend, step=done) as hooks:
    for step in range(done + 1, done + 400):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8) / step).square().mean()
        loss.backward()
        optimizer.step()
        if step == done + 3 and mst.rank() == 1 and fault != "none":
            os.kill(os.getpid(), getattr(signal, fault))
        stops = hooks.step(loss)
        if hooks.saves:
            mst.save(folder, model, optimizer, step=step)
        if stops or (fault == "none" and step == done + 3):
            break
mst.print(f"ends after {step}")
"""


def job(script: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "mpishard", "run", "-n", "2", str(script), *arguments]
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=script.parent,
    )
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.spawned
@pytest.mark.timeout(240)
def test_a_preempted_job_saves_and_resumes(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(RUNNING)
    code, said = job(script, "saved", "SIGTERM")
    assert code == 75, said
    step = int(said.partition("preempted after step ")[2].split()[0])
    code, said = job(script, "saved", "none")
    assert (code, f"begins after {step}\n" in said) == (0, True), said
    assert f"ends after {step + 3}\n" in said


@pytest.mark.spawned
@pytest.mark.timeout(120)
def test_a_rank_that_is_killed_is_named_with_its_last_call(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(RUNNING)
    code, said = job(script, "saved", "SIGKILL")
    assert code == 128 + signal.SIGKILL, said
    assert "rank 1" in said
    assert f"{script}" in said.rpartition("SIGKILL")[2]  # and not a file of PyTorch
    assert "optimizer.step()" in said.rpartition("SIGKILL")[2]


@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@in_worlds(2)
def test_a_trace_has_steps_and_their_parts(backend, path, shared_path):
    mst.init()
    with trace(shared_path / "trace", backend):
        model = mst.shard(nets.make(nets.perceptron), "fsdp")
        optimizer = mst.optimizer(torch.optim.SGD, model, lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            nets.squared(model, *nets.mine(backend, nets.batch("mlp"))).backward()
            optimizer.step()
        copy.deepcopy(model)(nets.batch("mlp")[0])
    backend.barrier()
    found = summarize_trace(open_trace(shared_path / "trace"))
    assert [rank.steps for rank in found.ranks] == [3, 3]  # the first begins before it is known
    text = (shared_path / "trace" / f"rank_{backend.rank}.json").read_text()
    counts = [text.count(f'"{name}"') for name in ("forward", "backward", "update")]
    assert counts == [4, 4, 4]
    backend.barrier()


@in_worlds(3)
def test_replicas_are_compared(backend):
    mst.init()
    models = [mst.shard(nets.make(nets.perceptron), s) for s in ("ddp", "fsdp")]
    assert mst.check_replicas(*models) == 6  # of fsdp there is one copy
    if backend.rank == 1:
        module_of(models[0]).parts[3].tensor.data[2] += 1e-9
    with pytest.raises(ReplicaError, match=r"'2.bias' of rank 1 differs from that of ranks 0, 2"):
        mst.check_replicas(*models)
