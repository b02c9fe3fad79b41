"""Changes of parameters in place, which every rank makes and which count once."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest

from mpishard.errors import CollectiveMismatchError, ShardingError
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402
from mpishard.torch.sharded import module_of  # noqa: E402

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def decay(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def decay_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.9).add_(0.01)
        parameter.data -= 0.1 * parameter.detach()


def normalise_rows(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter / parameter.norm())


def change_elements(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[0] = 2 * parameter[0]
        model.net[0].bias += 0.1


def follow(model: Any) -> None:
    with torch.no_grad():
        model.momentum.weight.lerp_(model.net[0].weight, 0.5)
        model.momentum.bias.data.mul_(0.5).add_(model.net[0].bias)


def assign_values(model: Any) -> None:
    for parameter in model.net.parameters():
        parameter.data = 0.9 * parameter.data
    vector = torch.nn.utils.parameters_to_vector(model.net.parameters())
    torch.nn.utils.vector_to_parameters(vector - 0.01, model.net.parameters())
    own, followed = model.momentum.weight, model.net[0].weight
    own.data = (0.5 * own.data + 0.5 * followed.data).T.contiguous().T


def change_views(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[0].mul_(0.9)
            parameter.detach().add_(0.01)
            parameter.data.view(-1)[:1].mul_(0.5)
            parameter.data.unbind()[0].add_(0.1)


class Momentum(torch.nn.Module):
    """A network, and a frozen layer that follows one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nets.make(nets.perceptron)
        self.momentum = copy.deepcopy(self.net[0]).requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.net(x) + self.momentum(x).sum(1, keepdim=True)


@pytest.mark.parametrize(
    "change",
    [
        decay,
        decay_data,
        normalise_rows,
        change_elements,
        follow,
        assign_values,
        change_views,
    ],
    ids=lambda c: c.__name__,
)
@by_path
@in_worlds(1, 2, 3)
def test_a_change_that_every_rank_makes_is_made_once(
    backend: Any, change: Any, path: str, shared_path: Any
) -> None:
    mst.init()
    x, y = nets.batch("mlp")
    for strategy in STRATEGIES:
        alone = Momentum()
        model = mst.shard(Momentum(), strategy, minimum_unit_size=1)
        for one, optimizer, data in (
            (model, mst.optimizer(torch.optim.SGD, model, lr=0.01), nets.mine(backend, (x, y))),
            (alone, torch.optim.SGD(alone.parameters(), lr=0.01), (x, y)),
        ):
            for _ in range(3):
                optimizer.zero_grad()
                nets.squared(one, *data).backward()
                optimizer.step()
                change(one)
        assert nets.difference(model, alone.state_dict()) < 1e-13


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: torch._foreach_mul_([weight], 2),
        lambda weight: torch.mul(weight, 2, out=weight),
        lambda weight: weight.view(-1).mul_(2),
        torch.nn.init.orthogonal_,  # It copies each rank's own matrix to a view.
    ],
    ids=["foreach", "out", "view", "orthogonal"],
)
@by_path
@in_worlds(1, 2, 3)
def test_a_change_that_is_not_counted_is_refused_if_ranks_share_the_memory(
    backend: Any, change: Any, path: str, shared_path: Any
) -> None:
    mst.init()
    for strategy in STRATEGIES:
        model = mst.shard(nets.make(nets.perceptron), strategy)
        optimizer = mst.optimizer(torch.optim.SGD, model, lr=0.1)
        shares = module_of(model).parameters.once_per_node
        if change is torch.nn.init.orthogonal_ and not shares and backend.world_size > 1:
            continue  # The ranks' matrices differ, which is refused at the latest in backward().
        with torch.no_grad():
            change(model[2].weight)
        nets.squared(model, *nets.mine(backend, nets.batch("mlp"))).backward()
        if backend.world_size == 1 or not shares:
            optimizer.step()
            continue
        with pytest.raises(ShardingError, match=r"parameter '2.weight' was changed in place by"):
            optimizer.step()
        with torch.no_grad(), pytest.raises(ShardingError, match=r"'2.weight' was changed"):
            model[2].weight.mul_(2)


