"""Habits of public PyTorch programs, each as a program: ranks train as one process, or refuse it.

A program is a function of a `Kit`, which makes it one of plain PyTorch, or of `mpishard.torch`. The
table that begins docs/torch-loop.md has the same habits. Those of gradients that a program reads
are in test_habits_gradients.py.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mpishard import run_in_threads
from mpishard.errors import CollectiveMismatchError
from mpishard.testing.worlds import in_worlds

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
import torch_nets as nets  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import mpishard.torch as mst  # noqa: E402
from mpishard.torch.lone_saves import lone_saves  # noqa: E402

nn, functional = torch.nn, torch.nn.functional
SAMPLES = 12
X = torch.linspace(-1, 1, 3 * SAMPLES, dtype=torch.float64).view(SAMPLES, 3)
Y = torch.sin(3 * X[:, :1]) * X[:, 1:2]


def net(*sizes: int) -> Any:
    """A network with the same values on each call, whatever the generator of PyTorch draws."""
    layers: list[Any] = []
    for inside, outside in pairwise(sizes):
        layers += [nn.Linear(inside, outside, dtype=torch.float64), nn.Tanh()]
    module = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.cos(1.3 * torch.arange(p.numel()) + i).view(p.shape) / 2)
    return module


class Kit:
    """Plain PyTorch in one process, with all samples."""

    rank = 0
    no_sync = staticmethod(lambda model: nullcontext())
    clip = staticmethod(lambda model, norm: nn.utils.clip_grad_norm_(model.parameters(), norm))

    def shard(self, module: Any, **options: Any) -> Any:
        return module

    def optimizer(self, kind: Any, parameters: Any, **options: Any) -> Any:
        is_module = isinstance(parameters, nn.Module)
        return kind(parameters.parameters() if is_module else parameters, **options)

    def own(self, values: Any) -> Any:
        return values


class Ranks(Kit):
    """The same program on ranks: the lines that differ."""

    no_sync = staticmethod(mst.no_sync)
    clip = staticmethod(mst.clip_grad_norm_)
    optimizer = staticmethod(mst.optimizer)

    def __init__(self, backend: Any, strategy: str) -> None:
        mst.init()
        self.backend, self.strategy, self.rank = backend, strategy, backend.rank

    def shard(self, module: Any, **options: Any) -> Any:
        return mst.shard(module, self.strategy, minimum_unit_size=1, **options)

    def own(self, values: Any) -> Any:
        return values[self.rank :: self.backend.world_size]


def trained(kit: Kit, model: Any, optimizer: Any, steps: int = 3) -> Any:
    for _ in range(steps):
        optimizer.zero_grad()
        functional.mse_loss(model(kit.own(X)), kit.own(Y)).backward()
        optimizer.step()
    return model


# --------------------------------------------------------------------------------------- programs


def a_loss_that_is_a_sum(kit: Kit) -> Any:
    """A variational autoencoder; ranks may have any numbers of samples."""
    model = kit.shard(nn.ModuleDict({"in": net(3, 5, 4), "out": net(2, 5, 3)}), loss_is_sum=True)
    optimizer = kit.optimizer(torch.optim.Adam, model, lr=1e-2)
    x = X if type(kit) is Kit else [X[:7], X[7:], X[:0]][kit.rank]
    for _ in range(3):
        mean, log_variance = model["in"](x).chunk(2, 1)
        z = mean + 0.3 * torch.exp(log_variance / 2)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
        optimizer.zero_grad()
        (functional.mse_loss(model["out"](z), x, reduction="sum") + divergence).backward()
        optimizer.step()
    return model


def a_closure(kit: Kit) -> Any:
    """A physics-informed network: derivatives of the outputs, and ``step(closure)``."""
    model = kit.shard(net(1, 4, 4, 4, 1))  # more units than are gathered at a time
    optimizer = kit.optimizer(torch.optim.Adam, model, lr=1e-2)
    x = kit.own(X[:, :1]).clone().requires_grad_()

    def closure() -> Any:
        optimizer.zero_grad()
        u = model(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        loss = ((curve + torch.sin(3 * x)) ** 2).mean()
        loss.backward()
        return loss

    return model, torch.stack([optimizer.step(closure).detach() for _ in range(3)])


def lbfgs(kit: Kit) -> Any:
    model = kit.shard(net(3, 6, 1))
    optimizer = kit.optimizer(torch.optim.LBFGS, model, max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(kit.own(X)), kit.own(Y))
        loss.backward()
        return loss

    return model, torch.stack([optimizer.step(closure).detach() for _ in range(3)])


class SAM(torch.optim.Optimizer):
    """Foret et al. 2021, as its public implementations are written."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, options)
        self.base = torch.optim.SGD(self.param_groups, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM needs a closure"
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        moves = [0.05 * p.grad / norm for p in parameters]
        torch._foreach_add_(parameters, moves)
        closure()
        torch._foreach_sub_(parameters, moves)
        self.base.step()
        return loss


def sharpness_aware(kit: Kit) -> Any:
    model = kit.shard(net(3, 6, 1))
    optimizer = kit.optimizer(SAM, model, lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(kit.own(X)), kit.own(Y))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return model


def rank_zero_saves(kit: Kit) -> Any:
    """Each rank calls ``state_dict()``, rank 0 saves, and a new program resumes."""
    model = kit.shard(net(3, 6, 1))
    optimizer = kit.optimizer(torch.optim.AdamW, model, lr=1e-2)
    trained(kit, model, optimizer)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    file = io.BytesIO()
    if kit.rank == 0:
        torch.save(state, file)
    if isinstance(kit, Ranks):  # As a file that every rank reads.
        written = np.frombuffer(file.getvalue(), np.uint8)
        file = io.BytesIO(kit.backend.all_gather(written).tobytes())
    file.seek(0)
    state = torch.load(file)
    module = net(3, 6, 1)
    module.load_state_dict(state["model"])
    model = kit.shard(module)
    optimizer = kit.optimizer(torch.optim.AdamW, model, lr=1e-2)
    optimizer.load_state_dict(state["optimizer"])
    return trained(kit, model, optimizer)


def groups_clipping_and_a_schedule(kit: Kit) -> Any:
    """As nanoGPT: decay of matrices alone, accumulation, clipping, a rate in ``param_groups``."""
    model = kit.shard(net(3, 6, 1))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = kit.optimizer(torch.optim.AdamW, groups, lr=1e-2, betas=(0.9, 0.95))
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        for part in range(2):
            with kit.no_sync(model) if part == 0 else nullcontext():
                x, y = kit.own(X[part::2]), kit.own(Y[part::2])
                (functional.mse_loss(model(x), y) / 2).backward()
        kit.clip(model, 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model


def schedulers(kit: Kit) -> Any:
    model = kit.shard(net(3, 6, 1))
    optimizer = kit.optimizer(torch.optim.SGD, model, lr=0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=6)
    for _ in range(5):
        trained(kit, model, optimizer, 1)
        schedule.step()
    return model


def two_networks(kit: Kit) -> Any:
    """A GAN with weight clipping: each network has an optimizer, and detached outputs."""
    maker, judge = kit.shard(net(3, 5, 1)), kit.shard(net(1, 5, 1))
    makes = kit.optimizer(torch.optim.RMSprop, maker, lr=1e-3)
    judges = kit.optimizer(torch.optim.RMSprop, judge, lr=1e-3)
    for _ in range(3):
        judges.zero_grad()
        (judge(maker(kit.own(X)).detach()).mean() - judge(kit.own(Y)).mean()).backward()
        judges.step()
        for p in judge.parameters():
            p.data.clamp_(-0.3, 0.3)
        makes.zero_grad()
        (-judge(maker(kit.own(X))).mean()).backward()
        makes.step()
    return nn.ModuleList([maker, judge])


def a_gradient_penalty(kit: Kit) -> Any:
    judge = kit.shard(net(3, 5, 1))
    optimizer = kit.optimizer(torch.optim.Adam, judge, lr=1e-2, betas=(0.5, 0.9))
    for _ in range(3):
        x = kit.own(X).clone().requires_grad_()
        output = judge(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        optimizer.zero_grad()
        (output.mean() + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()).backward()
        optimizer.step()
    return judge


def a_target_network(kit: Kit) -> Any:
    """As in DQN and SAC: a copy made before ``shard``, updated softly."""
    module = net(3, 6, 1)
    target = copy.deepcopy(module)
    model = kit.shard(module)
    optimizer = kit.optimizer(torch.optim.Adam, model, lr=1e-2)
    for _ in range(3):
        with torch.no_grad():
            goal = kit.own(Y) + 0.9 * target(kit.own(X))
        loss = functional.smooth_l1_loss(model(kit.own(X)), goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for p, q in zip(model.parameters(), target.parameters(), strict=True):
            q.data.copy_(0.1 * p.data + 0.9 * q.data)
    return nn.ModuleList([model, target])


def an_average_of_the_parameters(kit: Kit) -> Any:
    model = kit.shard(net(3, 6, 1))
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = kit.optimizer(torch.optim.SGD, model, lr=0.1)
    for _ in range(3):
        trained(kit, model, optimizer, 1)
        average.update_parameters(model)
    return nn.ModuleList([model, average.module])


def an_average_for_evaluation(kit: Kit) -> Any:
    """The parameters are exchanged for their averages and back; none is copied."""
    model = kit.shard(net(3, 6, 1))
    optimizer = kit.optimizer(torch.optim.SGD, model, lr=0.1)
    average = {name: p.data.clone() for name, p in model.named_parameters()}
    losses = []
    for _ in range(3):
        trained(kit, model, optimizer, 1)
        kept = {}
        for name, p in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * p.data
            kept[name] = p.data
            p.data = average[name]
        with torch.no_grad():
            losses.append(functional.mse_loss(model(X), Y))
        for name, p in model.named_parameters():
            p.data = kept[name]
    return model, torch.stack(losses)


def the_best_model(kit: Kit) -> Any:
    """Evaluation between epochs; the best values are kept, and restored at the end."""
    model = kit.shard(net(3, 6, 1))
    optimizer = kit.optimizer(torch.optim.SGD, model, lr=0.1)
    best, kept = float("inf"), None
    for _ in range(3):
        trained(kit, model.train(), optimizer, 1)
        model.eval()
        with torch.no_grad():
            loss = functional.mse_loss(model(X), Y).item()
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
    trained(kit, model, optimizer, 1)
    model.load_state_dict(kept)
    return model


def fine_tuning(kit: Kit) -> Any:
    """A frozen body with a new head, and an optimizer of ``filter(requires_grad)``."""
    model = net(3, 6, 4)
    model.requires_grad_(False)
    model.append(net(4, 1))
    model = kit.shard(model)
    parameters = filter(lambda p: p.requires_grad, model.parameters())
    return trained(kit, model, kit.optimizer(torch.optim.Adam, parameters, lr=1e-2))


def tied_weights_and_recomputation(kit: Kit) -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = net(3, 3), net(3, 3), net(3, 1)
            self.second[0].weight = self.first[0].weight

        def forward(self, x: Any) -> Any:
            x = checkpoint(self.first, x, use_reentrant=False)
            return self.out(torch.tanh(self.second(x)))

    model = kit.shard(Tied())
    return trained(kit, model, kit.optimizer(torch.optim.Adam, model, lr=1e-2))


def a_batch_left_out(kit: Kit) -> Any:
    """Gradients of ``no_sync`` are made 0, and not None."""
    model = kit.shard(net(3, 6, 1))
    optimizer = kit.optimizer(torch.optim.AdamW, model, lr=1e-2)
    for clear in (optimizer.zero_grad, model.zero_grad):
        for is_bad in (True, False):
            with kit.no_sync(model):
                functional.mse_loss(model(kit.own(X)), kit.own(Y)).backward()
            if is_bad:
                clear(set_to_none=False)
        functional.mse_loss(model(-kit.own(X)), kit.own(Y)).backward()
        optimizer.step()
    return model


def parametrised_weights(kit: Kit) -> Any:
    """The weights are functions of the parameters, which an assignment inverts."""
    model = net(3, 4, 1)
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrize.register_parametrization(model[2], "weight", Exponential())
    model = kit.shard(model)
    model[2].weight = torch.full_like(model[2].weight, 0.3)
    return trained(kit, model, kit.optimizer(torch.optim.Adam, model, lr=1e-2))


class Exponential(nn.Module):
    def forward(self, weight: Any) -> Any:
        return weight.exp()

    def right_inverse(self, weight: Any) -> Any:
        return weight.abs().log()


def weights_drawn_by_hand(kit: Kit) -> Any:
    """Initialisation after ``shard``: by ``p.data``, and by slices."""
    model = kit.shard(net(3, 6, 1))
    for p in model.parameters():
        p.data.mul_(0.5)
    nn.init.constant_(model[0].bias, 0.1)
    with torch.no_grad():
        model[2].weight[0, :2] = 0.2
    return trained(kit, model, kit.optimizer(torch.optim.Adam, model, lr=1e-2))


def a_fourier_operator(kit: Kit) -> Any:
    """Complex parameters: three optimizers, clipping, groups and a checkpoint."""
    models = []
    for kind, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    ):
        model = kit.shard(nets.make(lambda: nets.fourier(3, 1)))
        weights = [p for p in model.parameters() if p.requires_grad and p.dim() > 2]
        others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 2]
        groups = [{"params": weights, **options, "lr": 2e-2}, {"params": others}]
        optimizer = kit.optimizer(kind, groups, **options)
        trained(kit, model, optimizer)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state = copy.deepcopy(state)
        trained(kit, model, optimizer, 1)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for _ in range(2):
            trained(kit, model, optimizer, 1)
            kit.clip(model, 1e-3)
            optimizer.step()
        models.append(copy.deepcopy(model))
        found = optimizer.state_dict()["state"].values()
        moments = [v for state in found for v in state.values() if isinstance(v, torch.Tensor)]
        models.append(nn.ParameterList([nn.Parameter(v.detach(), False) for v in moments]))
    return nn.ModuleList(models)


def complex_numbers_by_hand(kit: Kit) -> Any:
    """Initialisation after ``shard``, and statistics and updates by ``p.grad``."""
    model = kit.shard(nets.make(lambda: nets.fourier(3, 1)))
    weight = model[2].weight
    with torch.no_grad():
        weight.mul_(1 - 1j)
        weight[0] = 0.1j
        model[4].weight.data += weight.conj() / 7
        weight.data[1].mul_(0.5j)
    found = []
    for _ in range(3):
        model.zero_grad()
        functional.mse_loss(model(kit.own(X)), kit.own(Y)).backward()
        weight.grad *= 1j
        weight.grad[0, 1] = 0.2 + 0.1j
        model[4].weight.grad = weight.grad.conj() + model[4].weight.grad
        found += [weight.grad.norm(), weight.grad.angle().sum(), weight.grad.sum().real]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.1)
    return model, torch.stack(found)


WORK: list[Callable[[Kit], Any]] = [
    a_loss_that_is_a_sum, a_closure, rank_zero_saves, groups_clipping_and_a_schedule, schedulers,
    two_networks, a_gradient_penalty, a_target_network, an_average_of_the_parameters,
    an_average_for_evaluation, a_batch_left_out, parametrised_weights,
    the_best_model, fine_tuning, tied_weights_and_recomputation, weights_drawn_by_hand,
    a_fourier_operator, complex_numbers_by_hand,
]  # fmt: skip
WHOLE = [lbfgs, sharpness_aware]  # look at all parameters together
PATHS = ["arena", "messages"]


def tensors(result: Any) -> Iterator[Any]:
    for part in result if isinstance(result, tuple) else [result]:
        yield from [part] if isinstance(part, torch.Tensor) else part.state_dict().values()


def error(result: Any, expected: Any) -> float:
    pairs = zip(tensors(result), tensors(expected), strict=True)
    return max(float((ours - theirs).abs().max()) for ours, theirs in pairs)


@pytest.mark.parametrize("program", WORK, ids=lambda program: program.__name__)
@pytest.mark.parametrize("path", PATHS, indirect=True)
@in_worlds(2, 3)
def test_a_program_trains_as_in_one_process(backend: Any, program: Any, path: str) -> None:
    with nets.making:  # Thread-ranks would share the generator.
        expected = program(Kit())
    for strategy in ("ddp", "zero1", "zero2", "fsdp"):
        assert error(program(Ranks(backend, strategy)), expected) < 1e-12, strategy
        backend.barrier()


@pytest.mark.parametrize("program", WHOLE, ids=lambda program: program.__name__)
@pytest.mark.parametrize("path", PATHS, indirect=True)
@in_worlds(2, 3)
def test_ddp_takes_each_optimizer_and_the_others_name_it(
    backend: Any, program: Any, path: str
) -> None:
    # Line searches amplify roundings.
    assert error(program(Ranks(backend, "ddp")), program(Kit())) < 1e-9
    for strategy in ("zero1", "zero2", "fsdp"):
        with pytest.raises(ValueError, match=r'looks at parameters as a whole .* strategy="ddp"'):
            program(Ranks(backend, strategy))


# --------------------------------------------------------------------- a checkpoint by rank 0 alone

LONE = """
import torch
from torch import nn
import mpishard.torch as mst

def save(optimizer, path):
    torch.save(optimizer.state_dict(), path)

def train(rank, strategy, path, optimizer_of, saves):
    model = mst.shard(nn.Linear(4, 3), strategy)
    optimizer = optimizer_of(torch.optim.Adam, model, lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if step == saves and rank == 0:
            checkpoint = {"optimizer": optimizer.state_dict(), "step": step}
            torch.save(checkpoint, path)
            save(optimizer, path)
"""


def lone_program(folder: Any) -> Any:
    file = folder / "lone_program.py"
    file.write_text(LONE)
    specification = importlib.util.spec_from_file_location(file.stem, file)
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)  # type: ignore[union-attr]
    return module


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_the_first_step_names_a_checkpoint_of_rank_zero_alone(strategy, tmp_path, caplog):
    program, notes = lone_program(tmp_path), ""

    def main(backend: Any, saves: int) -> None:
        nonlocal notes
        mst.init()
        try:
            program.train(backend.rank, strategy, tmp_path / "c.pt", mst.optimizer, saves)
        except CollectiveMismatchError as error:
            if backend.rank == 0:
                notes = "".join(error.__notes__)
            raise

    with caplog.at_level(logging.WARNING, "mpishard"):
        run_in_threads(2, main, 99)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2 * (strategy != "ddp")
    if strategy == "ddp":  # Each rank has the whole state.
        run_in_threads(2, main, 1)
        return
    for line, text in zip((7, 17), warned, strict=True):
        assert text.startswith(f"{program.__file__}:{line}: optimizer.state_dict() is collective")
    with pytest.raises(CollectiveMismatchError, match=r"optimizer\.state_dict\(\)"):
        run_in_threads(2, main, 1)
    assert "state = optimizer.state_dict()" in notes


