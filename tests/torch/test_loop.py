"""Common code of PyTorch loops with a sharded module: it works, or it is refused with a reason."""

from __future__ import annotations

import contextvars
import copy
import functools
import io
import re
from typing import Any

import pytest

from mpishard import run_in_threads
from mpishard.errors import (
    CollectiveMismatchError,
    NotInitializedError,
    PeerError,
    ShardingError,
)
from mpishard.observe.ledger import MemoryCategory
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import mpishard as ms  # noqa: E402
import mpishard.torch as mst  # noqa: E402
from mpishard.torch.sharded import module_of  # noqa: E402

nn = torch.nn
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def start(strategy: str, factory: Any = nets.perceptron, **options: Any) -> tuple[Any, Any]:
    """A sharded model and its optimizer."""
    mst.init()
    model = mst.shard(nets.make(factory), strategy, minimum_unit_size=1)
    return model, mst.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9, **options)


def alone(factory: Any = nets.perceptron) -> tuple[Any, Any]:
    model = nets.make(factory)
    return model, SGD(model.parameters())


def close(model: Any, expected: Any, limit: float = 1e-13) -> bool:
    return nets.difference(model, expected.state_dict()) < limit


@by_strategy
@in_worlds(1, 3)
def test_every_rank_gets_rank_zeros_values(backend, strategy):
    """Parameters, buffers, and frozen parameters of another dtype."""
    mst.init()
    model = nets.make(nets.convolutions)
    model.count = nn.Parameter(torch.full((3,), backend.rank), requires_grad=False)
    model.register_buffer("strided", torch.zeros(3, 2)[:, 0])
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(backend.rank)
    mst.shard(model, strategy)
    assert all((tensor == 0).all() for tensor in model.state_dict().values())
    backend.barrier()


@by_strategy
@in_worlds(2)
def test_two_backwards_add_up(backend, strategy):
    model, optimizer = start(strategy)
    expected, theirs = alone()
    x, y = nets.batch("mlp")
    for _ in range(3):
        for m, o, data in (
            (model, optimizer, nets.mine(backend, (x, y))),
            (expected, theirs, (x, y)),
        ):
            nets.squared(m, *data).backward()
            (m(data[0]) ** 2).mean().backward()
            o.step()
            o.zero_grad()
    assert close(model, expected)


@by_strategy
@pytest.mark.parametrize("path", ["arena"], indirect=True)
@in_worlds(2, 3)
def test_no_sync_sends_nothing_until_the_last_backward(backend, strategy, path):
    model, optimizer = start(strategy)
    expected, theirs = alone()
    x, y = nets.batch("mlp")
    part = nets.mine(backend, (x, y))
    for _ in range(3):
        with mst.no_sync(model):
            (model(part[0]) ** 2).mean().backward()
            sent = backend._sequence
            model(part[0]).abs().mean().backward()
            assert backend._sequence == sent
            with pytest.raises(ShardingError, match=r"no_sync"):
                optimizer.step()
        nets.squared(model, *part).backward()
        optimizer.step()
        optimizer.zero_grad()
        ((expected(x) ** 2).mean() + expected(x).abs().mean()).backward()
        nets.squared(expected, x, y).backward()
        theirs.step()
        theirs.zero_grad()
    assert close(model, expected)


@by_strategy
@in_worlds(2)
def test_gradients_that_no_sync_added_can_be_cleared(backend, strategy):
    model, optimizer = start(strategy)
    expected, theirs = alone()
    x, y = nets.batch("mlp")
    part = nets.mine(backend, (x, y))
    with mst.no_sync(model):
        (model(part[0]) ** 2).mean().backward()
    optimizer.zero_grad()
    nets.squared(model, *part).backward()
    optimizer.step()
    nets.squared(expected, x, y).backward()
    theirs.step()
    assert close(model, expected)


@by_strategy
@in_worlds(2)
def test_some_gradients_are_cleared_and_others_are_not(backend, strategy):
    model, optimizer = start(strategy)
    expected, theirs = alone()
    x, y = nets.batch("mlp")
    for m, o, data in ((model, optimizer, nets.mine(backend, (x, y))), (expected, theirs, (x, y))):
        nets.squared(m, *data).backward()
        m[0].weight.grad = None
        m[2].bias.grad = None
        nets.squared(m, *data).backward()
        o.step()
    assert close(model, expected)


