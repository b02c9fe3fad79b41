"""Sharded modules of one size that ranks use in different orders: all ranks raise."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mpishard.errors import CollectiveMismatchError, ShardingError
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import mpishard.torch as mst  # noqa: E402

STRATEGIES = ["ddp", "zero1", "zero2", "fsdp"]


class Weight(torch.nn.Module):
    """Six zeros."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(shape))


def sharded(strategy: str, *shape: int) -> tuple[Any, Any]:
    model = mst.shard(Weight(*shape), strategy)
    return model, mst.optimizer(torch.optim.SGD, model, lr=1.0)


@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@pytest.mark.parametrize("use", ["one each", "sum", "two passes"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2, 3)
def test_another_order_is_refused_by_name(backend: Any, path: str, strategy: str, use: str) -> None:
    mst.init()
    (a, _), (b, _) = sharded(strategy, 6), sharded(strategy, *((2, 3) if use == "sum" else (6,)))
    is_odd = backend.rank == 1

    def train() -> None:
        if use == "one each":
            (10 * b.w.sum() if is_odd else a.w.sum()).backward()
        elif use == "sum":
            (10 * b.w.sum() + a.w.sum() if is_odd else a.w.sum() + 10 * b.w.sum()).backward()
        else:
            for model in (b, a) if is_odd else (a, b):
                model.w.sum().backward()

    with pytest.raises(CollectiveMismatchError) as caught:
        train()
    message = str(caught.value)
    assert "do not match in the model or its unit" in message
    assert "odd" not in message or backend.world_size > 2
    line = sharded.__code__.co_firstlineno + 1
    place = re.escape(f"made at {__file__}:{line}")
    # One line makes both models, which have their numbers there.
    named = set(re.findall(rf"unit 0 \(w\) of Weight(?: number \d+)? \({place}\)", message))
    assert len(named) == 2
    assert f"at {__file__}:{train.__code__.co_firstlineno + 2} in" in message or use != "one each"


@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2)
def test_the_same_order_trains_each_with_its_own_gradient(
    backend: Any, path: str, strategy: str
) -> None:
    mst.init()
    (a, of_a), (b, of_b) = sharded(strategy, 6), sharded(strategy, 6)
    (a.w.sum() + 10 * b.w.sum()).backward()
    of_a.step()
    of_b.step()
    assert torch.equal(a.w + 0, torch.full((6,), -1.0))
    assert torch.equal(b.w + 0, torch.full((6,), -10.0))


class Two(torch.nn.Module):
    """Two parameters of six zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = (torch.nn.Parameter(torch.zeros(6)) for _ in range(2))


CHOICES = {
    "other groups": lambda x, y: [{"params": [x], "lr": 1.0}, {"params": [y], "lr": 0.1}],
    "one parameter": lambda x, y: [x],
    "another order": lambda x, y: [x, y],
}


@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@pytest.mark.parametrize("call", ["step", "state_dict"])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(2, 3)
def test_optimizers_of_other_parameters_are_refused_by_name(
    backend: Any, path: str, strategy: str, choice: str, call: str
) -> None:
    if strategy == "ddp" and call == "state_dict":
        pytest.skip("nothing is communicated")
    mst.init()
    model = mst.shard(Two(), strategy)
    given = (model.y, model.x) if backend.rank == 1 else (model.x, model.y)
    optimizer = mst.optimizer(torch.optim.SGD, CHOICES[choice](*given), lr=1.0)
    (model.x.sum() + model.y.sum()).backward()
    by_rank = ", ".join("y" if rank == 1 else "x" for rank in range(backend.world_size))
    with pytest.raises(ShardingError, match=f"parameter 0 of group 0 is {by_rank}"):
        getattr(optimizer, call)()
    assert model.x.abs().sum() + model.y.abs().sum() == 0


@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@in_worlds(2, 3)
def test_norms_of_other_parameters_are_refused(backend: Any, path: str) -> None:
    mst.init()
    model = mst.shard(Two(), "fsdp")
    (model.x.sum() + 10 * model.y.sum()).backward()
    chosen, other = (model.y, model.x) if backend.rank == 1 else (model.x, model.y)
    for norm_type in (2.0, float("inf")):
        with pytest.raises(ShardingError, match="gradients of different parameters"):
            mst.clip_grad_norm_([chosen], 1.0, norm_type)
    assert mst.clip_grad_norm_([chosen, other], 1e9).item() == pytest.approx(606**0.5)


class Normalised(torch.nn.Module):
    """Two layers of one size that use the samples of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            mst.convert_sync_batchnorm(torch.nn.BatchNorm1d(3)) for _ in range(2)
        )


@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@pytest.mark.parametrize("odd", ["layers", "models", "backward"])
@in_worlds(2, 3)
def test_normalisations_in_another_order_are_refused_by_name(
    backend: Any, path: str, odd: str
) -> None:
    mst.init()
    models = [mst.shard(Normalised(), "ddp") for _ in range(2)]
    layers = [models[0].first, models[0].second] if odd == "layers" else [m.first for m in models]
    x = torch.randn(4, 3, requires_grad=True)
    if backend.rank == 1 and odd != "backward":
        layers.reverse()

    def train() -> None:
        losses = [layer(x).pow(2).sum() for layer in layers]
        for loss in losses[::-1] if backend.rank == 1 else losses:
            loss.backward()

    with pytest.raises(CollectiveMismatchError, match="layer 'first' of Normalised") as caught:
        train()
    message = str(caught.value)
    layer_named = r"(layer '\w+' of Normalised(?: number \d+)?) \("
    assert len(set(re.findall(layer_named, message))) == 2
    assert ("layer 'second'" in message) == (odd == "layers")


STATE = {
    "save": lambda model, place: mst.save(place, model),
    "load": lambda model, place: mst.load(place, model),
}


@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@pytest.mark.parametrize("call", STATE)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@in_worlds(2, 3)
def test_files_of_two_models_are_not_mixed(
    backend: Any, shared_path: Any, path: str, strategy: str, call: str
) -> None:
    """Rank 1 saves or loads the other model."""
    mst.init()
    models = [sharded(strategy, 6)[0] for _ in range(2)]
    for number, model in enumerate(models):
        torch.nn.init.constant_(model.w, number)
    mst.save(shared_path / "second", models[1])
    with pytest.raises(CollectiveMismatchError, match="of Weight"):
        STATE[call](models[backend.rank == 1], shared_path / "second")
    mst.check_replicas(*models)  # also frees what is gathered
    assert [model.w.sum().item() for model in models] == [0, 6]
    mst.load(shared_path / "second", models[0])
    assert models[0].w.sum().item() == 6
