"""Checkpoints of PyTorch loops, resumed with any number of ranks under any strategy."""

from __future__ import annotations

from typing import Any

import pytest

from mpishard import checkpoint, run_in_threads
from mpishard.errors import CheckpointError
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402


def run(backend: Any, strategy: str, steps: int, start: Any = None, end: Any = None) -> Any:
    """Some updates, from a checkpoint and to one."""
    mst.init()
    model = mst.convert_sync_batchnorm(nets.make(nets.convolutions))
    mst.shard(model, strategy, minimum_unit_size=1)
    optimizer = mst.optimizer(torch.optim.AdamW, model, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
    done = 0
    if start is not None:
        found = mst.load(start, model, optimizer, scheduler)
        assert found["note"] == "here"
        done = found["step"]
    data = nets.mine(backend, nets.batch("conv"))
    for _ in range(done, steps):
        optimizer.zero_grad()
        nets.squared(model, *data).backward()
        optimizer.step()
        scheduler.step()
    if end is not None:
        mst.save(end, model, optimizer, scheduler, step=steps, metadata={"note": "here"})
    return model.state_dict()


@pytest.mark.parametrize(("first", "then"), [("fsdp", "ddp"), ("ddp", "zero1"), ("zero2", "fsdp")])
@in_worlds(2, 3)
def test_a_run_goes_on_with_other_ranks_and_another_strategy(backend, shared_path, first, then):
    path = shared_path / "run"
    expected = run(backend, first, 7)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    run(backend, first, 4, end=path)
    found = run(backend, then, 7, start=path)
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-12), name
    # The names are PyTorch's, and mpishard's own tools read them.
    arrays = checkpoint.load_arrays(path)
    assert set(arrays) == {n for n, _ in nets.make(nets.convolutions).named_parameters()}


def test_a_checkpoint_of_three_ranks_is_loaded_by_one_and_by_four(tmp_path):
    path = tmp_path / "run"
    (expected, *_) = run_in_threads(3, lambda b: run(b, "fsdp", 4, end=path))
    for world_size in (1, 4):
        (found, *_) = run_in_threads(world_size, lambda b: run(b, "zero1", 4, start=path))
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@in_worlds(2)
def test_a_checkpoint_that_does_not_fit_is_refused_on_all_ranks(backend, shared_path):
    path = shared_path / "run"
    run(backend, "fsdp", 1, end=path)
    mst.init()
    other = mst.shard(nets.make(nets.perceptron), "fsdp")
    with pytest.raises(CheckpointError):
        mst.load(path, other)
    model = mst.shard(nets.make(nets.convolutions), "fsdp")
    with pytest.raises(CheckpointError, match="AdamW"):
        mst.load(path, model, mst.optimizer(torch.optim.SGD, model, lr=0.1))
    with pytest.raises(TypeError, match=r"mpishard\.torch\.optimizer"):
        mst.save(path, model, torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1))
    with pytest.raises(FileNotFoundError):
        mst.load(shared_path / "nothing", model)


@pytest.mark.parametrize(("together", "most"), [(1 << 26, 2), (1 << 10, 20)])
@in_worlds(2, 3)
def test_states_of_many_parameters_are_gathered_together(backend, monkeypatch, together, most):
    mst.init()
    monkeypatch.setattr("mpishard.torch.optimizer_state._TOGETHER", together)
    x = torch.ones(2, 3, dtype=torch.float64)
    states = []
    for shards in (True, False):
        model = torch.nn.Sequential(*[nets.make(lambda: torch.nn.Linear(3, 3)) for _ in range(60)])
        model = mst.shard(model, "zero1", minimum_unit_size=50) if shards else model
        make = mst.optimizer if shards else lambda kind, one: kind(one.parameters())
        optimizer = make(torch.optim.Adam, model)
        model(x).sum().backward()
        optimizer.step()
        backend.traffic.reset()
        states.append(optimizer.state_dict()["state"])
        if shards:
            assert backend.traffic.calls["all_gather"] <= most  # 240 states; 0 in shared memory
    for ours, theirs in zip(*(state.values() for state in states), strict=True):
        for key, value in theirs.items():
            torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-12)
