"""Programs that read and change gradients by hand, against one process."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from typing import Any

import numpy as np
import pytest

from mpishard.errors import ShardingError
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402

import mpishard.torch as mst  # noqa: E402

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")


def optimizer_of(model: Any, kind: Any = torch.optim.SGD, **options: Any) -> Any:
    """Make an optimizer of a sharded model, or of a plain one."""
    if hasattr(next(model.parameters()), "_stored"):
        return mst.optimizer(kind, model, **options)
    return kind(model.parameters(), **options)


def descent(model: Any, x: Any, y: Any) -> None:
    for step in range(4):
        nets.squared(model, x, y).backward()
        with torch.no_grad():
            for p in model.parameters():
                if step == 0:
                    p.data.add_(p.grad, alpha=-0.1)
                elif step == 1:
                    p.__isub__(0.1 * p.grad)
                elif step == 2:
                    p.data = p.data - 0.1 * p.grad.data
                else:
                    p.copy_(p - 0.1 * p.grad)
                p.grad = None


def momentum_and_adam(model: Any, x: Any, y: Any) -> None:
    first = [torch.zeros_like(p) for p in model.parameters()]
    moments: dict[Any, Any] = {}
    for step in range(1, 4):
        model.zero_grad()
        nets.squared(model, x, y).backward()
        with torch.no_grad():
            for p, v in zip(model.parameters(), first, strict=True):
                v.mul_(0.9).add_(p.grad)
                p.sub_(v, alpha=0.01)
                m, s = moments.setdefault(p, (torch.zeros_like(p.grad), torch.zeros_like(p.grad)))
                m.lerp_(p.grad, 0.1)
                s.mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                denominator = (s / (1 - 0.99**step)).sqrt_().add_(1e-8)
                p.addcdiv_(m / (1 - 0.9**step), denominator, value=-0.01)


def clipping(model: Any, x: Any, y: Any) -> list[Any]:
    optimizer, norms = optimizer_of(model, lr=0.1), []
    for step in range(4):
        optimizer.zero_grad(set_to_none=step < 2)
        nets.squared(model, x, y).backward()
        if step == 0:
            total = sum(p.grad.norm() ** 2 for p in model.parameters()) ** 0.5
        elif step == 1:
            total = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        else:
            parameters = list(model.parameters())
            if step == 3:
                parameters = optimizer.param_groups[0]["params"]
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.2))
            total = norms[-1].new_tensor(0.0)
        norms.append(total)
        if total > 0.2:
            for p in model.parameters():
                p.grad.mul_(0.2 / total)
        optimizer.step()
        norms.append(max(p.grad.abs().max() for p in model.parameters()))
    return norms


def statistics(model: Any, x: Any, y: Any) -> list[Any]:
    nets.squared(model, x, y).backward()
    found = []
    for p in model.parameters():
        g = p.grad
        assert (g.shape, g.numel(), len(g)) == (p.shape, p.numel(), len(p))
        assert (g.dim(), g.stride()) == (p.dim(), p.stride())
        found += [g.mean(), g.std(), g.max(), g.abs().min(), g.norm(1), g.sum(0), g.median()]
        found += [torch.dot(g.view(-1), g.flatten()), (g > 0).sum(), (g == 0).float().mean()]
        found += [
            torch.isfinite(g).all(),
            g[0],
            g.view(-1).tolist()[-1],
            g.detach().cpu().numpy().sum(),
        ]
        found += [torch.stack([g, 2 * g]), (g * p).sum(), g @ g.mT if g.dim() > 1 else g @ g]
        found += [
            g.clone().reshape(-1)[-1].item(),
            next(iter(g)),
            g.data.sum(),
            f"{g.sum():.3f}",
            float(g[-1:].sum()),
        ]
        found += [torch.histc(g, 3, -1, 1), copy.deepcopy(g), p.grad / (p.data.abs() + 1)]
    return found


def accumulation(model: Any, x: Any, y: Any) -> None:
    optimizer = optimizer_of(model, torch.optim.Adam, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for inputs, targets in zip(x.chunk(2), y.chunk(2), strict=True):
            nets.squared(model, inputs, targets).backward()
        for p in model.parameters():
            p.grad /= 2
            p.grad.clamp_(-0.1, 0.1)
        optimizer.step()


def sharpness(model: Any, x: Any, y: Any) -> None:
    optimizer = optimizer_of(model, lr=0.1)
    for _ in range(3):
        nets.squared(model, x, y).backward()
        with torch.no_grad():
            norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]))
            moved = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
            for p, change in zip(model.parameters(), moved, strict=True):
                p.add_(change)
        optimizer.zero_grad()
        nets.squared(model, x, y).backward()
        with torch.no_grad():
            for p, change in zip(model.parameters(), moved, strict=True):
                p.sub_(change)
        optimizer.step()
        optimizer.zero_grad()


def changes_in_place(model: Any, x: Any, y: Any) -> None:
    optimizer = optimizer_of(model, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        nets.squared(model, x, y).backward()
        for p in model.parameters():
            p.grad.add_(p.data, alpha=0.1)
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
                p.grad[:, 0] *= 2
            p.grad[0] = 0.5
            p.grad[p.grad > 0.4] = 0.3
            for row in p.grad.view(-1, 1)[1:]:
                row.add_(0.01)
            flat = p.grad.view(-1)
            flat.mul_(0.5)[0] = 0.2
            torch.mul(p.grad, 2, out=p.grad)
            torch._foreach_add_([p.grad], 0.1)
            p.grad.data = p.grad.data + 0.01 * p.data.sign()
            p.grad.copy_(torch.where(p.grad > 1, p.detach(), p.grad))
        optimizer.step()


def surgery(model: Any, x: Any, y: Any) -> None:
    """PCGrad: the gradients of two losses, without what each has against the other."""
    optimizer, flat = optimizer_of(model, lr=0.1), []
    for loss in (nets.squared(model, x, y), model(x).abs().mean()):
        optimizer.zero_grad()
        loss.backward()
        flat.append(torch.cat([p.grad.view(-1) for p in model.parameters()]))
    dot = flat[0] @ flat[1]
    merged = flat[0] + flat[1] - dot.abs() * (flat[0] / flat[0].norm() ** 2 + flat[1])
    for p in model.parameters():
        own, merged = merged[: p.numel()], merged[p.numel() :]
        p.grad = own.view_as(p.grad)
    optimizer.step()


class DiffGrad(torch.optim.Optimizer):
    """As public optimizers keep the gradient of the step before: without a copy."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                gradient = p.grad.data
                before = self.state[p].get("before", torch.zeros_like(p))
                p.sub_(gradient * torch.sigmoid((before - gradient).abs()), alpha=group["lr"])
                self.state[p]["before"] = gradient