@by_path
@in_worlds(1, 2, 3)
def test_every_rank_gets_the_random_numbers_of_rank_0(
    backend: Any, path: str, shared_path: Any
) -> None:
    mst.init()
    expected = torch.empty(3, 5, dtype=torch.float64)
    torch.nn.init.kaiming_uniform_(expected, generator=torch.Generator().manual_seed(0))
    for strategy in STRATEGIES:
        model = mst.shard(torch.nn.Linear(5, 3).double(), strategy, minimum_unit_size=1)
        own = torch.Generator().manual_seed(backend.rank)
        torch.nn.init.kaiming_uniform_(model.weight, generator=own)
        assert torch.equal(model.weight.detach().clone(), expected)
        torch.nn.init.normal_(model.weight, generator=own)
        torch.nn.init.kaiming_uniform_(model.weight.data, generator=own)
        model.bias.data.normal_(generator=own)
        for parameter in model.parameters():
            mine = parameter.detach().clone().numpy().reshape(1, -1)
            everyone = backend.all_gather(mine)
            assert (everyone == everyone[0]).all()


@pytest.mark.parametrize("path", ["arena"], indirect=True)
@in_worlds(2)
def test_values_of_a_state_dict_are_changed_once(backend: Any, path: str) -> None:
    mst.init()
    model, alone = mst.shard(nets.make(nets.perceptron)), nets.make(nets.perceptron)
    for one in (model, alone):
        for values in one.state_dict().values():
            values.mul_(0.5)
    assert nets.difference(model, alone.state_dict()) == 0


@by_path
@in_worlds(1, 2)
def test_a_change_of_rounded_copies_is_refused(backend: Any, path: str, shared_path: Any) -> None:
    """The next update would round the owners' float32 parameters again."""
    mst.init()
    for strategy in STRATEGIES:
        model = mst.shard(nets.make(nets.perceptron).float(), strategy, precision="bfloat16")
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for change in (
            decay, decay_data, lambda m: m[0].weight.data.clamp_(-0.1, 0.1),
            lambda m: m[0].weight.data.normal_(), lambda m: m[0].weight.data[0].zero_(),
        ):  # fmt: skip
            with pytest.raises(ShardingError, match="change the rounded copies"):
                change(model)
        assert nets.difference(model, before) == 0


@in_worlds(1)
def test_values_of_a_parameter_are_saved_as_plain_tensors(backend: Any) -> None:
    """A program without mpishard reads them; they are not saved with the unit around them."""
    mst.init()
    model = mst.shard(nets.make(nets.perceptron))
    values = model[0].weight.data
    file = io.BytesIO()
    torch.save({"weight": values}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)["weight"]
    for copied in (saved, copy.deepcopy(values)):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, model[0].weight)
        assert copied.untyped_storage().nbytes() == values.numel() * values.itemsize


@in_worlds(1)
def test_values_of_a_state_dict_are_saved_without_a_copy(backend: Any, monkeypatch: Any) -> None:
    mst.init()
    for precision in (None, "bfloat16"):
        model = mst.shard(nets.make(nets.perceptron).float(), precision=precision)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        file = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", None)
            torch.save(model.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert all(torch.equal(saved[name], value) for name, value in expected.items())


@in_worlds(2)
def test_a_change_on_one_rank_is_named(backend: Any) -> None:
    mst.init()
    model = mst.shard(nets.make(nets.perceptron))
    # The sentence begins with the call that the ranks have made less often, also in other tests.
    change = "a change of a parameter in place"
    expected = f"{change} is collective: rank 0 called it|rank 0 called {change}"
    act = decay if backend.rank == 0 else functools.partial(mst.clip_grad_norm_, max_norm=1.0)
    with pytest.raises(CollectiveMismatchError, match=expected):
        act(model)
