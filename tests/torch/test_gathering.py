"""FSDP on ranks that share no memory, or are on several nodes: units are gathered and freed."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import pytest

from mpishard import run_in_threads
from mpishard.errors import CollectiveMismatchError, PeerError, ShardingError
from mpishard.observe.ledger import MemoryCategory
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import mpishard.torch as mst  # noqa: E402
from mpishard.torch.sharded import module_of  # noqa: E402

nn = torch.nn
SIDE, DEPTH = 30, 6
UNIT = 8 * (SIDE * SIDE + SIDE)

by_path = pytest.mark.parametrize("path", ["messages", "two nodes"], indirect=True)
messages = pytest.mark.parametrize("path", ["messages"], indirect=True)


def tower() -> Any:
    return nn.Sequential(*[nn.Linear(SIDE, SIDE) for _ in range(DEPTH)])


class Careless(nn.Module):
    """Uses parameters without calling modules, by views, frozen, twice, and many at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)

    def forward(self, x: Any) -> Any:
        one, two = self.first.weight.t(), self.second.weight.T
        x = self.frozen(torch.tanh(x @ one @ two + self.second.bias)) @ self.matrix[:, :6]
        x = self.recurrent(torch.tanh(x)[:, None])[0][:, 0]
        x = x + torch.stack([self.matrix[0], self.second.bias, self.first.bias]).sum(0)
        half = self.third.weight.chunk(2)
        return torch.cat([x @ part.t() for part in half], 1) + 0.1 * (x @ self.matrix)[:, :2]


def train(model: Any, optimizer: Any, data: Any, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nets.squared(model, *data).backward()
        optimizer.step()


@by_path
@in_worlds(4)
def test_a_rank_holds_its_shard_and_two_units(backend, path):
    mst.init()
    model = mst.shard(nets.make(tower), "fsdp", minimum_unit_size=1)
    ledger = module_of(model).ledger
    optimizer = mst.optimizer(torch.optim.SGD, model, lr=0.1)

    def held(category: MemoryCategory) -> int:
        return ledger.held(category)

    assert held(MemoryCategory.GATHERED) == 0
    ledger.reset_peaks()
    for _ in range(2):
        output = model(torch.ones(2, SIDE, dtype=torch.float64))
        assert held(MemoryCategory.GATHERED) == 2 * UNIT
        output.sum().backward()
        assert held(MemoryCategory.GATHERED) == 0
        optimizer.step()
    assert ledger.peak(MemoryCategory.GATHERED) == 2 * UNIT
    assert abs(held(MemoryCategory.PARAMETERS) - DEPTH * UNIT // 4) <= 8 * DEPTH
    assert abs(held(MemoryCategory.GRADIENTS) - DEPTH * UNIT // 4) <= 8 * DEPTH
    # In this order a step gathers each unit twice, but for the two that backward begins with.
    own = module_of(model).backend
    sent = own._sequence
    model(torch.ones(2, SIDE, dtype=torch.float64)).sum().backward()
    gathers, reductions, flags = 2 * DEPTH - 2, DEPTH, 1
    assert own._sequence - sent == gathers + reductions + flags


@by_path
@in_worlds(2, 3)
def test_the_next_unit_is_gathered_while_this_one_computes(backend, path):
    mst.init()
    model = mst.shard(nets.make(tower), "fsdp", minimum_unit_size=1)
    gathered = module_of(model).gathered
    x = torch.ones(2, SIDE, dtype=torch.float64, requires_grad=True)
    coming = []

    def note(*_: Any) -> None:
        coming.append(gathered._coming[0] if gathered._coming else None)

    for layer in model:
        layer.register_forward_hook(note)
        layer.register_full_backward_hook(note)
    for _ in range(4):
        model(x).sum().backward()
    # The second step learns that the first of backward are still here.
    assert coming[: 2 * DEPTH] == [None] * (2 * DEPTH)
    forward, backward = [1, 2, 3, 4, 5, None], [None, None, 2, 1, 0, None]
    assert coming[4 * DEPTH :] == 2 * (forward + backward)
    assert not model.state_dict()["0.weight"].requires_grad
    assert gathered._coming is None


@messages
@in_worlds(2)
def test_memory_that_is_being_gathered_outlives_the_model(backend, path):
    mst.init()
    model = mst.shard(nets.make(tower), "fsdp", minimum_unit_size=1)
    x = torch.ones(2, SIDE, dtype=torch.float64)
    model(x).sum().backward()

    def fail(*_: Any) -> None:
        raise KeyError

    model[2].register_forward_hook(fail)
    with pytest.raises(KeyError):
        model(x)
    gathered = module_of(model).gathered
    unit, full, *_ = gathered._coming
    storage = gathered.tensor(unit).untyped_storage()._weak_ref()
    model_is_gone = weakref.ref(model)
    del model, gathered
    with nets.making:
        gc.collect()
    assert model_is_gone() is None
    assert not torch.UntypedStorage._expired(storage)
    del full
    torch.UntypedStorage._free_weak_ref(storage)
    backend.barrier()


@by_path
@in_worlds(2, 3)
def test_parameters_may_be_used_in_any_way(backend, path):
    mst.init()
    made = []
    for is_ours in (True, False):
        model = nets.make(Careless)
        if is_ours:
            mst.shard(model, "fsdp", minimum_unit_size=1)
            optimizer = mst.optimizer(torch.optim.Adam, model, lr=1e-2)
        else:
            optimizer = torch.optim.Adam(
                [p for p in model.parameters() if p.requires_grad], lr=1e-2
            )
        data = nets.batch("mlp")
        train(model, optimizer, nets.mine(backend, data) if is_ours else data)
        made.append(model)
    assert nets.difference(made[0], made[1].state_dict()) < 1e-12


@messages
@pytest.mark.parametrize("is_reentrant", [False, True])
@in_worlds(2)
def test_checkpointed_segments_gather_again(backend, path, is_reentrant):
    mst.init()
    model, alone = (
        mst.shard(nets.make(nets.perceptron), "fsdp", minimum_unit_size=1),
        nets.make(nets.perceptron),
    )
    x, y = nets.batch("mlp")
    for one, data in ((model, nets.mine(backend, (x, y))), (alone, (x, y))):
        inputs = data[0].clone().requires_grad_()
        output = checkpoint(one, inputs, use_reentrant=is_reentrant)
        nn.functional.mse_loss(output, data[1]).backward()
    norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 1.0))
    assert abs(float(mst.clip_grad_norm_(model, 1.0)) - norm) < 1e-14


@messages
@in_worlds(3)
def test_changes_that_every_rank_makes_are_kept(backend, path, shared_path):
    mst.init()
    expected = nets.make(nets.perceptron)
    model = mst.shard(nets.make(nets.perceptron), "fsdp", minimum_unit_size=1)
    optimizer = mst.optimizer(torch.optim.SGD, model, lr=0.1)
    for one in (model, expected):
        for p in one.parameters():
            p.data.mul_(2)
        with torch.no_grad():
            nn.init.constant_(one[0].bias, 0.25)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    mst.save(shared_path / "run", model, optimizer)
    train(expected, plain, nets.batch("mlp"))
    for _ in range(2):
        train(model, optimizer, nets.mine(backend, nets.batch("mlp")))
        state = model.state_dict()
        assert all(type(tensor) is torch.Tensor for tensor in state.values())
        assert nets.difference(model, expected.state_dict()) < 1e-13
        model(nets.batch("mlp")[0])  # gathers what load must replace
        mst.load(shared_path / "run", model, optimizer)
    for p in model.parameters():
        p.data.zero_()
    model.load_state_dict(state)
    assert nets.difference(model, expected.state_dict()) < 1e-13


@messages
@in_worlds(2)
def test_autocast_and_evaluation(backend, path):
    mst.init()
    model = mst.shard(nets.make(nets.perceptron).float(), "fsdp", minimum_unit_size=1)
    alone = nets.make(nets.perceptron).float()
    x, y = (values.float() for values in nets.batch("mlp"))
    for one in (model, alone):
        with torch.autocast("cpu", torch.bfloat16):
            nn.functional.mse_loss(one(x).float(), y).backward()
    theirs = nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    assert torch.allclose(mst.clip_grad_norm_(model, 1.0), theirs, rtol=1e-5)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), alone.eval()(x))