def kept_by_an_optimizer(model: Any, x: Any, y: Any) -> None:
    optimizer = optimizer_of(model, DiffGrad, lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nets.squared(model, x, y).backward()
        optimizer.step()


def kept_views(model: Any, x: Any, y: Any) -> list[Any]:
    """Views of the gradients of earlier steps, and views that follow gradients that add up."""
    optimizer, kept, numbers = optimizer_of(model, lr=0.1), [], []
    for _ in range(3):
        nets.squared(model, x, y).backward()
        for p in model.parameters():
            kept += [p.grad.view(-1), p.grad[0], p.grad.detach(), p.grad.data, p.grad.flatten()]
            numbers.append(p.grad.numpy())
        optimizer.step()
        optimizer.zero_grad()
    found = [2 * one for one in kept] + [torch.tensor(one) for one in numbers]
    nets.squared(model, x, y).backward()
    first = [p.grad for p in model.parameters()]
    flat = [p.grad.view(-1) for p in model.parameters()]
    nets.squared(model, x, 2 * y).backward()
    found += [one + 0 for one in (*first, *flat)]
    optimizer.zero_grad(set_to_none=False)
    nets.squared(model, x, y).backward()
    for p, one in zip(model.parameters(), flat, strict=True):
        p.grad.mul_(2)
        one[0] += 0.5
    optimizer.step()
    return [*found, *[one + 0 for one in (*first, *flat)]]


def accumulation_of_kept_gradients(model: Any, x: Any, y: Any) -> list[Any]:
    """A gradient that the program has is also that of later passes, inside no_sync too."""
    optimizer, found = optimizer_of(model, lr=0.1), []
    nets.squared(model, x, y).backward()
    kept = [p.grad for p in model.parameters()]
    for scale, is_last in ((2, False), (3, False), (4, True)):
        is_sharded = hasattr(model[0].weight, "_stored")
        with mst.no_sync(model) if is_sharded and not is_last else contextlib.nullcontext():
            nets.squared(model, x, scale * y).backward()
        if scale == 2:
            model[2].weight.grad = None
            del kept[2]
    found += [one + 0 for one in kept]
    optimizer.step()
    optimizer.zero_grad()
    nets.squared(model, x, y).backward()
    optimizer.step()
    return [*found, *[one + 0 for one in kept]]


def centred(model: Any, x: Any, y: Any) -> None:
    """A number of the whole gradient, of the shape of one element."""
    optimizer = optimizer_of(model, lr=0.1)
    nets.squared(model, x, y).backward()
    for p in model.parameters():
        p.grad.data.add_(-p.grad.data.mean(dim=0, keepdim=True))
        p.grad.sub_(p.grad.view(-1).sum().view([1] * p.dim()))
    optimizer.step()


def assigned_gradients(model: Any, x: Any, y: Any) -> list[Any]:
    """PyTorch adds to the tensor that the program has assigned; also changes of ``p.grad``."""
    optimizer = optimizer_of(model, lr=0.1)
    mine = [torch.full_like(p, 0.5) for p in model.parameters()]
    for p, one in zip(model.parameters(), mine, strict=True):
        p.grad = one
    nets.squared(model, x, y).backward()
    found = [one.clone() for one in mine]
    for p in model.parameters():
        p.grad.mul_(0.5)
        p.grad[0] = 0.1
    found += [one.clone() for one in mine]
    is_sharded = hasattr(model[0].weight, "_stored")
    clip = mst.clip_grad_norm_ if is_sharded else torch.nn.utils.clip_grad_norm_
    clip(model.parameters(), 0.1)
    found += [one.clone() for one in mine]
    optimizer.step()
    optimizer.zero_grad()
    model[0].weight.grad = torch.full_like(model[0].weight, 0.5).to_sparse()
    nets.squared(model, x, y).backward()
    optimizer.step()
    return [*found, *mine]


def kept_gradients(model: Any, x: Any, y: Any) -> list[Any]:
    """Gradients of earlier steps, as for SVRG, which a program keeps without a copy."""
    optimizer, kept = optimizer_of(model, lr=0.1), []
    for _ in range(3):
        nets.squared(model, x, y).backward()
        kept.append([p.grad for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    for p, first, last in zip(model.parameters(), kept[0], kept[2], strict=True):
        p.grad = 0.5 * first + last
    optimizer.step()
    return [(a - b).abs().max() for a, b in zip(*kept[:2], strict=True)]


HABITS = [
    descent, momentum_and_adam, clipping, statistics, accumulation, sharpness, changes_in_place,
    surgery, kept_gradients, kept_by_an_optimizer, kept_views, accumulation_of_kept_gradients,
    assigned_gradients, centred,
]  # fmt: skip


@pytest.mark.parametrize("habit", HABITS, ids=lambda h: h.__name__)
@by_path
@in_worlds(1, 2, 3)
def test_a_gradient_is_that_of_one_process(
    backend: Any, habit: Any, path: str, shared_path: Any
) -> None:
    mst.init()
    x, y = nets.batch("mlp")
    for strategy in STRATEGIES:
        alone = nets.make(nets.perceptron)
        model = mst.shard(nets.make(nets.perceptron), strategy, minimum_unit_size=1)
        found, expected = habit(model, *nets.mine(backend, (x, y))), habit(alone, x, y)
        assert nets.difference(model, alone.state_dict()) < 1e-13, strategy
        for one, other in zip(found or (), expected or (), strict=True):
            torch.testing.assert_close(_plain(one), _plain(other), rtol=1e-12, atol=1e-14)


def _plain(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(float(value))


def refuse_gradients_of_no_sync(model: Any, x: Any, y: Any) -> None:
    weight, bias = model[0].weight, model[0].bias
    nets.squared(model, x, y).backward()
    kept = bias.grad
    weight.grad = None
    with mst.no_sync(model):
        nets.squared(model, x, y).backward()
        assert weight.grad is not None
    for gradient, name in ((weight.grad, "0.weight"), (kept, "0.bias")):
        for use in (torch.norm, lambda g: g.mul_(2), lambda g: 2 * g, torch.ones_like):
            with pytest.raises(ShardingError, match=rf"'{name}' is not reduced .* no_sync"):
                use(gradient)
    kept.zero_()
    assert float(kept.norm()) == 0 == float(bias.grad.norm())
    nets.squared(model, x, y).backward()
    assert float(weight.grad.norm()) > 0
    torch.testing.assert_close(kept + 0, bias.grad + 0)
    model.zero_grad()


@by_path
@in_worlds(2)
def test_changes_that_other_ranks_would_not_notice_are_refused(
    backend: Any, path: str, shared_path: Any
) -> None:
    mst.init()
    x, y = nets.mine(backend, nets.batch("mlp"))
    for strategy in STRATEGIES:
        model = mst.shard(nets.make(nets.perceptron), strategy, minimum_unit_size=1)
        optimizer = optimizer_of(model, lr=0.1)
        nets.squared(model, x, y).backward()
        optimizer.step()
        for p in optimizer.param_groups[0]["params"]:  # as Lookahead around an optimizer does
            p.data.copy_(0.5 * p.data)
        if strategy == "ddp":
            nets.squared(model, x, y).backward()
            assert mst.check_replicas(model)
        else:
            with pytest.raises(ShardingError, match=r"changed .* through optimizer.param_groups"):
                nets.squared(model, x, y).backward()
        by_hand = mst.shard(nets.make(nets.perceptron), strategy, minimum_unit_size=1)
        with pytest.raises(ShardingError, match=r"set parameter '0.weight' to different values"):
            update_by_hand(by_hand, x, y)


def update_by_hand(model: Any, x: Any, y: Any) -> None:
    """Without the mean over ranks; the copies of ddp are compared before they change again."""
    for _ in range(2):
        own = torch.autograd.grad(nets.squared(model, x, y), list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), own, strict=True):
                p.sub_(gradient, alpha=0.1)


CHANGES = {
    "mul_": lambda g, rank: g.mul_(1.0 + rank),
    "number of NumPy": lambda g, rank: g.mul_(np.float64(1 + rank)),
    "data": lambda g, rank: g.data.add_(torch.full((7, 5), 0.1 * rank, dtype=g.dtype)),
    "index": lambda g, rank: g.__setitem__(0, 0.1 * rank),
    "view": lambda g, rank: g.view(-1).add_(rank),
}
CLIPS = {
    "norm": lambda model, rank: mst.clip_grad_norm_(model, 0.01 * (1 + rank)),
    "PyTorch's norm": lambda model, rank: torch.nn.utils.clip_grad_norm_(
        model.parameters(), 0.01 * (1 + rank)
    ),
    "value": lambda model, rank: torch.nn.utils.clip_grad_value_(
        model.parameters(), 0.001 * (1 + rank)
    ),
}


@in_worlds(2)
def test_changes_of_gradients_that_depend_on_the_rank_are_refused(backend: Any) -> None:
    mst.init()
    x, y = nets.mine(backend, nets.batch("mlp"))
    for strategy in STRATEGIES:
        model = mst.shard(nets.make(nets.perceptron), strategy)
        optimizer = optimizer_of(model, lr=0.1)
        for change in CHANGES.values():
            nets.squared(model, x, y).backward()
            change(model[0].weight.grad, 1)
            optimizer.step()
            optimizer.zero_grad()
            nets.squared(model, x, y).backward()
            change(model[0].weight.grad, backend.rank)
            model[0].weight.grad[0] += 0  # A change that is equal does not hide the other.
            with pytest.raises(ShardingError, match=r"gradients differently .*'0\.weight' is"):
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("clip", CLIPS)
@in_worlds(2)
def test_clipping_that_depends_on_the_rank_is_refused(backend: Any, clip: str) -> None:
    mst.init()
    x, y = nets.mine(backend, nets.batch("mlp"))
    for strategy in STRATEGIES:
        model = mst.shard(nets.make(nets.perceptron), strategy)
        optimizer = optimizer_of(model, lr=0.1)

        def step(rank: int, model: Any = model, optimizer: Any = optimizer) -> None:
            nets.squared(model, x, y).backward()
            CLIPS[clip](model, rank)
            optimizer.step()

        step(0)
        optimizer.zero_grad()
        is_named = clip == "norm" and strategy != "ddp"
        way = r"max_norm by rank: 0\.01 .*0\.02" if is_named else "changed or assigned gradients"
        with pytest.raises(ShardingError, match=way):
            step(backend.rank)


@in_worlds(2, 3)
def test_gradients_that_differ_between_ranks_are_refused(backend: Any) -> None:
    mst.init()
    x, y = nets.mine(backend, nets.batch("mlp"))
    for strategy in STRATEGIES:
        model = mst.shard(nets.make(nets.perceptron), strategy)
        refuse_gradients_of_no_sync(model, x, y)
        if strategy == "ddp":
            continue
        weight = model[0].weight
        weight.grad = torch.full_like(weight, 0.5)
        assert float(weight.grad.sum()) == 0.5 * weight.numel()
        with pytest.raises(ShardingError, match=r"different values to the gradient of '0.weight'"):
            weight.grad = torch.full_like(weight, backend.rank)
        with pytest.raises(ShardingError, match=r"'0.weight' has shape \(7, 5\); got .* \(7,\)"):
            weight.grad = weight[:, 0].detach()
        weight.grad = one = torch.full_like(weight, 0.5)
        one.mul_(2)
        for use in (optimizer_of(model, lr=0.1).step, functools.partial(getattr, weight, "grad")):
            with pytest.raises(ShardingError, match=r"assigned .* '0.weight' was changed after"):
                use()
        weight.grad = one
        nets.squared(model, x, y).backward()
        view = weight.grad.view(-1)
        with pytest.raises(ShardingError, match=r"one call changed the gradient of '0.weight' and"):
            torch._foreach_add_([weight.grad, view], 1)
        with pytest.raises(ValueError, match="read-only"):
            weight.grad.numpy()[0] = 0
        file = io.BytesIO()
        torch.save(weight.grad, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True), weight.grad.full_tensor())
        assert "of the gradient of '0.weight', of shape (7, 5): tensor(" in repr(weight.grad)


@in_worlds(1, 2, 3)
def test_an_assigned_gradient_counts_once_if_no_sync_adds_to_it(backend: Any) -> None:
    mst.init()
    x, y = nets.batch("mlp")
    alone = nets.make(nets.perceptron)
    nets.squared(alone, x, y).backward()
    for strategy in STRATEGIES:
        model = mst.shard(nets.make(nets.perceptron), strategy)
        model[0].weight.grad = torch.full_like(model[0].weight, 0.5)
        with mst.no_sync(model):
            nets.squared(model, *nets.mine(backend, (x, y))).backward()
        nets.squared(model, *nets.mine(backend, (x, y))).backward()
        expected = 0.5 + 2 * alone[0].weight.grad
        torch.testing.assert_close(_plain(model[0].weight.grad + 0), expected)
        model.zero_grad()
        model[0].weight.grad = one = torch.full_like(model[0].weight, 0.5)
        with mst.no_sync(model):
            nets.squared(model, *nets.mine(backend, (x, y))).backward()
        model.zero_grad()
        if backend.world_size > 1:  # In one process it has the gradient, which is not known here.
            with pytest.raises(ShardingError, match=r"'0.weight' is not reduced .* by zero_\(\)"):
                one.sum()
        model[0].weight.grad = one.zero_()
        nets.squared(model, *nets.mine(backend, (x, y))).backward()
        torch.testing.assert_close(one, alone[0].weight.grad)


class DataDependent(nets.nn.Module):
    """ActNorm, set by its first batch, and codes that follow the batches (as in VQ-VAE)."""

    def __init__(self, mean: Any) -> None:
        super().__init__()
        self.net = nets.nn.Linear(5, 2)
        self.shift = nets.nn.Parameter(torch.zeros(5))
        self.codes = nets.nn.Parameter(torch.zeros(5), requires_grad=False)
        self.mean, self.is_set, self.replaces = mean, False, False

    def forward(self, x: Any) -> Any:
        if not self.is_set:
            self.shift.data, self.is_set = self.mean(x.mean(0)), True
        with torch.no_grad():
            self.codes.mul_(0.9).add_(self.mean(x.mean(0)), alpha=0.1)
            self.codes.data.clamp_(-self.mean(x.abs().mean()), 1.0)
        if self.replaces:
            self.codes = nets.nn.Parameter(self.codes.data, requires_grad=False)
        return self.net(x - self.shift) + self.codes.sum()


@by_path
@in_worlds(1, 2, 3)
def test_values_that_forward_sets_are_the_mean_or_refused(
    backend: Any, path: str, shared_path: Any
) -> None:
    mst.init()
    x, y = nets.batch("mlp")
    own = nets.mine(backend, (x, y))
    for strategy in STRATEGIES:
        make = functools.partial(nets.make, functools.partial(DataDependent, mst.mean_over_ranks))
        alone, model = nets.make(functools.partial(DataDependent, lambda v: v)), make()
        mst.shard(model, strategy, minimum_unit_size=1)
        for one, data in ((alone, (x, y)), (model, own)):
            optimizer = optimizer_of(one, lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                nets.squared(one, *data).backward()
                optimizer.step()
        assert nets.difference(model, alone.state_dict()) < 1e-13, strategy
        model.replaces = True
        nets.squared(model, *own).backward()
        with pytest.raises(ShardingError, match=r"'codes' was replaced .* module\.codes\.data = "):
            optimizer.step()
        if backend.world_size > 1:
            other = nets.make(functools.partial(DataDependent, lambda v: v))
            mst.shard(other, strategy)
            with pytest.raises(ShardingError, match=r"to different .*mean_over_ranks"):
                other(own[0]).sum().backward()


@by_path
@in_worlds(2, 3)
def test_repeatable_changes_that_differ_are_refused(
    backend: Any, path: str, shared_path: Any
) -> None:
    mst.init()
    x, y = nets.mine(backend, nets.batch("mlp"))

    def fill(model: Any, value: float) -> None:
        model[2].weight.data.fill_(value)
        nets.squared(model, x, y).backward()

    for strategy in STRATEGIES:
        model = mst.shard(nets.make(nets.perceptron), strategy)
        with pytest.raises(ShardingError, match=r"'2.weight' to different"):
            fill(model, 0.1 * backend.rank)
        fill(model, 0.1)


@in_worlds(2)
def test_a_mean_over_ranks(backend: Any) -> None:
    mst.init()
    for dtype in (torch.float32, torch.bfloat16):
        mean = mst.mean_over_ranks(torch.full((2, 3), float(backend.rank), dtype=dtype))
        assert torch.equal(mean, torch.full((2, 3), 0.5, dtype=dtype))
    with pytest.raises(ValueError, match=r"require a gradient .* give values.detach\(\)"):
        mst.mean_over_ranks(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="of floating point"):
        mst.mean_over_ranks(torch.ones(2, dtype=torch.int64))


def transformed(model: Any, x: Any, y: Any) -> list[Any]:
    """Calls of torch.func: gradients of samples, of inputs, and a backward pass through vmap."""

    def loss(parameters: Any, inputs: Any, targets: Any) -> Any:
        found = torch.func.functional_call(model, parameters, (inputs,))
        return nets.nn.functional.mse_loss(found, targets)

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    of_samples = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
    gradients = torch.func.grad(loss)(dict(model.named_parameters()), x, y)
    slope = torch.func.grad(lambda v: model(v).sum())
    laplacian = torch.func.jacrev(slope)(x[0]).trace()
    jacobian = torch.func.vmap(torch.func.jacrev(model))(x)
    of_weight = torch.func.grad(lambda w: (x @ w.mT).square().sum())(model[0].weight)
    found = [*of_samples.values(), *gradients.values(), laplacian, jacobian, of_weight]
    (torch.func.vmap(model)(x) - y).square().mean().backward()
    optimizer_of(model, lr=0.1).step()
    return found


@by_path
@in_worlds(1, 2, 3)
def test_torch_func(backend: Any, path: str, shared_path: Any) -> None:
    mst.init()
    own = nets.mine(backend, nets.batch("mlp"))
    for strategy in STRATEGIES:
        alone = nets.make(nets.perceptron)
        model = mst.shard(nets.make(nets.perceptron), strategy, minimum_unit_size=1)
        for one, other in zip(transformed(model, *own), transformed(alone, *own), strict=True):
            torch.testing.assert_close(one.detach().clone(), other.detach(), rtol=1e-12, atol=1e-14)
        everyone = nets.make(nets.perceptron)
        transformed(everyone, *nets.batch("mlp"))
        assert nets.difference(model, everyone.state_dict()) < 1e-13, strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
@in_worlds(2, 3)
def test_a_gradient_that_a_graph_keeps_has_its_values_after_the_next_backward(backend, strategy):
    """The user has no reference to the gradient itself, which autograd has saved."""
    mst.init()
    x, y = nets.batch("mlp")
    model = mst.shard(nets.make(nets.perceptron), strategy)
    optimizer = optimizer_of(model, lr=0.1)
    weight = torch.ones(model[0].weight.shape, dtype=model[0].weight.dtype, requires_grad=True)
    for _ in range(3):
        optimizer.zero_grad()
        nets.squared(model, x, y).backward()
        gradient = model[0].weight.grad
        values = gradient.clone() if strategy == "ddp" else gradient.full_tensor()
        product = (gradient * weight).sum()
        del gradient
        optimizer.step()
        optimizer.zero_grad()
        nets.squared(model, 2 * x, y).backward()
        weight.grad = None
        product.backward()
        assert torch.equal(weight.grad, values)


@pytest.mark.parametrize("make", [nets.perceptron, nets.fourier])
@in_worlds(2, 3)
def test_rank_0_alone_may_read_gradients_under_ddp(backend: Any, make: Any) -> None:
    mst.init()
    x, y = nets.batch("mlp")
    alone, model = nets.make(make), mst.shard(nets.make(make), "ddp")

    def train(model: Any, x: Any, y: Any, *, reads: bool = False) -> None:
        optimizer = optimizer_of(model, lr=0.1, momentum=0.5)
        for step in range(4):
            nets.squared(model, x, y).backward()
            if reads:
                assert all(p.grad.norm() >= 0 for p in model.parameters() if p.requires_grad)
            if step % 2:
                nets.squared(model, 2 * x, y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()

    train(model, *nets.mine(backend, (x, y)), reads=backend.rank == 0)
    train(alone, x, y)
    assert nets.difference(model, alone.state_dict()) < 1e-13
    nets.squared(model, *nets.mine(backend, (x, y))).backward()
    changed = max(model.parameters(), key=lambda p: p.is_complex())
    local = changed.grad.to_local() if changed.is_complex() else changed.grad
    local.mul_(1 + backend.rank)
    with pytest.raises(ShardingError, match="changed or assigned gradients differently"):
        optimizer_of(model, lr=0.1).step()


@in_worlds(2, 3)
def test_different_gradients_that_ranks_assign_are_refused_under_ddp(backend):
    mst.init()
    x, y = nets.batch("mlp")
    model = mst.shard(nets.make(nets.perceptron), "ddp")
    optimizer = optimizer_of(model, lr=0.1)
    nets.squared(model, x, y).backward()
    model[2].weight.grad = torch.ones_like(model[2].weight)
    optimizer.step()
    if backend.rank == 0:  # which `zero_grad` clears on every rank
        model[2].weight.grad = torch.zeros_like(model[2].weight)
    optimizer.zero_grad()
    nets.squared(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    nets.squared(model, x, y).backward()
    model[2].weight.grad = torch.full_like(model[2].weight, 1.0 + backend.rank)
    with pytest.raises(ShardingError, match=r"'2\.weight' is \d+.*mean_over_ranks"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