class Gated(nn.Module):
    """Autograd gives every parameter a gradient, or none to the factor, or none to any."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 2)
        self.factor = nn.Parameter(torch.linspace(0.5, 2, 4))

    def forward(self, x: Any, gives: str) -> Any:
        x = self.first(x).tanh()
        x = self.last(nets.Silent.apply(x, self.factor) if gives == "some" else x * self.factor)
        return nets.Silent.apply(x) if gives == "none" else x


GIVES = {
    "some on every rank": lambda rank, step: "some",
    "some on one rank": lambda rank, step: "some" if rank == 1 else "all",
    "some from the second step on": lambda rank, step: "some" if step else "all",
    "none on every rank": lambda rank, step: "none",
    "none on one rank from the second step on": (
        lambda rank, step: "none" if rank == 0 and step else "all"
    ),
}


@by_strategy
@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@pytest.mark.parametrize("gives", GIVES)
@in_worlds(1, 2, 3)
def test_a_parameter_to_which_autograd_gives_no_gradient_is_unused(backend, strategy, path, gives):
    model, optimizer = start(strategy, Gated, weight_decay=0.5)
    expected = nets.make(Gated)
    theirs = SGD(expected.parameters(), weight_decay=0.5)
    x, _ = nets.batch("mlp")
    for step in range(4):
        if step != 2:  # The third pass adds to the gradients of the second.
            optimizer.zero_grad()
            theirs.zero_grad()
        model(x, GIVES[gives](backend.rank, step)).sum().backward()
        of_ranks = [expected(x, GIVES[gives](r, step)).sum() for r in range(backend.world_size)]
        (sum(of_ranks) / backend.world_size).backward()
        for mine, one in zip(model.parameters(), expected.parameters(), strict=True):
            assert (mine.grad is None) == (one.grad is None)
        optimizer.step()
        theirs.step()
    assert close(model, expected)


@by_strategy
@in_worlds(2)
def test_a_penalty_on_gradients_of_inputs_alone_trains(backend, strategy):
    """The last bias has no part in it, and autograd gives the normalisation's bias no gradient."""

    def normalised() -> Any:
        return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 2))

    model, optimizer = start(strategy, normalised)
    expected, theirs = alone(normalised)
    x, y = nets.batch("mlp")
    for m, o, data in ((model, optimizer, nets.mine(backend, (x, y))[0]), (expected, theirs, x)):
        for _ in range(2):
            o.zero_grad()
            inputs = data.clone().requires_grad_()
            (slope,) = torch.autograd.grad(m(inputs).sum(), inputs, create_graph=True)
            (slope**2).mean().backward()
            o.step()
    assert close(model, expected)


@by_strategy
@pytest.mark.parametrize("path", ["arena"], indirect=True)
@in_worlds(2, 3)
def test_ranks_use_different_branches_and_one_is_never_used(backend, strategy, path):
    """A parameter that a rank did not use adds zero; one that none used has no gradient."""
    model, optimizer = start(strategy, nets.Branches, weight_decay=0.5)
    expected = nets.make(nets.Branches)
    theirs = SGD(expected.parameters(), weight_decay=0.5)
    x, _ = nets.batch("mlp")
    for _ in range(3):
        optimizer.zero_grad()
        model(x, left=backend.rank == 0).sum().backward()
        optimizer.step()
        theirs.zero_grad()
        total = sum(expected(x, left=r == 0).sum() for r in range(backend.world_size))
        (total / backend.world_size).backward()
        theirs.step()
    assert model.never.weight.grad is None
    assert close(model, expected)


@by_strategy
@in_worlds(2)
def test_groups_frozen_parts_and_a_scheduler(backend, strategy):
    mst.init()
    x, y = nets.batch("mlp")
    made = []
    for is_ours in (True, False):
        model = nets.make(nets.perceptron)
        model[2].requires_grad_(False)
        if is_ours:
            mst.shard(model, strategy, minimum_unit_size=1)
        groups = [
            {"params": [model[0].weight, model[4].weight], "weight_decay": 0.3},
            {"params": [model[0].bias, model[4].bias], "lr": 0.05},
        ]
        make = mst.optimizer if is_ours else lambda kind, *a, **k: kind(*a, **k)
        optimizer = make(torch.optim.AdamW, groups[:1], lr=0.01)
        optimizer.add_param_group(groups[1])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for _ in range(4):
            nets.squared(model, *(nets.mine(backend, (x, y)) if is_ours else (x, y))).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=False)
        optimizer.load_state_dict(optimizer.state_dict())
        made.append(model)
    assert close(*made)


