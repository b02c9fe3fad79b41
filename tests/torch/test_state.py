"""State beside the arrays of a checkpoint: that of a module, an optimizer and a scheduler."""

from __future__ import annotations

import copy
import re
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpishard.errors import CheckpointError
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import mpishard as ms  # noqa: E402
import mpishard.torch as mst  # noqa: E402
from mpishard import adapters, checkpoint  # noqa: E402

nn = torch.nn
strategies = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])


class Scaled(nn.Module):
    """Divides by a running scale, whose state it saves in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        if self.training:
            self.scale *= 1.5
        return self.linear(x / self.scale.float())


class WithExtraState(Scaled):
    """It has the number of its calls and a table, which no buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.table = 0, np.zeros(2, np.float32)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.table = self.table + np.float32(0.1)
        return super().forward(x) / self.calls

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "table": self.table}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.table = state["calls"], state["table"]


class WithOwnNames(Scaled):
    """It saves the logarithm of its scale, under another name."""

    _version = 3

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "log_scale"] = self.scale.log()

    def _load_from_state_dict(
        self, state: Any, prefix: str, metadata: Any, strict: bool, *rest: Any
    ) -> None:
        assert metadata["version"] == 3
        self.scale = state[prefix + "log_scale"].exp()


class WithCopies(Scaled):
    """Its state dict holds copies, and None, which a buffer is, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("missing", None)

    def get_extra_state(self) -> Any:
        return None

    def set_extra_state(self, state: Any) -> None:
        assert state is None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "scale"] = self.scale.detach().clone()
        destination[prefix + "_extra_state"] = self.get_extra_state()


KINDS = [WithExtraState, WithOwnNames, WithCopies]


def start(module: Any, strategy: str = "fsdp", **options: Any) -> tuple[Any, Any, Any]:
    mst.init()
    torch.manual_seed(0)
    model = mst.shard(nn.Sequential(nn.Linear(4, 3), module()), strategy, minimum_unit_size=1)
    optimizer = mst.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def step(model: Any, optimizer: Any, scheduler: Any = None) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if scheduler is not None:
        scheduler.step()


def everything(model: Any, optimizer: Any, scheduler: Any = None) -> str:
    """All that a load may change, as text."""
    parts: list[Any] = [model.state_dict(), [b.tolist() for b in model.buffers()]]
    parts.append(optimizer.state_dict())
    if scheduler is not None:
        parts.append(scheduler.state_dict())
    with np.printoptions(precision=17):
        torch.set_printoptions(precision=17)
        return str(parts)


@pytest.mark.parametrize("kind", KINDS)
@strategies
@in_worlds(1, 2)
def test_a_module_gets_all_of_its_state_again(backend, shared_path, kind, strategy):
    expected = start(kind, strategy)
    step(*expected)
    mst.save(shared_path / "a", *expected)
    step(*expected)
    found = start(kind, strategy)
    mst.load(shared_path / "a", *found)
    step(*found)
    assert everything(*found) == everything(*expected)
    module = found[0][1]
    if kind is WithExtraState:
        assert module.calls == 2
        assert type(module.table) is np.ndarray
        assert module.table.dtype == np.float32


@in_worlds(2)
def test_rounded_parameters_and_state_of_a_module(backend, shared_path):
    mst.init()
    saved = mst.shard(WithExtraState(), precision="bfloat16")
    saved.calls = 5
    mst.save(shared_path / "a", saved)
    found = mst.shard(WithExtraState(), precision="bfloat16")
    mst.load(shared_path / "a", found)
    assert found.calls == 5


@in_worlds(1)
def test_an_adapter_saves_the_state_of_its_module(backend):
    def squared(output: Any, y: Any) -> Any:
        return ((output - y) ** 2).mean()

    saved, found = (adapters.TorchModel(WithExtraState(), squared) for _ in range(2))
    saved.module.calls = 5
    found.deserialize(saved.serialize())
    assert found.module.calls == 5


class NobodyReads(Scaled):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "log_scale"] = self.scale.log()


class NobodySets(Scaled):
    def get_extra_state(self) -> Any:
        return 5


class HasAnObject(WithExtraState):
    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "table": Path}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NobodyReads, r"NobodyReads saves '1\.log_scale' .* no _load_from_state_dict"),
        (NobodySets, r"NobodySets saves '1\._extra_state' .* no set_extra_state\(\)"),
        (HasAnObject, r"model\['state_dict'\]\['1\._extra_state'\]\['table'\] is .*Path"),
    ],
)
@in_worlds(1, 2)
def test_state_that_cannot_be_read_is_refused_at_save(backend, shared_path, kind, message):
    model, optimizer, _ = start(kind)
    with pytest.raises(TypeError, match=message):
        mst.save(shared_path / "a", model, optimizer)
    backend.barrier()
    assert not (shared_path / "a").exists()


@in_worlds(1, 2)
def test_settings_of_numpy_and_paths_are_the_same_after_a_load(backend, shared_path):
    model, optimizer, _ = start(Scaled)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + np.cos(s)))
    steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, np.array([2, 5]))
    given = {
        "rate": np.float32(0.1),
        "table": np.arange(6.0).reshape(2, 3)[:, ::-1],
        "path": Path("a/b"),
        "flag": np.True_,
        "nested": [({"x": np.int16(3)}, None), OrderedDict(a=1j), {4, 5}],
        "kind": torch.float64,
    }
    optimizer.param_groups[0].update(given, name=np.str_("c"))
    step(model, optimizer, scheduler)
    mst.save(shared_path / "a", model, optimizer, scheduler)
    mst.save(shared_path / "b", model, optimizer, steps)
    optimizer.param_groups[0]["name"] = "c"
    expected = everything(model, optimizer, scheduler)
    step(model, optimizer, scheduler)
    for name in given:
        del optimizer.param_groups[0][name]
    mst.load(shared_path / "b", model, optimizer, steps)
    assert steps.milestones == Counter([2, 5])
    mst.load(shared_path / "a", model, optimizer, scheduler)
    assert everything(model, optimizer, scheduler) == expected
    found = optimizer.param_groups[0]
    for name in ("rate", "path", "flag"):
        assert type(found[name]) is type(given[name])
    assert found["table"].dtype == np.float64
    step(model, optimizer, scheduler)


class Rate:
    """A function of the step, as an object with a state."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def __call__(self, step: int) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (lambda s: s, "a function"),
        (np.array(["a"]), r"a ndarray: array\(\['a'\]"),
        (np.datetime64("2020-01-01"), "a datetime64"),
        (np.ma.masked_array([1.0]), "a MaskedArray"),
        (range(3), r"a range: range\(0, 3\)"),
        (re.compile("a"), "a Pattern"),
    ],
)
@in_worlds(2)
def test_settings_that_no_load_can_read_are_refused_at_save(backend, shared_path, value, shown):
    model, optimizer, _ = start(Scaled)
    mst.save(shared_path / "a", model, optimizer, step=1)
    before = (shared_path / "a" / "manifest.json").read_bytes()
    optimizer.param_groups[0]["rule"] = value
    with pytest.raises(TypeError, match=rf"optimizer\['param_groups'\]\[0\]\['rule'\] is {shown}"):
        mst.save(shared_path / "a", model, optimizer)
    del optimizer.param_groups[0]["rule"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Rate([value]))
    where = r"scheduler\['lr_lambdas'\]\[0\]\['rule'\]\[0\]"
    with pytest.raises(TypeError, match=rf"{where} is {shown}"):
        mst.save(shared_path / "a", model, optimizer, scheduler)
    if not isinstance(value, np.ndarray):
        with pytest.raises(TypeError, match=rf"scheduler\['held'\] is {shown}"):
            mst.save(shared_path / "a", model, scheduler=Holder({value: 1}))
    backend.barrier()
    assert (shared_path / "a" / "manifest.json").read_bytes() == before


