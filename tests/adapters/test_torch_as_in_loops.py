"""The same module in a PyTorch loop and as a model: both give equal results and errors."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard.adapters import TorchModel
from mpishard.errors import ShardingError
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402
from mpishard.torch.sharded import module_of  # noqa: E402

nn = torch.nn
squared = nn.functional.mse_loss
RATE = 0.1

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])


class Loop:
    """A module in a loop, whose `step` trains on all samples."""

    def __init__(self, backend: Any, strategy: str, module: Any, **options: Any) -> None:
        mst.init()
        self.backend = backend
        self.module = mst.shard(module, strategy, minimum_unit_size=1, **options)

    def optimize(self, rule: Any) -> None:
        self.optimizer = mst.optimizer(rule, self.module)

    def step(self) -> None:
        x, y = (values.to(next(self.module.parameters()).dtype) for values in nets.batch("mlp"))
        self.optimizer.zero_grad()
        squared(self.module(x), y).backward()
        self.optimizer.step()

    def save(self, path: Any) -> None:
        mst.save(path, self.module)

    def load(self, path: Any) -> None:
        mst.load(path, self.module)


class Model:
    """The same as a model of mpishard."""

    def __init__(self, backend: Any, strategy: str, module: Any, **options: Any) -> None:
        self.config = ms.ShardingConfiguration(backend, minimum_parameter_group_size=1, **options)
        self.strategy = strategy
        self.model = ms.as_distributed(TorchModel(module, squared), self.config, strategy)
        self.module = module

    def optimize(self, rule: Any) -> None:
        self.optimizer = ms.as_distributed(rule, self.config, self.strategy)

    def step(self) -> None:
        x, y = (values.numpy().astype(self.model.dtype) for values in nets.batch("mlp"))
        self.optimizer.step(self.model, x, y)

    def save(self, path: Any) -> None:
        self.model.save_model(path)

    def load(self, path: Any) -> None:
        self.model.load_model(path)


by_house = pytest.mark.parametrize("house", [Loop, Model])


def start(
    house: Any, backend: Any, strategy: str, module: Any, rule: Any = None, **options: Any
) -> Any:
    made = house(backend, strategy, module, **options)
    made.optimize(rule or ms.optimizers.SGD(RATE, 0.9))
    return made


def partly_frozen(dtype: Any = None) -> Any:
    module = nets.make(nets.perceptron)
    module[2].requires_grad_(False).to(dtype or torch.float64)
    return module


def decay(module: Any) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.9)
            parameter.data[0] += 0.01


@by_path
@in_worlds(1, 2, 3)
def test_a_change_that_every_rank_makes_is_made_once(backend: Any, path: str) -> None:
    alone = partly_frozen()
    theirs = torch.optim.SGD([p for p in alone.parameters() if p.requires_grad], RATE, 0.9)
    everyone = [
        start(house, backend, strategy, partly_frozen())
        for house in (Loop, Model)
        for strategy in ("ddp", "zero1", "fsdp")
    ]
    for _ in range(3):
        theirs.zero_grad()
        squared(alone(nets.batch("mlp")[0]), nets.batch("mlp")[1]).backward()
        theirs.step()
        decay(alone)
        for made in everyone:
            made.step()
            decay(made.module)
    for made in everyone:
        assert nets.difference(made.module, alone.state_dict()) < 1e-13


@by_house
@in_worlds(2)
def test_changes_that_ranks_cannot_make_together_are_refused(backend: Any, house: Any) -> None:
    made = start(house, backend, "fsdp", nets.make(nets.perceptron))
    weight = made.module[2].weight
    with torch.no_grad():
        weight.normal_(generator=torch.Generator().manual_seed(backend.rank))
    everyone = backend.all_gather(weight.detach().numpy()[None])
    assert (everyone == everyone[0]).all()
    with torch.no_grad():
        torch._foreach_mul_([weight], 0.5)
    if weight._stored.store.once_per_node:
        with pytest.raises(ShardingError, match=r"parameter '2\.weight' was changed in place by"):
            made.step()


@by_house
@in_worlds(2)
def test_a_change_of_rounded_parameters_is_refused(backend: Any, house: Any) -> None:
    module = nets.make(nets.perceptron).float()
    made = start(house, backend, "fsdp", module, precision="bfloat16")
    with pytest.raises(ShardingError, match=r"mul_\(\) of parameter '0.weight' .* rounded copies"):
        decay(made.module)
    twin = copy.deepcopy(made.module)
    state = {name: values.clone() for name, values in made.module.state_dict().items()}
    with pytest.raises((ShardingError, RuntimeError), match="rounded copies"):
        made.module.load_state_dict({name: 2 * values for name, values in state.items()})
    assert nets.difference(made.module, state) == 0
    twin.load_state_dict({name: 2 * values for name, values in state.items()})
    assert torch.equal(twin[0].weight, 2 * state["0.weight"])


@by_house
@in_worlds(2)
def test_only_one_optimizer_and_one_wrapper_have_a_parameter(backend: Any, house: Any) -> None:
    made = start(house, backend, "fsdp", nets.make(nets.perceptron))
    with pytest.raises(ShardingError, match=r"SGD would update parameter '0.weight'"):
        torch.optim.SGD(made.module.parameters(), 0.1).step()
    for again in (mst.shard, lambda module: TorchModel(module, squared)):
        mst.init()
        with pytest.raises(ShardingError, match=r"parameter '0\.weight' is sharded already"):
            again(made.module)
    with pytest.raises(ShardingError, match="sharded already"):
        mst.convert_sync_batchnorm(made.module)
    twin = copy.deepcopy(made.module)
    assert {type(parameter) for parameter in twin.parameters()} == {nn.Parameter}
    made.step()


@in_worlds(2)
def test_a_released_module_is_plain_again(backend: Any) -> None:
    made = start(Model, backend, "fsdp", nets.make(nets.perceptron))
    made.step()
    made.model.release()
    assert {type(parameter) for parameter in made.module.parameters()} == {nn.Parameter}
    other = start(Loop, backend, "fsdp", made.module)
    other.step()


@by_house
@by_path
@in_worlds(2, 3)
def test_complex_parameters_train_as_in_one_process(backend: Any, path: str, house: Any) -> None:
    rules, theirs = ms.optimizers, torch.optim
    for strategy in ("ddp", "zero2", "fsdp"):
        for rule, kind, options in (
            (rules.SGD(RATE, 0.9), theirs.SGD, {"lr": RATE, "momentum": 0.9}),
            (rules.AdamW(1e-3, weight_decay=0.1), theirs.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
        ):
            made = start(house, backend, strategy, nets.make(nets.fourier), rule)
            alone = nets.make(nets.fourier)
            optimizer = kind(alone.parameters(), **options)
            for _ in range(3):
                made.step()
                optimizer.zero_grad()
                squared(alone(nets.batch("mlp")[0]), nets.batch("mlp")[1]).backward()
                optimizer.step()
            decay_of_complex_numbers(made.module)
            decay_of_complex_numbers(alone)
            assert nets.difference(made.module, alone.state_dict()) < 1e-12
            backend.barrier()
    if house is Model:
        with made.model.unsharded() as plain:
            vector = np.concatenate([[0.0], plain.get_parameters()])[1:]  # not aligned
            for one in (plain, plain.with_parameters(vector)):
                assert nets.difference(one.module, alone.state_dict()) < 1e-12
        waves = nn.Linear(2, 2)
        waves.register_forward_hook(lambda _module, _inputs, output: torch.fft.fft(output))
        with pytest.raises(TypeError, match=r"must return real .* torch\.complex64"):
            TorchModel(waves, squared).predict(np.ones((1, 2)))


def decay_of_complex_numbers(module: Any) -> None:
    with torch.no_grad():
        module[2].weight.mul_(0.9 + 0.1j)
        module[4].weight.data[0] += 0.01j


@by_house
@in_worlds(1)
def test_a_compiled_module_is_compiled_after_it_was_given(backend: Any, house: Any) -> None:
    with pytest.raises(TypeError, match=r"takes the module itself; .* or module\.compile\(\)"):
        house(backend, "fsdp", torch.compile(nn.Linear(5, 2), backend="eager"))
    made, same = (start(house, backend, "fsdp", nets.make(nets.perceptron)) for _ in range(2))
    made.module.compile(backend="eager")
    for one in (made, made, same, same):
        one.step()
    assert nets.difference(made.module, same.module.state_dict()) < 1e-13


@by_house
@by_strategy
@in_worlds(2)
def test_frozen_parameters_of_every_dtype_are_in_checkpoints(
    backend: Any, house: Any, strategy: str, shared_path: Any
) -> None:
    for dtype in (torch.float64, torch.float32):
        made, other = (start(house, backend, strategy, partly_frozen(dtype)) for _ in range(2))
        made.module[2].weight.data.fill_(3.0)
        made.save(shared_path / "frozen")
        other.load(shared_path / "frozen")
        assert nets.difference(other.module, made.module.state_dict()) == 0
        assert (other.module[2].weight == 3).all()


@in_worlds(2)
def test_a_model_loads_the_parameters_of_a_loop(backend: Any, shared_path: Any) -> None:
    loop, model = (start(house, backend, "fsdp", partly_frozen()) for house in (Loop, Model))
    loop.module[2].weight.data.fill_(3.0)
    loop.save(shared_path / "frozen")
    model.load(shared_path / "frozen")
    assert (model.module[2].weight == 3).all()


@by_house
@pytest.mark.parametrize("path", ["arena"], indirect=True)
@in_worlds(2)
def test_a_node_holds_frozen_parameters_once(backend: Any, path: str, house: Any) -> None:
    made = start(house, backend, "fsdp", partly_frozen())
    held = module_of(made.module).ledger if house is Loop else made.model.memory
    everyone = backend.all_gather(np.array([held.as_dict()["parameters"]]))
    assert everyone.sum() == 8 * sum(p.numel() for p in made.module.parameters())


@in_worlds(2)
def test_frozen_parameters_of_copies_are_frozen(backend: Any) -> None:
    made = start(Model, backend, "fsdp", partly_frozen())
    with made.model.unsharded() as plain:
        twins = [plain.module, made.model.deep_copy().wrapped_model.module]
    twins += [made.model.release().module, copy.deepcopy(made.module)]
    for module in twins:
        trained = [p.requires_grad for p in module.parameters()]
        assert trained == [True, True, False, False, True, True]


@in_worlds(2)
def test_a_parameter_that_is_frozen_later_is_left_out_meanwhile(backend: Any) -> None:
    """Weight decay and momentum do not change it, and its count of updates stays."""
    states = []
    for house in (Loop, Model):
        rule = ms.optimizers.AdamW(RATE, weight_decay=0.3)
        made = start(house, backend, "fsdp", nets.make(nets.perceptron), rule)
        frozen = made.module[2].weight
        for is_frozen in (False, True, True, False):
            made.module[2].requires_grad_(not is_frozen)
            before = frozen.detach().clone()
            made.step()
            assert torch.equal(frozen, before) == is_frozen
        states.append([p.detach().clone() for p in made.module.parameters()])
    for ours, theirs in zip(*states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
