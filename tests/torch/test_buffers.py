"""Buffers that forward passes change, replace or drop: rank 0's on all ranks, or all raise."""

from __future__ import annotations

from typing import Any

import pytest

from mpishard.errors import ShardingError
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import mpishard.torch as mst  # noqa: E402

nn = torch.nn

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])


class Keeps(nn.Module):
    """A layer whose passes call ``change(module, number)`` for a number that differs by rank."""

    def __init__(self, change: Any = None, table: Any = None, state: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.change = change
        self.register_buffer("table", torch.zeros(2) if table is None else table)
        self.register_buffer("state", state)

    def forward(self, x: Any, number: float) -> Any:
        if self.change is not None:
            self.change(self, number)
        return self.linear(x)


def run(model: Any, number: float) -> None:
    model(torch.ones(2, 3), number).sum().backward()


def replace(module: Any, values: Any) -> None:
    module.table = values


def set_none(module: Any, number: float) -> None:
    module.table = None


def delete(module: Any, number: float) -> None:
    if hasattr(module, "table"):
        del module.table


def declared(module: Any, number: float) -> None:
    module.state = torch.full((3,), number)


def registered(module: Any, number: float) -> None:
    module.register_buffer("state", torch.full((3,), number))


def new_submodule(module: Any, number: float) -> None:
    if not hasattr(module, "inner"):
        module.inner = nn.Sequential(nn.BatchNorm1d(3, affine=False))
    module.inner(torch.ones(2, 3) * number)


def replaced_submodule(module: Any, number: float) -> None:
    module.inner = nn.BatchNorm1d(3, affine=False)
    module.inner(torch.ones(2, 3) * number)


def in_inference_mode(module: Any, number: float) -> None:
    with torch.inference_mode():
        module.table = torch.full((2,), number)
        module.state = torch.full((1,), number).expand(3)


CHANGES = {
    "in place": lambda m, n: m.table.fill_(n),
    "by .data": lambda m, n: m.table.data.add_(n),
    "by numpy": lambda m, n: m.table.numpy().fill(n),
    "data replaced": lambda m, n: setattr(m.table, "data", torch.full((3,), n)),
    "replaced": lambda m, n: replace(m, torch.full((5,), n)),
    "another dtype": lambda m, n: replace(m, torch.full((2,), n, dtype=torch.float64)),
    "without elements": lambda m, n: replace(m, torch.full((0, 3), n)),
    "conj": lambda m, n: replace(m, torch.full((3,), n * (1 + 1j)).conj()),
    "negative view": lambda m, n: replace(m, torch._neg_view(torch.full((3,), n))),
    "expanded": lambda m, n: replace(m, torch.full((3, 1), n).expand(3, 4)),
    "with a graph": lambda m, n: replace(m, (0 * m.linear.weight.sum() + n).expand(4)),
    "inference mode": in_inference_mode,
    "set to None": set_none,
    "deleted": delete,
    "declared as None": declared,
    "registered late": registered,
    "of a new submodule": new_submodule,
    "of a replaced submodule": replaced_submodule,
}


@pytest.mark.parametrize("name", CHANGES)
@by_strategy
@by_path
@in_worlds(1, 2, 3)
def test_every_rank_has_rank_zeros_buffers_after_any_change(
    backend: Any, name: str, strategy: str, path: str
) -> None:
    mst.init()
    model = mst.shard(Keeps(CHANGES[name]), strategy)
    expected = Keeps(CHANGES[name])
    for step in range(3):
        run(expected, step + 1.0)
        run(model, step + 1.0 + 10 * backend.rank)
        theirs, ours = dict(expected.named_buffers()), dict(model.named_buffers())
        assert ours.keys() == theirs.keys()
        for key, values in ours.items():
            assert values.dtype == theirs[key].dtype
            assert torch.equal(values.detach(), theirs[key].detach())


@in_worlds(2)
def test_buffers_that_ranks_register_in_another_order_keep_their_names(backend: Any) -> None:
    mst.init()
    names = ["one", "two"] if backend.rank else ["two", "one"]

    def register(module: Any, number: float) -> None:
        for name in names:
            module.register_buffer(name, torch.full((2,), number + 5 * (name == "two")))

    model = mst.shard(Keeps(register))
    run(model, float(backend.rank))
    assert (model.one.tolist(), model.two.tolist()) == ([0, 0], [5, 5])


@in_worlds(2)
def test_shared_buffers_stay_one_tensor(backend: Any) -> None:
    mst.init()
    model = Keeps(CHANGES["in place"], table=torch.zeros(1).expand(4))
    model.linear.register_buffer("same", model.table)
    model.change = lambda m, n: setattr(m.table, "data", torch.full((1,), n).expand(4))
    run(mst.shard(model), 1.0 + backend.rank)
    assert model.linear.same is model.table
    assert model.table.tolist() == [1.0] * 4


VIEWS = {
    "conj": lambda n: torch.full((3,), n * (1 + 1j)).conj(),
    "expanded": lambda n: torch.full((3, 1), n).expand(3, 2),
}


@pytest.mark.parametrize("name", VIEWS)
@in_worlds(2)
def test_conjugated_and_expanded_tensors_are_sharded_saved_and_loaded(
    backend: Any, name: str, shared_path: Any
) -> None:
    mst.init()

    def sharded(number: float) -> Any:
        model = Keeps(table=VIEWS[name](number))
        values = torch.full((1,), number, dtype=torch.float64).expand(3)
        model.frozen = nn.Parameter(values, requires_grad=False)
        return mst.shard(model)

    model = sharded(1.0 + backend.rank)
    mst.save(shared_path / "run", model)
    other = sharded(5.0)
    mst.load(shared_path / "run", other)
    for each in (model, other):
        assert torch.equal(each.table, VIEWS[name](1.0))
        assert each.frozen.tolist() == [1.0] * 3


def grow(module: Any, number: float) -> None:
    """Two tables that grow with the sequence, and have equally many elements together."""
    module.table = torch.arange(4 + number)
    module.state = torch.arange(6 - number)


def float_or_int(module: Any, number: float) -> None:
    module.table = torch.ones(2, dtype=torch.float32 if number else torch.int32)


def turned(module: Any, number: float) -> None:
    module.table = torch.ones((2, 3) if number else (3, 2))


def one_drops(module: Any, number: float) -> None:
    module.table = None if number else torch.ones(2)


def one_deletes(module: Any, number: float) -> None:
    if number and hasattr(module, "table"):
        del module.table
    module.state = torch.ones(1)


def another_name(module: Any, number: float) -> None:
    module.register_buffer(f"at_{number:.0f}", torch.ones(2))


DIFFERENCES = {
    grow: r"buffer 'state' is float32\[6\], float32\[4\]; buffer 'table' is float32\[4\], float",
    float_or_int: r"buffer 'table' is int32\[2\], float32\[2\]\. Give each buffer one shape",
    turned: r"by rank, buffer 'table' is float32\[3, 2\], float32\[2, 3\]",
    one_drops: r"by rank, buffer 'table' is float32\[2\], None",
    one_deletes: r"by rank, buffer 'table' is float32\[2\], None",
    another_name: r"buffer 'at_0' is float32\[2\], None; buffer 'at_2' is None, float32\[2\]",
}


@pytest.mark.parametrize("change", DIFFERENCES)
@by_strategy
@by_path
@in_worlds(2)
def test_buffers_that_differ_between_ranks_are_refused_by_name(
    backend: Any, change: Any, strategy: str, path: str
) -> None:
    mst.init()
    model = mst.shard(Keeps(change), strategy)
    optimizer = mst.optimizer(torch.optim.SGD, model, lr=0.1)
    for _ in range(2):  # and again in the next pass
        with pytest.raises(ShardingError, match=DIFFERENCES[change]):
            run(model, 2.0 * backend.rank)
        expected = Keeps(change)
        change(expected, 2.0 * backend.rank)
        theirs = dict(expected.named_buffers())
        assert all(torch.equal(t, theirs[name]) for name, t in model.named_buffers())
    optimizer.step()  # The gradients are complete.


@in_worlds(2)
def test_the_loop_goes_on_when_the_buffers_agree_again(backend: Any) -> None:
    mst.init()
    model = mst.shard(Keeps(grow))
    with pytest.raises(ShardingError, match="the ranks' buffers differ"):
        run(model, float(backend.rank))
    run(model, 3.0)
    assert model.table.tolist() == list(range(7))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr"])
@in_worlds(1, 2)
def test_tensors_that_cannot_be_sent_are_refused_by_name(backend: Any, form: str) -> None:
    mst.init()
    sparse = getattr(torch.eye(3), form)()
    with pytest.raises(TypeError, match="'table' are not plain strided tensors"):
        mst.shard(Keeps(table=sparse))
    model = mst.shard(Keeps(lambda module, _: replace(module, sparse)))
    with pytest.raises(ShardingError, match=r"'table' has become .* cannot send .* attribute"):
        run(model, 1.0)


@in_worlds(2)
def test_equal_buffers_are_not_sent(backend: Any) -> None:
    mst.init()
    model = mst.shard(Keeps(lambda module, _: replace(module, torch.ones(64))), "ddp")
    run(model, 0.0)
    backend.traffic.reset()
    run(model, 0.0)
    assert backend.traffic.calls["broadcast"] == 0


@in_worlds(2)
def test_the_refusal_to_shard_names_the_buffer(backend: Any) -> None:
    mst.init()
    model = Keeps(table=torch.zeros(2 + backend.rank))
    with pytest.raises(ValueError, match=r"by rank, 'table' is float32\[2\], float32\[3\]"):
        mst.shard(model)