class Holder:
    """A scheduler of the user's."""

    def __init__(self, held: Any, fails: bool = False) -> None:
        self.held, self.fails = held, fails

    def state_dict(self) -> Any:
        return {"held": self.held}

    def load_state_dict(self, state: Any) -> None:
        self.held = "another"
        if self.fails:
            raise KeyError("another version")


class Refuses(WithExtraState):
    """A module that changes, and then raises."""

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state(state)
        self.scale = torch.zeros(2)
        self.new = 1
        raise RuntimeError("saved by another version")


class NamedSGD(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        raise RuntimeError("this SGD loads nothing")


NamedSGD.__name__ = "SGD"


def without_scale() -> Any:
    module = WithExtraState()
    del module.scale
    module.scale = torch.ones(1)
    return module


def longer_scale() -> Any:
    module = WithExtraState()
    module.scale = torch.ones(3, dtype=torch.float64)
    return module


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no scheduler", "it was saved without a scheduler"),
        ("its scheduler", r"Holder\.load_state_dict\(\) raised KeyError: 'another version'"),
        ("one scheduler", r"Holder\.load_state_dict\(\) raised KeyError: 'another version'"),
        ("other schedulers", r"SequentialLR\.load_state_dict\(\) raised .*lr_lambdas"),
        ("its module", r"Sequential\.load_state_dict\(\) raised .*saved by another version"),
        ("its groups", r"groups of \[4\] parameters, this one of \[1, 3\]"),
        ("its order", r"has '0\.weight' where this one has '1\.linear\.bias'"),
        ("its optimizer", r"SGD\.load_state_dict\(\) raised RuntimeError: this SGD loads nothing"),
        ("a shape", r"'1\.scale' of shape \(1,\), and this module has \(3,\)"),
        ("a name", r"'1\.scale' of shape \(1,\), and this module has none"),
    ],
)
@in_worlds(1, 2)
def test_a_load_that_fails_changes_nothing(backend, shared_path, fault, message):
    schedulers = torch.optim.lr_scheduler
    saved, optimizer, scheduler = start(WithExtraState)
    if fault == "other schedulers":
        chain = [scheduler, schedulers.StepLR(optimizer, 2)]
        scheduler = schedulers.SequentialLR(optimizer, chain, [2])
    step(saved, optimizer, scheduler)
    scheduler = None if fault == "no scheduler" else scheduler
    mst.save(shared_path / "a", saved, optimizer, scheduler)

    modules = {"its module": Refuses, "a shape": longer_scale, "a name": without_scale}
    model, optimizer, scheduler = start(modules.get(fault, WithExtraState))
    if fault in ("its scheduler", "one scheduler"):
        is_last = backend.rank == backend.world_size - 1
        scheduler = Holder(3, fails=is_last or fault == "its scheduler")
    if fault == "other schedulers":
        chain = [scheduler, schedulers.LambdaLR(optimizer, lambda s: 0.5)]
        scheduler = schedulers.SequentialLR(optimizer, chain, [2])
    if fault == "its groups":
        first, *others = model.parameters()
        groups = [{"params": [first]}, {"params": others}]
        optimizer = mst.optimizer(torch.optim.SGD, groups, lr=0.1, momentum=0.9)
    if fault == "its order":
        parameters = [*model.parameters()][::-1]
        optimizer = mst.optimizer(torch.optim.SGD, parameters, lr=0.1, momentum=0.9)
    if fault == "its optimizer":
        optimizer = mst.optimizer(NamedSGD, model, lr=0.1, momentum=0.9)
    step(model, optimizer)
    step(model, optimizer)
    before, attributes = everything(model, optimizer, scheduler), dict(vars(model[1]))
    with pytest.raises(CheckpointError, match=message):
        mst.load(shared_path / "a", model, optimizer, scheduler)
    assert everything(model, optimizer, scheduler) == before
    assert vars(model[1]) == attributes
    step(model, optimizer)


@in_worlds(1, 2)
def test_a_checkpoint_of_another_save_is_refused_and_changes_nothing(backend, shared_path):
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    other = adapters.TorchModel(copy.deepcopy(module), lambda output, y: output.mean())
    checkpoint.save(shared_path / "a", ms.DDPModel(other, ms.ShardingConfiguration(backend)))
    mst.init()
    model = mst.shard(module)
    with torch.no_grad():
        model[0].weight.fill_(3)
    with pytest.raises(CheckpointError, match=r"was not saved by mpishard\.torch\.save"):
        mst.load(shared_path / "a", model)
    assert (model[0].weight == 3).all()
