"""Checkpoints that earlier releases wrote of PyTorch modules give the same values today."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import checkpoint
from mpishard.adapters import TorchModel
from mpishard.errors import CheckpointError
from mpishard.sharding import ParameterEntry, Placement
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402

nn = torch.nn


class Net(nn.Module):
    """Its first layer is frozen, and so is a factor of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.first.requires_grad_(False)
        self.factor = nn.Parameter(torch.full((2,), 0.5), requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.last(self.norm(self.first(x)).tanh()) * self.factor.double()


def make(shift: int) -> Any:
    """A module whose trained parameters and buffers are others than those of another shift."""
    module = nets.make(Net)
    module.factor.data = torch.full((2,), 0.5)
    with torch.no_grad():
        for tensor in [*module.buffers(), *(p for p in module.parameters() if p.requires_grad)]:
            tensor.add_(shift)
    return module


def as_text(values: Any) -> str:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def write(
    path: Any, backend: Any, module: Any, rule: str, document: Any, *, with_frozen: bool
) -> None:
    """Write parameters, and the moments ``parameter ** 2`` and 2, of the trained ones."""
    entries, start = [], 0
    for name, p in module.named_parameters():
        if p.dtype == torch.float64 and (p.requires_grad or with_frozen):
            entries.append(ParameterEntry(name, tuple(p.shape), start, p.requires_grad))
            start += p.numel()
    flat = {e.name: module.get_parameter(e.name).detach().numpy().ravel() for e in entries}
    whole = Placement.whole(entries)
    is_first = backend.rank == 0
    arrays = {"parameters": whole.cut([(e.start, flat[e.name]) for e in entries if is_first])}
    for number, name in enumerate(("first_moment", "second_moment")):
        arrays[f"optimizer/{rule}/{name}"] = whole.cut(
            [
                (e.start, flat[e.name] ** 2 if number == 0 else np.full(e.size, 2.0))
                for e in entries
                if is_first and e.trainable
            ]
        )
    checkpoint.write_checkpoint(path, backend, entries, np.dtype(float), arrays, document)


def same(module: Any, other: Any) -> bool:
    mine, theirs = module.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def first_moments(made: Any, module: Any) -> bool:
    trained = [p for p in module.parameters() if p.requires_grad]
    return all(
        torch.equal(state["first_moment"], p.detach() ** 2)
        for state, p in zip(made.state_dict()["state"].values(), trained, strict=True)
    )


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(1, 2)
def test_a_model_with_buffers_and_frozen_parameters_loads(
    backend: Any, strategy: str, shared_path: Any, caplog: Any
) -> None:
    """Checkpoints had no frozen parameters: the module keeps its own."""
    saved = make(1)
    buffers = as_text(dict(saved.named_buffers()))
    steps = {"settings": ms.optimizers.AdamW(0.1).fingerprint(), "optimizer_steps": 5}
    model = {"strategy": "FSDP", "world_size": 2, "steps": 5, "choices": {"buffers": buffers}}
    document = {"model": model, "optimizer": steps, "user": {}}
    write(shared_path / "c", backend, saved, "AdamW", document, with_frozen=False)
    config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1)
    loaded = ms.as_distributed(TorchModel(make(0), nn.functional.mse_loss), config, strategy)
    optimizer = ms.as_distributed(ms.optimizers.AdamW(0.1), config, strategy)
    checkpoint.load(shared_path / "c", loaded, optimizer)
    assert same(loaded.wrapped_model.module, saved)
    assert optimizer.steps == 5
    assert backend.rank or "no frozen parameters; those of the model stay" in caplog.text
    plain = TorchModel(make(0), nn.functional.mse_loss)
    plain.load_model(shared_path / "c")
    assert same(plain.module, saved)


@in_worlds(1, 2)
def test_bytes_with_buffers_load(backend: Any) -> None:
    config = ms.ShardingConfiguration(backend)
    perceptron = nets.make(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    plain = TorchModel(perceptron, nn.functional.mse_loss)
    before = {name: tensor + 1 for name, tensor in perceptron.named_buffers()}
    plain.choices = lambda: {"buffers": as_text(before)}
    data = plain.serialize()
    del plain.choices
    model = ms.as_distributed(plain, config, "fsdp")
    model.deserialize(data)
    assert all(torch.equal(tensor, before[name]) for name, tensor in perceptron.named_buffers())


@pytest.mark.parametrize(("strategy", "is_oldest"), [("ddp", True), ("fsdp", False)])
@in_worlds(1, 2)
def test_the_state_of_a_loop_loads(
    backend: Any, strategy: str, is_oldest: bool, shared_path: Any
) -> None:
    mst.init()
    saved = make(1)
    trained = [n for n, p in saved.named_parameters() if p.requires_grad]
    group = {"lr": 0.25, "steps": 5, "numbers": {}, "initial_lr": 0.5, "params": trained}
    beside = {
        "buffers": {"factor": saved.factor.detach(), **dict(saved.named_buffers())},
        "optimizer": {
            "groups": [group],
            "rest": {name: {"first_moment": None, "second_moment": None} for name in trained},
        },
        "scheduler": {"last_epoch": 3, "_step_count": 4},
    }
    user = {"step": 5, "user": {"note": "kept"}}
    written_by = {"strategy": "fsdp", "world_size": 2}
    if is_oldest:
        user["torch"] = as_text(beside)
    else:
        parts = beside["optimizer"]
        beside["model"] = {"state_dict": beside.pop("buffers"), "versions": {}}
        beside["optimizer"] = {"param_groups": parts["groups"], "state": parts["rest"]}
        written_by["beside"] = as_text(beside)
    document = {"model": written_by, "optimizer": {}, "user": user}
    write(shared_path / "c", backend, saved, "mpishard.AdamW", document, with_frozen=True)
    model = mst.shard(make(0), strategy, minimum_unit_size=1)
    with torch.no_grad():
        model.factor.add_(1)
    made = mst.optimizer(ms.optimizers.AdamW(0.5), model)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
    assert mst.load(shared_path / "c", model, made, scheduler) == {"note": "kept", "step": 5}
    assert same(model, saved)
    assert first_moments(made, saved)
    assert (made.param_groups[0]["lr"], made.param_groups[0]["steps"]) == (0.25, 5)
    assert scheduler.last_epoch == 3


@in_worlds(1, 2)
def test_a_trained_parameter_that_is_missing_is_refused(backend: Any, shared_path: Any) -> None:
    saved = make(1)
    saved.last.requires_grad_(False)
    document = {"model": {}, "optimizer": {}, "user": {}}
    write(shared_path / "c", backend, saved, "AdamW", document, with_frozen=False)
    config = ms.ShardingConfiguration(backend)
    model = ms.as_distributed(TorchModel(make(0), nn.functional.mse_loss), config, "fsdp")
    before = model.gather_full_parameters()
    with pytest.raises(CheckpointError, match=r"last\.weight: \(2, 4\) in the model, not"):
        checkpoint.load(shared_path / "c", model)
    assert np.array_equal(model.gather_full_parameters(), before)
