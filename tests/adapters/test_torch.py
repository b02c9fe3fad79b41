"""PyTorch modules: sharded training is PyTorch's own in one process, to 1e-12 in float64."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from typing import Any

import numpy as np
import pytest

import mpishard as ms
from mpishard import nn as ours
from mpishard.adapters import OptaxRule, TorchModel
from mpishard.checkpoint import load, save
from mpishard.communication import InMemoryCommunicationBackend as InMemory
from mpishard.communication import run_in_threads
from mpishard.errors import PeerError, ShardingError, StructureOnlyError
from mpishard.models import DDPModel, FSDPModel, HybridShardedModel
from mpishard.optimizers import (
    LBFGS,
    SGD,
    Adam,
    AdamW,
    Cosine,
    DDPOptimizer,
    FSDPOptimizer,
    HybridShardedOptimizer,
)
from mpishard.sharding import ShardingConfiguration
from mpishard.testing.worlds import in_worlds
from mpishard.training import OptimizationInputData

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed here; pip install 'mpishard[torch]'"
)
from torch_nets import GPT, Silent  # noqa: E402

import mpishard.torch as mst  # noqa: E402

nn = torch.nn

RATE = 1e-3
STEPS = 4
STRATEGIES = {"ddp": (DDPModel, DDPOptimizer), "fsdp": (FSDPModel, FSDPOptimizer)}
RULES = {"sgd": lambda: SGD(RATE, 0.9), "adamw": lambda: AdamW(RATE, weight_decay=0.1)}
THEIRS = {
    "sgd": lambda p: torch.optim.SGD(p, RATE, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.1),
}

by_path = pytest.mark.parametrize("path", ["arena", "messages", "two nodes"], indirect=True)
by_strategy = pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
by_rule = pytest.mark.parametrize("rule", ["sgd", "adamw"])


class Branches(nn.Module):
    """The sign of the first input chooses one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)  # registered in another order than used
        self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 4)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.last((self.left if x[0, 0] > 0 else self.right)(x).tanh())


def perceptron() -> Any:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 2))


def cross_entropy(logits: Any, targets: Any) -> Any:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


KINDS = {
    "mlp": (perceptron, nn.functional.mse_loss),
    "transformer": (GPT, cross_entropy),
}