@by_strategy
@pytest.mark.parametrize("is_reentrant", [False, True])
@in_worlds(2)
def test_checkpointed_segments(backend, strategy, is_reentrant):
    model, optimizer = start(strategy)
    expected, theirs = alone()
    backend.barrier()  # recomputing sets the generator, with which the other rank makes its own
    x, y = nets.batch("mlp")
    for m, o, data in ((model, optimizer, nets.mine(backend, (x, y))), (expected, theirs, (x, y))):
        inputs = data[0].clone().requires_grad_()
        hidden = checkpoint(m[:3], inputs, use_reentrant=is_reentrant)
        nn.functional.mse_loss(m[3:](hidden), data[1]).backward()
        o.step()
    assert close(model, expected)


@by_strategy
@in_worlds(2)
def test_autocast_computes_in_bfloat16_and_updates_float32(backend, strategy):
    mst.init()
    made = []
    x, y = (values.float() for values in nets.batch("mlp"))
    for is_ours in (True, False):
        model = nets.make(nets.perceptron).float()
        if is_ours:
            mst.shard(model, strategy)
        make = mst.optimizer if is_ours else lambda kind, *a, **k: kind(*a, **k)
        optimizer = make(torch.optim.SGD, model if is_ours else model.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
            assert output.dtype == torch.bfloat16
            loss = nn.functional.mse_loss(output.float(), y)
        loss.backward()
        optimizer.step()
        made.append(model)
    assert close(*made, 1e-6)


@by_strategy
@in_worlds(1, 2)
def test_autocast_gives_the_bits_of_averaged_gradients(backend, strategy):
    mst.init()
    data = [values.float() for values in nets.batch("mlp")]
    parts = list(zip(*(values.chunk(backend.world_size) for values in data), strict=True))
    model, alone = (nets.make(nets.perceptron).float() for _ in range(2))
    optimizer = mst.optimizer(torch.optim.SGD, mst.shard(model, strategy), lr=0.1)

    def backward(one, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(one(x), y)
        (loss / (1 if one is model else backend.world_size)).backward()

    for _ in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        backward(model, *parts[backend.rank])
        for part in parts:
            backward(alone, *part)
        optimizer.step()
        torch.optim.SGD(alone.parameters(), lr=0.1).step()
    assert nets.difference(model, alone.state_dict()) == 0


@by_strategy
@in_worlds(1, 2)
def test_a_penalty_on_gradients_of_parameters_trains(backend, strategy):
    mst.init()
    model, alone = nets.make(nets.perceptron), nets.make(nets.perceptron)
    sgd = {"lr": 0.1, "momentum": 0.9}
    sharded = mst.shard(model, strategy, minimum_unit_size=1)
    optimizer = mst.optimizer(torch.optim.SGD, sharded, **sgd)
    theirs = torch.optim.SGD(alone.parameters(), **sgd)
    x, y = nets.batch("mlp")
    for one, made in ((model, optimizer), (alone, theirs)):
        for _ in range(3):
            loss = nets.squared(one, x, y)
            slopes = torch.autograd.grad(loss, list(one.parameters()), create_graph=True)
            made.zero_grad()
            (loss + 0.1 * sum((slope**2).sum() for slope in slopes)).backward()
            made.step()
    assert close(model, alone)


@in_worlds(2)
def test_two_models_train_each_other(backend):
    """A GAN: the generator's loss leaves gradients in the discriminator, which are dropped."""
    mst.init()
    made = []
    noise, real = nets.batch("mlp")
    for is_ours in (True, False):
        g, d = nets.make(nets.perceptron), nets.make(lambda: nn.Linear(2, 1))
        if is_ours:
            mst.shard(g, "fsdp"), mst.shard(d, "zero2")
            make = functools.partial(mst.optimizer, torch.optim.Adam, lr=1e-2)
            of_g, of_d = make(g), make(d)
        else:
            of_g, of_d = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (g, d))
        z, x = nets.mine(backend, (noise, real)) if is_ours else (noise, real)
        for _ in range(3):
            of_d.zero_grad()
            (
                nn.functional.softplus(-d(x)) + nn.functional.softplus(d(g(z).detach()))
            ).mean().backward()
            of_d.step()
            of_g.zero_grad()
            nn.functional.softplus(-d(g(z))).mean().backward()
            of_g.step()
        made.append((g, d))
    assert close(made[0][0], made[1][0])
    assert close(made[0][1], made[1][1])


@by_strategy
@pytest.mark.parametrize("make", [nets.perceptron, nets.fourier])
@in_worlds(1)
def test_a_compiled_model_trains(backend, strategy, make):
    model, optimizer = start(strategy, make)
    expected, theirs = alone(make)
    compiled = torch.compile(model, backend="aot_eager")
    for m, called, o in ((model, compiled, optimizer), (expected, expected, theirs)):
        for rows in (12, 12, 7):  # another shape is compiled while gradients are there
            x, y = (values[:rows] for values in nets.batch("mlp"))
            nets.squared(called, x, y).backward()
        o.step()
        assert m is not None
    mst.clip_grad_norm_(compiled, 1.0)
    assert close(model, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("path", ["arena"], indirect=True)
@in_worlds(2)
def test_a_module_of_torch_jit_trains(backend, path):
    mst.init()
    with nets.making:  # two threads that script one class at once may define its methods twice
        scripted = torch.jit.script(nets.make(nets.perceptron))
    model = mst.shard(scripted, "fsdp")
    optimizer = mst.optimizer(torch.optim.SGD, model, lr=0.1)
    alone = nets.make(nets.perceptron)
    nets.squared(alone, *nets.batch("mlp")).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    nets.squared(model, *nets.mine(backend, nets.batch("mlp"))).backward()
    optimizer.step()
    assert nets.difference(model, alone.state_dict()) < 1e-12


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@by_strategy
@in_worlds(1)
def test_a_model_that_slices_a_parameter_is_traced(backend, strategy):
    """PyTorch traces once with gradients and once without, and compares the graphs."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 4))

        def forward(self, x):
            return x + self.weight[: x.shape[0]]

    mst.init()
    model, x = mst.shard(Positions(), strategy), torch.ones(5, 4)
    assert torch.equal(torch.jit.trace(model, (x,))(x), x + 1)


@by_strategy
@in_worlds(3)
def test_state_dicts_are_pytorchs_own_both_ways(backend, strategy):
    def scaled():
        return nn.Sequential(*nets.perceptron(), nets.Scale())

    mst.init()
    x, y = nets.batch("mlp")
    adam = functools.partial(torch.optim.AdamW, lr=1e-2)
    expected = nets.make(scaled)
    theirs = adam(expected.parameters())
    nets.squared(expected, x, y).backward()
    theirs.step()
    # What plain PyTorch saved is loaded by two more lines, and the other way round.
    model = mst.shard(nets.make(scaled), strategy)
    optimizer = mst.optimizer(torch.optim.AdamW, model, lr=1e-2)
    model.load_state_dict(expected.state_dict())
    optimizer.load_state_dict(theirs.state_dict())
    backend.barrier()
    for m, o, data in ((model, optimizer, nets.mine(backend, (x, y))), (expected, theirs, (x, y))):
        o.zero_grad()
        nets.squared(m, *data).backward()
        o.step()
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    plain = nets.make(scaled)
    again = adam(plain.parameters())
    plain.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert close(plain, expected)
    for ours, other in zip(plain.parameters(), expected.parameters(), strict=True):
        for key, value in theirs.state[other].items():
            assert again.state[ours][key].shape == value.shape
            assert torch.allclose(again.state[ours][key], value, rtol=0, atol=1e-15)
    backend.barrier()


@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@in_worlds(2)
def test_a_copy_of_a_sharded_model_is_a_plain_one(backend, path):
    model, _ = start("fsdp")
    copied = copy.deepcopy(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for plain in (copied, torch.load(buffer, weights_only=False)):
        assert type(plain[0].weight) is nn.Parameter
        plain(nets.batch("mlp")[0]).sum().backward()
        assert plain[0].weight.grad.shape == plain[0].weight.shape
        assert close(plain, model, 1e-300)
    backend.barrier()


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
@pytest.mark.parametrize("path", ["arena"], indirect=True)
@in_worlds(3)
def test_each_rank_holds_its_part(backend, strategy, path):
    mst.init()
    model = mst.shard(
        nets.make(lambda: nn.Sequential(*[nn.Linear(30, 30) for _ in range(6)])),
        strategy,
        minimum_unit_size=1,
    )
    optimizer = mst.optimizer(torch.optim.Adam, model)
    model(torch.ones(2, 30, dtype=torch.float64)).sum().backward()
    optimizer.step()
    S = 8 * sum(p.numel() for p in model.parameters())
    third, ledger = S // 3, module_of(model).ledger
    unit = 8 * 930

    def held(category: MemoryCategory) -> int:
        return ledger.held(category)

    shares = strategy != "ddp"
    assert abs(held(MemoryCategory.PARAMETERS) - (third if shares else S)) <= 8 * 6
    full = strategy in ("ddp", "zero1")
    assert abs(held(MemoryCategory.GRADIENTS) - (S if full else third)) <= 8 * 6
    assert held(MemoryCategory.FULL_GRADIENTS) <= (0 if full else 2 * unit)
    state = sum(
        value.nbytes
        for states in optimizer.state.values()
        for key, value in states.items()
        if key != "step"
    )
    assert abs(state - 2 * (third if shares else S)) <= 16 * 6
    if shares:  # one copy on the node: what one rank writes, another reads
        if backend.rank == 0:
            with torch.no_grad():
                model[0].weight.fill_(7)
        backend.barrier()
        assert float(model[0].weight.detach()[3, 3]) == 7
        backend.barrier()


@by_strategy
@in_worlds(1)
def test_a_trained_model_is_exported(backend, strategy):
    """torch.export, which torch.onnx.export calls, copies the gradients of parameters, too."""
    mst.init()
    x, y = nets.batch("mlp")
    model = mst.shard(nets.make(nets.perceptron), strategy)
    optimizer = mst.optimizer(torch.optim.SGD, model, lr=0.1)
    nets.squared(model, x, y).backward()
    optimizer.step()
    exported = torch.export.export(model, (x,)).module()
    assert torch.equal(exported(x), model(x))


# ------------------------------------------------------------------------------------- refusals


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))


@in_worlds(2)
def test_an_optimizer_that_needs_whole_matrices_is_refused_or_has_them(backend):
    mst.init()
    expected = nets.make(nets.perceptron)
    model = mst.shard(nets.make(nets.perceptron), "fsdp")
    with pytest.raises(ValueError, match="Adafactor looks at parameters as a whole"):
        mst.optimizer(torch.optim.Adafactor, model, lr=1e-2)
    with pytest.raises(ValueError, match="Muon looks at parameters as a whole"):
        mst.optimizer(torch.optim.Muon, [p for p in model.parameters() if p.ndim == 2])
    with pytest.raises(ValueError, match=r"^Invalid learning rate: -1"):
        mst.optimizer(torch.optim.Adam, model, lr=-1)
    with pytest.raises(ValueError, match=r'LBFGS looks at .* use strategy="ddp"'):
        mst.optimizer(torch.optim.LBFGS, model)
    with pytest.raises(TypeError, match=r"kind must be a class .* got the class AdamW"):
        mst.optimizer(ms.optimizers.AdamW, model)
    with pytest.raises(TypeError, match=r"kind must be a class .* got Sequential"):
        mst.optimizer(model, torch.optim.SGD)
    divided, model = model, mst.shard(nets.make(nets.perceptron), "ddp")
    ours = mst.optimizer(torch.optim.Adafactor, model, lr=1e-2)
    with pytest.raises(ValueError, match="Adafactor looks at parameters as a whole"):
        ours.add_param_group({"params": list(divided.parameters())})
    assert len(ours.param_groups) == 1
    theirs = torch.optim.Adafactor(expected.parameters(), lr=1e-2)
    x, y = nets.batch("mlp")
    for _ in range(3):
        for m, o, data in ((model, ours, nets.mine(backend, (x, y))), (expected, theirs, (x, y))):
            o.zero_grad()
            nets.squared(m, *data).backward()
            o.step()
    assert close(model, expected)


class Clipping(torch.optim.SGD):
    """Clips gradients by the norm of all that it updates, as optimizers of Detectron2 do."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 10.0)
        return super().step(closure)


@by_strategy
@in_worlds(2)
def test_no_norm_of_the_parts_of_one_rank_is_taken_for_that_of_all(backend, strategy):
    mst.init()
    model = mst.shard(nets.make(nets.perceptron), strategy)
    if strategy == "ddp":
        mst.optimizer(Clipping, model, lr=0.1)
        return
    with pytest.raises(ValueError, match="Clipping looks at parameters as a whole"):
        mst.optimizer(Clipping, model, lr=0.1)


@pytest.mark.parametrize(
    "name", ["Adam", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD"]
)
@in_worlds(3)
def test_every_optimizer_of_pytorch_that_updates_elements_alone(backend, name):
    mst.init()
    kind = getattr(torch.optim, name)
    model, expected = mst.shard(nets.make(nets.perceptron), "fsdp"), nets.make(nets.perceptron)
    x, y = nets.batch("mlp")
    ours, theirs = mst.optimizer(kind, model), kind(expected.parameters())
    for _ in range(3):
        for m, o, data in ((model, ours, nets.mine(backend, (x, y))), (expected, theirs, (x, y))):
            o.zero_grad()
            nets.squared(m, *data).backward()
            o.step()
    assert close(model, expected, 1e-10)


def test_before_init_there_are_no_ranks():
    with pytest.raises(NotInitializedError, match=r"mpishard\.torch\.init"):
        contextvars.Context().run(mst.shard, nn.Linear(2, 2))


@in_worlds(2)
def test_misuse_is_refused_with_the_way_out(backend):
    model, optimizer = start("fsdp")
    x, y = nets.mine(backend, nets.batch("mlp"))
    nets.squared(model, x, y).backward()
    with pytest.raises(ShardingError, match=r"mpishard\.torch\.optimizer\(torch\.optim\.Adam"):
        torch.optim.Adam(model.parameters()).step()
    with pytest.raises(ShardingError, match=r"hook of parameter '0.weight' .* after backward\(\)"):
        model[0].weight.register_post_accumulate_grad_hook(print)
    hooked = nn.Linear(2, 2)
    hooked.weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(ValueError, match=r"'weight': a hook of .* after backward\(\)"):
        mst.shard(hooked)
    with pytest.raises(ShardingError, match="sharded already"):
        mst.shard(model)
    with pytest.raises(ShardingError, match="is not a trained parameter of a sharded module"):
        mst.optimizer(torch.optim.SGD, nn.Linear(2, 2).parameters())
    with pytest.raises(ShardingError, match="is not sharded"):
        mst.clip_grad_norm_(nn.Linear(2, 2), 1.0)
    for given in (None, model[0].weight):
        with pytest.raises(TypeError, match="parameters must be a sharded module"):
            mst.optimizer(torch.optim.SGD, given, lr=0.1)
    with pytest.raises(TypeError, match="got str among them"):
        mst.optimizer(torch.optim.SGD, [model[0].weight, "0.bias"], lr=0.1)
    with pytest.raises(TypeError, match=r"call torch\.compile\(\) afterwards"):
        mst.shard(torch.compile(nn.Linear(2, 2), backend="eager"))
    with pytest.raises(ValueError, match="strategy must be one of ddp, zero1, zero2, fsdp"):
        mst.shard(nn.Linear(2, 2), "fsdp2")
    plain = nn.Linear(2, 2)
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    for arguments in ((sgd, "fsdp"), (sgd,)):
        with pytest.raises(TypeError, match=r"no optimizer, got SGD: write mst\.shard"):
            mst.shard(plain, *arguments)
    with pytest.raises(TypeError, match="values must be a Tensor, got float"):
        mst.mean_over_ranks(1.0)
    with pytest.raises(ValueError, match="multiple of their number: got 3 for 2 ranks"):
        mst.DataLoader([1, 2, 3], 3)
    with pytest.raises(TypeError, match="batch_size must be an integer"):
        mst.DataLoader([1, 2, 3], 4.0)
    with pytest.raises(TypeError, match=r"Stream has no length; .* IterableDataset use torch"):
        mst.DataLoader(Stream(), 4)
    model.append(nn.Linear(2, 2))
    model[5].bias.requires_grad_(False)
    with pytest.raises(ShardingError, match=r"'5.weight' was .* not in the module, when mpishard"):
        mst.save("nowhere", model)
    model[5].weight.requires_grad_(False)
    mst.optimizer(torch.optim.SGD, model)
    model[5].bias.requires_grad_(True)
    for late in (optimizer.step, lambda: mst.optimizer(torch.optim.SGD, model)):
        with pytest.raises(ShardingError, match=r"'5.bias' was frozen"):
            late()
    del model[5]
    model.float()
    with pytest.raises(ShardingError, match=r"'0.weight' is no longer in the memory"):
        optimizer.step()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("kind", [SGD.func, ms.optimizers.SGD(0.1)], ids=["torch", "rule"])
@in_worlds(2)
def test_a_scaler_is_refused_on_every_rank_if_one_has_an_inf(backend, kind, unscales):
    mst.init()
    model = mst.shard(nets.make(nets.perceptron), "fsdp", minimum_unit_size=1)
    optimizer = mst.optimizer(kind, model)
    before = copy.deepcopy(model).state_dict()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(nets.squared(model, *nets.mine(backend, nets.batch("mlp")))).backward()
    if backend.rank == 1:
        next(own for p in model.parameters() if len(own := p.grad.to_local()))[0] = torch.inf
    if unscales:
        scaler.unscale_(optimizer)
    with pytest.raises(ShardingError, match=r"GradScaler looks for .* of one rank, .* bfloat16"):
        scaler.step(optimizer)
    assert nets.difference(model, before) == 0
    optimizer.zero_grad()
    nets.squared(model, *nets.mine(backend, nets.batch("mlp"))).backward()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    assert nets.difference(model, before) > 0


@in_worlds(2)
def test_ranks_with_other_rates_or_models_are_refused(backend):
    mst.init()
    counted = nets.make(nets.perceptron)
    counted.register_buffer("counts", torch.zeros(1 + backend.rank))
    with pytest.raises(ValueError, match="also of buffers"):
        mst.shard(counted)
    with pytest.raises(ValueError, match=r"every rank must shard the same module.*rank 1: 2 param"):
        mst.shard(nn.Linear(2, 2 + backend.rank))
    model, optimizer = start("fsdp")
    nets.squared(model, *nets.mine(backend, nets.batch("mlp"))).backward()
    optimizer.param_groups[0]["lr"] = 0.1 + backend.rank
    with pytest.raises(ShardingError, match="the update, such as the learning rate, differ"):
        optimizer.step()


def test_an_error_on_one_rank_ends_all():
    def body(backend: Any) -> None:
        model, _ = start("fsdp")
        loss = nets.squared(model, *nets.mine(backend, nets.batch("mlp")))
        if backend.rank == 1:
            raise ValueError("no more")
        loss.backward()

    with pytest.raises((ValueError, PeerError), match="no more"):
        run_in_threads(2, body)


@pytest.mark.parametrize("path", ["arena", "messages"], indirect=True)
@pytest.mark.parametrize(
    ("missing", "word"),
    [
        ("pass", r"optimizer\.step\(\)"),
        ("backward", r"backward\(\)"),
        ("step", r"optimizer\.step\(\)"),
    ],
)
def test_a_call_that_a_rank_leaves_out_is_named_by_the_users_line(path, missing, word):
    """And not by PyTorch's, which calls the hooks."""

    def body(backend: Any) -> None:
        model, optimizer = start("fsdp")
        for step in range(2):
            here = missing if (step, backend.rank) == (1, 1) else ""
            if here != "pass":
                loss = nets.squared(model, *nets.mine(backend, nets.batch("mlp")))
            if here not in ("pass", "backward"):
                loss.backward()
            if here != "step":
                optimizer.step()

    with pytest.raises((CollectiveMismatchError, PeerError)) as caught:
        run_in_threads(2, body)
    assert re.search(rf"{__file__}:\d+( in|:|, ).*{word}|{word}.*{__file__}:\d+", str(caught.value))
    assert "site-packages" not in str(caught.value)


@in_worlds(1, 2, 3)
def test_the_loader_gives_the_batches_of_one_process(backend):
    mst.init()
    loader = mst.DataLoader(list(range(24)), 6, shuffle=True, seed=3)
    model = mst.shard(nn.Linear(2, 1))  # A pass is an epoch if ranks train in it.
    alone = torch.utils.data.distributed.DistributedSampler(list(range(24)), 1, 0, seed=3)
    for epoch in range(2):
        alone.set_epoch(epoch)
        order = list(alone)
        batches = []
        for batch in loader:
            model(torch.ones(1, 2)).sum().backward()
            batches.append(batch.tolist())
        assert len(batches) == 4
        for number, own in enumerate(batches):
            wanted = order[6 * number : 6 * number + 6]
            assert own == wanted[backend.rank :: backend.world_size]
    assert loader.epoch == 2
    text = io.StringIO()
    mst.print("a", "b", sep="-", end="!", file=text)
    assert text.getvalue() == ("a-b!" if backend.rank == 0 else "")
    assert mst.rank() == backend.rank
    assert mst.world_size() == backend.world_size
    mst.barrier()
