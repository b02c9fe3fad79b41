"""Backward passes that raise, and how a loop may continue."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest

from mpishard import run_in_threads
from mpishard.errors import CollectiveMismatchError, PeerError, ShardingError
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402

nn = torch.nn
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
by_path = pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)


class Fragile(torch.autograd.Function):
    """The identity, whose backward raises if asked to."""

    @staticmethod
    def forward(context: Any, x: Any, raises: bool) -> Any:
        context.raises = raises
        return x.clone()

    @staticmethod
    def backward(context: Any, dy: Any) -> Any:
        if context.raises:
            raise ArithmeticError("this batch cannot be used")
        return dy, None


class Net(nn.Module):
    """Backward raises after the gradients of the last ``behind`` layers."""

    def __init__(self, behind: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(4)])
        self.behind = behind

    def forward(self, x: Any, raises: bool = False) -> Any:
        for index, layer in enumerate(self.layers):
            if index == 4 - self.behind:
                x = Fragile.apply(x, raises)
            x = layer(x).tanh()
        return x


def loss_of(model: Any, x: Any, raises: bool = False) -> Any:
    return (model(x, raises) ** 2).mean()


def start(strategy: str, behind: int = 2) -> tuple[Any, Any]:
    mst.init()
    model = mst.shard(nets.make(functools.partial(Net, behind)), strategy, minimum_unit_size=1)
    return model, mst.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9)


@by_path
@by_strategy
@in_worlds(1, 2, 3)
def test_the_loop_goes_on_if_every_rank_leaves_the_batch_out(backend, path, strategy):
    model, optimizer = start(strategy)
    expected = nets.make(Net)
    theirs = SGD(expected.parameters())
    x, _ = nets.batch("mlp")
    for m, o, data in ((model, optimizer, nets.mine(backend, (x,))[0]), (expected, theirs, x)):
        for step in range(6):
            o.zero_grad()
            try:
                loss_of(m, data + step, raises=step in (0, 2, 3)).backward()
            except ArithmeticError:
                continue
            o.step()
    assert nets.difference(model, expected.state_dict()) < 1e-13


@by_strategy
@in_worlds(2)
def test_a_part_of_a_gradient_is_not_used(backend, strategy):
    model, optimizer = start(strategy)
    x = nets.mine(backend, nets.batch("mlp"))[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss_of(model, x).backward()
    with pytest.raises(ArithmeticError):
        loss_of(model, x, raises=True).backward()
    with pytest.raises(ShardingError, match=r"step\(\) needs .* raised.*zero_grad\(\)"):
        optimizer.step()
    with pytest.raises(ShardingError, match=r"clip_grad_norm_\(\) needs .* raised"):
        mst.clip_grad_norm_(model, 1.0)
    # Under ddp gradients of an earlier pass have nothing of the one that raised.
    refused = pytest.raises(ShardingError, match=r"raised.* call .*zero_grad\(\)")
    with contextlib.nullcontext() if strategy == "ddp" else refused:
        loss_of(model, x).backward()
    assert nets.difference(model, before) == 0
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()
    expected = nets.make(Net)
    loss_of(expected, nets.batch("mlp")[0]).backward()
    SGD(expected.parameters()).step()
    assert nets.difference(model, expected.state_dict()) < 1e-13


@by_strategy
@pytest.mark.parametrize("path", ["arena"], indirect=True)
@in_worlds(2)
def test_in_no_sync_one_rank_may_raise_alone(backend, strategy, path):
    model, optimizer = start(strategy)
    x = nets.batch("mlp")[0]
    with mst.no_sync(model):
        sent = backend._sequence
        if backend.rank == 0:
            with pytest.raises(ArithmeticError):
                loss_of(model, x, raises=True).backward()
        assert backend._sequence == sent
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()
    expected = nets.make(Net)
    loss_of(expected, x).backward()
    SGD(expected.parameters()).step()
    assert nets.difference(model, expected.state_dict()) < 1e-13


@by_path
@by_strategy
@pytest.mark.parametrize("behind", [1, 3])
def test_one_rank_that_raised_alone_cannot_go_on(path, strategy, behind):
    notes = []

    def body(backend: Any) -> None:
        model, optimizer = start(strategy, behind)
        x = nets.mine(backend, nets.batch("mlp"))[0]
        try:
            for step in range(3):
                optimizer.zero_grad()
                try:
                    loss_of(model, x, raises=(step, backend.rank) == (1, 1)).backward()
                except ArithmeticError:
                    continue
                optimizer.step()
        except CollectiveMismatchError as error:
            notes.extend(getattr(error, "__notes__", []))
            raise

    if (strategy, path) == ("fsdp", "messages"):  # the next forward() gathers, and finds out
        # The sentence begins with the function that ranks have called less often before, which
        # depends on the layer that raised.
        found = (
            r"backward\(\) is collective: rank 0 called it at .*, "
            r"rank 1 called an operation on a parameter at|"
            r"an operation on a parameter is collective: rank 1 called it at .*, "
            r"rank 0 called backward\(\) at"
        )
        with pytest.raises(CollectiveMismatchError, match=found):
            run_in_threads(2, body, timeout=10)
        return
    with pytest.raises((CollectiveMismatchError, PeerError)) as caught:
        run_in_threads(2, body, timeout=10)
    assert "site-packages" not in str(caught.value)
    (note,) = notes
    assert "The last backward() of rank 1 raised, and not every other rank's did" in note


@by_strategy
@pytest.mark.parametrize("path", ["arena"], indirect=True)
def test_ranks_that_raised_at_different_places_cannot_go_on(strategy, path):
    notes = []

    def body(backend: Any) -> None:
        model, _ = start(strategy)
        model.behind = 1 + backend.rank
        x = nets.mine(backend, nets.batch("mlp"))[0]
        with pytest.raises(ArithmeticError):
            loss_of(model, x, raises=True).backward()
        try:
            loss_of(model, x).backward()
        except CollectiveMismatchError as error:
            notes.extend(getattr(error, "__notes__", []))
            raise

    with pytest.raises((CollectiveMismatchError, PeerError)):
        run_in_threads(2, body, timeout=10)
    assert any("raised, and not every other rank's did" in note for note in notes)