def module_of(kind: Any, seed: int) -> Any:
    """A module in float64 whose values are a function of ``seed`` alone."""
    module = (KINDS[kind][0] if isinstance(kind, str) else kind)().double()
    generator = np.random.default_rng(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            values = generator.standard_normal(tuple(parameter.shape)) * 0.3
            parameter.copy_(torch.from_numpy(values))
    return module


def batch(kind: Any, step: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(step)
    samples = 7 + 2 * step
    if kind == "transformer":
        return tuple(generator.integers(0, 11, (2, samples, 6)).astype(np.uint8))
    x = generator.standard_normal((samples, 5))
    return x, np.sin(x[:, :2])


def rows(samples: int, step: int, rank: int, world_size: int) -> slice:
    """A rank's samples: uneven, and none for one rank, another one at each step."""
    if world_size == 1:
        return slice(0, samples)
    shares = np.random.default_rng([step, world_size]).dirichlet(np.ones(world_size))
    shares[step % world_size] = 0
    ends = np.round(np.cumsum(shares / shares.sum()) * samples).astype(int)
    return slice(int(ends[rank - 1]) if rank else 0, int(ends[rank]))


def flat(module: Any) -> Any:
    values = [p.detach().reshape(-1) for p in module.parameters() if p.requires_grad]
    return torch.cat(values).numpy().copy()


@functools.cache
def train_plainly(kind: str, rule: str, steps: int = STEPS) -> tuple[list[float], list[Any]]:
    """Losses before each step and parameters after it, of PyTorch alone."""
    module, loss = module_of(kind, 0), KINDS[kind][1]
    optimizer = THEIRS[rule](module.parameters())
    losses, parameters = [], []
    for step in range(steps):
        x, y = (torch.from_numpy(a) for a in batch(kind, step))
        if kind == "transformer":
            x, y = x.long(), y.long()
        optimizer.zero_grad()
        value = loss(module(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        parameters.append(flat(module))
    return losses, parameters


def wrap(
    backend: Any, kind: Any, strategy: str, unit_size: int = 1, loss: Any = None, seed: Any = None
) -> Any:
    """Each rank's module has values of its own: rank 0's count."""
    if loss is None:
        loss = KINDS[kind][1] if isinstance(kind, str) else nn.functional.mse_loss
    plain = TorchModel(module_of(kind, backend.rank if seed is None else seed), loss)
    config = ShardingConfiguration(backend, minimum_parameter_group_size=unit_size)
    return STRATEGIES[strategy][0](plain, config)


def optimizer_for(model: Any, rule: str = "adamw") -> Any:
    return STRATEGIES[model.strategy.lower()][1](RULES[rule](), model.sharding_configuration)


def local_batch(backend: Any, kind: Any, step: int) -> tuple[Any, Any]:
    x, y = batch(kind, step)
    mine = rows(len(x), step, backend.rank, backend.world_size)
    return x[mine], y[mine]


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------- equality


@pytest.mark.parametrize("kind", KINDS)
@by_rule
@by_strategy
@by_path
@in_worlds(1, 2, 3, 4)
def test_equals_training_by_pytorch(
    backend: Any, kind: str, rule: str, strategy: str, path: str
) -> None:
    losses, parameters = train_plainly(kind, rule)
    for unit_size in (1, 100):  # twice, which finds buffers that are stale
        model = wrap(backend, kind, strategy, unit_size)
        optimizer = optimizer_for(model, rule)
        for step in range(STEPS):
            close(optimizer.step(model, *local_batch(backend, kind, step)), losses[step])
            close(model.gather_full_parameters(), parameters[step])
            close(flat(model.wrapped_model.module), parameters[step])


LEAVES_OUT = {
    "sgd": (
        lambda: SGD(RATE, 0.9, weight_decay=0.3),
        lambda p: torch.optim.SGD(p, RATE, momentum=0.9, weight_decay=0.3),
    ),
    "adam": (
        lambda: Adam(RATE, weight_decay=0.3),
        lambda p: torch.optim.Adam(p, RATE, weight_decay=0.3),
    ),
    "adamw": (
        lambda: AdamW(Cosine(RATE, 9), weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, RATE, weight_decay=0.3),
    ),
}  # fmt: skip
LEFT = ["all", "all", "none", "one", "none", "all", "none"]
"""The ranks whose batches take the left branch in each step; the others take the right one."""


def branch_batch(step: int, rank: int) -> tuple[Any, Any]:
    x, y = batch("mlp", step)
    mine = slice(2 * rank, 2 * rank + 2 + rank % 2)
    is_left = LEFT[step] == "all" or (LEFT[step] == "one" and rank == 0)
    x = x[mine].copy()
    x[:, 0] = 1 if is_left else -1
    return x, y[mine]


@functools.cache
def branches_of_pytorch(rule: str, world_size: int) -> list[Any]:
    """Parameters after each step, of PyTorch alone on the batches of all ranks."""
    module, parameters = module_of(Branches, 0), []
    optimizer = LEAVES_OUT[rule][1](module.parameters())
    for step in range(len(LEFT)):
        for group in optimizer.param_groups:
            group["lr"] = LEAVES_OUT[rule][0]().rate_of_step(step)
        optimizer.zero_grad()
        total, samples = 0, 0
        for rank in range(world_size):
            x, y = map(torch.from_numpy, branch_batch(step, rank))
            total = total + nn.functional.mse_loss(module(x), y) * len(x)
            samples += len(x)
        (total / samples).backward()
        optimizer.step()
        parameters.append(flat(module))
    return parameters


def take_branches(backend: Any, strategy: str, rule: str, **options: Any) -> tuple[Any, Any]:
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1, **options)
    plain = TorchModel(module_of(Branches, backend.rank), nn.functional.mse_loss)
    return (
        ms.as_distributed(plain, config, strategy),
        ms.as_distributed(LEAVES_OUT[rule][0](), config, strategy),
    )


@pytest.mark.parametrize("rule", LEAVES_OUT)
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@by_path
@in_worlds(1, 2, 3, 4)
def test_a_parameter_that_no_rank_uses_is_left_out_as_by_pytorch(
    backend: Any, rule: str, strategy: str, path: str
) -> None:
    """Its values, moments and counts of updates stay; one rank that uses it is enough."""
    model, optimizer = take_branches(backend, strategy, rule)
    for step, expected in enumerate(branches_of_pytorch(rule, backend.world_size)):
        optimizer.step(model, *branch_batch(step, backend.rank))
        close(model.gather_full_parameters(), expected)


@pytest.mark.parametrize("size", ["pipeline_parallel_size", "tensor_parallel_size"])
@in_worlds(2, 4)
def test_unused_parameters_are_left_out_on_a_mesh(backend: Any, size: str) -> None:
    config = ShardingConfiguration(backend, minimum_parameter_group_size=1)
    plain = TorchModel(module_of(Branches, 0), nn.functional.mse_loss)
    model = ms.as_distributed(plain, config, "hybrid", **{size: 2})
    rule = LEAVES_OUT["adamw"][0]()
    optimizer = ms.as_distributed(rule, config, "hybrid", **{size: 2})
    data_rank = model.engine.replica.sample_group.rank
    for step, expected in enumerate(branches_of_pytorch("adamw", backend.world_size // 2)):
        optimizer.step(model, *branch_batch(step, data_rank))
        close(model.gather_full_parameters(), expected)


@by_strategy
@in_worlds(1, 2, 4)
def test_gradient_leaves_leave_unused_parameters_out(backend: Any, strategy: str) -> None:
    model, optimizer = take_branches(backend, strategy, "adamw", gradient_leaves=4)
    everyone = [branch_batch(step, 0) for step in range(len(LEFT))]
    for (x, y), expected in zip(everyone, branches_of_pytorch("adamw", 1), strict=True):
        mine = model.batch_indices(len(x))
        optimizer.step(model, x[mine], y[mine])
        close(model.gather_full_parameters(), expected)


@pytest.mark.parametrize("defer", [False, True])
@by_strategy
@in_worlds(1, 2, 3)
def test_a_parameter_that_one_accumulated_batch_uses_is_updated(
    backend: Any, strategy: str, defer: bool
) -> None:
    """The batches of a round are those of all ranks; a batch that was given up does not count."""
    model, optimizer = take_branches(backend, strategy, "adamw")
    for step, expected in enumerate(branches_of_pytorch("adamw", backend.world_size)):
        x, y = branch_batch(step, backend.rank)
        with contextlib.suppress(KeyError), model.accumulate(defer=defer):
            optimizer.step(model, -x, y)  # the other branch
            raise KeyError
        with model.accumulate(defer=defer):
            optimizer.step(model, x[:1], y[:1])
            model.compute_gradients(-x, y)  # which is no part of the round
        optimizer.step(model, x[1:], y[1:])
        close(model.gather_full_parameters(), expected)


@by_strategy
@in_worlds(1, 2, 3)
def test_left_out_updates_are_counted_in_checkpoints(
    backend: Any, strategy: str, shared_path: Any
) -> None:
    expected = branches_of_pytorch("adamw", backend.world_size)
    model, optimizer = take_branches(backend, strategy, "adamw")
    for step in range(3):
        optimizer.step(model, *branch_batch(step, backend.rank))
    save(shared_path / "all", model, optimizer)
    state = optimizer.serialize()
    for way in ("files", "bytes"):
        other, its = take_branches(backend, "zero1", "adamw")
        load(shared_path / "all", other, its if way == "files" else None)
        if way == "bytes":
            its.bind(other)
            its.deserialize(state)
        for step in range(3, len(LEFT)):
            its.step(other, *branch_batch(step, backend.rank))
            close(other.gather_full_parameters(), expected[step])


class AllBranches(Branches):
    """It uses every parameter, some with the gradient 0."""

    def forward(self, x: Any) -> Any:
        return super().forward(x) + 0 * sum(p.sum() for p in self.parameters())


def adam_of_optax() -> Any:
    optax = pytest.importorskip("optax")
    pytest.importorskip("jax").config.update("jax_enable_x64", val=True)
    return OptaxRule(optax.adamw(RATE, weight_decay=0.3))


@pytest.mark.parametrize("rule", [LBFGS, adam_of_optax])
@by_strategy
@in_worlds(1, 2)
def test_rules_with_numbers_of_all_parameters_take_an_unused_one_for_gradient_0(
    backend: Any, strategy: str, rule: Any
) -> None:
    """As the line search of PyTorch, and as optax do."""
    found = []
    for kind in (Branches, AllBranches):
        model = wrap(backend, kind, strategy, seed=0)
        optimizer = STRATEGIES[strategy][1](rule(), model.sharding_configuration)
        for step in range(4):
            optimizer.step(model, *branch_batch(step, backend.rank))
        found.append(model.gather_full_parameters())
    assert np.array_equal(*found)


class Gated(nn.Module):
    """Autograd gives its factor no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.factor = nn.Linear(5, 4), nn.Parameter(torch.ones(4))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.last(Silent.apply(self.first(x).tanh(), self.factor))


@pytest.mark.parametrize("rule", LEAVES_OUT)
@by_strategy
@in_worlds(1, 3)
def test_a_parameter_to_which_autograd_gives_no_gradient_is_unused(
    backend: Any, strategy: str, rule: str
) -> None:
    x, y = np.linspace(-1, 1, 30).reshape(6, 5), np.ones((6, 2))
    module = module_of(Gated, 0)
    theirs = LEAVES_OUT[rule][1](module.parameters())
    model = wrap(backend, Gated, strategy)
    optimizer = STRATEGIES[strategy][1](LEAVES_OUT[rule][0](), model.sharding_configuration)
    mine = rows(6, 0, backend.rank, backend.world_size)
    for step in range(2):
        for group in theirs.param_groups:
            group["lr"] = LEAVES_OUT[rule][0]().rate_of_step(step)
        nn.functional.mse_loss(module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        theirs.step()
        theirs.zero_grad()
        optimizer.step(model, x[mine], y[mine])
        close(model.gather_full_parameters(), flat(module))


@pytest.mark.parametrize("defer", [False, True])
@by_strategy
@in_worlds(1, 2, 3)
def test_accumulated_batches_are_one(backend: Any, strategy: str, defer: bool) -> None:
    _, parameters = train_plainly("mlp", "adamw", 1)
    model = wrap(backend, "mlp", strategy)
    optimizer = optimizer_for(model)
    x, y = local_batch(backend, "mlp", 0)
    with model.accumulate(defer=defer):
        optimizer.step(model, x[:1], y[:1])
        optimizer.step(model, x[1:2], y[1:2])
    optimizer.step(model, x[2:], y[2:])
    close(model.gather_full_parameters(), parameters[0])


@by_strategy
@in_worlds(1, 3)
def test_loops_evaluates_and_resumes(backend: Any, strategy: str, shared_path: Any) -> None:
    x, y = batch("mlp", 10)

    def run(folder: str, steps: int, resume: str | None = None) -> Any:
        model = wrap(backend, "mlp", strategy)
        data = OptimizationInputData(
            model=model,
            x_train=x,
            y_train=y,
            x_validation=x,
            y_validation=y,
            batch_size=8,
            epochs=9,
            max_steps=steps,
            validate_every=2,
            checkpoint=shared_path / folder,
            checkpoint_every=2,
            resume=None if resume is None else shared_path / resume,
        )
        return model, optimizer_for(model).optimize(data)

    whole, result = run("whole", 6)
    assert result.validation_history[-1][1] < result.validation_history[0][1]
    run("half", 4)
    resumed, _ = run("rest", 6, resume="half")
    assert np.array_equal(resumed.gather_full_parameters(), whole.gather_full_parameters())
    names = [entry.name for entry in whole.parameter_entries]
    assert names == [f"{layer}.{part}" for layer in (0, 2, 4) for part in ("weight", "bias")]
    alone = TorchModel(module_of("mlp", 5), nn.functional.mse_loss)
    alone.deserialize(whole.serialize())
    assert np.array_equal(alone.get_parameters(), whole.gather_full_parameters())


@in_worlds(2)
def test_takes_losses_of_ours_and_of_the_call(backend: Any) -> None:
    x, y = batch("mlp", 0)
    model = wrap(backend, "mlp", "fsdp", loss=ours.MSE())
    theirs = wrap(backend, "mlp", "fsdp")
    gradient = model.compute_gradients(x, y)
    close(gradient, theirs.compute_gradients(x, y))
    close(gradient, theirs.compute_gradients(x, y, ours.MSE()))
    module = module_of("mlp", 0)
    nn.functional.mse_loss(module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
    close(gradient, torch.cat([p.grad.reshape(-1) for p in module.parameters()]))


# --------------------------------------------------------------------------------------- memory


def _inside(module: Any, vector: Any) -> bool:
    first = vector.ctypes.data
    addresses = [parameter.data_ptr() for parameter in module.parameters()]
    return all(first <= address < first + vector.nbytes for address in addresses)


@by_strategy
@by_path
@in_worlds(1, 2)
def test_parameters_are_views_of_the_store_in_every_step(
    backend: Any, strategy: str, path: str
) -> None:
    model = wrap(backend, "mlp", strategy)
    module, store = model.wrapped_model.module, model.engine.parameters
    optimizer = optimizer_for(model)
    before = [parameter.data_ptr() for parameter in module.parameters()]
    assert _inside(module, store._vector)
    for step in range(2):
        optimizer.step(model, *local_batch(backend, "mlp", step))
        model.train(*local_batch(backend, "mlp", step))
    model.set_parameters(np.zeros(model.parameter_count))
    assert [parameter.data_ptr() for parameter in module.parameters()] == before
    assert not any(parameter.grad is not None for parameter in module.parameters())
    assert not any(parameter.detach().any() for parameter in module.parameters())


@pytest.mark.parametrize("path", ["arena"], indirect=True)
@in_worlds(2)
def test_a_node_holds_parameters_once_and_says_so(backend: Any, path: str) -> None:
    model = wrap(backend, "mlp", "fsdp")
    held = model.memory.as_dict()
    total = sum(p.numel() for p in perceptron().parameters()) * 8
    assert sum(backend.all_gather(np.array([held["parameters"]]))) == total
    says = [
        wrap(backend, "mlp", strategy).get_model_metadata().properties for strategy in STRATEGIES
    ]
    assert [s["ParametersOncePerNode"] for s in says] == [False, True]
    assert [s["GradientsSharded"] for s in says] == [False, True]
    assert [s["ParametersSharded"] for s in says] == [False, False]


@in_worlds(2)
def test_says_where_parameters_stay_whole(backend: Any, messages_only: Any, caplog: Any) -> None:
    model = wrap(backend, "mlp", "fsdp")
    backend.barrier()
    assert (
        "stay whole on every rank, because the ranks of a node share no memory" in caplog.text
        or (backend.rank > 0)
    )
    assert not model.get_model_metadata().properties["ParametersOncePerNode"]


@by_strategy
@by_path
@in_worlds(2)
def test_released_modules_live_on(backend: Any, strategy: str, path: str) -> None:
    model = wrap(backend, "mlp", strategy)
    plain, vector = model.wrapped_model, model.engine.parameters._vector
    with pytest.raises(StructureOnlyError, match="gather_full_parameters"):
        plain.get_parameters()
    expected = model.gather_full_parameters()
    assert model.release() is plain
    assert not _inside(plain.module, vector)
    assert np.array_equal(plain.get_parameters(), expected)
    plain.train(*batch("mlp", 0))
    again = STRATEGIES[strategy][0](plain, model.sharding_configuration)
    optimizer_for(again).step(again, *batch("mlp", 0))
    module = again.wrapped_model.module
    gone = weakref.ref(again)
    del again, plain
    gc.collect()
    assert gone() is None
    assert np.isfinite(flat(module)).all()
    module(torch.from_numpy(batch("mlp", 0)[0])).sum().backward()


@by_strategy
@in_worlds(2)
def test_copies_share_nothing(backend: Any, strategy: str) -> None:
    model = wrap(backend, "mlp", strategy)
    before = model.gather_full_parameters()
    copy = model.deep_copy()
    optimizer_for(model).step(model, *batch("mlp", 0))
    assert np.array_equal(copy.gather_full_parameters(), before)
    assert np.array_equal(flat(copy.wrapped_model.module), before)
    optimizer_for(copy).step(copy, *batch("mlp", 0))
    close(copy.gather_full_parameters(), model.gather_full_parameters())
    with model.unsharded() as plain:
        assert np.array_equal(flat(plain.module), model.gather_full_parameters())
        assert plain.module is not model.wrapped_model.module
        plain.train(*batch("mlp", 0))
    close(copy.gather_full_parameters(), model.gather_full_parameters())


# ------------------------------------------------------------------------------ what modules may be


class Odd(nn.Module):
    """A frozen layer, a buffer, a transposed parameter and a layer that predicts otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.register_buffer("scale", torch.rand((), dtype=torch.float64))
        self.turned = nn.Parameter(torch.rand(2, 5, dtype=torch.float64).T)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.dropout(self.frozen(x)) @ self.turned * self.scale


@in_worlds(1, 2)
def test_frozen_parameters_and_buffers_are_rank_0s(backend: Any) -> None:
    def build() -> Any:
        module = module_of(Odd, backend.rank)
        module.scale.fill_(1.0 + backend.rank)
        return module

    plain = TorchModel(build(), nn.functional.mse_loss)
    model = FSDPModel(plain, ShardingConfiguration(backend))
    x, y = np.ones((3, 5)), np.ones((3, 2))
    mode = [part.training for part in plain.module.modules()]
    first = model.predict(x)
    assert np.array_equal(first, model.predict(x))  # no dropout
    assert [part.training for part in plain.module.modules()] == mode
    everyone = backend.all_gather(first[None])
    assert (everyone == everyone[0]).all()
    before = [plain.module.frozen.weight.clone(), plain.module.scale.clone()]
    optimizer_for(model).step(model, x, y)
    frozen = {entry.name: not entry.trainable for entry in model.parameter_entries}
    assert frozen == {"turned": False, "frozen.weight": True, "frozen.bias": True}
    assert torch.equal(plain.module.frozen.weight, before[0])
    assert plain.module.scale == before[1] == 1.0
    assert model.predict(np.ones((0, 5))).shape == (0, 2)


@pytest.mark.mpi
def test_ranks_of_a_mesh_that_repeat_work_draw_the_same_masks(backend: Any) -> None:
    config = ShardingConfiguration(backend)
    data_size = 2 if backend.world_size == 4 else 1
    torch.manual_seed(backend.rank)
    torch.rand(1 + backend.rank)  # the generator of rank 0 has left its seed behind
    plain = TorchModel(module_of(Odd, 0), nn.functional.mse_loss)
    model = HybridShardedModel(plain, config, -(-backend.world_size // data_size), 1, data_size)
    draws = backend.all_gather(torch.rand(1).numpy())
    model.train(np.ones((3, 5)), np.ones((3, 2)))
    assert model.check_replicas() == len(model.parameter_entries) == 3
    groups = {model.data_rank_of(rank): draws[rank] for rank in range(backend.world_size)}
    for rank, drawn in enumerate(draws):
        assert drawn == groups[model.data_rank_of(rank)]
    assert len(set(groups.values())) == data_size


def test_a_plain_model_trains_alone() -> None:
    x, y = batch("mlp", 0)
    x.flags.writeable = False
    plain = TorchModel(module_of("mlp", 0), nn.functional.mse_loss)
    first = plain.train(x.astype(np.float32), y, learning_rate=0.1)
    result = AdamW(RATE).optimize(OptimizationInputData(model=plain, x_train=x, y_train=y))
    assert result.best_solution is plain
    assert plain.train(x, y) < first
    twin = plain.deep_copy()
    twin.set_parameters(np.zeros(plain.parameter_count))
    assert plain.get_parameters().any()
    assert not flat(twin.module).any()
    assert plain.get_model_metadata().name == "Sequential"


class Counting(nn.Linear):
    """Changes a buffer in each pass."""

    def __init__(self) -> None:
        super().__init__(5, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.passes += 1
        return super().forward(x)


class TwoOutputs(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 2)

    def forward(self, x: Any) -> Any:
        return super().forward(x), x


def mixed() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


REFUSED = {
    "two dtypes": (mixed, ValueError, r"'0.weight' and 1 more are float32, '1.weight' and 1"),
    "half": (lambda: nn.Linear(2, 2).half(), ValueError, "float16; use module.float"),
    "complex": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex128)), ValueError,
        r"float32 \(complex64\), .*'1.weight' and 1 more are complex128; .*torch.complex64",
    ),
    "device": (lambda: nn.Linear(2, 2, device="meta"), ValueError, "'weight on meta' and 1 more"),
    "lazy": (lambda: nn.LazyLinear(2), TypeError, "no shape yet; call the module once"),
    "nothing": (nn.ReLU, ValueError, "ReLU has no parameter that requires a gradient"),
    "frozen": (lambda: nn.Linear(2, 2).requires_grad_(False), ValueError, "no parameter that"),
    "max_norm": (
        lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), ValueError,
        "'0': max_norm changes weights in forward",
    ),
    "no module": (object, TypeError, "must be a torch.nn.Module, got object"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_it_cannot_place(case: str) -> None:
    build, error, message = REFUSED[case]
    module = build()
    before = [(p, p.data_ptr()) for p in getattr(module, "parameters", list)() if case != "lazy"]
    with pytest.raises(error, match=message):
        TorchModel(module, nn.functional.mse_loss)
    assert [(p, p.data_ptr()) for p, _ in before] == before


def test_max_norm_of_other_modules_than_embeddings_is_not_refused() -> None:
    module = nn.Linear(5, 2)
    module.max_norm = 1.0  # such as the norm to which the user clips
    TorchModel(module, nn.functional.mse_loss)


def test_refuses_what_it_cannot_train() -> None:
    x, y = batch("mlp", 0)
    with pytest.raises(TypeError, match=r"loss\(output, y\), or a loss of mpishard.nn"):
        TorchModel(nn.Linear(5, 2), 3)
    with pytest.raises(TypeError, match=r"a scalar tensor.* got a tensor of shape \(7, 2\)"):
        TorchModel(nn.Linear(5, 2), lambda a, b: a - b).train(x, y)
    with pytest.raises(TypeError, match="must return one tensor, got tuple"):
        TorchModel(TwoOutputs(), nn.functional.mse_loss).predict(x)
    plain = TorchModel(nn.Linear(5, 2), nn.functional.mse_loss)
    with pytest.raises(ValueError, match=r"12 parameters; got a vector of shape \(3,\)"):
        plain.set_parameters(np.zeros(3))
    with pytest.raises(TypeError, match=r"x must be a NumPy array of samples.*got list"):
        plain.predict([[1.0]])


LATE = {
    "float": (lambda m: m.float(), "'0.weight' is no longer in the memory"),
    "assign": (
        lambda m: m.load_state_dict(nn.Sequential(*m).double().state_dict(), assign=True),
        "'0.weight' was replaced or deleted",
    ),
    "replaced": (lambda m: m.insert(0, nn.Linear(5, 5)), "'0.weight' was .* not in the module"),
    "appended": (lambda m: m.append(nn.Linear(2, 2)), "'2.weight' was .* not in the module"),
    "thawed": (lambda m: m[1].requires_grad_(True), "'1.weight' was frozen"),
}


@pytest.mark.parametrize("case", LATE)
def test_a_module_that_changes_later_is_not_trained_in_part(case: str) -> None:
    change, message = LATE[case]

    def body(backend: Any) -> None:
        module = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)).double()
        module[1].requires_grad_(False)
        model = DDPModel(TorchModel(module, nn.functional.mse_loss), ShardingConfiguration(backend))
        change(module)
        model.train(*batch("mlp", 0))

    with pytest.raises(ShardingError, match=message):
        run_in_threads(1, body)


def test_a_module_of_a_loop_is_no_model() -> None:
    def body(_backend: Any) -> None:
        mst.init()
        TorchModel(mst.shard(nn.Linear(5, 2)), nn.functional.mse_loss)

    with pytest.raises(ShardingError, match="'weight' is sharded already"):
        run_in_threads(1, body)


def test_a_module_belongs_to_one_rank() -> None:
    module = perceptron()

    def share(backend: Any) -> None:
        FSDPModel(TorchModel(module, nn.functional.mse_loss), ShardingConfiguration(backend))

    with pytest.raises((ShardingError, PeerError), match="Sequential object is wrapped already"):
        run_in_threads(2, share)


class Reentrant(nn.Linear):
    """Uses its parameters in two parts that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__(5, 5)

    def forward(self, x: Any) -> Any:
        x = torch.utils.checkpoint.checkpoint(
            super().forward, x * self.weight[0], use_reentrant=True
        )
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=True)[:, :2]


@in_worlds(2)
def test_names_the_parameter_that_comes_twice(backend: Any) -> None:
    model = wrap(backend, Reentrant, "fsdp")
    with pytest.raises((ShardingError, PeerError), match=r"(weight|bias)' got two gradients"):
        model.train(*batch("mlp", 0))


@pytest.mark.parametrize(("given", "expected"), [(None, 2), (1, 1)])
def test_torch_gets_as_many_threads_as_the_ranks_blas(
    given: int | None, expected: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr("mpishard.torch.world.blas_threads", lambda: given)

    def rank(backend: Any) -> int:  # torch keeps the number by thread
        torch.set_num_threads(2)
        wrap(backend, "mlp", "fsdp")
        return torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        assert run_in_threads(1, rank) == [expected]
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------ mixed precision


def train_in_bfloat16(kind: str, world_size: int) -> Any:
    """PyTorch alone, by the rank: a bfloat16 module, float32 gradients and parameters."""
    master, module = module_of(kind, 0).float(), module_of(kind, 0).float().bfloat16()
    optimizer = torch.optim.SGD(master.parameters(), RATE, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        x, y = (torch.from_numpy(a) for a in batch(kind, step))
        x, y = (x.long(), y.long()) if kind == "transformer" else (x.bfloat16(), y.float())
        for rank in range(world_size):
            part = rows(len(x), step, rank, world_size)
            module.zero_grad()
            if part.start < part.stop:
                (KINDS[kind][1](module(x[part]).float(), y[part]) * len(x[part])).backward()
                for ours, theirs in zip(master.parameters(), module.parameters(), strict=True):
                    ours.grad = ours.grad if ours.grad is not None else torch.zeros_like(ours)
                    ours.grad += 0 if theirs.grad is None else theirs.grad.float() / len(x)
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(master.parameters(), module.parameters(), strict=True):
                theirs.copy_(ours)
    return flat(master)


@pytest.mark.parametrize("kind", KINDS)
@by_path
@in_worlds(1, 2, 3)
def test_computes_with_bfloat16_views_and_updates_float32(
    backend: Any, kind: str, path: str
) -> None:
    found = {}
    for strategy in STRATEGIES:
        plain = TorchModel(module_of(kind, backend.rank).float(), KINDS[kind][1])
        config = ShardingConfiguration(
            backend, minimum_parameter_group_size=1, precision="bfloat16"
        )
        model = STRATEGIES[strategy][0](plain, config)
        optimizer = optimizer_for(model, "sgd")
        for step in range(STEPS):
            x, y = local_batch(backend, kind, step)
            y = y.astype("f4") if y.dtype.kind == "f" else y
            optimizer.step(model, x, y)
        found[strategy] = model.gather_full_parameters()
        (seen,) = {p.dtype for p in plain.module.parameters()}
        assert seen == torch.bfloat16
        views = torch.cat([p.detach().reshape(-1) for p in plain.module.parameters()])
        assert torch.equal(views, torch.from_numpy(found[strategy]).bfloat16())
        first = next(plain.module.parameters()).data_ptr()
        together = set(backend.all_gather(np.array([first])).tolist())
        is_shared = path == "arena" and strategy == "fsdp" and isinstance(backend, InMemory)
        assert len(together) == (1 if is_shared else len(together))
        assert model.predict(x[:1]).dtype == np.float32
    np.testing.assert_array_equal(found["ddp"], found["fsdp"])
    reference = train_in_bfloat16(kind, backend.world_size)
    learned = np.abs(reference - flat(module_of(kind, 0).float())).max()
    np.testing.assert_allclose(found["fsdp"], reference, rtol=0, atol=0.02 * learned)
    with model.unsharded() as whole:
        assert {p.dtype for p in whole.module.parameters()} == {torch.float32}


@pytest.mark.parametrize("data", ["ddp", "fsdp"])
@in_worlds(2, 4)
def test_a_mesh_computes_in_bfloat16_as_its_data_axis_does(backend: Any, data: str) -> None:
    def train(backend: Any, *mesh: int) -> Any:
        config = ShardingConfiguration(backend, precision="bfloat16")
        plain = TorchModel(module_of("mlp", backend.rank).float(), KINDS["mlp"][1])
        model = HybridShardedModel(plain, config, *mesh, data_parallel_strategy=data)
        optimizer = HybridShardedOptimizer(SGD(RATE, momentum=0.9), config, *mesh)
        for step in range(STEPS):
            x, y = batch("mlp", step)
            mine = model.batch_indices(len(x))
            optimizer.step(model, x[mine], y[mine].astype("f4"))
        return model.gather_full_parameters()

    data_size = backend.world_size // 2
    expected, *_ = run_in_threads(data_size, train, 1, 1, data_size)
    np.testing.assert_array_equal(train(backend, 2, 1, data_size), expected)


@in_worlds(2)
def test_frozen_parameters_are_rounded_or_bfloat16_already(backend: Any) -> None:
    x = np.ones((2, 5), np.float32)
    for dtype in (torch.float32, torch.bfloat16):
        module = perceptron()
        module[0].requires_grad_(False).to(dtype)
        everyone = backend.all_gather(module[0].weight.detach().float().numpy()[None])
        config = ShardingConfiguration(backend, precision="bfloat16")
        model = FSDPModel(TorchModel(module, nn.functional.mse_loss), config)
        assert np.isfinite(model.train(x, x[:, :2]))
        assert torch.equal(
            module[0].weight.float(), torch.from_numpy(everyone[0]).bfloat16().float()
        )
    module = perceptron()
    module[0].requires_grad_(False).double()
    with pytest.raises(
        ValueError, match=r"rounds float32 .*'0\.weight' of .* is torch.float64: use"
    ):
        FSDPModel(TorchModel(module, nn.functional.mse_loss), config)


@in_worlds(2)
def test_float32_buffers_are_named_if_pytorch_refuses_them_in_bfloat16(backend: Any) -> None:
    config = ShardingConfiguration(backend, precision="bfloat16")
    x = np.ones((2, 5), np.float32)
    module = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2).eval())
    model = FSDPModel(TorchModel(module, nn.functional.mse_loss), config)
    with pytest.raises(RuntimeError) as raised:
        model.train(x, x[:, :2])
    assert "no buffers: '1.running_mean' and 1 more may have" in raised.value.__notes__[0]
    module = nn.Sequential(nn.Linear(5, 2), nn.BatchNorm1d(2).bfloat16().eval())
    module[1].weight.data, module[1].bias.data = torch.ones(2), torch.zeros(2)
    model = FSDPModel(TorchModel(module, nn.functional.mse_loss), config)
    assert np.isfinite(model.train(x, x[:, :2]))