@messages
@in_worlds(2)
def test_the_compiler_is_refused(backend, path):
    mst.init()
    model = mst.shard(nets.make(nets.perceptron), "fsdp")
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(Exception, match=r'strategy="zero2"'):
        compiled(nets.batch("mlp")[0])


@messages
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@in_worlds(2)
def test_modules_of_torch_jit_are_refused(backend, path):
    mst.init()
    with nets.making:
        model = nn.Sequential(torch.jit.script(nn.Linear(5, 4)), nn.Linear(4, 2))
    with pytest.raises(ShardingError, match=r'torch\.jit needs .* strategy="zero2"'):
        mst.shard(model, "fsdp")
    assert type(model[1].weight) is nn.Parameter
    mst.shard(model, "zero2")


@messages
def test_a_rank_that_uses_parameters_alone_is_named(path):
    def body(backend: Any) -> None:
        mst.init()
        model = mst.shard(nets.make(nets.perceptron), "fsdp")
        if backend.rank == 1:
            model[0].weight.sum()
        backend.barrier()

    with pytest.raises((CollectiveMismatchError, PeerError), match="an operation on a parameter"):
        run_in_threads(2, body)


@messages
@in_worlds(2, 3)
def test_branches_of_the_same_size_are_not_mixed(backend, path):
    mst.init()
    model = mst.shard(nets.make(nets.Branches), "fsdp", minimum_unit_size=1)
    x, _ = nets.batch("mlp")
    with pytest.raises(CollectiveMismatchError, match="let ranks take branches of their own") as e:
        model(x, left=backend.rank == 0)
    for rank, name in (0, "left"), (1, "right"):
        assert re.search(
            rf"rank {rank}: .* of unit \d \({name}\.weight\) of Branches", str(e.value)
        )
