"""Sharded modules of one size that ranks use in different orders: refused, and never mixed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mpishard.errors import CollectiveMismatchError
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