@in_worlds(2)
def test_a_source_that_cannot_be_parsed_does_not_end_the_step(backend, monkeypatch):
    def raise_as_two_threads_at_once(_: str) -> Any:
        raise SystemError("AST constructor recursion depth mismatch")

    monkeypatch.setattr("ast.parse", raise_as_two_threads_at_once)
    kit = Ranks(backend, "fsdp")
    model = kit.shard(net(3, 6, 1))
    trained(kit, model, kit.optimizer(torch.optim.SGD, model, lr=0.1), 1)  # has a state_dict()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("if rank == 0:\n    torch.save(optimizer.state_dict())", [2]),
        ("if step % 9 == 0 and master_process:\n    c = {'o': optim.state_dict()}", [2]),
        ("if not args.distributed or args.rank % gpus == 0:\n    save(opt.state_dict())", [2]),
        ("if is_main_process():\n    x = self.opt.state_dict()", [2]),
        ("if not rank:\n    x = optimizer.state_dict()", [2]),
        ("def save(o):\n    o.optimizer.state_dict()\nif dist.get_rank() == 0:\n    save(o)", [2]),
        ("s = optimizer.state_dict()\nif rank == 0:\n    torch.save(s)", []),
        ("if rank == 0:\n    torch.save(scheduler.state_dict())", []),
        ("if rank == 0:\n    print(1)\nelse:\n    optimizer.state_dict()", []),
        ("if step == 0:\n    optimizer.state_dict()", []),
        ("if rank == 0:\n    torch.save(model.state_dict())", []),
        ("if rank != 0:\n    optimizer.state_dict()", []),
    ],
)
def test_a_checkpoint_of_one_rank_is_found_in_the_source(source: str, expected: list[int]) -> None:
    import ast

    assert [line for line, _ in lone_saves(ast.parse(source), gathers=False)] == expected
    if "model." in source:
        assert lone_saves(ast.parse(source), gathers=True) == [(2, "model.state_dict()")]
